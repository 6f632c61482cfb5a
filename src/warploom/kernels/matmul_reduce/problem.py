"""A row reduction of a product as a problem: the kernels of a call, their launches, and the states between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.matmul_reduce.states import MERGE_ROWS, ReduceOp, Reduction
from warploom.kernels.settings import violated
from warploom.kernels.source import KernelCall, KernelSource

STATES = "first", "second"
"""The arrays of the parts of states, 32 bits each, (tiles along N, rows)."""


@dataclass(frozen=True)
class ReduceProblem:
    """A reduction of the rows of epilogue(alpha · A·B + bias)."""

    product: MatmulProblem
    op: ReduceOp

    @property
    def states(self) -> tuple[str, ...]:
        """The arrays that the states of this operation take."""
        return STATES[: len(Reduction(self.op).types)]

    def violations(self, config: MatmulConfig) -> list[str]:
        """The constraints of the reduction that a configuration for the product violates; empty if there are none."""
        return violated(
            [
                (not config.cut, "split_k and stream_k cut sums that the reduction needs whole"),
                (config.reducing != "", "a rung of the ladder has no kernel that reduces rows"),
            ]
        )

    def calls(self, config: MatmulConfig, multiprocessors: int) -> tuple[KernelCall, KernelCall]:
        """The kernel that reduces tiles, and the one that merges their states; of arrays a, b, bias, out, index."""
        product, m = config.calls(self.product, multiprocessors)[0], self.product.m
        tiles = self.product.tiling(config).cols
        source = replace(
            product.source,
            function=config.reducing,
            name=f"{product.source.name}_{self.op}",
            arguments=(*product.source.arguments, ("op", self.op)),
        )
        reduced = replace(
            product,
            source=source,
            arrays=("a", "b", *self.states, *self.product.combined),
            workspace=dict.fromkeys(self.states, tiles * m),
        )
        with_index = self.op == "argmax"
        merge = KernelSource.of(
            "warploom.kernels.matmul_reduce.merge_kernel:merge_tiles",
            f"merge_tiles_{self.op}",
            op=self.op,
            with_index=with_index,
        )
        results = ("out", *(["index"] if with_index else []))
        grid = -(-m // MERGE_ROWS), 1, 1
        return reduced, KernelCall(merge, grid, {"m": m, "tiles": tiles}, (), (*self.states, *results))
