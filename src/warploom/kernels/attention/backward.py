"""The backward pass of attention as a problem, and the kernels that solve it one after another.

With P = softmax(S), S = scale · Q·Kᵀ, dP = dO·Vᵀ and delta = rowsum(dO∘O) - dLSE::

    dV = Pᵀ·dO        dS = P∘(dP - delta)        dQ = scale · dS·K        dK = scale · dSᵀ·Q

A sink s is part of the log-sum-exp L, and so of P; it has no value, hence no dP: ds = -Σ e^(s - L)·delta over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warploom.kernels.attention.problem import AttentionProblem, HeadConfig, HeadDims, Operands
from warploom.kernels.settings import violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.panels import PANEL_COLS

TENSORS = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
"""The arrays with rows of a head_dim, Q's or V's, in the order that :class:`BackwardOperands` has their strides."""
MULTIPLIED = "q", "k", "v", "dout", "shift", "delta", "dk", "dv"
"""Those of the kernels of dK and dV, in their order."""


@dataclass(frozen=True)
class BackwardProblem:
    """What is asked: the forward problem (its ``lse`` means nothing here), and whether the log-sum-exp has a gradient.

    ``deterministic``: equal bits from run to run.
    """

    forward: AttentionProblem
    lse_gradient: bool = False
    deterministic: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of the five products."""
        p = self.forward
        return 2 * p.planes * (3 * p.head_dim + 2 * p.value_dim) * p.visible_scores

    def differences(self, config: HeadConfig) -> list[str]:
        """How a configuration differs from the problem, and what no kernel takes; empty if nothing does."""
        return self.forward.differences(config) + violated([self.forward.grid_constraint])


class BackwardOperands(Operands):
    """How the arrays of a backward pass lie."""

    names: ClassVar[tuple[str, ...]] = TENSORS


class GradientDims(HeadDims):
    """A configuration of a backward pass, whose shared tiles are whole panels of 64 columns, with zeros beyond."""

    @property
    def width(self) -> int:
        """Columns of the shared tiles of Q and K."""
        return -(-self.head_dim // PANEL_COLS) * PANEL_COLS

    @property
    def value_width(self) -> int:
        """Columns of the shared tiles of V and dO."""
        return -(-self.value_dim // PANEL_COLS) * PANEL_COLS

    @property
    def sum_cols(self) -> int:
        """Columns of an accumulator of dQ or dK: head_dim in steps of 16."""
        return -(-self.head_dim // 16) * 16

    @property
    def value_sum_cols(self) -> int:
        """Columns of an accumulator of dV."""
        return -(-self.value_dim // 16) * 16


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


def rows_calls(problem: BackwardProblem, operands: BackwardOperands, tile: int, slots: int) -> tuple[KernelCall, ...]:
    """The kernel that forms ``shift`` and ``delta`` of every row: ``slots`` places for a tile of ``tile`` rows.

    After it the one of the gradient of the sinks, if there are any.
    """
    p = problem.forward
    groups, tiles = RowGroups(p.value_dim), -(-p.q_len // tile)
    source = KernelSource.of(
        "warploom.kernels.attention.device.backward_rows:attention_backward_rows",
        f"attention_backward_rows_{p.value_dim}",
        head_dim=p.value_dim,
        dtype=p.dtype,
        lse_gradient=problem.lse_gradient,
        tile=(tile, slots),
    )
    grid = -(-tiles * tile // groups.rows), p.heads, p.batch
    scalars = {"q_len": p.q_len, "padded": tiles * tile, **operands.scalars("out", "dout")}
    gradient = ("dlse",) if problem.lse_gradient else ()
    arrays = ("out", "dout", "lse", *gradient, "shift", "delta")
    memory: dict[str, int] = dict.fromkeys(("shift", "delta"), p.planes * tiles * slots)
    rows = KernelCall(source, grid, scalars, (), arrays, memory)
    sinks = sinks_call(p.heads, (tile, slots), q_len=p.q_len, plane=tiles * slots, batches=p.batch)
    return (rows, sinks) if p.sinks else (rows,)


def sinks_call(heads: int, tile: tuple[int, int], **scalars: int) -> KernelCall:
    """The kernel of the gradient of the sinks, of ``shift`` and ``delta``."""
    name = "attention_backward_sinks"
    source = KernelSource.of(f"warploom.kernels.attention.device.backward_rows:{name}", name, tile=tile)
    return KernelCall(source, (heads, 1, 1), scalars, (), ("sinks", "shift", "delta", "dsinks"))
