"""The ladder's ``wgmma`` matmul kernels: what the production kernel does, one idea after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from warploom.core.targets import Target
from warploom.kernels.matmul.problem import MatmulProblem
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import KernelCall


@dataclass(frozen=True)
class RungWgmma(MatmulSm90):
    """The production kernel with the consumers of :mod:`.ladder_sm90_kernel`: without what the rungs above add."""

    word: ClassVar[str] = "matmul_wgmma"
    product: ClassVar[str] = "warploom_lab.kernels.matmul.ladder_sm90_kernel:StepwiseProduct"
    reducing: ClassVar[str] = ""

    persistent: bool = flag(True, "one CTA per multiprocessor: the next tile's loads run during this one's epilogue")
    in_flight: bool = flag(True, "a k-tile's products are waited for while the next one's run")

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        return super().check(target) or violated(
            [
                (self.persistent or not self.pingpong, "pingpong is between two consumers of a persistent kernel"),
            ]
        )

    def calls(self, problem: MatmulProblem, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem: with one CTA per multiprocessor, or one for each tile."""
        product, *others = super().calls(problem, multiprocessors)
        if not self.persistent:
            product = replace(product, grid=(problem.tiling(self).count, 1, 1))
        return product, *others
