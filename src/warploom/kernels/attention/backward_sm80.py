"""Attention backward on sm_80 and newer: the configuration of its kernels, and what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from warploom.core.dtypes import DType, bf16, f16
from warploom.kernels.attention.backward import BackwardOperands, BackwardProblem, GradientDims, rows_calls
from warploom.kernels.attention.packed import Strides
from warploom.kernels.attention.packed_backward_problem import PackedBackwardProblem, features, row_calls
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.order import most_pieces

ROWS = 16
"""Keys of a warp."""
_WHOLE_HEAD = 128
"""Up to this head_dim a warp's registers hold dK and dV of its keys."""


@dataclass(frozen=True)
class BackwardSm80(GradientDims):
    """The kernels of :mod:`.backward_sm80_kernel`: warps own 16 keys each, or a half of their dK and dV."""

    word: ClassVar[str] = "attention_backward_sm80"
    always: ClassVar[tuple[str, ...]] = ("tile_m", "num_warps", "head_dim", "dtype")
    requires: ClassVar[str] = "sm_80"

    tile_m: int = flag(64, "query rows per step", (16, 32, 64))
    num_warps: int = flag(8, "warps per CTA", (4, 8))
    stages: int = flag(2, "blocks of Q and dO in flight", (2, 3))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of the inputs and gradients", (bf16, f16))
    v_dim: int = flag(0, "elements per head of V and O, if they are not head_dim", (0,))
    in_turn: bool = flag(False, "CTAs add to dQ in the order of their keys: equal bits from run to run")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def halves(self) -> int:
        """Warps that share their keys, each with a part of the columns of dK and dV."""
        return 1 if max(self.head_dim, self.value_dim) <= _WHOLE_HEAD else 2

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return ROWS * self.num_warps // self.halves

    @property
    def sum_cols(self) -> int:
        """Columns of dK that a warp sums."""
        return self.width // 2 if self.halves == 2 else super().sum_cols

    @property
    def value_sum_cols(self) -> int:
        """Columns of dV that a warp sums."""
        return self.value_width // 2 if self.halves == 2 else super().value_sum_cols

    @property
    def dq_warps(self) -> tuple[int, int]:
        """Warps along the rows and the columns of a block of dQ."""
        return self.tile_m // ROWS, self.num_warps * ROWS // self.tile_m

    @property
    def dq_cols(self) -> int:
        """Columns of dQ that a warp sums."""
        return self.width // self.dq_warps[1]

    @property
    def dq_registers(self) -> int:
        """Sums of dQ of a thread."""
        return ROWS * self.dq_cols // 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the tiles, in bytes."""
        rows = self.keys + self.stages * self.tile_m
        return (rows * (self.width + self.value_width) + self.keys * self.tile_m) * self.dtype.bytes

    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        step = self.threads // 8
        return [
            (self.num_warps in (4, 8), f"there are 4 or 8 warps, not {self.num_warps}"),
            (self.tile_m in (16, 32, 64) and self.tile_m % step == 0 and self.dq_cols % 16 == 0,
             f"tile_m {self.tile_m} is not 16, 32 or 64, copied {step} rows at once, in parts of 16 columns for warps"),
            (self.stages >= 2, "the ring has at least 2 stages"),
        ]  # fmt: skip

    def misfits(self, problem: BackwardProblem) -> list[str]:
        """The constraints of the kernels that a problem violates; empty if they take it."""
        return problem.differences(self) + violated([
            (self.in_turn or not problem.deterministic, "deterministic sums need in_turn=True"),
        ])  # fmt: skip

    def calls(
        self, problem: BackwardProblem, operands: BackwardOperands, multiprocessors: int
    ) -> tuple[KernelCall, ...]:
        """The kernels for a problem, on arrays that lie so; a CTA for each tile."""
        rows = rows_calls(problem, operands, self.tile_m, self.tile_m)
        return *rows, self._products(problem.forward, operands), self._rounding(problem.forward, operands)

    def _products(self, p: AttentionProblem, operands: BackwardOperands) -> KernelCall:
        """The kernel that multiplies."""
        names = "q", "k", "v", "dout", "dk", "dv"
        source = KernelSource.of(
            "attention.backward_sm80_kernel:attention_backward_sm80",
            f"attention_backward_{self.tile_m}x{self.keys}x{self.dims}",
            config=self, features=p.features(self.tile_m, self.keys), row_strides=operands.row_strides(*names),
        )  # fmt: skip
        grid = -(-p.kv_len // self.keys), p.kv_heads, p.batch
        scalars = {"q_len": p.q_len, "kv_len": p.kv_len, **operands.scalars(*names)}
        blocks = p.planes * -(-p.q_len // self.tile_m)
        memory = {"total": blocks * self.tile_m * self.width} | ({"turns": blocks} if self.in_turn else {})
        arrays = "q", "k", "v", "dout", "shift", "delta", "dk", "dv", *memory
        return KernelCall(source, grid, scalars, (), arrays, memory, [*memory][-1])

    def _rounding(self, p: AttentionProblem, operands: BackwardOperands) -> KernelCall:
        """The kernel that scales and rounds dQ."""
        source = KernelSource.of(
            "attention.backward_sm80_kernel:attention_backward_dq_sm80", f"attention_backward_dq_{self.head_dim}",
            config=self, features=p.features(self.tile_m, self.keys), row_strides=operands.row_strides("dq"),
        )  # fmt: skip
        grid = -(-p.q_len // self.tile_m), p.heads, p.batch
        scalars = {"q_len": p.q_len, "kv_len": p.kv_len, **operands.scalars("dq")}
        return KernelCall(source, grid, scalars, (), ("dq", "total"))

    @property
    def blocks(self) -> tuple[int, int]:
        """Query rows of a block, and keys of a tile."""
        return self.tile_m, self.keys

    @property
    def least_together(self) -> int:
        """Heads of keys whose tiles come side by side, at least."""
        return 1

    def calls_packed(
        self, problem: PackedBackwardProblem, strides: Mapping[str, Strides], multiprocessors: int
    ) -> tuple[KernelCall, ...]:
        """The kernels for packed sequences, on their lists of tiles."""
        p, names = problem.forward, ("q", "k", "v", "dout", "dk", "dv")
        kernels, slots, given = "attention.packed_backward_kernel", problem.slots(self.tile_m), features(problem)
        products = KernelSource.of(
            f"{kernels}:packed_backward_sm80", f"packed_backward_{self.tile_m}x{self.keys}x{self.dims}",
            config=self, features=given, row_strides=tuple(strides[x][0] for x in names),
        )  # fmt: skip
        blocks = slots * p.heads
        memory = {"total": blocks * self.tile_m * self.width} | ({"turns": blocks} if self.in_turn else {})
        arrays = "q", "k", "v", "dout", "shift", "delta", "tiles", "dk", "dv", *memory
        scalars = {"slots": slots, **{f"{x}_head": strides[x][1] for x in names}}
        grid = most_pieces(p.total_k, p.batch, self.keys) * p.kv_heads, 1, 1
        rounding = KernelSource.of(
            f"{kernels}:packed_backward_dq_sm80", f"packed_backward_dq_{self.head_dim}",
            config=self, features=given, row_strides=(strides["dq"][0],),
        )  # fmt: skip
        return (
            *row_calls(problem, strides, self.tile_m, self.tile_m),
            KernelCall(products, grid, scalars, (), arrays, memory, [*memory][-1]),
            KernelCall(rounding, (blocks, 1, 1), {"slots": slots, "dq_head": strides["dq"][1]},
                       (), ("dq", "total", "blocks")),
        )  # fmt: skip
