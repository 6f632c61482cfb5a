"""The backward pass of packed sequences as a problem, and the launch that every configuration begins with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.kernels.attention.backward import BackwardProblem, RowGroups, sinks_call
from warploom.kernels.attention.packed import PackedOperands, PackedProblem
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.order import most_pieces


@dataclass(frozen=True)
class PackedBackwardProblem:
    """The forward problem (its ``lse`` means nothing here), and as for :class:`BackwardProblem`."""

    forward: PackedProblem
    lse_gradient: bool = False
    deterministic: bool = False

    @property
    def typical(self) -> BackwardProblem:
        """A problem of one length that asks for the same: what a configuration is chosen by."""
        return BackwardProblem(self.forward.typical, self.lse_gradient, self.deterministic)

    @property
    def flops(self) -> int:
        """Of the five products: for estimates."""
        return self.forward.flops * 5 // 2

    def slots(self, tile: int) -> int:
        """Blocks of so many query rows of a head that there may be."""
        return most_pieces(self.forward.total_q, self.forward.batch, tile)


def row_calls(
    problem: PackedBackwardProblem, operands: PackedOperands, tile: int, vector: int
) -> tuple[KernelCall, ...]:
    """The launch that forms ``shift`` and ``delta``: ``vector`` places for a block of ``tile`` rows.

    After it the one of the gradient of the sinks, if there are any: ``delta`` is 0 where no row has its place.
    """
    p = problem.forward
    source = KernelSource.of(
        "warploom.kernels.attention.device.packed_backward:packed_backward_rows",
        f"packed_backward_rows_{p.value_dim}",
        head_dim=p.value_dim,
        dtype=p.dtype,
        lse_gradient=problem.lse_gradient,
        tile=(tile, vector),
    )
    slots = problem.slots(tile)
    scalars = {"total_q": p.total_q, "slots": slots, **operands.scalars("out", "dout")}
    gradient = ("dlse",) if problem.lse_gradient else ()
    memory: dict[str, int] = dict.fromkeys(("shift", "delta"), p.heads * slots * vector)
    grid = slots * p.heads, -(-tile // RowGroups(p.value_dim).rows), 1
    arrays = "o", "dout", "lse", *gradient, "shift", "delta", "blocks"
    rows = KernelCall(source, grid, scalars, (), arrays, memory, "delta" if p.sinks else "")
    sinks = sinks_call(p.heads, (1, 1), q_len=slots * vector, plane=slots * vector, batches=1)
    return (rows, sinks) if p.sinks else (rows,)


def features(problem: PackedBackwardProblem) -> AttentionFeatures:
    """What the kernels must be able to do."""
    return replace(problem.forward.features, lse=False, sinks=False)
