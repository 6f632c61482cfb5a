"""Epilogues: values of a tile of sums, and the ways out of registers.

A *value* is a function of two neighbouring sums and of their row and column that gives what is stored. The ways out are
``stmatrix`` into a tile that a pipeline sends (:func:`store_rows`), panels that the TMA or the threads copy out
(:class:`Panels`), a staging tile (:class:`Staging`), and the registers themselves (:func:`store_registers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warploom.core.dtypes import DType, f16, f32, u16, u32
from warploom.core.errors import TraceError
from warploom.lang import Fragment, GlobalPointer, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import Addressing, TileAddresses
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment, wgmma_operand
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import stmatrix_plan
from warploom.layout.reduction import reduction_plan
from warploom.tile.pipeline import Boxes
from warploom.tile.planning import CopyPlan
from warploom.tile.product import DEPTH, A, Part, of_warps, read
from warploom.tile.roles import WARPGROUP, WARPGROUP_ROWS

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Mutable, SharedTile, Traced
    from warploom.lang.values import Number


PIECE = mma_fragment("m16n8k16", "C", 16).tile(1, 2)
"""16×16 of a warp's packed sums: what one ``stmatrix.x4`` stores."""
_STORE = stmatrix_plan(PIECE, transposed=False)
_FORMED = 32
"""Values of a thread that are formed before the first of them is stored."""

Pair = tuple[Traced, Traced]
Value = Callable[[Pair, Traced, Traced], Pair]
"""Makes the values that are stored at (row, col) and (row, col + 1) of two sums."""


@dataclass(frozen=True)
class OutputMatrix:
    """A matrix in global memory that sums go to, in elements of ``dtype``: 16-bit floats or f32.

    ``rows`` and ``cols`` are its extents, or None where no tile reaches beyond them. ``chunk``: elements that its lines
    are aligned to (8, 4, 2, 1). ``pairs``: columns come in aligned pairs.
    """

    k: Kernel
    pointer: GlobalPointer
    stride: Number
    dtype: DType
    rows: Traced | None = None
    cols: Traced | None = None
    chunk: int = 8
    pairs: bool = True

    def __post_init__(self) -> None:
        has = self.pointer.dtype
        if has is not self.dtype and (has.is_float or has.bytes != self.dtype.bytes):
            raise TraceError(f"a target of {self.dtype} has a pointer to {has}: give the pointer that type")

    def exists(self, row: Traced, col: Traced) -> Traced | None:
        """Whether there is an element (row, col); None where there always is."""
        found = None if self.rows is None else row < self.rows
        if self.cols is not None:
            inside = col < self.cols
            found = inside if found is None else found & inside
        return found

    def store_pair(self, row: Traced, col: Traced, values: Pair) -> None:
        """Store the values of (row, col) and (row, col + 1), as far as they exist."""
        k = self.k
        target = self.pointer + (k.mul_wide(row, self.stride) + k.mul_wide(col, 1))
        kind = f32 if self.dtype is f32 else u32 if self.pairs else u16
        if self.pairs:
            words = list(values) if self.dtype is f32 else [k.pack(*values, self.dtype)]
            self.store_words(target, row, col, words, kind)
            return
        for i, value in enumerate(values):
            word = value if self.dtype is f32 else k.pack(value, 0.0, self.dtype)
            self.store_words(target + i, row, col + i, [word], kind)

    def store_words(self, target: GlobalPointer, row: Traced, col: Traced, words: list[Traced], kind: DType) -> None:
        """Store words at ``*target``, the place of (row, col) and what follows, if that element exists."""
        exists = self.exists(row, col)
        if exists is None:
            target.store(words, dtype=kind)
        else:
            with self.k.when(exists):
                target.store(words, dtype=kind)


@dataclass(frozen=True)
class Sums:
    """An accumulator as values: its first element is (row, col) of the target.

    ``warp`` is the warp's index among those that share the fragment, by default its number in the CTA modulo theirs.
    """

    k: Kernel
    fragment: Fragment
    row: Traced
    col: Traced
    warp: Number | None = None
    value: Value | None = None

    @property
    def part(self) -> Number:
        """The warp's part of the fragment: what ``warp`` says, or its default."""
        return self.fragment.warp if self.warp is None else self.warp

    def place(self, element: int) -> Pair:
        """(row, col) in the target of an element of this thread."""
        row, col = self.fragment.layout.coordinates(self.k.lane, element, self.part)
        return row + self.row, col + self.col

    def pair(self, first: int) -> Pair:
        """The values to store for elements ``first`` and ``first + 1``, neighbouring columns, in f32."""
        registers = self.fragment.registers
        if self.fragment.dtype is f16:
            found = self.k.unpack(read(registers[first // 2]), f16)
        else:
            found = read(registers[first]), read(registers[first + 1])
        return found if self.value is None else self.value(found, *self.place(first))

    def packed(self, first: int, dtype: DType) -> Traced:
        """The values of :meth:`pair` rounded to ``dtype`` and packed."""
        if self.fragment.dtype is dtype and self.value is None:
            return read(self.fragment.registers[first // 2])
        return self.k.pack(*self.pair(first), dtype)


# -- into a tile that somebody else sends
def store_rows(k: Kernel, tile: SharedTile, sums: Fragment, row: Number, *, cols: int | None = None) -> None:
    """A warp's 16 rows of an accumulator, rounded, into a shared tile from ``row`` on, by ``stmatrix`` (sm_90).

    ``cols``: as many of its columns, by default the tile's.
    """
    packed = sums.packed(tile.dtype)
    to = TileAddresses(k, tile, _STORE.address, k.lane, row, "strided")
    for d in range(-(-(cols or tile.layout.cols) // 16)):
        piece = (*packed.atom(0, 2 * d), *packed.atom(0, 2 * d + 1))
        k.stmatrix(to.address(0, 16 * d), [piece[r] for r in _STORE.register_order])


def send_rows(
    k: Kernel,
    tile: SharedTile,
    sums: Fragment,
    me: Traced,
    boxes: Boxes,
    place: tuple[Number, ...],
    *,
    barrier: Number | None = None,
) -> None:
    """A warpgroup's 64 rows, rounded, through rows 64·``me`` … of a shared tile that it owns, and out by the TMA.

    ``barrier`` is a named barrier of the warpgroup's own, by default a new one. :func:`await_sent` comes before the CTA
    ends.
    """
    first = me * WARPGROUP_ROWS
    barrier = me + k.named_barriers(tile.layout.rows // WARPGROUP_ROWS) if barrier is None else barrier
    store_rows(k, tile, sums, first + (k.warp & 3) * 16, cols=sums.layout.shape[1])
    k.fence_async()
    k.bar_sync(barrier, WARPGROUP)
    with k.when((k.thread & (WARPGROUP - 1)) == 0):
        boxes.send(k, tile, place, row=first, cols=sums.layout.shape[1])


def send_tile(k: Kernel, tile: SharedTile, boxes: Boxes, place: tuple[Number, ...]) -> None:
    """Send a tile that all threads of the CTA have stored to by the TMA; thread 0 waits until it was read."""
    k.fence_async()
    k.syncthreads()
    with k.when(k.thread == 0):
        boxes.send(k, tile, place)
        k.wait_bulk(0, reads_only=True)


def await_sent(k: Kernel) -> None:
    """Wait, in the first thread of a warpgroup, until the rows that it has sent were read."""
    with k.when((k.thread & (WARPGROUP - 1)) == 0):
        k.wait_bulk(0, reads_only=True)


def store_pairs(k: Kernel, tile: SharedTile, sums: Fragment, row: Number, part: Number = 0) -> None:
    """A warp's rows of an accumulator, rounded, into a shared tile from ``row`` on, two columns at a time (sm_80).

    ``part``: its number among accumulators side by side in the tile.
    """
    packed = sums.packed(tile.dtype)
    at = Part.of(k, tile, packed.layout.atom.restrict("lane"), sums.layout.shape[1], part)
    to = TileAddresses(k, tile, at.lanes, at.who, at.row + row, "strided")
    for register, pair in enumerate(packed.registers):
        own_row, col = packed.layout.coordinates(0, 2 * register)
        k.store("shared", to.address(own_row, at.col(col)), u32, [pair], "", "weak")


# -- to global memory
def store_registers(sums: Sums, target: OutputMatrix) -> None:
    """Store sums straight from the registers: of f32 four lanes fill a sector of 32 bytes.

    Values may come from memory, the target's own too, past whose stores no load moves: several are formed before the
    first of them is stored.
    """
    count = sums.fragment.layout.elements_per_thread
    for begin in range(0, count, _FORMED):
        firsts = range(begin, min(begin + _FORMED, count), 2)
        for first, values in [(first, sums.pair(first)) for first in firsts]:
            target.store_pair(*sums.place(first), values)


def store_row_values(
    k: Kernel,
    to: GlobalPointer,
    values: list[Traced],
    sums: Fragment,
    first: Number,
    end: Number,
    *,
    warp: Number | None = None,
) -> None:
    """One f32 for each row of an accumulator (a log-sum-exp, say), as ``sums.reduce(…, "col")`` orders them.

    Row 0 of the fragment is element ``first`` of ``to``; rows from ``end`` on are left out. Of the lanes that share a
    row the first one stores.
    """
    plan = reduction_plan(sums.layout, "col")
    first_lane = (k.lane & sum(plan.lane_masks)) == 0
    for group, value in enumerate(values):
        row = first + plan.result_coordinate(group, k.lane, sums.warp if warp is None else warp)
        with k.when(first_lane & (row < end)):
            to.store(value, row)


def copy_out(
    target: OutputMatrix,
    tile: SharedTile,
    row: Traced,
    col: Traced,
    who: Traced,
    threads: int,
    *,
    width: int | None = None,
    addressing: Addressing = "strided",
) -> None:
    """A shared tile to the target from (row, col) on: as many elements at a time as its lines are aligned to.

    ``who`` of ``threads`` is this thread; a pass covers ``width`` columns, by default what the threads reach.
    ``addressing``: how shared addresses are formed.
    """
    k, rows, cols, chunk = target.k, tile.layout.rows, tile.layout.cols, target.chunk
    width = min(cols, threads * chunk) if width is None else width
    plan = CopyPlan(rows, width, threads // 32, True, chunk)
    while plan.rows_per_step > rows:  # more threads than chunks: narrower ones
        chunk //= 2
        plan = CopyPlan(rows, width, threads // 32, True, chunk)
    lanes = plan.threads()
    at: dict[str, Traced] = lanes.apply(lane=who)
    own_row, own_col = at["row"] + row, at["col"] + col
    addresses = TileAddresses(k, tile, lanes, who, 0, addressing)
    start = target.pointer + k.mul_wide(own_row, target.stride) + own_col
    kind, count = (u16, 1) if chunk == 1 else (u32, chunk // 2)
    for step_row, step_col in ((r, left + c) for r, c in plan.steps for left in range(0, cols, width)):
        words = k.load("shared", addresses.address(step_row, step_col), kind, count, "", "weak")
        at_line = start.bytes(k.mul_wide(target.stride, 2 * step_row)) if step_row else start
        target.store_words(at_line + step_col, own_row + step_row, own_col + step_col, words, kind)


class Panels:
    """A consumer warpgroup's way out for 16-bit targets: ``count`` panels of 64 rows, one after another.

    With ``boxes`` the TMA takes each out, which clips what lies beyond the target; else the threads copy it. A panel is
    written again when what was in it has left. ``barrier`` is a named barrier of this warpgroup's own, by default a new
    one.
    """

    def __init__(self, k: Kernel, dtype: DType, cols: int, count: int, consumers: int, boxes: Boxes | None) -> None:
        self._k, self._count, self._boxes, self._cols = k, count, boxes, cols
        self._to: TileAddresses | None = None
        self._tile = k.shared(dtype, (WARPGROUP_ROWS, cols), name="panels", swizzle="auto", stages=consumers * count)

    def prepare(self, me: Traced, barrier: Number | None = None) -> None:
        """Form the addresses that all tiles share, of consumer ``me``."""
        k = self._k
        self._barrier = me + k.named_barriers(self._tile.stages // self._count) if barrier is None else barrier
        self._who = k.thread & (WARPGROUP - 1)
        self._own = self._tile.stage(me * self._count)
        self._to = TileAddresses(k, self._own, _STORE.address, k.lane, (k.warp & 3) * 16, "strided")
        self._to.prepare([(0, col) for col in range(0, self._cols, 16)])

    def store(self, sums: Sums, number: int, target: OutputMatrix, outer: tuple[Number, ...] = ()) -> None:
        """Store accumulator ``number`` of the consumer; ``outer``: the box's place beyond rows and columns."""
        k, to, cols = self._k, self._to, sums.fragment.layout.shape[1]
        if to is None:
            raise TraceError("panels are prepared before sums are stored: call prepare(me)")
        boxes, beyond = divmod(cols, self._cols)
        if beyond:
            raise TraceError(
                f"{cols} columns of sums are no whole panels of {self._cols}: make panels of as many as divide them"
            )
        for j in range(boxes):
            buffer = (number * boxes + j) % self._count
            if self._boxes is not None:
                with k.when(self._who == 0):
                    k.wait_bulk(self._count - 1, reads_only=True)
            k.bar_sync(self._barrier, WARPGROUP)  # what was in the panel has left
            self._fill(sums, j, to.staged(buffer))
            if self._boxes is not None:
                k.fence_async()
            k.bar_sync(self._barrier, WARPGROUP)  # every warp has written its rows
            col, panel = sums.col + j * self._cols, self._own.stage(buffer)
            if self._boxes is None:
                copy_out(target, panel, sums.row, col, self._who, WARPGROUP)
                continue
            where = self._boxes.order(0, col, sums.row, *outer)
            k.tma_store(self._boxes.tensor_map, where, panel, when=self._who == 0)
            k.commit_bulk()

    def _fill(self, sums: Sums, box: int, to: TileAddresses) -> None:
        layout = sums.fragment.layout
        for col in range(0, self._cols, 16):
            first = (box * self._cols + col) // 8
            elements = [e for j in (first, first + 1) for e in range(*layout.atom_elements(0, j).indices(1 << 20))[::2]]
            packed = [sums.packed(e, self._tile.dtype) for e in elements]
            self._k.stmatrix(to.address(0, col), [packed[r] for r in _STORE.register_order])

    def wait(self) -> None:
        """Wait until everything has left: shared memory goes with the CTA."""
        if self._boxes is not None:
            with self._k.when(self._who == 0):
                self._k.wait_bulk(0)


class Staging:
    """The way out of a CTA whose warps hold a tile together: a shared tile, then whole lines of 16 bytes a thread.

    ``warps``: how many share the tile's rows and columns, powers of two; neighbours are side by side.
    """

    def __init__(self, k: Kernel, tile: SharedTile, warps: tuple[int, int], addressing: Addressing = "strided") -> None:
        self._k, self._tile, self._warps = k, tile, warps
        self._addressing: Addressing = addressing

    def store(self, sums: Sums, target: OutputMatrix, first: Pair) -> None:
        """Store all warps' sums as the tile whose first element is ``first``; no warp reads what lies there."""
        k, layout = self._k, sums.fragment.layout
        self._check(layout.shape)
        lanes = of_warps(layout.atom.restrict("lane"), self._warps, 1, layout.shape[1])
        row = k.warp // self._warps[1] * layout.shape[0]
        to = TileAddresses(k, self._tile, lanes, k.thread, row, self._addressing)
        for register in range(layout.elements_per_thread // 2):
            at = layout.coordinates(0, 2 * register)
            k.store("shared", to.address(*at), u32, [sums.packed(2 * register, target.dtype)], "", "weak")
        k.syncthreads()  # the lines that leave were written by other warps
        self.copy_out(target, first)

    def _check(self, own: tuple[int, int]) -> None:
        tile = self._tile.layout
        fits = tile.rows // own[0], tile.cols // own[1]
        if self._warps != fits or (tile.rows % own[0], tile.cols % own[1]) != (0, 0) or any(n & (n - 1) for n in fits):
            raise TraceError(
                f"warps={self._warps} with {own[0]}×{own[1]} sums each do not fill {self._tile.name}, {tile.rows}×"
                f"{tile.cols}: warps are (along rows, along columns), powers of two that do"
            )

    def copy_out(self, target: OutputMatrix, first: Pair) -> None:
        """The staging tile, which every warp has written, as the tile whose first element is ``first``."""
        tile, threads = self._tile, 32 * self._warps[0] * self._warps[1]
        copy_out(target, tile, *first, self._k.thread, threads, width=tile.layout.cols, addressing=self._addressing)


_TRANSPOSED = stmatrix_plan(A.transposed(), transposed=True)
_TRANSPOSED_LANES = LinearMap(
    {"lane": (*_TRANSPOSED.address.bases("lane"), *wgmma_operand().transposed().atom.bases("warp"))},
    {"row": DEPTH, "col": 4 * DEPTH},
)
"""Where the threads of a warpgroup store 16 columns of its 64 rows: as 16 rows, each of 64 columns."""


def column_values(vector: SharedTile | GlobalPointer, like: Fragment, lane: Traced) -> list[Traced]:
    """Load for each element of an accumulator the f32 that a vector in memory has for its column."""
    loaded: dict[int, list[Traced]] = {}
    found: list[Traced] = []
    for element in range(like.layout.elements_per_thread):
        first = like.layout.coordinates(0, element)[1]  # of lane 0: elements of one column share it
        pair = first & ~1
        if pair not in loaded:
            col = like.layout.coordinates(lane, element & ~1)[1]
            loaded[pair] = vector.load(col, 2) if isinstance(vector, GlobalPointer) else vector.load(0, col, 2)
        found.append(loaded[pair][first & 1])
    return found


def row_values(vector: GlobalPointer, like: Fragment, lane: Traced, first: Traced) -> list[Traced]:
    """Load for each element of an accumulator the f32 that a vector has for its row; row 0 is element ``first``."""
    loaded: dict[int, Traced] = {}
    found: list[Traced] = []
    for element in range(like.layout.elements_per_thread):
        row = like.layout.coordinates(0, element)[0]  # of lane 0: elements of one row share it
        if row not in loaded:
            loaded[row] = vector.load(like.layout.coordinates(lane, element)[0] + first)
        found.append(loaded[row])
    return found


class TransposedStore:
    """A warpgroup's way to store 64 rows of an accumulator as 64 columns of a shared tile (``stmatrix.trans``, sm_90).

    ``row``: of the tile, where they begin. A panel is as large as the tile has rows, so whole panels are rows too.
    """

    def __init__(self, k: Kernel, tile: SharedTile, row: Number = 0) -> None:
        self._k = k
        self._to = TileAddresses(k, tile, _TRANSPOSED_LANES, k.thread & (WARPGROUP - 1), row, "strided")

    def prepare(self, rows: int) -> None:
        """Form the addresses for so many rows here, before a loop."""
        self._to.prepare([(row, 0) for row in range(0, rows, DEPTH)])

    def store(self, tile: SharedTile, packed: Sequence[Traced | Mutable]) -> None:
        """Store what :meth:`Wgmma.pack <warploom.tile.product.Wgmma.pack>` made of the accumulator to a stage."""
        to = self._to.on(tile)
        for step in range(0, len(packed), 4):
            piece = packed[step : step + 4]
            self._k.stmatrix(
                to.address(DEPTH * (step // 4), 0),
                [piece[r] for r in _TRANSPOSED.register_order],
                transposed=True,
            )
