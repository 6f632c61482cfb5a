"""Matrix products on the emulator beside float64, through a configuration's calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tests.kernels.mutate import objection, run_calls
from warploom.core.dtypes import DType
from warploom.emulate import Emulation, Finding
from warploom.ir.program import Program
from warploom.kernels.matmul.features import Epilogue
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, Matrix
from warploom.kernels.matmul.reference import GemmError, GemmReference, gemm_error, gemm_reference
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.source import KernelCall
from warploom_lab.kernels.matmul.ladder import FULL_LADDER, LADDER
from warploom_lab.kernels.matmul.ladder_sm90 import RungWgmma

RUNGS = {rung.key: rung.config for rung in LADDER.rungs}
"""The rungs for every GPU: ``mma.sync``."""
EVERY_RUNG = {rung.key: rung.config for rung in FULL_LADDER.rungs}

SMALL = MatmulSm80(tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, stages=3)
"""Four warps that share both operands."""
STREAMED = MatmulSm80(32, 32, 32, 16, 16, 3, block_stride=2, stream_k=True)
TOGETHER = MatmulSm90(128, 64, 2, block_stride=4)
"""Two consumers on one tile."""
TURNS = MatmulSm90(64, 64, 2, block_stride=4, pingpong=True)
"""Two consumers with a tile each."""
ALONE = RungWgmma(64, 96, 2, 1, block_stride=4, persistent=False, in_flight=False)
WGMMA: dict[str, MatmulSm90] = {"together": TOGETHER, "turns": TURNS, "alone": ALONE}


@lru_cache(maxsize=64)
def inputs(m: int, n: int, k: int, dtype: DType) -> tuple[Any, Any, GemmReference]:
    """Random A and B, and their float64 product."""
    rng = np.random.default_rng(m + 3 * n + 7 * k)
    a, b = (rng.standard_normal(shape).astype(dtype.numpy) for shape in ((m, k), (k, n)))
    return a, b, gemm_reference(a, b)


def alignment(extent: int) -> int:
    """Elements (8, 4, 2, 1) that lines of ``extent`` elements are aligned to."""
    return next(c for c in (8, 4, 2, 1) if extent % c == 0)


def padded(lines: Any, to: int) -> Any:
    """A row-major matrix whose lines begin at multiples of ``to`` elements; NaN lies between them."""
    whole = np.full((lines.shape[0], -(-lines.shape[1] // to) * to), np.nan, lines.dtype)
    whole[:, : lines.shape[1]] = lines
    return whole[:, : lines.shape[1]]


@dataclass(frozen=True)
class Case:
    """A kernel and one product of matrices that are stored row-major, or column-major without ``a_rows``, ``b_rows``.

    Lines are contiguous, or aligned for the TMA where the kernel needs it. ``ctas``: multiprocessors, as it is told.
    """

    config: MatmulConfig
    m: int
    n: int
    k: int
    a_rows: bool = True
    b_rows: bool = True
    out: DType | None = None
    ctas: int = 3

    @classmethod
    def of_tiles(cls, config: MatmulConfig, rows: int = 2, cols: int = 2, depth: int | None = None, **how: Any) -> Case:
        """Whole tiles; by default enough along K that every ring of stages wraps twice."""
        stages: int = getattr(config, "stages", 1)
        return cls(config, rows * config.tile_m, cols * config.tile_n, config.tile_k * (depth or 2 * stages + 1), **how)

    @property
    def _line(self) -> int:
        """What the lines of A and B are aligned to, in elements."""
        return 8 if self.config.requires == "sm_90a" else 1

    @cached_property
    def problem(self) -> MatmulProblem:
        """What is asked."""
        c, m, n, k, line = self.config, self.m, self.n, self.k, self._line
        a, b = (-(-extent // line) * line for extent in (k if self.a_rows else m, n if self.b_rows else k))
        return MatmulProblem(
            m,
            n,
            k,
            c.dtype,
            c.accumulate,
            self.out or c.dtype,
            Matrix(self.a_rows, a, 0, alignment(a)),
            Matrix(not self.b_rows, b, 0, alignment(b)),
            Matrix(True, n, 0, alignment(n)),
            epilogue=Epilogue(),
            pairs=n % 2 == 0,
        )

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches."""
        assert (refused := self.config.violations(self.problem)) == [], refused
        return self.config.calls(self.problem, self.ctas)

    @property
    def program(self) -> Program:
        """The traced kernel of the product."""
        return self.calls[0].source.program

    def run(self, *, seed: int | None = None, program: Program | None = None, stop: bool = False) -> Outcome:
        """Emulate the kernels (``program`` in place of the first); the result and what lies between start as NaN."""
        a, b, reference = inputs(self.m, self.n, self.k, self.config.dtype)
        stored = [(a if self.a_rows else a.T), (b if self.b_rows else b.T)]
        out = np.full((self.m, self.n), np.nan, self.problem.out_dtype.numpy)
        arrays = {**dict(zip("ab", (padded(x, self._line) for x in stored), strict=True)), "out": out}
        found = run_calls(self.calls, arrays, seed, program, stop=stop)
        return Outcome(found, gemm_error(out, reference, self.problem.out_dtype, self.config.accumulate), out)

    def survives(self, program: Program, seed: int | None = None) -> bool:
        """Whether nothing objects to ``program`` in the kernel's place; the first finding is enough."""
        return objection(lambda: self.run(program=program, seed=seed, stop=True)) is None


@dataclass(frozen=True)
class Outcome:
    """What one run found, how far its result is from float64, and the result."""

    emulations: tuple[Emulation, ...]
    error: GemmError
    output: Any

    @property
    def emulation(self) -> Emulation:
        """Of the kernel of the product."""
        return self.emulations[0]

    @property
    def findings(self) -> list[Finding]:
        """Of all kernels."""
        return [finding for emulation in self.emulations for finding in emulation.findings]

    @property
    def fine(self) -> bool:
        """No finding, and every element within its bound."""
        return not self.findings and self.error.ok

    @property
    def conflicts(self) -> dict[str, int]:
        """Wavefronts beyond the ideal by class of access, where there are some."""
        return {name: w.conflicts for name, w in self.emulation.traffic.shared.items() if w.conflicts}

    def __str__(self) -> str:
        return "\n".join([str(self.error), *map(str, self.findings)])
