"""What a call of ``matmul`` would run: configuration, kernels, their arguments and the memory they need."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from warploom.core.dtypes import f32
from warploom.interop.arrays import ArrayView, describe
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem
from warploom.kernels.gemm.shares import Shares
from warploom.kernels.mapped import MappedArray
from warploom.ops.backends import Grid
from warploom.ops.gemm_kernels import trace_finish, trace_for
from warploom.ops.places import EMULATED_MULTIPROCESSORS
from warploom.ops.recipes import Recipe

if TYPE_CHECKING:
    from warploom.ir.program import Program


@dataclass(frozen=True)
class MatmulPlan:
    """What a call of :func:`matmul` would run: nothing has been compiled or launched yet."""

    problem: GemmProblem
    config: AnyGemmConfig
    reason: str
    target: str
    device: str
    alpha: float
    multiprocessors: int = EMULATED_MULTIPROCESSORS

    @property
    def grid(self) -> Grid:
        """CTAs along x, y and z."""
        return self.problem.grid(self.config, self.multiprocessors)

    @property
    def mapped(self) -> tuple[MappedArray, ...]:
        """How the TMA sees a, b and the result; empty for ``mma.sync``."""
        return self.problem.mapped(self.config)

    @property
    def shares(self) -> Shares | None:
        """Who sums what of a stream-K launch; None of any other."""
        c = self.config
        return self.problem.shares(c, self.multiprocessors) if isinstance(c, GemmConfig) and c.stream_k else None

    @property
    def workspace(self) -> tuple[int, ...]:
        """Shape of the f32 workspace: the parts of a split K, or two parts of tiles for each CTA; empty without one."""
        p, splits, shares = self.problem, self.config.split_k, self.shares
        if shares is not None and isinstance(self.config, GemmConfig):
            return (shares.ctas, 2, self.config.part_words) if shares.cut else ()
        return (p.batch, splits, p.m, p.n) if splits > 1 else ()

    @property
    def counts(self) -> int:
        """32-bit words behind the workspace that are 0 when the kernel starts: arrivals at tiles that are cut."""
        return 0 if self.shares is None else self.shares.cut

    @property
    def recipe(self) -> Recipe:
        """The kernel by what it is traced from."""
        return Recipe(trace_for, (self.config, self.problem.features(self.config)))

    @property
    def finish_recipe(self) -> Recipe | None:
        """The kernel that adds the parts of a split K, by what it is traced from."""
        if self.config.split_k == 1:
            return None
        return Recipe(trace_finish, (self.config.split_k, self.config.dtype, self.problem.finish_features()))

    @cached_property
    def program(self) -> Program:
        """The traced kernel."""
        return self.recipe.program

    @cached_property
    def finish(self) -> Program | None:
        """The kernel that adds the parts of a split K."""
        return None if self.finish_recipe is None else self.finish_recipe.program

    @property
    def scalars(self) -> dict[str, int]:
        """Scalar arguments of :attr:`program`."""
        return self.problem.scalars(self.config, bits_of(self.alpha), self.multiprocessors)

    @property
    def finish_scalars(self) -> dict[str, int]:
        """Scalar arguments of :attr:`finish`."""
        return self.problem.finish_scalars(bits_of(self.alpha))

    def shared_workspace(self) -> dict[str, ArrayView]:
        """For the emulator, the workspace of stream-K by the kernel's names: parts full of NaN, counts of 0."""
        if self.shares is None:
            return {}
        parts = np.full(self.workspace or (1,), np.nan, np.float32)
        return {"parts": describe(parts.view(np.uint32)), "arrived": describe(np.zeros(self.counts or 1, np.uint32))}

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return "\n".join(print_cuda(p) for p in (self.program, self.finish) if p is not None)

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"


def bits_of(value: float) -> int:
    """A float32 as the integer that the kernels' factors come as."""
    return int.from_bytes(struct.pack("<f", value), "little")


def argument_names(problem: GemmProblem, config: AnyGemmConfig) -> list[str]:
    """The kernel's names of a, b, the result and what is combined with it, in that order."""
    features = problem.features(config)
    out = "out_f32" if features.out_dtype is f32 else "out"
    names = ["a", "b", out]
    if isinstance(config, HopperGemmConfig):
        names = ["a_map", "b_map", "c_map" if features.bulk_out else out]
    extras = [f"extra{i}" for i in range(features.epilogue.extras)]
    return [*names, *(["bias"] if features.epilogue.bias else []), *extras]


def finish_names(problem: GemmProblem) -> list[str]:
    """The names of the result and what is combined with it in the kernel that adds the parts of a split K."""
    epilogue = problem.epilogue
    names = ["out_f32" if problem.out_dtype is f32 else "out", *(["bias"] if epilogue.bias else [])]
    return names + [f"extra{i}" for i in range(epilogue.extras)]
