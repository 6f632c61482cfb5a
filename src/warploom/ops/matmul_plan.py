"""What a call of ``matmul`` would run: configuration, kernels and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.source import KernelCall
from warploom.ops.steps import Plan, Step, Steps

Offsets = tuple[int, int, int, int]
"""Bytes, of (a, b, the result, the extra matrices)."""


@dataclass(frozen=True)
class MatmulPlan(Plan):
    """What a call of :func:`matmul` would run: nothing has been compiled or launched yet."""

    problem: MatmulProblem
    config: MatmulConfig
    multiprocessors: int

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches: of a split K a second one adds the parts."""
        return self.config.calls(self.problem, self.multiprocessors)

    def steps(self, groups: Iterable[Offsets] = ((0, 0, 0, 0),)) -> Steps:
        """The launches, for each group of batches."""
        found: list[Step] = []
        for of_a, of_b, of_out, of_extra in groups:
            offsets = {"a": of_a, "b": of_b, "out": of_out, "extra0": of_extra, "extra1": of_extra}
            found += [Step(call, self.problem.flops if "a" in call.arrays else 0, offsets) for call in self.calls]
        return Steps(tuple(found))
