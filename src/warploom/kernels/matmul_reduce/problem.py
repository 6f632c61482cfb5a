"""A row reduction of a product as a problem: the kernels of a call, their launches, and the states between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul_reduce.states import MERGE_ROWS, STATES, ReduceOp, Reduction
from warploom.kernels.settings import violated
from warploom.kernels.source import KernelCall, KernelSource


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
        return reduced, merge_call(self.op, m, tiles)


@dataclass(frozen=True)
class ExponentialsProblem:
    """A product of which exp(x - top) is stored, for parts of its rows, and the rows' log-sum-exps."""

    product: MatmulProblem

    @staticmethod
    def part(config: MatmulConfig) -> int:
        """Columns of a part of a row: what a warp holds of it."""
        return config.warp_n if isinstance(config, MatmulSm80) else config.tile_n

    def parts(self, config: MatmulConfig) -> int:
        """Parts of a row; the last ones may hold no column."""
        return self.product.tiling(config).cols * config.tile_n // self.part(config)

    def calls(self, config: MatmulConfig, multiprocessors: int) -> tuple[KernelCall, KernelCall]:
        """The product's kernel, and the one that merges the parts' states; of arrays a, b, out, bias and lse."""
        p, (call,) = self.product, config.calls(self.product, multiprocessors)
        ragged_m, ragged_n = p.m % config.tile_m != 0, p.n % config.tile_n != 0
        given = dict(call.source.arguments)
        features = replace(given["features"], ragged_m=ragged_m, ragged_n=ragged_n)  # the TMA does not clip states
        source = replace(
            call.source,
            function=_EXPONENTIALS[config.requires],
            name=f"{call.source.name}_exponentials",
            arguments=tuple({**given, "features": features}.items()),
        )
        parts = self.parts(config)
        states = dict.fromkeys(STATES, parts * p.m)
        product = replace(call, source=source, arrays=(*call.arrays, *STATES), workspace=states)
        return product, merge_call("logsumexp", p.m, parts, "lse")


_EXPONENTIALS = {
    "sm_80": "warploom.kernels.matmul_reduce.exponentials_kernel:matmul_exponentials_sm80",
    "sm_90a": "warploom.kernels.matmul_reduce.exponentials_kernel:matmul_exponentials_sm90",
}
"""The kernels by the architectures that they need."""


def merge_call(op: ReduceOp, m: int, tiles: int, out: str = "out") -> KernelCall:
    """The kernel that merges the states of m rows in so many tiles."""
    with_index = op == "argmax"
    merge = KernelSource.of(
        "warploom.kernels.matmul_reduce.merge_kernel:merge_tiles",
        f"merge_tiles_{op}",
        op=op,
        with_index=with_index,
    )
    arrays = (*STATES[: len(Reduction(op).types)], out, *(["index"] if with_index else []))
    return KernelCall(merge, (-(-m // MERGE_ROWS), 1, 1), {"m": m, "tiles": tiles}, (), arrays)
