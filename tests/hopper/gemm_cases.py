"""Products by the kernels fed by the TMA on the emulator, with a seed of the scheduler and a program of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, f32
from warploom.emulate import Emulation, emulate
from warploom.interop.arrays import describe
from warploom.ir.program import Program
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.reference import gemm_error, gemm_reference
from warploom.ops.backends import emulator_arguments
from warploom.ops.matmul import plan_matmul
from warploom.ops.matmul_plan import MatmulPlan, argument_names

TOGETHER = HopperGemmConfig(tile_m=128, tile_n=64, stages=2, block_stride=4, in_flight=True, persistent=True)
"""Two consumers on one tile."""
TURNS = replace(TOGETHER, tile_m=64, pingpong=True)
"""Two consumers with a tile each."""
ALONE = replace(TOGETHER, tile_m=64, tile_n=96, consumers=1, persistent=False, in_flight=False)
PAIRS = replace(TURNS, tile_n=128, consumers=1, pingpong=False, cluster=2)
"""Clusters of two CTAs that load B together."""

WARPS = HopperGemmConfig(128, 64, 2, block_stride=4, persistent=True, mma_sync=True)
"""Two consumers on one tile, by ``mma.sync``."""
WARPS_IN_TURNS = replace(WARPS, tile_m=64, pingpong=True)
WARPS_ALONE = HopperGemmConfig(64, 256, 3, 1, mma_sync=True)
WARPS_IN_PAIRS = replace(PAIRS, in_flight=False, mma_sync=True)


def matrix(rng: np.random.Generator, rows: int, cols: int, dtype: DType, *, row_major: bool = True) -> Any:
    """Random numbers, their lines padded to multiples of 16 bytes as the TMA needs them."""
    lines, length = (rows, cols) if row_major else (cols, rows)
    padded = rng.standard_normal((lines, -(-length // 8) * 8)).astype(dtype.numpy)[:, :length]
    return padded if row_major else padded.T


def run(
    made: MatmulPlan, a: Any, b: Any, *, seed: int | None = None, program: Program | None = None, ctas: int = 2
) -> tuple[Emulation, Any]:
    """The emulation of a plan's kernel (without a split K) and its output, which began as NaN."""
    made = replace(made, multiprocessors=ctas)
    out = np.full((made.problem.m, made.problem.n), np.nan, made.problem.out_dtype.numpy)
    program = program or made.program
    views = dict(zip(argument_names(made.problem, made.config), map(describe, (a, b, out)), strict=True))
    arguments = emulator_arguments(program, views, made.scalars, mapped=made.mapped)
    return emulate(program, made.grid, arguments, seed=seed), out


def check(config: HopperGemmConfig, a: Any, b: Any, *, seed: int | None = None, out_dtype: DType | None = None) -> None:
    """No finding, and every element within its bound of float64."""
    made = plan_matmul(a, b, config=config, out_dtype=out_dtype)
    emulation, out = run(made, a, b, seed=seed)
    assert emulation.findings == ()
    error = gemm_error(out, gemm_reference(a, b), made.problem.out_dtype, f32)
    assert error.ok, (config, a.shape, b.shape, error)
