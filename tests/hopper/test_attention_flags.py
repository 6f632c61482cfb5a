"""Every combination of flags that is a ``wgmma`` attention kernel is right and free of findings; the others say why."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from warploom.emulate import emulate
from warploom.interop.arrays import describe
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.ops.attention import plan
from warploom.ops.attention_kernels import mapped
from warploom.ops.backends import emulator_arguments

FLAGS = tuple(f.name for f in fields(HopperConfig) if f.type == "bool")


def every_config(consumers: int) -> list[HopperConfig]:
    """All settings of the flags, at the smallest tiles."""
    smallest = HopperConfig(consumers=consumers, tile_n=64, head_dim=64)
    settings = product((False, True), repeat=len(FLAGS))
    return [replace(smallest, **dict(zip(FLAGS, values, strict=True))) for values in settings]


def check_emulated(config: HopperConfig, seed: int) -> None:
    """Three key blocks and ragged ends; persistent kernels walk it with one CTA."""
    tiles = (2 if config.consumers == 3 else 3) if config.flat else 1
    q_len, kv_len = tiles * config.tile_m - 24, 3 * config.tile_n - 8
    rng = np.random.default_rng(seed)

    def some(length: int) -> Any:
        return rng.standard_normal((1, length, 1, config.head_dim), np.float32).astype(ml_dtypes.bfloat16)

    q, k, v = some(q_len), some(kv_len), some(kv_len)
    out = np.full_like(q, np.nan)
    made = plan(q, k, v, config=config)
    views = [describe(x) for x in (q, k, v, out)]
    arguments = emulator_arguments(made.program, views, made.scalars, mapped(made.config, made.layout, views))
    run = emulate(made.program, 1 if config.flat else made.grid, arguments, seed=seed)
    assert run.findings == (), str(config)
    heads_first = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    reference = attention_reference(*heads_first, dtype=config.dtype)
    error = attention_error(np.swapaxes(out, 1, 2), reference, config.dtype)
    assert error.value <= error.bound, str(config)


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_every_combination_of_flags_is_clean_or_refused(consumers: int) -> None:
    accepted = [c for c in every_config(consumers) if not c.check()]
    assert len(accepted) == (36 if consumers == 2 else 20)
    for seed, config in enumerate(accepted):
        check_emulated(config, seed)


def test_flags_without_effect_are_refused() -> None:
    plain = HopperConfig(overlap=False, flat=False, pingpong=False, hold=False)
    assert plain.check() == []
    for config in (replace(plain, pingpong=True), replace(plain, hold=True), replace(plain, flat=True)):
        (problem,) = config.check()
        assert "overlap" in problem
