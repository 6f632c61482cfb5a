"""Attention backward on sm_90a above head_dim 128: the configuration of its kernels, and what they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.kernels.attention.backward_rows import MULTIPLIED, option_calls, rows_call
from warploom.kernels.attention.backward_shares import WGMMA_RATE, HeadShares
from warploom.kernels.attention.problem import MOST_POSITIONS, ArrayStrides, BackwardProblem, GradientDims
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import KernelCall, KernelSource, MappedArray
from warploom.tile.planning import PANEL_COLS, divisors, row_tiles

CONSUMERS = 2
KEYS = 64
"""Keys of a CTA of the kernel for dK and dV, which both of its consumers work on."""
ROWS = 64 * CONSUMERS
"""Query rows of a CTA of the kernel for dQ."""
STAGES = 2
"""Of what the kernel for dQ streams of V."""
BARRIER_BYTES = 512
_MOST_REGISTERS = 212
"""Of a thread's 240 for accumulators and operands; ptxas needs the rest."""


@dataclass(frozen=True)
class BackwardWideSm90(GradientDims):
    """The kernels of :mod:`.device.backward_wide`: seven products, dK and dV in one kernel and dQ in another."""

    word: ClassVar[str] = "attention_backward_wide_sm90"
    always: ClassVar[tuple[str, ...]] = ("tile_m", "tile_n", "head_dim", "dtype")
    requires: ClassVar[str] = "sm_90a"

    tile_m: int = flag(64, "query rows per step of dK and dV", (32, 64))
    tile_n: int = flag(48, "keys per step of dQ", (32, 48, 64))
    head_dim: int = flag(256, "elements per head", (192, 256))
    dtype: DType = flag(bf16, "element type of the inputs and gradients", (bf16, f16))
    v_dim: int = flag(0, "elements per head of V and O, if they are not head_dim", (0,))
    stages: int = flag(2, "of Q and dO; of K in the kernel of dQ", (2, 3))
    held: int = flag(0, "steps of 16 columns of K, and of V, that registers hold in the kernel of dK and dV", (0, 6))
    held_queries: int = flag(0, "steps of 16 columns of Q that registers hold in the kernel of dQ", (0, 6))
    side_by_side: int = flag(16, "planes whose tiles run at a time", (1, 16))

    @property
    def key_width(self) -> int:
        """Columns of the tiles of the keys' own K and V, through which dV and dK leave."""
        return max(self.width, self.value_width)

    @property
    def crossing_stages(self) -> int:
        """Stages of P: one more of Q and dO takes the place of the second."""
        return 2 if self.stages == 2 else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread for products alone, in the kernel of dK and dV and in that of dQ."""
        m, n, sums = self.tile_m, self.tile_n, max(self.sum_cols, self.value_sum_cols)
        return sums // 2 + m // 2 + m // 4 + 4 * self.held, self.sum_cols // 2 + n + n // 4 + 4 * self.held_queries

    @property
    def score_registers(self) -> int:
        """Accumulator registers of a block of Sᵀ."""
        return self.tile_m // 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the larger kernel, in bytes."""
        both = self.width + self.value_width
        vectors = (2 * self.stages + self.crossing_stages * KEYS) * self.tile_m * f32.bytes
        of_keys = (2 * KEYS * self.key_width + self.stages * self.tile_m * both) * self.dtype.bytes + vectors
        keys = self.tile_n * (self.stages * self.width + STAGES * self.value_width)
        of_queries = (ROWS * both + keys) * self.dtype.bytes
        return max(of_keys, of_queries) + BARRIER_BYTES

    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        return [
            (self.tile_m in (16, 32, 64), f"tile_m is 16, 32 or 64, not {self.tile_m}"),
            (self.tile_n in (16, 32, 48, 64), f"tile_n is 16, 32, 48 or 64, not {self.tile_n}"),
            (self.stages >= 2, "a block's stage is read beside the next one's: there are at least 2"),
            (
                max(self.registers) <= _MOST_REGISTERS,
                f"products alone take {max(self.registers)} registers of at most {_MOST_REGISTERS}",
            ),
        ]

    def violations(self, problem: BackwardProblem) -> list[str]:
        """The constraints of the kernels that a problem violates; empty if they take it."""
        p = problem.forward
        if p.listed:
            return ["packed sequences take attention_backward_sm90 or attention_backward_sm80"]
        tiles = max(-(-p.kv_len // KEYS) * p.kv_heads, -(-p.q_len // ROWS) * p.heads) * p.batch
        return problem.differences(self, ROWS) + violated(
            [
                (tiles < MOST_POSITIONS, f"{tiles} tiles reach {MOST_POSITIONS}"),
            ]
        )

    def calls(self, problem: BackwardProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem, on arrays with these strides; a CTA for each tile."""
        rows, options = rows_call(problem, operands, ROWS, ROWS), option_calls(problem, operands, ROWS, ROWS)
        shares = HeadShares.of(problem, (self.tile_m, KEYS), multiprocessors, rate=WGMMA_RATE)
        keys = self._keys(problem, operands, shares)
        return rows, keys, self._queries(problem, operands), *shares.sums(problem, operands, self), *options

    def _keys(self, problem: BackwardProblem, operands: ArrayStrides, shares: HeadShares) -> KernelCall:
        """The kernel of dK and dV."""
        p = problem.forward
        source = KernelSource.of(
            "warploom.kernels.attention.device.backward_wide:attention_backward_keys_sm90",
            f"attention_backward_keys_{self.tile_m}x{KEYS}x{self.dims}",
            config=self,
            features=problem.features(self.tile_m, KEYS),
            heads_inside=operands.heads_inside,
            **shares.argument,
        )
        walkers, padded, tiles = p.kv_heads * shares.count, -(-p.q_len // ROWS) * ROWS, -(-p.kv_len // KEYS)
        planes = walkers * p.batch
        vector = MappedArray(f32, (p.planes, padded), (padded, 1), (1, self.tile_m), swizzled=False)
        maps = (
            operands.mapped("q", p, self.tile_m, PANEL_COLS),
            operands.mapped("k", p, KEYS, PANEL_COLS),
            operands.mapped("v", p, KEYS, PANEL_COLS),
            operands.mapped("dout", p, self.tile_m, PANEL_COLS),
            vector,
            vector,
            operands.mapped("dk", p, KEYS, PANEL_COLS),
            operands.mapped("dv", p, KEYS, PANEL_COLS),
        )
        scalars = {
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            **divisors(kv_heads=walkers),
            **row_tiles(tiles, planes, min(planes, self.side_by_side)),
        }
        memory = shares.workspace(problem, KEYS * (self.sum_cols + self.value_sum_cols))
        arrays = *shares.stored(MULTIPLIED), *p.changing_arrays, *memory
        return KernelCall(source, (tiles * planes, 1, 1), scalars, shares.stored(maps), arrays, memory)

    def _queries(self, problem: BackwardProblem, operands: ArrayStrides) -> KernelCall:
        """The kernel of dQ."""
        p = problem.forward
        source = KernelSource.of(
            "warploom.kernels.attention.device.backward_wide:attention_backward_queries_sm90",
            f"attention_backward_queries_{ROWS}x{self.tile_n}x{self.dims}",
            config=self,
            features=problem.features(ROWS, self.tile_n),
            heads_inside=operands.heads_inside,
        )
        blocks = -(-p.q_len // ROWS)
        maps = (
            operands.mapped("q", p, ROWS, PANEL_COLS),
            operands.mapped("k", p, self.tile_n, PANEL_COLS),
            operands.mapped("v", p, self.tile_n, PANEL_COLS),
            operands.mapped("dout", p, ROWS, PANEL_COLS),
            operands.mapped("dq", p, 64, PANEL_COLS),
        )
        scalars = {
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            **divisors(heads=p.heads),
            **row_tiles(blocks, p.planes, min(p.planes, self.side_by_side)),
        }
        arrays = "q", "k", "v", "dout", "dq", "shift", "delta", *p.changing_arrays
        return KernelCall(source, (blocks * p.planes, 1, 1), scalars, maps, arrays)
