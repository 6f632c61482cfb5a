"""Small matrix products on the emulator, for the tests of this room."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from warploom.core.dtypes import DType
from warploom.emulate import Emulation, emulate
from warploom.ir.program import Program
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.features import Epilogue
from warploom.kernels.gemm.forward import gemm
from warploom.kernels.gemm.ladder import LADDER
from warploom.kernels.gemm.problem import GemmProblem, Matrix
from warploom.kernels.gemm.reference import GemmError, GemmReference, gemm_error, gemm_reference
from warploom.kernels.gemm.stream import gemm_stream_k

RUNGS = {rung.key: rung.config for rung in LADDER.rungs if isinstance(rung.config, GemmConfig)}
assert len(RUNGS) == len(LADDER.rungs)


@lru_cache(maxsize=64)
def inputs(m: int, n: int, k: int, dtype: DType) -> tuple[Any, Any, GemmReference]:
    """Random A and B, and their float64 product."""
    rng = np.random.default_rng(m + 3 * n + 7 * k)
    a, b = (rng.standard_normal(shape).astype(dtype.numpy) for shape in ((m, k), (k, n)))
    return a, b, gemm_reference(a, b)


def alignment(extent: int) -> int:
    """Elements (8, 4, 2, 1) that lines of ``extent`` elements are aligned to."""
    return next(c for c in (8, 4, 2, 1) if extent % c == 0)


def problem_of(
    config: GemmConfig,
    m: int,
    n: int,
    k: int,
    *,
    a_rows: bool = True,
    b_rows: bool = True,
    out: DType | None = None,
    epilogue: Epilogue | None = None,
) -> GemmProblem:
    """The problem of contiguous matrices; ``a_rows``, ``b_rows``: stored row-major, else column-major."""
    a_stride, b_stride = (k if a_rows else m), (n if b_rows else k)
    return GemmProblem(
        m, n, k, config.dtype, config.accumulate, out or config.dtype,
        Matrix(a_rows, a_stride, 0, alignment(a_stride)), Matrix(not b_rows, b_stride, 0, alignment(b_stride)),
        Matrix(True, n, 0, alignment(n)), epilogue=epilogue or Epilogue(), pairs=n % 2 == 0,
    )  # fmt: skip


@lru_cache(maxsize=256)
def traced(config: GemmConfig, problem: GemmProblem) -> Program:
    """The Program of a configuration for a problem, once per process."""
    generator = gemm_stream_k if config.stream_k else gemm
    return generator.trace(config=config, features=problem.features(config), name="gemm")


@dataclass(frozen=True)
class Outcome:
    """What one run found, and how far its result is from float64."""

    emulation: Emulation
    error: GemmError
    output: Any

    @property
    def fine(self) -> bool:
        """No finding, and every element within its bound."""
        return not self.emulation.findings and self.error.ok


def run(
    config: GemmConfig,
    problem: GemmProblem,
    *,
    program: Program | None = None,
    seed: int | None = None,
    scalars: dict[str, int] | None = None,
    multiprocessors: int = 3,
) -> Outcome:
    """One product on the emulator, unsplit and without epilogue. The output and a workspace start as NaN."""
    a, b, reference = inputs(problem.m, problem.n, problem.k, config.dtype)
    stored_a = a if problem.a.k_contiguous else np.ascontiguousarray(a.T)
    stored_b = np.ascontiguousarray(b.T) if problem.b.k_contiguous else b
    out = np.full((problem.m, problem.n), np.nan, problem.out_dtype.numpy)
    program = program or traced(config, problem)
    everything: dict[str, Any] = problem.scalars(config, 0, multiprocessors) | (scalars or {})
    everything |= {"a": stored_a.view(np.uint16), "b": stored_b.view(np.uint16), "out_f32": out}
    if problem.out_dtype.bits == 16:
        everything["out"] = out.view(np.uint16)
    if config.stream_k:
        shares = problem.shares(config, multiprocessors)
        everything["parts"] = np.full((shares.ctas, 2, config.part_words), np.nan, np.float32).view(np.uint32)
        everything["arrived"] = np.zeros(max(1, shares.cut), np.uint32)
    arguments = {p.name: everything[p.name] for p in program.parameters}
    emulation = emulate(program, problem.grid(config, multiprocessors), arguments, seed=seed)
    error = gemm_error(out, reference, problem.out_dtype, config.accumulate)
    return Outcome(emulation, error, out)
