"""Attention forward on sm_90a: the configuration of its kernel, what it takes, and the ones to choose from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from warploom.core.arguments import strides
from warploom.core.dtypes import DType, bf16, f16
from warploom.kernels.attention.lists import cache_pitches, cached_tiles, list_cached_tiles, list_tiles
from warploom.kernels.attention.problem import (
    FORWARD,
    MOST_LIST_WORDS,
    MOST_POSITIONS,
    ArrayStrides,
    AttentionProblem,
    Cached,
    HeadDims,
    Packed,
)
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import Grid, KernelCall, KernelSource, MappedArray
from warploom.tile.planning import (
    ENTRY_WORDS,
    FLOPS_PER_SECOND,
    PANEL_COLS,
    Work,
    box_rows,
    divisors,
    padded_cols,
    page_table,
    panel_cols,
    planes_together,
    row_tiles,
)

BARRIER_BYTES = 256
"""Shared memory behind the tiles that is set aside for the mbarriers."""
ROWS = 64
"""Query rows of a consumer."""
SUM_COLS = 8
"""Columns of the accumulator that hold the row sums: the narrowest step of ``wgmma``'s N."""


@dataclass(frozen=True)
class ListForm:
    """The form of a list of tiles that the kernel is traced for: it names rows of packed or of cached sequences.

    ``page_size``: keys of a page, 0 where a sequence's keys lie side by side. ``packed``: whether queries are.
    """

    cached: bool = False
    page_size: int = 0
    packed: bool = True


@dataclass(frozen=True)
class ForwardSm90(HeadDims):
    """A kernel of :mod:`.device.forward_sm90`: a producer warpgroup, and ``consumers`` that own 64 query rows each."""

    word: ClassVar[str] = "attention_sm90"
    always: ClassVar[tuple[str, ...]] = ("consumers", "tile_n", "stages", "head_dim", "dtype")

    consumer: ClassVar[str] = "warploom.kernels.attention.device.forward_sm90:Consumer"
    """Whose part of the kernel a consumer warpgroup does, as ``module:name``."""
    requires: ClassVar[str] = "sm_90a"

    consumers: int = flag(2, "consumer warpgroups, 64 query rows each", (1, 2, 3))
    tile_n: int = flag(128, "keys per step", (48, 64, 80, 96, 112, 128, 144, 160, 176))
    stages: int = flag(2, "K and V tiles in flight", (2, 3))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of Q, K, V and O", (bf16, f16))
    v_dim: int = flag(0, "elements per head of V and O, if they are not head_dim", (0,))
    persistent: bool = flag(True, "a CTA takes several tiles, each one's first Q·Kᵀ beside the last P·V before it")
    turns: bool = flag(True, "consumers take turns at the tensor cores")
    q_in_registers: bool = flag(True, "Q as the register operand of Q·Kᵀ, loaded once a tile")
    sum_column: bool = flag(False, "the row sums are one more column of P·V: ones stand beside V")
    skip_masked: bool = flag(False, "a consumer passes over key blocks that its own rows do not see")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (self.consumers + 1)

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return ROWS * self.consumers

    @property
    def narrow(self) -> Self:
        """The configuration with the fewest query rows per CTA."""
        return replace(self, consumers=1)

    @property
    def once(self) -> Self:
        """The configuration for CTAs of one tile each."""
        return replace(self, persistent=False)

    @property
    def q_stages(self) -> int:
        """Q tiles: of a persistent kernel one is multiplied while the other is stored from and loaded again."""
        return 2 if self.persistent else 1

    @property
    def packed(self) -> bool:
        """Whether a place in a ring is one register: three consumers have none to spare."""
        return self.consumers == 3

    @property
    def spare_cols(self) -> int:
        """Columns behind V that hold ones: a panel, of which the first few are read."""
        return PANEL_COLS if self.sum_column else 0

    @property
    def output_cols(self) -> int:
        """Columns of the accumulator of P·V: V's head_dim in steps of 16, and those of the row sums."""
        return -(-self.value_dim // 16) * 16 + (SUM_COLS if self.sum_column else 0)

    @property
    def most_masked(self) -> int:
        """Key blocks that the last consumer's rows see and the first one's may not, at most."""
        return -(-(self.tile_m - ROWS) // self.tile_n)

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the tiles and the mbarriers, in bytes."""
        cols = padded_cols(self.head_dim) + padded_cols(self.value_dim) + self.spare_cols
        q, keys = self.q_stages * self.tile_m, self.stages * self.tile_n
        return (q * self.query_cols + keys * cols) * self.dtype.bytes + BARRIER_BYTES

    def giving(self, lse: bool) -> ForwardSm90:
        """The configuration with or without log-sum-exps: sums of rounded P are good enough for O, rounded too."""
        return replace(self, sum_column=False) if lse else self

    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        return [
            (1 <= self.consumers <= 3, f"there are 1 to 3 consumer warpgroups, not {self.consumers}"),
            (
                self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256,
                f"tile_n {self.tile_n} is no multiple of 16 from 16 to 256",
            ),
            (self.stages >= 2, "the ring has at least 2 stages"),
            (
                not self.sum_column or (self.value_dim % PANEL_COLS == 0 and self.output_cols <= 256),
                f"sum_column puts ones behind V's last panel: its head_dim {self.value_dim} is not 64, 128 or 192",
            ),
            (
                not self.sum_column or self.dtype is bf16,
                "sum_column needs bf16: f16's exponents leave no room for maxima that grew",
            ),
            (
                not self.skip_masked or self.most_masked <= self.stages,
                f"skip_masked passes over up to {self.most_masked} blocks at once, more than {self.stages} stages hold",
            ),
        ]

    def violations(self, problem: AttentionProblem) -> list[str]:
        """The constraints of the kernel that a problem without a cache violates; empty if it takes it."""
        tiles = problem.tiles(self.tile_m)
        most = MOST_LIST_WORDS // ENTRY_WORDS if problem.listed else MOST_POSITIONS
        return problem.differences(self) + violated([(tiles < most, f"{tiles} tiles of query rows reach {most}")])

    def violations_on_cache(self, problem: AttentionProblem, operands: ArrayStrides) -> list[str]:
        """The constraints that a problem on a cache, with such arrays, violates; empty if the kernel takes it."""
        return unlisted(problem, operands) or self.violations(as_packed(problem, operands))

    def calls(self, problem: AttentionProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernel for a problem, on arrays with these strides: persistent with one CTA per multiprocessor.

        Before it the kernel that lists the tiles of packed or cached sequences.
        """
        p, tile_m = problem, self.tile_m
        if isinstance(p.sequences, Cached):
            return list_cached_tiles(p, operands, tile_m, multiprocessors), self._on_cache(p, operands, multiprocessors)
        tiles, maps = p.tiles(tile_m), self._maps(p, operands)
        if p.listed:
            listing, listed = list_tiles(p, tile_m, multiprocessors, overlap=True), ListForm()
            call = self._call(p, "packed_", tiles, {"total_q": p.q_len}, maps, multiprocessors, listed=listed)
            return *listing, call
        scalars = {
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            **divisors(heads=p.heads),
            **row_tiles(tiles // p.planes, p.planes, self._together(p, multiprocessors)),
        }
        return (self._call(p, "", tiles, scalars, maps, multiprocessors, heads_inside=operands.heads_inside),)

    def _on_cache(self, problem: AttentionProblem, operands: ArrayStrides, multiprocessors: int) -> KernelCall:
        """The launch on listed tiles of queries whose keys lie in a cache."""
        p, cache, packed = problem, problem.cache, as_packed(problem, operands)
        q_pitch, k_pitch = cache_pitches(p, operands)
        maps = self._maps(packed, ArrayStrides({name: operands.strides[name][:0:-1] for name in FORWARD}))
        if cache.page_size:
            rows = box_rows(cache.page_size, self.tile_n)
            keys, values = (replace(x, box=(rows, *x.box[1:])) for x in maps[1:3])
            maps = maps[0], keys, values, maps[3]
        (row,) = operands.strides.get("table", (0,))
        table = page_table(row, cache.table_pages, cache.pages)
        scalars = {**table, "page_pitch": k_pitch, **strides(lse=p.lse_strides), **divisors(spacing=max(1, q_pitch))}
        tiles, form = cached_tiles(p, self.tile_m).most * p.heads, ListForm(True, cache.page_size, cache.packed)
        call = self._call(packed, "paged_", tiles, scalars, maps, multiprocessors, listed=form)
        return replace(call, arrays=(*call.arrays, *(["table"] if cache.page_size else ())))

    def _call(
        self,
        problem: AttentionProblem,
        name: str,
        tiles: int,
        scalars: dict[str, int],
        maps: tuple[MappedArray, ...],
        multiprocessors: int,
        **form: Any,
    ) -> KernelCall:
        """The launch for so many tiles; a listed one may begin before the list is there."""
        source = KernelSource.of(
            "warploom.kernels.attention.device.forward_sm90:attention_sm90",
            f"attention_{name}{self.tile_m}x{self.tile_n}x{self.dims}",
            config=self.giving(problem.lse),
            features=problem.features(self.tile_m, self.tile_n),
            **form,
        )
        grid = self.grid(tiles, multiprocessors)
        return KernelCall(source, grid, scalars, maps, problem.arrays, overlaps=problem.listed)

    def grid(self, tiles: int, multiprocessors: int) -> Grid:
        """A CTA for each tile, of a persistent kernel at most one per multiprocessor."""
        return min(tiles, multiprocessors) if self.persistent else tiles, 1, 1

    def _maps(self, problem: AttentionProblem, operands: ArrayStrides) -> tuple[MappedArray, ...]:
        """The tensor maps of Q, K, V and O."""
        queries = ROWS, panel_cols(self.query_cols)
        boxes = queries, *((self.tile_n, panel_cols(cols)) for cols in (self.head_dim, self.value_dim)), queries
        return tuple(operands.mapped(x, problem, *box) for x, box in zip(FORWARD, boxes, strict=True))

    def _together(self, problem: AttentionProblem, multiprocessors: int) -> int:
        """Planes that form a group where tiles differ in work; elsewhere it means nothing."""
        if problem.right is None:
            return max(1, problem.planes)
        cols = self.head_dim + self.value_dim
        flops, row = 2 * self.tile_m * self.tile_n * cols, cols * self.dtype.bytes
        return planes_together(
            Work(
                problem.planes,
                problem.visited_blocks(self.tile_m, self.tile_n),
                flops / FLOPS_PER_SECOND,
                self.tile_n * row * problem.kv_heads / problem.heads,
                self.tile_m * row,
                self.persistent,
                multiprocessors,
            )
        )


def unlisted(problem: AttentionProblem, operands: ArrayStrides) -> list[str]:
    """The reasons against tiles on a cache: a tensor map reaches sequences and pages that are whole rows apart."""
    cache = problem.cache
    q, k, v, out = (operands.strides[name] for name in FORWARD)
    even = all(outer % row == 0 for outer, _, row in (q, k, v, out) if row) and 0 not in (q[2], k[2])
    return violated(
        [
            (not cache.fp8, "an fp8 cache takes attention_decode"),
            (cache.split is None, "fixed_split takes attention_decode"),
            (
                even and k[0] * v[2] == v[0] * k[2] and (cache.packed or q[0] * out[2] == out[0] * q[2]),
                "k_cache and v_cache (or q and out) lie differently, or not in whole rows",
            ),
        ]
    )


def as_packed(problem: AttentionProblem, operands: ArrayStrides) -> AttentionProblem:
    """A problem on a cache as one of packed sequences: all rows that there are."""
    p, cache, (q_pitch, k_pitch) = problem, problem.cache, cache_pitches(problem, operands)
    total_q = p.q_len if cache.packed else (p.batch - 1) * q_pitch + p.q_len
    total_k = (cache.pages - 1) * k_pitch + cache.page_size if cache.page_size else (p.batch - 1) * k_pitch + p.kv_len
    return replace(p, sequences=Packed(total_q, total_k))
