"""Copies of row-major tiles between global and shared memory, 16 bytes per thread and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from warploom.core.dtypes import u32, u64
from warploom.core.errors import ConfigError
from warploom.tile.copy_plan import CHUNK_BYTES, CopyPlan
from warploom.lang import GlobalPointer, Kernel, SharedTile, Traced
from warploom.lang.fragments import Addressing, TileAddresses
from warploom.lang.values import Number


class TileCopy:
    """Copies tiles of one shape between a global matrix and a shared tile, by all threads of the CTA.

    ``row_stride`` is the global distance between rows in elements: a traced u32, or an int when it is known while
    tracing (offsets are immediates then). ``valid_cols`` columns of the matrix exist (a multiple of 8); the tile's
    others are filled with zeros, and not written back.
    """

    def __init__(
        self,
        k: Kernel,
        tile: SharedTile,
        plan: CopyPlan,
        row_stride: Number,
        addressing: Addressing,
        valid_cols: int | None = None,
    ) -> None:
        problems = plan.problems()
        if problems:
            raise ConfigError("; ".join(problems))
        self._k, self._plan, self._stride = k, plan, row_stride
        self._valid_cols = plan.cols if valid_cols is None else valid_cols
        who = k.thread if plan.cooperative else k.lane
        first_row: Number = 0 if plan.cooperative else k.warp * plan.own_rows
        lanes = plan.threads()
        at = lanes.apply(lane=who)
        self._row, self._col = at["row"] + first_row, at["col"]
        self._shared = TileAddresses(k, tile, lanes, who, first_row, addressing)

    @property
    def _steps(self) -> list[tuple[int, int]]:
        """The plan's steps that touch columns some fragment reads: those below ``valid_cols``, rounded up to 16."""
        return [(row, col) for row, col in self._plan.steps if col < -(-self._valid_cols // 16) * 16]

    def start(self, matrix: GlobalPointer) -> GlobalPointer:
        """This thread's first element of the tile whose first element is ``*matrix``."""
        return matrix + self._k.mul_wide(self._row, self._stride) + self._col

    def prepare(self) -> None:
        """Form the shared bases before a loop."""
        self._shared.prepare(self._steps)

    def _source(self, start: GlobalPointer, row: int, col: int) -> GlobalPointer:
        if isinstance(self._stride, int):
            return start + (row * self._stride + col)
        if row == 0:
            return start + col
        offset = self._k.convert(self._k.operand(self._stride, u32) * (2 * row), u64)
        return start.bytes(offset) + col

    def _exists(self, row: int, col: int, rows: Traced | None) -> Traced | None:
        """Whether this thread's part of a step lies in the matrix; None if it always does."""
        found: Traced | None = None
        if rows is not None:
            found = self._row + row < rows
        if col + self._plan.chunks * 8 > self._valid_cols:
            inside = self._col + col < self._valid_cols
            found = inside if found is None else found & inside
        return found

    def load_async(self, start: GlobalPointer, stage: Number | None = None, rows: Traced | None = None) -> None:
        """Issue ``cp.async`` for the whole tile; ``start`` is this thread's first element.

        ``rows`` (u32) of the tile exist in the matrix; the others are filled with zeros.
        """
        k = self._k
        shared = self._shared if stage is None else self._shared.staged(stage)
        for row, col in self._steps:
            exists = self._exists(row, col, rows)
            size = None if exists is None else k.select(exists, k.value(CHUNK_BYTES, u32), k.value(0, u32))
            k.cp_async(shared.address(row, col), self._source(start, row, col), valid_bytes=size)

    def load_sync(self, start: GlobalPointer, rows: Traced | None = None) -> None:
        """The same through registers: ``ld.global`` and ``st.shared`` of 16 bytes."""
        k = self._k
        for row, col in self._steps:
            exists = self._exists(row, col, rows)
            words = k.registers(u32, 4, 0) if exists is not None else []
            if exists is None:
                values = self._source(start, row, col).load(count=4, dtype=u32)
            else:
                with k.when(exists):
                    for word, loaded in zip(words, self._source(start, row, col).load(count=4, dtype=u32), strict=True):
                        word.set(loaded)
                values = [word.get() for word in words]
            k.store("shared", self._shared.address(row, col), u32, values, "", "weak")

    def store(self, start: GlobalPointer, *, cache: str = "", rows: Traced | None = None) -> None:
        """Copy the shared tile to global memory, 16 bytes per thread and step; only what exists in the matrix."""
        k = self._k
        for row, col in self._steps:
            words = k.load("shared", self._shared.address(row, col), u32, 4, "", "weak")
            exists = self._exists(row, col, rows)
            if exists is None:
                self._source(start, row, col).store(words, cache=cache, dtype=u32)
            else:
                with k.when(exists):
                    self._source(start, row, col).store(words, cache=cache, dtype=u32)


@dataclass(frozen=True)
class Rows:
    """A matrix in global memory from one of its rows on: a pointer, and the distance between rows in elements.

    ``count`` rows of it exist (None: as many as are asked for); what a tile has beyond them is filled with zeros.
    ``cols`` of its columns exist, a multiple of 8. A ``stride`` known while tracing makes offsets immediates.
    """

    pointer: GlobalPointer
    stride: Number
    cols: int
    count: Traced | None = None

    def below(self, k: Kernel, row: Traced) -> Rows:
        """The same matrix from ``row`` on; ``count`` is of those already."""
        return replace(self, pointer=self.pointer + k.mul_wide(row, self.stride))

    def copy(self, k: Kernel, tile: SharedTile, threads: int) -> RowCopy:
        """The copy between a tile and this matrix's first rows, by all threads of the CTA."""
        plan = CopyPlan(tile.layout.rows, tile.layout.cols, threads // 32, cooperative=True)
        copy = TileCopy(k, tile, plan, self.stride, "strided", self.cols)
        return RowCopy(self, copy, copy.start(self.pointer))


@dataclass(frozen=True)
class RowCopy:
    """A :class:`TileCopy` between a tile and the first of some rows; ``start`` is this thread's first element."""

    rows: Rows
    copy: TileCopy
    start: GlobalPointer

    def load_async(self) -> None:
        """Start the copy into the tile; it is part of the thread's group."""
        self.copy.load_async(self.start, rows=self.rows.count)

    def store(self) -> None:
        """Copy the tile out, as far as the matrix has rows."""
        self.copy.store(self.start, rows=self.rows.count)


class CopyRing:
    """Stages of tiles that all threads copy in together by ``cp.async``, and all warps read: for kernels without roles.

    ``fed`` lists the tiles, each with the :class:`Rows` it is copied from. :meth:`each` runs a body on one block of rows
    after another, while the next are on their way.
    """

    def __init__(self, k: Kernel, *fed: tuple[SharedTile, Rows], threads: int) -> None:
        self._k, self._fed = k, fed
        self._stages = fed[0][0].stages
        self._copies = [rows.copy(k, tile, threads) for tile, rows in fed]

    def put(self, stage: int, row: Traced, *, when: Traced) -> None:
        """Start the copies of a stage from ``row`` of every matrix on, as one group; without ``when`` an empty one."""
        k = self._k
        with k.when(when, uniform=True):
            self._copy(stage, row)
        k.commit_group()

    def _copy(self, stage: int, row: Traced) -> None:
        k = self._k
        for each in self._copies:
            left = None if each.rows.count is None else each.rows.count - row
            each.copy.load_async(each.start + k.mul_wide(row, each.rows.stride), stage, left)

    def each(
        self, count: Traced, row: Callable[[Traced], Traced], body: Callable[..., None]
    ) -> None:
        """``body(j, *tiles)`` for j = 0 … ``count`` - 1, whose block of rows begins at ``row(j)``.

        The loop is unrolled over the stages, which are then known while tracing. One barrier a block: it says that the
        block is here for every warp, and that the stage which the next copy overwrites has been read.
        """
        k, n = self._k, self._stages
        for each in self._copies:
            each.copy.prepare()
        for stage in range(n - 1):
            self.put(stage, row(k.value(stage, u32)), when=count > stage)
        with k.loop(count, 0, n) as first:
            self._turn(first, 0, count, row, body)
            for stage in range(1, n):
                with k.when(first + stage < count, uniform=True):
                    self._turn(first + stage, stage, count, row, body)

    def _turn(
        self, j: Traced, stage: int, count: Traced, row: Callable[[Traced], Traced], body: Callable[..., None]
    ) -> None:
        k, n = self._k, self._stages
        k.wait_group(n - 2)
        k.syncthreads()
        following = j + (n - 1)
        self.put((stage + n - 1) % n, row(following), when=following < count)
        body(j, *(tile.stage(stage) for tile, _ in self._fed))
