"""What a call of ``matmul`` would run: configuration, kernels and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.source import Grid, KernelCall
from warploom.ops.steps import Step, Steps

if TYPE_CHECKING:
    from warploom.ir.program import Program

Offsets = tuple[int, int, int, int]
"""Bytes, of (a, b, the result, the extra matrices)."""


@dataclass(frozen=True)
class MatmulPlan:
    """What a call of :func:`matmul` would run: nothing has been compiled or launched yet."""

    problem: MatmulProblem
    config: MatmulConfig
    reason: str
    target: str
    device: str
    multiprocessors: int

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches: of a split K a second one adds the parts."""
        return self.config.calls(self.problem, self.multiprocessors)

    @property
    def grid(self) -> Grid:
        """CTAs of :attr:`program` along x, y and z."""
        return self.calls[0].grid

    @property
    def program(self) -> Program:
        """The traced kernel of the product."""
        return self.calls[0].source.program

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return "\n".join(print_cuda(call.source.program) for call in self.calls)

    def steps(self, groups: Iterable[Offsets] = ((0, 0, 0, 0),)) -> Steps:
        """The launches, for each group of batches."""
        found: list[Step] = []
        for of_a, of_b, of_out, of_extra in groups:
            offsets = {"a": of_a, "b": of_b, "out": of_out, "extra0": of_extra, "extra1": of_extra}
            found += [Step(call, self.problem.flops if "a" in call.arrays else 0, offsets) for call in self.calls]
        return Steps(tuple(found))

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"
