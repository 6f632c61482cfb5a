"""The GEMM ladder: the seeds' kernels by their names, each one change on the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.core.dtypes import DType, f16, f32
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig
from warploom.kernels.ladder import Ladder, Rung

_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("00a", "00a_WMMA", "cp.async, opaque fragments by the WMMA API", {"wmma": True}),
    ("00b", "00b_WMMAPadded", "8 elements of padding behind each row of the shared tiles", {"padding": 8}),
    ("01a", "01a_MMADirect", "as 00a, by mma.sync: fragments element by element through their map",
     {"wmma": False, "padding": 0}),
    ("01b", "01b_MMALdmatrix", "fragments by ldmatrix", {"ldmatrix": True}),
    ("02", "02_MMASwizzle", "XOR swizzle of the shared tiles", {"swizzle": True}),
    ("03", "03_MMAMultistage", "copies run ahead through three stages", {"stages": 3}),
    ("04", "04_MMAPipelining", "fragments double-buffered across tiles, copies at the midpoint", {"pipelined": True}),
    ("05", "05_MMAFinal", "CTAs walk in groups that share the L2", {"block_stride": 8}),
    ("06", "06_Strided", "addresses as base + signed strides, two B operands per ldmatrix",
     {"strided": True, "wide_b": True}),
    ("07", "07_WideTile", "a tile of 128×256 by eight warps: fewer bytes from the L2 for each product",
     {"tile_n": 256, "tile_k": 32, "stages": 4}),
)  # fmt: skip


def _configs() -> tuple[GemmConfig, ...]:
    config = GemmConfig(accumulate=f16)
    found: list[GemmConfig] = []
    for *_, flags in _STEPS:
        config = replace(config, **flags)
        found.append(config)
    return tuple(found)


_CONFIGS = _configs()
RUNGS = tuple(
    Rung[AnyGemmConfig](key, name, changes, config)
    for (key, name, changes, _), config in zip(_STEPS, _CONFIGS, strict=True)
)


def summed_in(config: GemmConfig, accumulate: DType) -> GemmConfig:
    """A rung with sums of type ``accumulate``.

    f32 sums take twice the registers. Beside 128 of them a thread has no room for two whole sets of fragments and for
    recomputed addresses: rungs 04 and 05 would spill and fall behind rung 03, so their fragments roll.
    """
    crowded = accumulate is f32 and config.pipelined and config.addressing == "recomputed"
    return replace(config, accumulate=accumulate, lead=8 if crowded else config.lead)


BEST16 = replace(_CONFIGS[-1], tile_m=256, warp_m=128)
"""The fastest configuration with f16 accumulation for large products."""

BEST32 = replace(_CONFIGS[-1], accumulate=f32, block_stride=16)
"""The fastest configuration with f32 accumulation for large products."""

BEST = {f16: BEST16, f32: BEST32}
"""By accumulator."""

LADDER = Ladder[AnyGemmConfig](
    "gemm",
    (
        *RUNGS,
        Rung("best16", "best with f16 accumulation", "256×256 tiles, 128×64 for each warp", BEST16),
        Rung("best32", "best with f32 accumulation", "128×256 tiles, 64×64 for each warp, f32 sums", BEST32),
    ),
)
"""The ``mma.sync`` ladder: what every GPU from sm_80 on runs."""

_HOPPER_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("h1", "wgmma: roles", "a TMA producer, one consumer warpgroup with m64n256k16",
     {"tile_m": 64, "consumers": 1, "stages": 5}),
    ("h2", "wgmma: two consumers", "two consumers of 64 rows each share the tile of B",
     {"tile_m": 128, "consumers": 2, "stages": 4}),
    ("h3", "wgmma: grouped", "tiles walk in groups that share the L2", {"block_stride": 8}),
    ("h4", "wgmma: persistent", "one CTA per SM: the next tile's loads run during this one's epilogue",
     {"persistent": True}),
    ("h5", "wgmma: in flight", "a k-tile's products are waited for while the next one's run", {"in_flight": True}),
    ("h6", "wgmma: ping-pong", "a tile of its own for each consumer: one multiplies while the other stores",
     {"pingpong": True, "tile_n": 128, "stages": 6}),
)  # fmt: skip


def _hopper_rungs() -> tuple[Rung[AnyGemmConfig], ...]:
    config = HopperGemmConfig()
    rungs: list[Rung[AnyGemmConfig]] = []
    for key, name, changes, flags in _HOPPER_STEPS:
        config = replace(config, **flags)
        rungs.append(Rung(key, name, changes, config))
    return tuple(rungs)


FED_BY_TMA = Rung[AnyGemmConfig](
    "08", "08_TMA", "rung 07's tile fed by the TMA: a producer and mbarriers for cp.async and CTA-wide barriers",
    HopperGemmConfig(block_stride=8, persistent=True, mma_sync=True, accumulate=f16),
)  # fmt: skip
"""The ``mma.sync`` rung above 07, for sm_90a."""

HOPPER_LADDER = Ladder[AnyGemmConfig]("gemm", (FED_BY_TMA, *_hopper_rungs()))
"""The rungs above it, for sm_90a alone."""

FULL_LADDER = Ladder[AnyGemmConfig]("gemm", (*LADDER.rungs, *HOPPER_LADDER.rungs))
"""Every rung."""
