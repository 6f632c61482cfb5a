"""One tile between global and shared memory: which thread copies what, as a :class:`.copy_plan.CopyPlan` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from warploom.core.dtypes import u32
from warploom.core.errors import ConfigError
from warploom.isa.async_copy import Eviction
from warploom.lang import GlobalPointer, Kernel, SharedTile, Traced
from warploom.lang.fragments import Addressing, TileAddresses
from warploom.lang.values import Number
from warploom.tile.copy_plan import CopyPlan

_LOW_HALVES = 0x5410  # prmt: the low 16 bits of two registers


class TileCopy:
    """Copies tiles of one shape between global matrices and a shared tile, by all threads of the CTA or each warp.

    ``plan`` says who copies what; with one warp that does not cooperate, each has a tile of its own. ``valid_cols``,
    known while tracing, are the columns that any matrix has: what no fragment of them reads is left out.
    """

    def __init__(
        self,
        k: Kernel,
        tile: SharedTile,
        plan: CopyPlan,
        row_stride: Number,
        addressing: Addressing = "strided",
        valid_cols: int | None = None,
    ) -> None:
        problems = plan.problems()
        if problems:
            raise ConfigError(f"{tile.name}: {'; '.join(problems)} ({k.here()})")
        self._k, self._plan, self._stride = k, plan, row_stride
        self._valid_cols = plan.cols if valid_cols is None else valid_cols
        who = k.thread if plan.cooperative else k.lane
        first_row: Number = 0 if plan.cooperative or plan.warps == 1 else k.warp * plan.own_rows
        lanes = plan.threads()
        at = lanes.apply(lane=who)
        self._row, self._col = at["row"] + first_row, at["col"]
        self._shared = TileAddresses(k, tile, lanes, who, first_row, addressing)

    @property
    def _steps(self) -> list[tuple[int, int]]:
        """The plan's steps that touch columns some fragment reads: those below ``valid_cols``, rounded up to 16."""
        return [(row, col) for row, col in self._plan.steps if col < -(-self._valid_cols // 16) * 16]

    def start(self, matrix: GlobalPointer, place: tuple[Number, Number] = (0, 0)) -> GlobalPointer:
        """This thread's first element of the tile that begins at a place of the matrix whose first is ``*matrix``."""
        row, col = place
        return matrix + self._k.mul_wide(self._row + row, self._stride) + (self._col + col)

    def start_of_run(self, row: GlobalPointer) -> GlobalPointer:
        """This thread's first element of rows that lie side by side from ``row`` on, as :meth:`load_runs` takes it."""
        lanes = self._plan.threads().apply(lane=self._k.thread if self._plan.cooperative else self._k.lane)
        return row + self._k.mul_wide(lanes["row"], self._stride) + lanes["col"]

    def prepare(self) -> None:
        """Form the shared bases before a loop."""
        self._shared.prepare(self._steps)

    def _source(self, start: GlobalPointer, row: int, col: int) -> GlobalPointer:
        if isinstance(self._stride, int):
            return start + (row * self._stride + col)
        if row == 0:
            return start + col
        return start.bytes(self._k.mul_wide(self._stride, 2 * row)) + col

    def _exists(self, row: int, col: int, rows: Traced | None) -> Traced | None:
        """Whether this thread's part of a step lies in the matrix; None if it always does."""
        found = None if rows is None else self._row + row < rows
        if col + self._plan.chunks * self._plan.chunk > self._valid_cols:
            inside = self._col + col < self._valid_cols
            found = inside if found is None else found & inside
        return found

    def load_async(
        self,
        start: GlobalPointer,
        stage: Number | None = None,
        rows: Traced | None = None,
        cols: Traced | None = None,
        *,
        partial: bool = False,
    ) -> None:
        """Issue ``cp.async`` for the whole tile; ``start`` is this thread's first element.

        ``rows`` and ``cols`` (u32) of the tile exist in the matrix; the others are filled with zeros.
        """
        self.load_runs((start,), stage, rows, cols, partial=partial)

    def load_runs(
        self,
        starts: Sequence[GlobalPointer],
        stage: Number | None = None,
        rows: Traced | None = None,
        cols: Traced | None = None,
        *,
        partial: bool = False,
        prefetch: int = 0,
        eviction: Eviction = "",
    ) -> None:
        """:meth:`load_async` of rows that lie side by side in runs of equal length alone: pages of a cache, say.

        ``starts``: this thread's first element of each run. ``prefetch``: bytes that the L2 fetches at once;
        ``eviction``: what it drops first, or last.
        """
        shared = self._shared if stage is None else self._shared.staged(stage)
        size = cast("Literal[4, 8, 16]", 2 * self._plan.chunk)
        length = self._plan.own_rows // len(starts)
        for row, col in self._steps:
            valid = self._valid_bytes(row, col, rows, cols, partial)
            source = self._source(starts[row // length], row % length, col)
            to = shared.address(row, col)
            self._k.cp_async(to, source, size, valid_bytes=valid, prefetch=prefetch, eviction=eviction)

    def _valid_bytes(
        self, row: int, col: int, rows: Traced | None, cols: Traced | None, partial: bool
    ) -> Traced | None:
        """Bytes of a thread's chunk that exist; None if all do."""
        k, chunk = self._k, self._plan.chunk
        exists = self._exists(row, col, rows)
        nothing, whole = k.value(0, u32), k.value(2 * chunk, u32)
        if cols is not None:
            at = self._col + col
            if partial:
                left = k.minimum(k.select(at < cols, cols - at, nothing), chunk) * 2
                return left if exists is None else k.select(exists, left, nothing)
            exists = at < cols if exists is None else exists & (at < cols)
        return None if exists is None else k.select(exists, whole, nothing)

    def load_sync(self, start: GlobalPointer, rows: Traced | None = None, stage: Number | None = None) -> None:
        """The same through registers: ``ld.global`` and ``st.shared`` of 16 bytes."""
        k = self._k
        shared = self._shared if stage is None else self._shared.staged(stage)
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
            k.store("shared", shared.address(row, col), u32, values, "", "weak")

    def load_elements(
        self, start: GlobalPointer, stage: Number | None, rows: Traced | None, cols: Traced | None
    ) -> None:
        """For lines at odd addresses: element by element, then one store of 16 bytes."""
        k, shared = self._k, self._shared if stage is None else self._shared.staged(stage)
        for row, col in self._steps:
            source, exists = self._source(start, row, col), self._exists(row, col, rows)
            elements: list[Traced] = []
            for i in range(self._plan.chunk):
                inside = None if cols is None else self._col + (col + i) < cols
                condition = exists if inside is None else inside if exists is None else exists & inside
                if condition is None:
                    elements.append(source.load(i))
                    continue
                element = k.register(u32, 0)
                with k.when(condition):
                    element.set(source.load(i))
                elements.append(element.get())
            words = [k.prmt(low, high, _LOW_HALVES) for low, high in zip(elements[::2], elements[1::2], strict=True)]
            k.store("shared", shared.address(row, col), u32, words, "", "weak")

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
