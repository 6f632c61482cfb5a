"""A ring of stages in shared memory between those who fill it and those who read it, ordered by mbarriers.

One thread puts a tile into the next stage (``put``), or warps store to it (``written``); others ``wait`` for it and
``release`` it. The pipeline alone knows which barrier, which phase and how many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import DType, dtype_of, f32, u32
from warploom.core.errors import LayoutError, TraceError, shown
from warploom.isa.async_copy import Eviction
from warploom.lang.hopper import Ring, TensorMapHandle
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.planning import panel_cols

if TYPE_CHECKING:
    from warploom.ir.statements import SourceLine
    from warploom.lang import Kernel, SharedTile, Traced
    from warploom.lang.hopper import MbarrierArray
    from warploom.lang.values import Number


def operand_tile(
    k: Kernel,
    dtype: DType,
    rows: int,
    cols: int,
    *,
    name: str,
    stages: int = 1,
    spare_cols: int = 0,
    panel: int = 0,
    tight: bool = False,
) -> SharedTile:
    """A shared tile of 16-bit elements that copies fill and ``wgmma`` and ``ldmatrix`` read without conflicts.

    ``cols`` are rounded up to whole panels, which copies fill with zeros where a matrix ends. ``spare_cols``: further
    columns that no copy reaches. ``panel``: columns of a panel, by default the most that ``cols`` allow, or where it is
    ``tight`` those that :func:`~warploom.tile.planning.panel_cols` then gives.
    """
    panel = panel or panel_cols(cols, tight=tight)
    whole = (-(-cols // panel) - (-spare_cols // panel)) * panel
    return k.shared(dtype, (rows, whole), name=name, swizzle="auto", panel_cols=panel, stages=stages)


def vector_tile(k: Kernel, size: int, *, name: str, stages: int = 1) -> SharedTile:
    """A row of f32 in shared memory, which comes as one box: stages begin where one may, at multiples of 128 bytes."""
    return k.shared(f32, size, name=name, panel_cols=size, stages=stages, padding=max(0, 32 - size))


def map_of(
    array: Any, rows: int, cols: int = 0, *, panel: int = 0, tight: bool = False, dtype: DType | None = None
) -> tuple[Any, TensorMapSpec]:
    """The argument of a ``TensorMap`` parameter: an array, and the boxes that fill a tile of so many rows and columns.

    ``array`` is of NumPy, its last dimension side by side, (…, rows, columns); the tile is an :func:`operand_tile` of
    these ``rows``, ``cols``, ``panel`` and ``tight``, or, of an array of one dimension, a :func:`vector_tile` of
    ``rows`` elements. ``dtype``: of the elements, where the array holds their bits as integers. Raises LayoutError for
    what the TMA does not take, such as rows that do not begin at multiples of 16 bytes.
    """
    element = dtype or dtype_of(array.dtype.name)
    if array.strides[-1] != element.bytes:
        raise LayoutError("the TMA copies rows whose elements lie side by side: pass a copy (np.ascontiguousarray)")
    if array.ndim == 1:
        return array, TensorMapSpec(element, array.shape, (), (rows,))
    width = panel or panel_cols(cols, tight=tight)
    box = (width, rows, *(1,) * (array.ndim - 2))
    return array, TensorMapSpec(element, array.shape[::-1], array.strides[-2::-1], box, width * element.bytes)


@dataclass(frozen=True)
class Boxes:
    """A matrix in global memory as the TMA sees it: one box for each panel of a tile.

    ``order(col, *place)`` gives the coordinates of a box, innermost first, that begins ``col`` columns into the tile at
    ``place``; by default a place is (row, further dimensions from the inside out). ``eviction`` is what the L2 does
    with the lines.
    """

    tensor_map: TensorMapHandle
    order: Callable[..., Sequence[Number]] = lambda col, row, *outer: (col, row, *outer)
    eviction: Eviction = ""

    @classmethod
    def of_heads(cls, tensor_map: TensorMapHandle, heads_inside: bool, eviction: Eviction = "") -> Boxes:
        """Boxes of (batch, rows, heads, columns), or (batch, heads, rows, columns): a place is (row, head, batch)."""

        def order(col: Number, row: Number, head: Number, batch: Number) -> tuple[Number, ...]:
            return (col, head, row, batch) if heads_inside else (col, row, head, batch)

        return cls(tensor_map, order, eviction)

    def parts(self, place: Sequence[Any]) -> Sequence[tuple[int, Sequence[Number]]]:
        """The boxes of a panel: (first row within the tile, place) of each. Here one, as high as the tile."""
        return ((0, place),)

    def send(
        self, k: Kernel, tile: SharedTile, place: Sequence[Number], *, row: Number = 0, cols: int | None = None
    ) -> None:
        """Start, in one thread, the copies of a tile that was written and fenced, from ``row`` on, as one bulk group.

        ``cols``: as many of its columns, by default all.
        """
        for panel in tile.layout.panels:
            if cols is None or panel.first_col < cols:
                offset = row * tile.layout.row_bytes + panel.byte_offset
                k.tma_store(self.tensor_map, self.order(panel.first_col, *place), tile, offset=offset)
        k.commit_bulk()


class PackedPosition:
    """Stage and phase in one register (0 … n - 1 and once more in the other phase): for where registers are short."""

    def __init__(self, k: Kernel, stages: int, name: str, phase: int) -> None:
        self._k, self._stages = k, stages
        self._at = k.register(u32, stages * phase, name)

    @property
    def stage(self) -> Traced:
        """The stage's index."""
        return self._k.select(self._at >= self._stages, self._at - self._stages, self._at.get())

    @property
    def phase(self) -> Traced:
        """0 or 1."""
        return self._k.select(self._at >= self._stages, 1, 0)

    def advance(self) -> None:
        """Move on to the next stage."""
        k = self._k
        self._at.set(k.select(self._at == 2 * self._stages - 1, 0, self._at + 1))


@dataclass(frozen=True)
class TurnPosition:
    """The stage of use number ``turn``: computed, in no register of its own."""

    stage: Number
    phase: Number

    def advance(self) -> None:
        """Do nothing: the turn tells the position."""


Position = Ring | PackedPosition | TurnPosition
"""A stage and the parity of its phase, and how to go on to the next."""


class _Arrivals:
    """The warps that release the stages of a pipeline, or write them, as far as they are known while tracing."""

    def __init__(self, pipeline: Pipeline, argument: str, does: str, count: int) -> None:
        self._pipeline, self._argument, self._does, self._count = pipeline, argument, does, count
        self._warps: set[int] | None = set() if pipeline.parts == 1 else None
        self._most = 0

    def forget(self) -> None:
        """Claim nothing: some warps arrive for some stages, others for others."""
        self._warps = None
        self._pipeline.k.unfinished.pop((self._pipeline, self._argument), None)

    def add(self) -> None:
        """Note that the warps that execute what is written now arrive once each; under a condition none are known.

        It is an error by the end of the kernel if they alone are more than the pipeline counts, or all together fewer.
        """
        k, argument, count = self._pipeline.k, self._argument, self._count
        here = k.warps_here((k.cta_threads or 0) // 32)
        if here is None or self._warps is None:
            self.forget()
            return
        self._warps |= set(here)
        self._most = max(self._most, len(here))
        k.unfinished.pop((self._pipeline, argument), None)
        if self._most > count or len(self._warps) < count:
            found = max(self._most, min(len(self._warps), count))
            k.unfinished[self._pipeline, argument] = TraceError(
                f"{found} warps {self._does} {self._pipeline.name} here, once each, and its pipeline counts {argument}="
                f"{count}: write {argument}={found}, or let {'fewer' if found > count else 'the others'} do so"
            ).at(k.here())


class Pipeline:
    """Stages of one shared tile, or of several that travel together.

    ``fed`` lists the tiles, each with the :class:`Boxes` it is loaded from (of a plain matrix its tensor map says
    enough), or alone where warps write it. ``readers``:
    how many times a stage is released before it may be filled again (once a warp, or by one thread); 0 where another
    pipeline over the same tile says so. ``writers``: arrivals that make a stage full: 1 for the TMA's thread, or so
    many warps. ``parts``: users with stages of their own, which :meth:`at` tells apart. ``cols``: columns that copies
    fill, by default all.

    Call :func:`ready` once all pipelines of a kernel are made.
    """

    def __init__(
        self,
        k: Kernel,
        *fed: SharedTile | tuple[SharedTile, Boxes | TensorMapHandle],
        readers: int,
        writers: int = 1,
        parts: int = 1,
        cols: int | None = None,
        name: str = "",
    ) -> None:
        self.k = k
        pairs = [x if isinstance(x, tuple) else (x, None) for x in fed]
        self.tiles = tuple(tile for tile, _ in pairs)
        self._boxes = tuple(Boxes(boxes) if isinstance(boxes, TensorMapHandle) else boxes for _, boxes in pairs)
        self.stages = self.tiles[0].stages
        if any(tile.stages != self.stages for tile in self.tiles):
            raise TraceError("the tiles of a pipeline have as many stages each")
        self.cols = cols
        """Columns that copies fill; None: all."""
        self._panels = [[p for p in tile.layout.panels if cols is None or p.first_col < cols] for tile in self.tiles]
        name = name or self.tiles[0].name
        self.name, self._writers, self._readers, self.parts = name, writers, readers, parts
        self.released_by, self.written_by = (
            _Arrivals(self, "readers", "release", readers),
            _Arrivals(self, "writers", "write", writers),
        )
        self.full: MbarrierArray = k.mbarriers(self.stages, f"{name}_full")
        self.empty: MbarrierArray | None = k.mbarriers(self.stages, f"{name}_empty") if readers else None
        self._lines: dict[str, SourceLine] = {}
        k.unfinished[self.full] = TraceError(
            f"the barriers of the pipeline of {name} are never set up: call ready(k, …) with it, once all pipelines of "
            "the kernel are made"
        ).at(k.here())

    @property
    def stage_bytes(self) -> int:
        """The bytes that copies bring into a stage."""
        return sum(
            tile.layout.rows * sum(panel.cols for panel in panels) * tile.dtype.bytes
            for tile, panels in zip(self.tiles, self._panels, strict=True)
        )

    def initialise(self) -> None:
        """Set up the mbarriers, by one thread."""
        self.full.init(self._writers)
        if self.empty is not None:
            self.empty.init(self._readers)

    # -- positions
    def producer(self) -> Cursor:
        """A cursor for whoever fills the stages, from the first on."""
        return Cursor(self, self.k.ring(self.stages, f"{self.tiles[0].name}_put", phase=1))

    def consumer(self, *, packed: bool = False, ahead: bool = False, name: str = "get") -> Cursor:
        """A cursor for whoever reads the stages, from the first on; ``packed``: stage and phase in one register.

        ``ahead``: it advances past stages that it has waited for, and releases them later, in the same order.
        """
        own = f"{self.tiles[0].name}_{name}"
        if packed:
            return Cursor(self, PackedPosition(self.k, self.stages, own, 0))
        position = self.k.ring(self.stages, own)
        return Cursor(self, position, self.k.ring(self.stages, f"{own}_read") if ahead else None)

    def at(self, turn: Number, part: Number = 0, *, filling: bool = False) -> Cursor:
        """The stage that a part uses as number ``turn``; ``filling``: for whoever fills it. Takes no registers."""
        n = self.stages // self.parts
        self.part_ways()
        number = self.k.value(turn, u32)
        since = number + n if filling else number  # what was there before was put n turns ago; at first all are empty
        return Cursor(self, TurnPosition(since % n * self.parts + part, since // n & 1))

    # -- what a cursor does
    def part_ways(self) -> None:
        """Note that warps may use other stages than each other: how many use one is not known."""
        self.released_by.forget()
        self.written_by.forget()

    def used(self, how: str) -> None:
        """Note that a cursor has claimed a stage, waited for one or released one: what is claimed again is released."""
        lines = self._lines
        lines.setdefault(how, self.k.here())
        if "release" in lines:
            self.k.unfinished.pop((self, "release"), None)
        elif self.empty is not None and {"claim", "wait"} <= lines.keys():
            self.k.unfinished[self, "release"] = TraceError(
                f"nothing releases {self.name}, which is waited for here and filled at {lines['claim']}: who fills it "
                f"again waits for ever once {self.stages} stages are full. Call release() of the cursor that waited, "
                "when its warp has read the stage"
            ).at(lines["wait"])

    def copy_in(self, stage: Number, places: Sequence[Sequence[Any]]) -> None:
        """Start the copies of every tile of a stage; their bytes complete the stage's phase."""
        if len(places) != len(self.tiles):
            raise TraceError(f"put takes a place for each of {len(self.tiles)} tiles")
        if alone := [place for place in places if not isinstance(place, Sequence)]:
            raise TraceError(
                f"a place is a tuple, which Boxes takes apart: (row,) of a matrix, and its further dimensions; not "
                f"{shown(alone[0])}"
            )
        self.full.expect(self.stage_bytes, stage)
        for tile, boxes, panels, place in zip(self.tiles, self._boxes, self._panels, places, strict=True):
            if boxes is None:
                raise TraceError(f"{tile.name} is written by warps: it has no boxes to load from")
            for first_row, at in boxes.parts(place):
                for panel in panels:
                    self.k.tma_load(
                        tile.stage(stage),
                        boxes.tensor_map,
                        boxes.order(panel.first_col, *at),
                        self.full,
                        stage,
                        offset=panel.byte_offset + first_row * panel.cols * tile.dtype.bytes,
                        eviction=boxes.eviction,
                    )


class Cursor:
    """A position in a pipeline: the stage that is filled or read next."""

    def __init__(self, pipeline: Pipeline, position: Position, released: Position | None = None) -> None:
        self._pipeline, self._position, self._released = pipeline, position, released or position
        self._given_back: tuple[object, SourceLine] | None = None  # the block and line of a release since the last wait

    @property
    def stage(self) -> Number:
        """The stage's index."""
        return self._position.stage

    @property
    def tile(self) -> SharedTile:
        """The stage's tile (the first of several), whether it is there or not."""
        return self.tiles[0]

    @property
    def tiles(self) -> tuple[SharedTile, ...]:
        """The stage's tiles, whether they are there or not."""
        return tuple(tile.stage(self.stage) for tile in self._pipeline.tiles)

    # -- who fills
    def put(self, *places: Sequence[Any]) -> None:
        """Start, in one thread, the copies of the tiles at ``places`` once the stage is empty; move on to the next."""
        self.claim()
        self._pipeline.copy_in(self.stage, places)
        self._position.advance()

    def claim(self) -> SharedTile:
        """The stage's tile once it is empty, for each writing warp."""
        p = self._pipeline
        p.used("claim")
        if p.empty is not None:
            p.empty.wait(self._position.phase, self.stage)
        return self.tile

    def written(self, *, for_loads: bool = False) -> None:
        """Publish what the lanes of each writing warp stored into the stage, to the TMA and ``wgmma`` too.

        ``for_loads``: ordinary loads alone read it, for which nothing is fenced.
        """
        k = self._pipeline.k
        self._pipeline.written_by.add()
        if not for_loads:
            k.fence_async()
        k.syncwarp()
        self._pipeline.full.arrive(self.stage, when=k.lane == 0)
        self._position.advance()

    # -- who reads
    def wait(self) -> SharedTile:
        """The stage's tile (the first of several), once it is full."""
        return self.wait_all()[0]

    def wait_all(self) -> tuple[SharedTile, ...]:
        """The stage's tiles, once they are full."""
        self._pipeline.used("wait")
        self._given_back = None
        self._pipeline.full.wait(self._position.phase, self.stage)
        return self.tiles

    def release(self) -> None:
        """Give the stage back to be filled again, and move on to the next. Lane 0 arrives for its warp at once.

        Lanes that read the stage themselves, by loads or ``ldmatrix``, meet before at a ``k.syncwarp()``, after a
        ``k.fence_async()`` if the TMA fills it.
        """
        p = self._pipeline
        if p.empty is None:
            raise TraceError("nobody releases this pipeline: it was made with readers=0")
        p.used("release")
        self._refuse_again()
        p.released_by.add()
        p.empty.arrive(self._released.stage, when=p.k.lane == 0)
        self._released.advance()

    def _refuse_again(self) -> None:
        """Refuse a second release of a block without a wait between: it gives back a stage that nobody waited for."""
        k, before = self._pipeline.k, self._given_back
        self._given_back = k.block_here(), k.here()
        if before is not None and before[0] is self._given_back[0] and self._released is self._position:
            raise TraceError(
                f"{self._pipeline.name} is released twice for one wait, at {before[1]} and here: a release gives one "
                "stage back and moves on to the next, so wait for that one before, or release once"
            ).at(k.here())

    def advance(self) -> None:
        """Move on to the next stage; this one is released later, or by another cursor."""
        self._pipeline.part_ways()
        self._position.advance()

    def skip(self, count: Traced) -> None:
        """Past ``count`` stages that somebody else reads, and has waited for before this cursor waits again.

        The warps must take turns at the stages: by its parity, a wait cannot tell a phase from the one two before.
        """
        self._pipeline.part_ways()
        self._given_back = None
        ring, n = self._registers(), self._pipeline.stages
        total = ring.stage.get() + count
        rounds = total // n
        ring.phase.set((ring.phase.get() + rounds) & 1)
        ring.stage.set(total - rounds * n)
        if self._released is not ring:
            Cursor(self._pipeline, self._released).catch_up(self)

    def catch_up(self, other: Cursor) -> None:
        """Move to the position of another cursor of this pipeline."""
        self._pipeline.part_ways()
        self._given_back = None
        mine, theirs = self._registers(), other._registers()
        mine.stage.set(theirs.stage)
        mine.phase.set(theirs.phase)

    def _registers(self) -> Ring:
        if not isinstance(self._position, Ring):
            raise TraceError("only a cursor in two registers moves so")
        return self._position

    def send(self, boxes: Boxes, place: Sequence[Number]) -> None:
        """Copy the stage out, in one thread, once warps have written it; return when its memory is free again."""
        k = self._pipeline.k
        boxes.send(k, self.wait(), place, cols=self._pipeline.cols)
        k.wait_bulk(0, reads_only=True)
        self._position.advance()


def ready(k: Kernel, *pipelines: Pipeline) -> None:
    """Set up the barriers of all pipelines; every thread may use them after this."""
    with k.when(k.thread == 0):
        for pipeline in pipelines:
            pipeline.initialise()
        k.mbarrier_fence()
    k.syncthreads()
