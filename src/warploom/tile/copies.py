"""Tiles between global and shared memory by the threads of a CTA: ``cp.async``, 16 bytes a thread and step.

:class:`CopyRing` is for kernels without the TMA and without roles what :class:`~warploom.tile.pipeline.Pipeline` is for
those with them: ``put`` a tile into a stage, ``wait`` for it. :func:`accumulate` is the sum over K of such kernels:
copies, fragments and products of a ring of k-tiles, one over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from warploom.core.dtypes import u32, u64
from warploom.core.errors import ConfigError, TraceError
from warploom.isa.async_copy import Eviction
from warploom.lang import Fragment, GlobalPointer, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import Addressing, TileAddresses
from warploom.lang.values import Number
from warploom.tile.planning import CHUNK_BYTES, CopyPlan
from warploom.tile.product import DEPTH, Registers, zero

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
            raise ConfigError(f"{tile.name}: {'; '.join(problems)}")
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
        """Copy through registers instead: ``ld.global`` and ``st.shared`` of 16 bytes."""
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
        """Copy lines at odd addresses element by element, then store 16 bytes at once."""
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
                f"{matrix.pointer.dtype}. For others write k.cp_async, or let the TMA copy boxes"
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
                raise TraceError("a place names one of several matrices: Rows(…, plane=…) says")
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
            raise TraceError("the tiles of a ring of copies have as many stages each")
        if k.cta_threads not in (None, threads):
            raise TraceError(
                f"a ring of copies is of all threads of the CTA, which meet at its waits: threads={threads} in a "
                f"kernel of {k.cta_threads}"
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
            raise TraceError("begin starts the first copies: call it before a cursor puts or waits")

    def _with(self, places: Sequence[Place]) -> list[tuple[RowCopy, Place]]:
        if len(places) != len(self.tiles):
            raise TraceError(f"put takes a place for each of {len(self.tiles)} tiles")
        return list(zip(self._copies, places, strict=True))

    def at(self, stage: Number) -> tuple[SharedTile, ...]:
        """The tiles of a stage."""
        return tuple(tile.stage(stage) for tile in self.tiles)

    def wait(self, pending: int) -> None:
        """Wait until every warp has all but the ``pending`` newest tiles, and is done with those before."""
        if pending < 0:
            raise TraceError(
                f"a ring that is filled while it is read takes 2 stages or more: {self.tiles[0].name} has {self.stages}"
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
        """Give the stage back and move on to the next; it is filled again once all warps have waited for that one."""
        stage = self._stage.get()
        self._advance()
        if when is not None:
            k = self._ring.k
            self._stage.set(k.select(when, self._stage.get(), stage))

    def _advance(self) -> None:
        following = self._stage.get() + 1
        self._stage.set(self._ring.k.select(following == self._ring.stages, 0, following))


class SteppedProduct(Protocol):
    """A product whose fragments load a k-step at a time, such as :class:`~warploom.tile.product.MmaSyncProduct`."""

    @property
    def sums(self) -> Fragment:
        """The accumulators of the product."""
        ...

    @property
    def depth(self) -> int:
        """The extent of a k-tile along K."""
        ...

    def fragments(self, a: SharedTile, b: SharedTile, depth: int) -> list[Registers]:
        """Load the operands of a k-step at ``depth``."""
        ...

    def multiply_loaded(self, fragments: Sequence[Registers]) -> None:
        """Add the products of one k-step."""
        ...


def accumulate(
    k: Kernel, ring: CopyRing, product: SteppedProduct, count: Traced, places: Callable[[Traced], Sequence[Place]]
) -> None:
    """The product's sums over ``count`` k-tiles, at least one, whose copies :meth:`CopyRing.begin` has started.

    Fragments load a k-step ahead, over the ends of tiles too; a tile's copy starts in the middle of another's products;
    one barrier a tile. At the end every copy has arrived, and no warp reads a stage any more.
    """

    def fragments(tiles: Sequence[SharedTile], depth: int) -> list[Registers]:
        a, b = tiles
        return product.fragments(a, b, depth)

    zero(product.sums)
    steps = range(0, product.depth, DEPTH)
    ring.wait(ring.stages - 2)
    ahead = [[k.register(u32, x, "ahead") for x in loaded] for loaded in fragments(ring.at(0), 0)]
    read, write = ring.consumer(), ring.producer()
    with k.loop(count) as tile:
        current: list[Sequence[Traced]] = [[r.get() for r in registers] for registers in ahead]
        for step in steps[1:]:
            following = fragments(read.tiles, step)
            product.multiply_loaded(current)
            if step == steps[len(steps) // 2]:  # over the tile before this one, which no warp reads since the barrier
                later = tile + (ring.stages - 1)
                write.put(*places(later), when=later < count)
            current = following
        read.release()
        read.wait()
        with k.when(tile + 1 < count, uniform=True):
            for registers, loaded in zip(ahead, fragments(read.tiles, 0), strict=True):
                for register, value in zip(registers, loaded, strict=True):
                    register.set(value)
        product.multiply_loaded(current)
