"""The attention ladder: the seeds' kernels by their numbers, each one change on the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.ladder import Ladder, Rung

_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("1", "kernel 1: base", "cp.async, ldmatrix, mma.m16n8k16, online softmax", {}),
    ("2", "kernel 2: swizzle", "XOR swizzle of the shared tiles", {"swizzle": True}),
)


def _rungs() -> tuple[Rung[AttentionConfig], ...]:
    config = AttentionConfig()
    rungs: list[Rung[AttentionConfig]] = []
    for key, name, changes, flags in _STEPS:
        config = replace(config, **flags)
        rungs.append(Rung(key, name, changes, config))
    return tuple(rungs)


BEST = AttentionConfig(
    tile_m=256,
    tile_n=64,
    num_warps=8,
    swizzle=True,
    eager=True,
    load_q=2,
    load_k=2,
    load_v=2,
    double_buffer=True,
    folded_scale=True,
    cooperative=True,
    strided=True,
    k_row_major=True,
    strided_epilogue=True,
    stages=2,
    lazy_rescale=True,
)
"""The fastest ``mma.sync`` configuration known for head_dim 128 on an H200."""

LADDER = Ladder(
    "attention",
    (
        *_rungs(),
        Rung("best", "two stages", "32 rows per warp, two K/V stages with one barrier, lazy rescaling", BEST),
    ),
)
