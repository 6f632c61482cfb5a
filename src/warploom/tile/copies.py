"""Tiles between global and shared memory by the threads of a CTA: ``cp.async``, 16 bytes a thread and step.

:class:`CopyRing` is for kernels without the TMA and without roles what :class:`~warploom.tile.pipeline.Pipeline` is for
those with them: ``put`` a tile into a stage, ``wait`` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from warploom.core.dtypes import u32, u64
from warploom.core.errors import TraceError
from warploom.lang import GlobalPointer, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import Addressing
from warploom.lang.values import Number
from warploom.tile.copy_plan import CHUNK_BYTES, CopyPlan
from warploom.tile.tile_copy import TileCopy

Place = tuple[Number, ...]
"""(row, column) of a matrix, in elements; of one of several, its number as well."""


@dataclass(frozen=True)
class Rows:
    """A row-major matrix of 16-bit elements: a pointer to its first, and the distance between rows in elements.

    ``rows`` and ``cols`` of it exist (None: as many as are asked for); a tile's elements beyond them are filled with
    zeros. Columns known while tracing, and a known ``stride``, make offsets immediates. ``chunk``: elements that its
    lines are aligned to: 8, 4 or 2 by ``cp.async``, 1 through registers. ``partial``: a line may end within a chunk.
    ``plane``: the distance between matrices, of which a place may name one.
    """

    pointer: GlobalPointer
    stride: Number
    rows: Traced | None = None
    cols: Number | None = None
    chunk: int = 8
    partial: bool = False
    plane: Traced | None = None

    def left(self, place: Place) -> tuple[Traced | None, Traced | None]:
        """Rows and columns that exist from a place on; None for as many as are asked for, and for known columns."""
        rows = None if self.rows is None else self.rows - place[0]
        return rows, self.cols - place[1] if isinstance(self.cols, Traced) else None


class RowCopy:
    """The copies of a matrix's tiles into a shared tile and back, by all threads of the CTA together."""

    def __init__(
        self, k: Kernel, tile: SharedTile, matrix: Rows, threads: int, addressing: Addressing = "strided"
    ) -> None:
        self._k, self._matrix = k, matrix
        if tile.dtype.bytes != 2 or matrix.pointer.dtype.bytes != 2:
            raise TraceError(
                f"rows of 16-bit elements are copied: {tile.name} has {tile.dtype}, its matrix "
                f"{matrix.pointer.dtype} ({k.here()}). For others write k.cp_async, or let the TMA copy boxes"
            )
        # Copies of single elements still store 16 bytes to shared memory.
        chunk = CHUNK_BYTES // 2 if matrix.chunk == 1 else matrix.chunk
        plan = CopyPlan(tile.layout.rows, tile.layout.cols, threads // 32, True, chunk)
        known = matrix.cols if isinstance(matrix.cols, int) else None
        self._copy = TileCopy(k, tile, plan, matrix.stride, addressing, known)
        self._position: Mutable | None = None
        self._name = tile.name

    def prepare(self) -> None:
        """Form the shared addresses before a loop."""
        self._copy.prepare()

    def load(self, place: Place, stage: Number | None = None) -> None:
        """Copy the tile that begins at a place of the matrix in; by ``cp.async`` as part of the thread's group."""
        self._load(self._from(place), place, stage)

    def aim(self, place: Place) -> None:
        """:meth:`load_next` begins at a place: its address is kept in a register, and moved on."""
        start = self._from(place).address
        if self._position is None:
            self._position = self._k.register(u64, start, f"{self._name}_source")
        else:
            self._position.set(start)

    def load_next(self, place: Place, stage: Number, step: tuple[int, int]) -> None:
        """:meth:`load` of the next tile, at ``place``; ``step`` rows and columns lie between tiles."""
        k, (row, col) = self._k, step
        assert self._position is not None
        start = self._position.get()
        self._load(GlobalPointer(k, start, self._matrix.pointer.dtype), place, stage)
        distance = k.mul_wide(self._matrix.stride, 2 * row) + 2 * col if row else 2 * col
        self._position.set(start + distance)

    def _load(self, start: GlobalPointer, place: Place, stage: Number | None) -> None:
        rows, cols = self._matrix.left(place)
        if self._matrix.chunk == 1:
            self._copy.load_elements(start, stage, rows, cols)
        else:
            self._copy.load_async(start, stage, rows, cols, partial=self._matrix.partial)

    def store(self, place: Place) -> None:
        """Copy the tile out to a place of the matrix, as far as it has rows."""
        self._copy.store(self._from(place), rows=self._matrix.left(place)[0])

    def _from(self, place: Place) -> GlobalPointer:
        row, col, *number = place
        matrix, plane = self._matrix.pointer, self._matrix.plane
        if number:
            if plane is None:
                raise TraceError(f"a place names one of several matrices: Rows(…, plane=…) says ({self._k.here()})")
            matrix = matrix + self._k.mul_wide(number[0], plane)
        return self._copy.start(matrix, (row, col))


class CopyRing:
    """Stages of tiles that all threads copy in together, and all warps read: for kernels without roles.

    ``fed`` lists the tiles, each with the matrix it is copied from. Copies are in flight for ``stages - 1`` tiles.
    ``threads``: of the kernel. ``addressing``: how shared addresses are formed. After :meth:`begin` a :meth:`producer`
    puts the tiles behind those and a :meth:`consumer` waits and releases, as of a
    :class:`~warploom.tile.pipeline.Pipeline`, or :meth:`each` does.

    Raises TraceError where elements are not of 16 bits, tiles have not as many stages each, ``threads`` are not the
    kernel's, a ring of one stage is waited for, and a cursor goes on from no :meth:`begin`.
    """

    def __init__(
        self, k: Kernel, *fed: tuple[SharedTile, Rows], threads: int, addressing: Addressing = "strided"
    ) -> None:
        self.k = k
        self.tiles = tuple(tile for tile, _ in fed)
        self.stages, self._begun = self.tiles[0].stages, False
        if any(tile.stages != self.stages for tile in self.tiles):
            raise TraceError(f"the tiles of a ring of copies have as many stages each ({k.here()})")
        if k.cta_threads not in (None, threads):
            raise TraceError(
                f"a ring of copies is of all threads of the CTA, which meet at its waits: threads={threads} in a "
                f"kernel of {k.cta_threads} ({k.here()})"
            )
        self._copies = [RowCopy(k, tile, matrix, threads, addressing) for tile, matrix in fed]
        self._steps: Sequence[tuple[int, int]] | None = None
        for copy in self._copies:
            copy.prepare()

    def producer(self) -> CopyCursor:
        """A cursor for the tiles behind those that :meth:`begin` starts."""
        return CopyCursor(self, self.k.register(u32, self.stages - 1, "write_stage"))

    def consumer(self, *, put_first: bool = False) -> CopyCursor:
        """A cursor for reading the stages, from the first on; ``put_first``: each wait comes after a put."""
        return CopyCursor(self, self.k.register(u32, 0, "read_stage"), self.stages - 1 - (not put_first))

    def put(self, stage: Number, places: Sequence[Place], *, when: Traced | None = None) -> None:
        """Start the copies of a stage, a place for each tile; all warps are done with what was there.

        Where ``when`` does not hold, the group is empty: so :meth:`wait` counts the same to the end.
        """
        k = self.k
        with nullcontext() if when is None else k.when(when, uniform=True):
            for i, (copy, place) in enumerate(self._with(places)):
                if self._steps is None:
                    copy.load(place, stage)
                else:
                    copy.load_next(place, stage, self._steps[i])
        k.commit_group()

    def begin(
        self, count: Traced, places: Callable[[Traced], Sequence[Place]], steps: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Start the copies of the first ``stages - 1`` tiles of ``count``; ``places(j)`` are those of number j.

        ``steps``: rows and columns from each tile's place to its next, where they are always the same: then addresses
        are moved on instead of formed anew, at the price of two registers each.
        """
        self._steps, self._begun = steps, True
        if steps is not None:
            for copy, place in self._with(places(self.k.value(0, u32))):
                copy.aim(place)
        for stage in range(self.stages - 1):
            number = self.k.value(stage, u32)
            self.put(stage, places(number), when=count > stage)

    def check_begun(self) -> None:
        """Raises TraceError where no copies are started that a cursor goes on from."""
        if not self._begun:
            raise TraceError(f"begin starts the first copies: call it before a cursor puts or waits ({self.k.here()})")

    def _with(self, places: Sequence[Place]) -> list[tuple[RowCopy, Place]]:
        if len(places) != len(self.tiles):
            raise TraceError(f"put takes a place for each of {len(self.tiles)} tiles ({self.k.here()})")
        return list(zip(self._copies, places, strict=True))

    def at(self, stage: Number) -> tuple[SharedTile, ...]:
        """The tiles of a stage."""
        return tuple(tile.stage(stage) for tile in self.tiles)

    def wait(self, pending: int) -> None:
        """All but the ``pending`` newest tiles are here for every warp; and every warp is done with those before."""
        if pending < 0:
            raise TraceError(
                f"a ring that is filled while it is read takes 2 stages or more: {self.tiles[0].name} has "
                f"{self.stages} ({self.k.here()})"
            )
        self.k.wait_group(pending)
        self.k.syncthreads()

    def each(
        self,
        count: Traced,
        places: Callable[[Traced], Sequence[Place]],
        body: Callable[..., None],
        *,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """``body(j, *tiles)`` for j = 0 … ``count`` - 1, while the next tiles are on their way; one barrier a tile.

        ``ready()`` is run before them, once the first tile is here, and what was copied earlier.
        The loop is unrolled over the stages, which are then known while tracing.
        """
        k, n = self.k, self.stages
        self.begin(count, places)
        if ready is not None:
            self.wait(n - 2)
            ready()

        def turn(j: Traced, stage: int) -> None:
            self.wait(n - 2)
            following = j + (n - 1)
            self.put((stage + n - 1) % n, places(following), when=following < count)
            body(j, *self.at(stage))

        with k.loop(count, step=n) as first:
            turn(first, 0)
            for stage in range(1, n):
                with k.when(first + stage < count, uniform=True):
                    turn(first + stage, stage)


class CopyCursor:
    """A position in a ring of copies, the same for all threads: the stage that is filled or read next."""

    def __init__(self, ring: CopyRing, stage: Mutable, pending: int = 0) -> None:
        self._ring, self._stage, self._pending = ring, stage, pending

    @property
    def tiles(self) -> tuple[SharedTile, ...]:
        """The stage's tiles, whether they are there or not."""
        return self._ring.at(self._stage.get())

    def put(self, *places: Place, when: Traced | None = None) -> None:
        """:meth:`CopyRing.put` into the stage that all warps have read longest ago; on to the next stage."""
        self._ring.check_begun()
        self._ring.put(self._stage.get(), places, when=when)
        self._advance()

    def wait(self) -> tuple[SharedTile, ...]:
        """The stage's tiles, once they are there for every warp; and every warp is done with those released before."""
        self._ring.check_begun()
        self._ring.wait(self._pending)
        return self.tiles

    def release(self, *, when: Traced | None = None) -> None:
        """On to the next stage, or not: this one is filled again once all warps have waited for that."""
        stage = self._stage.get()
        self._advance()
        if when is not None:
            k = self._ring.k
            self._stage.set(k.select(when, self._stage.get(), stage))

    def _advance(self) -> None:
        following = self._stage.get() + 1
        self._stage.set(self._ring.k.select(following == self._ring.stages, 0, following))
