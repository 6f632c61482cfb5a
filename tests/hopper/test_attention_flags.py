"""Every combination of flags that is a ``wgmma`` attention kernel is right and free of findings; the others say why."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.hopper.attention_runs import Case, emulated
from warploom.core.dtypes import f16
from warploom.kernels.attention.hopper_config import HopperConfig

PIPELINE = ("overlap", "pingpong", "flat", "q_in_registers", "lazy_rescale", "hold")
ON_TOP = ("carry_max", "sum_column", "skip_hidden")


def settings(names: tuple[str, ...]) -> list[dict[str, bool]]:
    """All settings of flags."""
    return [dict(zip(names, values, strict=True)) for values in product((False, True), repeat=len(names))]


def accepted(consumers: int) -> list[HopperConfig]:
    """Every pipeline at the smallest tiles, each with one of the settings on top of it that it takes, in turn."""
    smallest = HopperConfig(consumers=consumers, tile_n=64, head_dim=64)
    pipelines = [c for c in (replace(smallest, **flags) for flags in settings(PIPELINE)) if not c.check()]
    found: list[HopperConfig] = []
    for number, pipeline in enumerate(pipelines):
        choices = [c for c in (replace(pipeline, **flags) for flags in settings(ON_TOP)) if not c.check()]
        found.append(choices[number % len(choices)])
    return found


def check_emulated(config: HopperConfig, seed: int) -> None:
    """Three key blocks and ragged ends, keys that grow where maxima are carried, causal where blocks are hidden.

    Persistent kernels walk it with one CTA.
    """
    tiles = (2 if config.consumers == 3 else 3) if config.flat else 1
    q_len, kv_len = tiles * config.tile_m - 24, 3 * config.tile_n - 8
    causal = Case(config, q_len, q_len, window=(None, 0))
    case = causal if config.skip_hidden else Case(config, q_len, kv_len)
    found = emulated(replace(case, growth=8.0 if config.carry_max else 1.0), seed)
    assert found.findings == (), str(config)
    assert found.error.value <= found.error.bound, str(config)


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_every_combination_of_flags_is_clean_or_refused(consumers: int) -> None:
    configs = accepted(consumers)
    assert len(configs) == (20 if consumers == 1 else 36)
    for flag in ON_TOP:
        assert any(getattr(c, flag) for c in configs) == (consumers > 1 or flag != "skip_hidden")
    for seed, config in enumerate(configs):
        check_emulated(config, seed)


@pytest.mark.parametrize("tile_n", [80, 112])
def test_the_sum_column_at_tiles_of_half_a_warp_too_many(tile_n: int) -> None:
    case = Case(HopperConfig(consumers=1, pingpong=False, head_dim=64, tile_n=tile_n, sum_column=True), 64, tile_n)
    assert all(emulated(case, seed).findings == () for seed in (None, 0))


def test_flags_without_effect_are_refused() -> None:
    plain = HopperConfig(overlap=False, flat=False, pingpong=False, hold=False)
    assert plain.check() == []
    for config in (replace(plain, pingpong=True), replace(plain, hold=True), replace(plain, flat=True)):
        (problem,) = config.check()
        assert "overlap" in problem


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"pingpong": True, "consumers": 1}, "nobody to take turns with"),
        ({"carry_max": True, "lazy_rescale": False}, "lazy_rescale"),
        ({"sum_column": True, "head_dim": 80}, "64, 128 or 192"),
        ({"sum_column": True, "head_dim": 256}, "64, 128 or 192"),
        ({"sum_column": True, "carry_max": True, "dtype": f16}, "needs bf16"),
        ({"skip_hidden": True, "consumers": 1, "pingpong": False}, "one consumer"),
        ({"skip_hidden": True, "consumers": 3, "pingpong": False, "tile_n": 48}, "up to 3 blocks at once"),
    ],
)
def test_flags_that_do_not_go_together_say_why(flags: dict[str, Any], says: str) -> None:
    (problem,) = HopperConfig(**flags).check()
    assert says in problem
