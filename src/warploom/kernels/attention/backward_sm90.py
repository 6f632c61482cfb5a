"""Attention backward on sm_90a up to head_dim 128: the configuration of its kernels, and what they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.kernels.attention.backward_rows import MULTIPLIED, extents, option_calls, rows_call, vectors_of
from warploom.kernels.attention.backward_shares import WGMMA_RATE, HeadShares
from warploom.kernels.attention.lists import list_gradient_tiles
from warploom.kernels.attention.problem import (
    MOST_POSITIONS,
    ArrayStrides,
    AttentionProblem,
    BackwardProblem,
    GradientDims,
)
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import KernelCall, KernelSource, MappedArray
from warploom.tile.planning import L2_BYTES, PANEL_COLS, divisors, padded_cols, panel_cols, part_size, row_tiles
from warploom.tile.roles import WARPGROUP_ROWS

CONSUMERS = 2
KEYS = 64 * CONSUMERS
"""Keys of a CTA."""
STAGES = 2
"""Of Q, dO and dS."""
ADDERS = 2
"""Threads that add to dQ."""
BARRIER_BYTES = 256
_MOST_REGISTERS = 212
"""Of a thread's 240 for accumulators and operands of products under way; ptxas needs the rest."""


@dataclass(frozen=True)
class BackwardSm90(GradientDims):
    """The kernels of :mod:`.device.backward_sm90`: a CTA owns 128 keys and streams blocks of ``tile_m`` query rows."""

    word: ClassVar[str] = "attention_backward_sm90"
    always: ClassVar[tuple[str, ...]] = ("tile_m", "head_dim", "dtype")
    requires: ClassVar[str] = "sm_90a"
    most: ClassVar[int] = 128

    tile_m: int = flag(64, "query rows per step", (64, 96, 128))
    head_dim: int = flag(128, "elements per head", (64, 128))
    dtype: DType = flag(bf16, "element type of the inputs and gradients", (bf16, f16))
    v_dim: int = flag(0, "elements per head of V and O, if they are not head_dim", (0,))
    in_turn: bool = flag(False, "CTAs add to dQ in the order of their keys: equal bits from run to run")
    side_by_side: int = flag(8, "planes whose tiles run at a time, at least", (1, 2, 4, 8, 16, 32))
    rising: bool = flag(False, "blocks of query rows come from a tile's first one on, not from its last")
    alternating: bool = flag(False, "of the threads that add to dQ each takes every other block, not a consumer's part")
    persistent: bool = flag(False, "a CTA takes one tile after another, whose K and V come while the last leaves")
    by_heads: bool = flag(False, "of heads that share keys one comes after the other, not all of them at each block")

    @property
    def vector(self) -> int:
        """Elements of shift and delta for a step: a panel, of which the first ``tile_m`` count."""
        return 1 << (self.tile_m - 1).bit_length()

    @property
    def width(self) -> int:
        """Columns of the shared tiles of Q and K."""
        return padded_cols(max(PANEL_COLS, self.head_dim), tight=True)

    @property
    def value_width(self) -> int:
        """Columns of the shared tiles of V and dO."""
        return padded_cols(max(PANEL_COLS, self.value_dim), tight=True)

    @property
    def halves_head(self) -> bool:
        """Whether a consumer forms half of dQ's columns, not of its rows."""
        return self.width > WARPGROUP_ROWS

    @property
    def total_cols(self) -> int:
        """Query rows of a consumer's part of dQ, transposed: 64 of head_dim × these."""
        return self.tile_m if self.halves_head else self.tile_m // CONSUMERS

    @property
    def total_warps(self) -> int:
        """Warps of a consumer whose rows of its part count: the first ones, and of the second consumer the last."""
        return (self.width // CONSUMERS if self.halves_head else self.sum_cols) // 16

    @property
    def total_size(self) -> int:
        """Sums of a consumer's part."""
        return part_size(self.total_registers, self.total_warps)

    @property
    def total_registers(self) -> int:
        """Accumulator registers of that part."""
        return self.total_cols // 2

    @property
    def total_stages(self) -> int:
        """Stages of a consumer's parts."""
        return ADDERS if self.alternating else 1

    @property
    def at_once(self) -> bool:
        """Whether CTAs wait for each other: for those of lower numbers alone where each has one tile."""
        return self.persistent and self.in_turn

    @property
    def key_stages(self) -> int:
        """Stages of K and V."""
        return 2 if self.persistent else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the tiles and the mbarriers, in bytes."""
        rows = self.key_stages * KEYS + STAGES * self.tile_m
        grads = STAGES * self.tile_m * KEYS
        vectors = 2 * STAGES * self.vector * f32.bytes
        parts = CONSUMERS * self.total_stages * self.total_size * f32.bytes
        return (rows * (self.width + self.value_width) + grads) * self.dtype.bytes + vectors + parts + BARRIER_BYTES

    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        registers = self.tile_m + (self.sum_cols + self.value_sum_cols) // 2
        return [
            (
                self.tile_m % 16 == 0 and 16 <= self.tile_m <= 128,
                f"tile_m {self.tile_m} is no multiple of 16 from 16 to 128",
            ),
            (self.total_cols % 16 == 0, f"blocks of {self.tile_m} rows do not divide between two consumers"),
            (
                registers <= _MOST_REGISTERS,
                f"tile_m {self.tile_m} at head_dim {self.head_dim} takes {registers} registers for products alone",
            ),
            (self.side_by_side >= 1, f"no plane's tiles run at a time: side_by_side is {self.side_by_side}"),
        ]

    def violations(self, problem: BackwardProblem) -> list[str]:
        """The constraints of the kernels that a problem violates; empty if they take it."""
        return problem.differences(self, self.tile_m) + violated(
            [
                (self.in_turn or not problem.deterministic, "deterministic sums need in_turn=True"),
                (self._key_tiles(problem.forward) < MOST_POSITIONS, "there are too many tiles of keys"),
            ]
        )

    def calls(self, problem: BackwardProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem, on arrays with these strides; persistent with one CTA per multiprocessor.

        Packed sequences have their tiles listed first. Without any keys there is nothing to multiply.
        """
        tile = self.tile_m, KEYS
        shares = HeadShares.of(problem, tile, multiprocessors, rate=WGMMA_RATE, whole=self.persistent)
        listing = list_gradient_tiles(problem, tile, self.side_by_side, shares.count)
        rows = rows_call(problem, operands, self.tile_m, self.vector)
        options = option_calls(problem, operands, self.tile_m, self.vector)
        if not problem.forward.kv_len:
            return *listing[:1], rows, *options
        products = self._products(problem, operands, multiprocessors, shares)
        sums = shares.sums(problem, operands, self)
        return *listing, rows, products, self._rounding(problem, operands), *sums, *options

    def _products(
        self, problem: BackwardProblem, operands: ArrayStrides, multiprocessors: int, shares: HeadShares
    ) -> KernelCall:
        """The kernel that multiplies."""
        p, tiles = problem.forward, self._key_tiles(problem.forward) * shares.count
        source = self._source(
            problem,
            "warploom.kernels.attention.device.backward_sm90:attention_backward_sm90",
            f"{self.tile_m}x{KEYS}x{self.dims}",
            operands,
            **shares.argument,
        )
        vectors, parts = (
            vectors_of(problem, self.tile_m, self.vector),
            CONSUMERS * math.prod(vectors_of(problem, self.tile_m, 1)),
        )
        maps = self._maps(p, operands, MappedArray(f32, vectors, (vectors[1], 1), (1, self.vector), False))
        scalars = extents(problem, self.tile_m)
        if not p.listed:
            walkers = p.kv_heads * shares.count
            planes = walkers * p.batch
            scalars |= divisors(kv_heads=walkers) | row_tiles(tiles // planes, planes, self._together(p, shares))
        memory = {"total": parts * self.total_size, "turns": parts} | shares.workspace(
            problem, KEYS * (self.sum_cols + self.value_sum_cols)
        )
        arrays = *shares.stored(MULTIPLIED), *p.changing_arrays, *(["tiles"] if p.listed else ()), *memory
        grid = min(tiles, multiprocessors) if self.persistent else tiles, 1, 1
        return KernelCall(
            source, grid, scalars, shares.stored(maps), arrays, memory, zeroed="turns", at_once=self.at_once
        )

    def _rounding(self, problem: BackwardProblem, operands: ArrayStrides) -> KernelCall:
        """The kernel that scales and rounds dQ."""
        p, scalars = problem.forward, extents(problem, self.tile_m)
        source = self._source(
            problem,
            "warploom.kernels.attention.device.backward_sm90:attention_backward_dq_sm90",
            f"dq_{self.head_dim}",
            operands,
        )
        maps = (operands.mapped("dq", p, self.tile_m, PANEL_COLS),)
        arrays = "dq", "total", *(["blocks"] if p.listed else ())
        return KernelCall(source, p.grid(self.tile_m, p.heads, p.q_len), scalars, maps, arrays)

    def _source(
        self, problem: BackwardProblem, kernel: str, name: str, operands: ArrayStrides, **more: int
    ) -> KernelSource:
        listed = problem.forward.listed
        return KernelSource.of(
            kernel,
            f"{'packed' if listed else 'attention'}_backward_{name}",
            config=self,
            features=problem.features(self.tile_m, KEYS),
            heads_inside=operands.heads_inside,
            listed=listed,
            **more,
        )

    def _maps(self, p: AttentionProblem, operands: ArrayStrides, vector: MappedArray) -> tuple[MappedArray, ...]:
        """The tensor maps of what the kernel that multiplies reads and stores."""

        def mapped(name: str, rows: int) -> MappedArray:
            return operands.mapped(name, p, rows, self._box_cols(name))

        return (
            mapped("q", self.tile_m),
            mapped("k", KEYS),
            mapped("v", KEYS),
            mapped("dout", self.tile_m),
            vector,
            vector,
            mapped("dk", 64),
            mapped("dv", 64),
        )

    def _box_cols(self, name: str) -> int:
        """Columns of a tensor's boxes."""
        return panel_cols(self.value_width if name in ("v", "dv", "dout") else self.width, tight=True)

    @staticmethod
    def _key_tiles(p: AttentionProblem) -> int:
        """Tiles of keys of all key heads, of packed sequences the most there may be."""
        return math.prod(p.grid(KEYS, p.kv_heads, p.kv_len))

    def _together(self, p: AttentionProblem, shares: HeadShares) -> int:
        """Planes that form a group: as many as the L2 holds Q, dO and dQ of, and at least ``side_by_side``.

        Each tile waits for those before it: the first ones start one after another, and the more of a plane, the later.
        """
        row = (self.width + self.value_width) * self.dtype.bytes + self.sum_cols * f32.bytes
        plane, planes = p.q_len * shares.heads * row, p.kv_heads * shares.count * p.batch
        return max(1, min(planes, max(self.side_by_side, L2_BYTES // max(1, plane))))
