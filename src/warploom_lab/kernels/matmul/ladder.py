"""The matmul ladder: the seeds' kernels by their names, each one change on the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.core.dtypes import DType, f16, f32
from warploom.kernels.matmul.choice import BEST16, BEST32
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom_lab.kernels.ladder import Ladder, Rung, steps
from warploom_lab.kernels.matmul.ladder_config import RungGemm
from warploom_lab.kernels.matmul.ladder_sm90 import RungWgmma

_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("00a", "00a_WMMA", "cp.async, opaque fragments by the WMMA API", {"wmma": True}),
    ("00b", "00b_WMMAPadded", "8 elements of padding behind each row of the shared tiles", {"padding": 8}),
    (
        "01a",
        "01a_MMADirect",
        "as 00a, by mma.sync: fragments element by element through their map",
        {"wmma": False, "padding": 0},
    ),
    ("01b", "01b_MMALdmatrix", "fragments by ldmatrix", {"ldmatrix": True}),
    ("02", "02_MMASwizzle", "XOR swizzle of the shared tiles", {"swizzle": True}),
    ("03", "03_MMAMultistage", "copies run ahead through three stages", {"stages": 3}),
    ("04", "04_MMAPipelining", "fragments double-buffered across tiles, copies at the midpoint", {"pipelined": True}),
    ("05", "05_MMAFinal", "CTAs walk in groups that share the L2", {"block_stride": 8}),
)


RUNGS: tuple[Rung[MatmulConfig], ...] = (
    *steps(RungGemm(accumulate=f16), _STEPS),
    Rung(
        "06",
        "06_Strided",
        "addresses as base + strides, two B operands per ldmatrix",
        MatmulSm80(tile_n=128, tile_k=64, stages=3, accumulate=f16),
    ),
    Rung(
        "07",
        "07_WideTile",
        "a tile of 128×256 by eight warps: fewer bytes from the L2 for each product",
        MatmulSm80(accumulate=f16),
    ),
)

BEST = {f16: BEST16, f32: BEST32}
"""By accumulator."""

LADDER = Ladder[MatmulConfig](
    "gemm",
    (
        *RUNGS,
        Rung("best16", "best with f16 accumulation", "256×256 tiles, 128×64 for each warp", BEST16),
        Rung("best32", "best with f32 accumulation", "128×256 tiles, 64×64 for each warp, f32 sums", BEST32),
    ),
)
"""The ``mma.sync`` ladder: what every GPU from sm_80 on runs."""

CONFIGURATIONS = (RungWgmma, RungGemm)
"""Configurations that calls of matmul take beside the production kernels'."""

_FIRST = RungWgmma(block_stride=0, persistent=False, in_flight=False)
_GROUPED = replace(_FIRST, block_stride=8)

HOPPER_LADDER = Ladder[MatmulConfig](
    "gemm",
    (
        Rung(
            "h1",
            "wgmma: roles",
            "a TMA producer, one consumer warpgroup with m64n256k16",
            replace(_FIRST, tile_m=64, consumers=1, stages=5),
        ),
        Rung("h2", "wgmma: two consumers", "two consumers of 64 rows each share the tile of B", _FIRST),
        Rung("h3", "wgmma: grouped", "tiles walk in groups that share the L2", _GROUPED),
        Rung(
            "h4",
            "wgmma: persistent",
            "one CTA per SM: the next tile loads during this one's epilogue",
            replace(_GROUPED, persistent=True),
        ),
        Rung("h5", "wgmma: in flight", "a k-tile's products are waited for while the next one's run", MatmulSm90()),
        Rung(
            "h6",
            "wgmma: ping-pong",
            "each consumer has its own tile: one multiplies while one stores",
            MatmulSm90(pingpong=True, tile_n=128, stages=6),
        ),
    ),
)
"""The rungs above it, for sm_90a alone."""

FULL_LADDER = Ladder[MatmulConfig]("gemm", (*LADDER.rungs, *HOPPER_LADDER.rungs))
"""Every rung."""


def summed_in(config: MatmulConfig, accumulate: DType) -> MatmulConfig:
    """A rung with sums of type ``accumulate``. Raises ConfigError for one that has no such sums.

    f32 sums take twice the registers. Beside 128 of them a thread has no room for two whole sets of fragments and for
    recomputed addresses: rungs 04 and 05 would spill and fall behind rung 03, so their fragments roll.
    """
    if config.accumulate is accumulate:
        return config
    changes = {"accumulate": accumulate.name}
    if accumulate is f32 and getattr(config, "pipelined", False):
        changes["lead"] = "8"
    return config.with_settings(changes)
