"""The first and the last kernels of every backward pass: two numbers of each query row, and gradients of options."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.kernels.attention.problem import ArrayStrides, BackwardProblem
from warploom.kernels.attention.scores import HeadRows
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import most_pieces

MULTIPLIED = "q", "k", "v", "dout", "shift", "delta", "dk", "dv"
"""The arrays of the kernels of dK and dV, in their order."""
ROW_THREADS = 256
SINK_THREADS = 512


@dataclass(frozen=True)
class RowGroups:
    """Which rows a CTA of the first kernel works on, and who in a warp: 16 bytes of a row a thread."""

    head_dim: int
    steps: int = 4
    """Rows that a thread has loads of under way."""

    @property
    def lanes(self) -> int:
        """Threads side by side on one row: a power of two."""
        return 1 << (self.head_dim // 8 - 1).bit_length()

    @property
    def side(self) -> int:
        """Rows of one warp at a time."""
        return 32 // self.lanes

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self.steps * self.side

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return ROW_THREADS // 32 * self.warp_rows


def slots_of(problem: BackwardProblem, tile: int) -> int:
    """Blocks of so many query rows of a head: exact for one sequence, the most there may be for packed ones in all."""
    p = problem.forward
    return most_pieces(p.q_len, p.batch, tile) if p.listed else -(-p.q_len // tile)


def extents(problem: BackwardProblem, tile: int) -> dict[str, int]:
    """The numbers by which kernels find their tiles: of packed sequences the slots for blocks of ``tile`` rows."""
    p = problem.forward
    return {"slots": slots_of(problem, tile)} if p.listed else {"q_len": p.q_len, "kv_len": p.kv_len}


def vectors_of(problem: BackwardProblem, tile: int, vector: int) -> tuple[int, int]:
    """(rows, columns) of ``shift`` and ``delta``, with ``vector`` places for a block of ``tile`` query rows."""
    p = problem.forward
    return p.heads if p.listed else p.planes, slots_of(problem, tile) * vector


def rows_call(problem: BackwardProblem, operands: ArrayStrides, tile: int, vector: int) -> KernelCall:
    """The launch that forms ``shift`` and ``delta`` of every row: ``vector`` places for a block of ``tile`` rows."""
    p, (planes, places) = problem.forward, vectors_of(problem, tile, vector)
    groups, slots = RowGroups(p.value_dim), slots_of(problem, tile)
    source = KernelSource.of(
        "warploom.kernels.attention.device.backward_rows:attention_backward_rows",
        f"{'packed' if p.listed else 'attention'}_backward_rows_{p.value_dim}",
        head_dim=p.value_dim,
        dtype=p.dtype,
        lse_gradient=problem.lse_gradient,
        tile=(tile, vector),
        listed=p.listed,
    )
    gradient = ("dlse",) if problem.lse_gradient else ()
    arrays = "out", "dout", "lse", *gradient, "shift", "delta", *(("blocks",) if p.listed else ())
    memory: dict[str, int] = dict.fromkeys(("shift", "delta"), planes * places)
    if p.listed:
        grid, extent = (slots * p.heads, -(-tile // groups.rows), 1), {"total_q": p.q_len, "slots": slots}
    else:
        grid, extent = (-(-slots * tile // groups.rows), p.heads, p.batch), {"q_len": p.q_len, "padded": slots * tile}
    scalars = extent | operands.scalars("out", "dout")
    zeroed = "delta" if p.listed and p.head_arrays else ""  # sums over a head's rows count places without a row, too
    return KernelCall(source, grid, scalars, (), arrays, memory, zeroed)


def option_calls(problem: BackwardProblem, operands: ArrayStrides, tile: int, vector: int) -> tuple[KernelCall, ...]:
    """The launches that form the gradients of options' arrays, of a pass with such ``shift`` and ``delta``."""
    p, (_, places) = problem.forward, vectors_of(problem, tile, vector)
    per_block, lengths = (tile, vector), {"q_len": p.q_len, "plane": places, "batches": p.batch}
    if p.listed:
        per_block, lengths = (1, 1), {"q_len": places, "plane": places, "batches": 1}
    strides = operands.scalars("q", "dq")
    rows = HeadRows(p.heads, p.q_len, p.head_dim, p.dtype, p.listed, per_block, lengths, strides)
    return tuple(p.options[name].gradient(rows) for name in p.head_arrays)
