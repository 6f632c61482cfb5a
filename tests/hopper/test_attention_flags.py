"""Every combination of flags that is a ``wgmma`` attention kernel is right and free of findings."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from tests.kernels.attention_cases import Case
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.ladder_sm90 import RungSm90
from warploom.kernels.attention.sm90 import ForwardSm90


def accepted(kind: type[ForwardSm90]) -> list[ForwardSm90]:
    """Every valid setting of a kernel's flags at the smallest tiles, with one to three consumers in turn."""
    names = [f.name for f in fields(kind) if f.default in (True, False)]
    settings = (dict(zip(names, values, strict=True)) for values in product((False, True), repeat=len(names)))
    found = [c for c in (kind(tile_n=64, head_dim=64, **flags) for flags in settings) if not c.check()]
    return [replace(c, consumers=1 + number % 3) for number, c in enumerate(found)]


def test_the_flags_leave_many_kernels() -> None:
    assert [len(accepted(kind)) for kind in (ForwardSm90, RungSm90)] == [2**5, 2**2 + 2**5]


@pytest.mark.parametrize("config", accepted(ForwardSm90) + accepted(RungSm90), ids=str)
def test_every_combination_of_flags_is_right(config: ForwardSm90) -> None:
    """Three key blocks and ragged ends, keys that grow, causal where blocks are passed over; one CTA if persistent."""
    tiles = (2 if config.consumers == 3 else 3) if config.persistent else 1
    q_len, kv_len = tiles * config.tile_m - 24, 3 * config.tile_n - 8
    case = Case(config, q_len, kv_len, growth=8.0)
    if config.skip_masked:
        case = replace(case, kv_len=q_len, window=(None, 0))
    assert (outcome := case.run(seed=tiles + config.consumers)).fine, outcome


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        *(({"tile_n": n, "sum_column": True}, n) for n in (80, 112)),
        *(({"head_dim": d, "q_in_registers": q}, 200) for d, q in ((8, True), (72, False), (80, True), (96, False))),
        ({"head_dim": 192, "tile_n": 96, "persistent": False, "q_in_registers": False}, 200),
        ({"head_dim": 256, "tile_n": 48, "q_in_registers": False}, 100),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_other_tiles(flags: dict[str, Any], length: int, dtype: Any) -> None:
    """Key tiles that are no multiple of 32, and head_dims that are none of 64."""
    config = replace(ForwardSm90(consumers=1, tile_n=64, head_dim=64, dtype=dtype), **flags)
    if config.sum_column and dtype is f16:
        return
    assert config.check() == []
    for seed in (None, 0):
        assert (outcome := Case(config, 72, length, growth=8.0).run(seed=seed)).fine, outcome
