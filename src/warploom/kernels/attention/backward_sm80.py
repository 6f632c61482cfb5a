"""Attention backward on sm_80 and newer: the configuration of its kernels, and what they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from warploom.core.arguments import fields
from warploom.core.dtypes import DType, bf16, f16
from warploom.kernels.attention.backward_rows import MULTIPLIED, extents, option_calls, rows_call, vectors_of
from warploom.kernels.attention.backward_shares import MMA_RATE, HeadShares
from warploom.kernels.attention.lists import list_gradient_tiles
from warploom.kernels.attention.problem import BACKWARD, ArrayStrides, BackwardProblem, GradientDims
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import KernelCall, KernelSource

ROWS = tuple(x for x in MULTIPLIED if x in BACKWARD)
"""The arrays of the kernel that multiplies with rows of a head_dim."""
STAGES = 2
"""Blocks of Q and dO in flight."""
_WARPS = 8
"""That run on a multiprocessor at a time."""
_MOST_SUMS = 2048
"""Elements of dK, and as many of dV, that a warp's registers hold."""
_MOST_SCORES = 1024
"""Scores that they hold at a time."""


@dataclass(frozen=True)
class BackwardSm80(GradientDims):
    """The kernels of :mod:`.device.backward_sm80`: groups of warps own keys, of whose dK and dV each has columns."""

    word: ClassVar[str] = "attention_backward_sm80"
    always: ClassVar[tuple[str, ...]] = ("tile_m", "num_warps", "warp_keys", "head_dim", "dtype")
    requires: ClassVar[str] = "sm_80"

    tile_m: int = flag(64, "query rows per step", (16, 32, 64))
    num_warps: int = flag(8, "warps per CTA", (4, 8))
    warp_keys: int = flag(32, "keys of a group of warps", (16, 32))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of the inputs and gradients", (bf16, f16))
    v_dim: int = flag(0, "elements per head of V and O, if they are not head_dim", (0,))
    held: int = flag(0, "steps along head_dim of K and of V that stay in registers", (0, 3))
    in_turn: bool = flag(False, "CTAs add to dQ in the order of their keys: equal bits from run to run")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def share(self) -> int:
        """Warps of a group: 1, 2 or 4."""
        parts = -(-max(super().sum_cols, super().value_sum_cols) * self.warp_keys // _MOST_SUMS)
        return 1 << (parts - 1).bit_length()

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return self.warp_keys * self.num_warps // self.share

    @property
    def sum_cols(self) -> int:
        """Columns of dK that a warp sums."""
        return _part(super().sum_cols, self.share)

    @property
    def value_sum_cols(self) -> int:
        """Columns of dV that a warp sums."""
        return _part(super().value_sum_cols, self.share)

    @property
    def parts(self) -> int:
        """Parts of a block's rows: each warp of a group forms the scores of one, which has at least 16 of them."""
        return min(self.share, self.tile_m // 16)

    @property
    def strip(self) -> int:
        """Query rows whose scores a warp forms at a time."""
        return min(self.tile_m // self.parts, _MOST_SCORES // self.warp_keys)

    @property
    def dq_tile(self) -> tuple[int, int]:
        """Rows and columns of dQ that a warp sums: those for which it loads, and pads, the least."""

        def cols(rows: int) -> int:
            return _part(super(BackwardSm80, self).sum_cols, self.num_warps * rows // self.tile_m)

        within = [r for r in (16, 32) if r <= self.tile_m and cols(r) * self.num_warps * r <= self.width * self.tile_m]
        rows = min(within, key=lambda r: (r + cols(r), r * cols(r)), default=16)
        return rows, cols(rows)

    @property
    def dq_warps(self) -> tuple[int, int]:
        """Warps along the rows and the columns of a block of dQ."""
        rows = self.tile_m // self.dq_tile[0]
        return rows, self.num_warps // rows

    @property
    def dq_registers(self) -> int:
        """Sums of dQ of a thread."""
        return self.dq_tile[0] * self.dq_tile[1] // 32

    @property
    def key_registers(self) -> tuple[int, int]:
        """Sums of dK and of dV of a thread."""
        return self.warp_keys * self.sum_cols // 32, self.warp_keys * self.value_sum_cols // 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the tiles, in bytes."""
        rows = self.keys + STAGES * self.tile_m
        scores = self.keys * self.tile_m * (2 if self.parts > 1 else 1)
        return (rows * (self.width + self.value_width) + scores) * self.dtype.bytes

    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        step = self.threads // 8
        return [
            (self.num_warps in (4, 8), f"there are 4 or 8 warps, not {self.num_warps}"),
            (
                self.tile_m in (16, 32, 64) and self.tile_m % step == 0,
                f"tile_m {self.tile_m} is not 16, 32 or 64, copied {step} rows at once",
            ),
            (self.warp_keys in (16, 32), f"a group of warps has 16 or 32 keys, not {self.warp_keys}"),
        ]

    def violations(self, problem: BackwardProblem) -> list[str]:
        """The constraints of the kernels that a problem violates; empty if they take it."""
        return problem.differences(self, self.tile_m) + violated(
            [
                (self.in_turn or not problem.deterministic, "deterministic sums need in_turn=True"),
            ]
        )

    def calls(self, problem: BackwardProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem, on arrays with these strides; a CTA for each tile.

        Packed sequences have their tiles listed first. Without any keys there is nothing to multiply.
        """
        tile, side_by_side = (self.tile_m, self.keys), _WARPS // self.num_warps
        listing = list_gradient_tiles(problem, tile, 1)
        rate, ctas = MMA_RATE / side_by_side, multiprocessors * side_by_side
        shares = HeadShares.of(problem, tile, ctas, rate=rate, whole=problem.forward.listed)
        rows = rows_call(problem, operands, self.tile_m, self.tile_m)
        options = option_calls(problem, operands, self.tile_m, self.tile_m)
        if not problem.forward.kv_len:
            return *listing[:1], rows, *options
        products, rounding = self._products(problem, operands, shares), self._rounding(problem, operands)
        return *listing, rows, products, rounding, *self._shared_sums(problem, operands, shares), *options

    def _products(self, problem: BackwardProblem, operands: ArrayStrides, shares: HeadShares) -> KernelCall:
        """The kernel that multiplies."""
        p = problem.forward
        source = self._source(
            problem,
            "warploom.kernels.attention.device.backward_sm80:attention_backward_sm80",
            f"{self.tile_m}x{self.keys}x{self.dims}",
            operands.rows(*ROWS),
            **shares.argument,
        )
        scalars = {**extents(problem, self.tile_m), **fields("arrays", **operands.scalars(*ROWS))}
        blocks = math.prod(vectors_of(problem, self.tile_m, 1))
        memory = {"total": blocks * self.threads * self.dq_registers} | ({"turns": blocks} if self.in_turn else {})
        zeroed, memory = [*memory][-1], memory | shares.workspace(problem, self.threads * sum(self.key_registers))
        arrays = *shares.stored(MULTIPLIED), *p.changing_arrays, *(["tiles"] if p.listed else ()), *memory
        grid = p.grid(self.keys, p.kv_heads * shares.count, p.kv_len)
        return KernelCall(source, grid, scalars, (), arrays, memory, zeroed)

    def _shared_sums(
        self, problem: BackwardProblem, operands: ArrayStrides, shares: HeadShares
    ) -> tuple[KernelCall, ...]:
        """The kernel that sums dK and dV of shares, where there are any."""
        if shares.count == 1:
            return ()
        p = problem.forward
        source = KernelSource.of(
            "warploom.kernels.attention.device.backward_sm80:attention_backward_shares_sm80",
            f"attention_backward_shares_{self.dims}",
            config=self,
            features=problem.features(self.tile_m, self.keys),
            row_strides=operands.rows("dk", "dv"),
            count=shares.count,
        )
        scalars = {"kv_len": p.kv_len, **operands.scalars("dk", "dv")}
        return (KernelCall(source, p.grid(self.keys, p.kv_heads, p.kv_len), scalars, (), ("dk", "dv", "shares")),)

    def _rounding(self, problem: BackwardProblem, operands: ArrayStrides) -> KernelCall:
        """The kernel that scales and rounds dQ."""
        p = problem.forward
        source = self._source(
            problem,
            "warploom.kernels.attention.device.backward_sm80:attention_backward_dq_sm80",
            f"dq_{self.head_dim}",
            operands.rows("dq"),
        )
        scalars = {**extents(problem, self.tile_m), **operands.starts("dq")}
        arrays = "dq", "total", *(["blocks"] if p.listed else ())
        return KernelCall(source, p.grid(self.tile_m, p.heads, p.q_len), scalars, (), arrays)

    def _source(
        self, problem: BackwardProblem, kernel: str, name: str, row_strides: tuple[int, ...], **more: int
    ) -> KernelSource:
        listed = problem.forward.listed
        return KernelSource.of(
            kernel,
            f"{'packed' if listed else 'attention'}_backward_{name}",
            config=self,
            features=problem.features(self.tile_m, self.keys),
            row_strides=row_strides,
            listed=listed,
            **more,
        )


def _part(cols: int, parts: int) -> int:
    """Columns of a part, a multiple of 16."""
    return -(-cols // (16 * parts)) * 16
