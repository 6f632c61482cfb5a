"""The GEMM ladder: the seeds' kernels by their names, each one change on the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.core.dtypes import f16, f32
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.ladder import Ladder, Rung

_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("01a", "01a_MMADirect", "cp.async, fragments element by element through their map", {}),
    ("01b", "01b_MMALdmatrix", "fragments by ldmatrix", {"ldmatrix": True}),
    ("02", "02_MMASwizzle", "XOR swizzle of the shared tiles", {"swizzle": True}),
    ("03", "03_MMAMultistage", "copies run ahead through three stages", {"stages": 3}),
    ("04", "04_MMAPipelining", "fragments double-buffered across tiles, copies at the midpoint", {"pipelined": True}),
    ("05", "05_MMAFinal", "CTAs walk in groups that share the L2", {"block_stride": 8}),
    ("06", "06_Strided", "addresses as base + signed strides, two B operands per ldmatrix",
     {"strided": True, "wide_b": True}),
)  # fmt: skip


def _rungs() -> tuple[Rung[GemmConfig], ...]:
    config = GemmConfig(accumulate=f16)
    rungs: list[Rung[GemmConfig]] = []
    for key, name, changes, flags in _STEPS:
        config = replace(config, **flags)
        rungs.append(Rung(key, name, changes, config))
    return tuple(rungs)


RUNGS = _rungs()

BEST16 = replace(RUNGS[-1].config, tile_m=128, tile_n=256, tile_k=32, warp_m=64, warp_n=64, stages=4)
"""The fastest configuration with f16 accumulation for large products."""

BEST32 = replace(BEST16, accumulate=f32)
"""The fastest configuration with f32 accumulation for large products."""

LADDER = Ladder(
    "gemm",
    (
        *RUNGS,
        Rung("best16", "best with f16 accumulation", "tile, stages and warps chosen by measurement", BEST16),
        Rung("best32", "best with f32 accumulation", "the same with f32 accumulators", BEST32),
    ),
)
