"""Combinations of flags of the ``wgmma`` attention kernels are right and free of findings."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

import pytest

from tests.kernels.attention_cases import Case
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90


def flags(kind: type[ForwardSm90]) -> list[str]:
    """The names of a kernel's flags."""
    return [f.name for f in fields(kind) if isinstance(f.default, bool)]


def accepted(kind: type[ForwardSm90]) -> list[ForwardSm90]:
    """Every valid setting of a kernel's flags at the smallest tiles, with one to three consumers in turn."""
    settings = (
        dict[str, Any](zip(flags(kind), values, strict=True))
        for values in product((False, True), repeat=len(flags(kind)))
    )
    found = [c for c in (kind(tile_n=64, head_dim=64, **values) for values in settings) if not c.check()]
    return [replace(c, consumers=1 + number % 3, tile_n=(32, 32, 64)[number % 3]) for number, c in enumerate(found)]


def pairwise(kind: type[ForwardSm90]) -> list[ForwardSm90]:
    """Some of those, which together set every two flags in every valid way."""

    def pairs(config: ForwardSm90) -> set[Any]:
        return set(combinations(((name, getattr(config, name)) for name in flags(kind)), 2))

    seen: set[Any] = set()
    chosen: list[ForwardSm90] = []
    rest = accepted(kind)
    while new := max((pairs(c) - seen for c in rest), key=len):
        chosen.append(next(c for c in rest if pairs(c) - seen == new))
        seen |= new
    return chosen


def test_the_flags_leave_many_kernels() -> None:
    assert [len(accepted(kind)) for kind in (ForwardSm90, RungSm90)] == [2**5, 2**2 + 2**5]


@pytest.mark.parametrize("config", accepted(ForwardSm90) + pairwise(RungSm90), ids=str)
def test_combinations_of_flags_are_right(config: ForwardSm90) -> None:
    """Three key blocks and ragged ends, keys that grow, causal where blocks are passed over; one CTA if persistent."""
    tiles = 2 if config.persistent else 1
    q_len, kv_len = tiles * config.tile_m - 24, 3 * config.tile_n - 8
    case = Case(config, q_len, kv_len, growth=8.0)
    if config.skip_masked:
        case = replace(case, kv_len=q_len, window=(None, 0))
    assert (outcome := case.run(seed=tiles + config.consumers)).fine, outcome


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        *(({"tile_n": n, "sum_column": True}, n) for n in (80, 112)),
        *(({"head_dim": d, "q_in_registers": q}, 200) for d, q in ((8, True), (72, False), (80, True), (96, False))),
        ({"head_dim": 72, "dtype": f16}, 200),
        ({"head_dim": 192, "tile_n": 96, "persistent": False, "q_in_registers": False}, 200),
        ({"head_dim": 256, "tile_n": 48, "q_in_registers": False, "dtype": f16}, 100),
    ],
    ids=str,
)
def test_other_tiles(changes: dict[str, Any], length: int) -> None:
    """Key tiles that are no multiple of 32, and head_dims that are none of 64."""
    config = replace(ForwardSm90(consumers=1, tile_n=64, head_dim=64, dtype=bf16), **changes)
    assert config.check() == []
    assert (outcome := Case(config, 72, length, growth=8.0).run(seed=0)).fine, outcome
