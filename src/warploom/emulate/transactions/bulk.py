"""Bulk transactions (the TMA, ``cp.async.bulk``, ``st.async``): loads land on an mbarrier, stores read and write late.

Copies of ``cp.async`` that complete on an mbarrier (``cp.async.mbarrier.arrive``) land like the TMA's: they are in no
group any more, and whoever waits for the phase knows that they are done, which no barrier of the CTA tells.

Sources: PTX ISA, ``cp.async.bulk.tensor``, "Async proxy".
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.mbarriers import Mbarriers
from warploom.emulate.control.frames import Actor, Execution, Frame
from warploom.emulate.findings.report import SEEN, Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.memory.shared_memory import SHARED_BASE, SharedMemory
from warploom.emulate.transactions.made_maps import MadeMaps
from warploom.emulate.transactions.tensor_maps import CHUNK, ByteRange, StoredWords, TensorMapArgument
from warploom.emulate.transactions.transaction import (
    Copies,
    CopyQueue,
    Groups,
    Landing,
    SharedRead,
    Transaction,
    cells_of,
)
from warploom.isa import effects as fx

Array = NDArray[Any]
_BOX_ALIGNMENT = 128  # in shared memory


@dataclass(frozen=True, eq=False)
class Starter(Actor):
    """One lane that starts a transaction, at a position of a frame, and ``operands`` of it, each (warps, lanes)."""

    frame: Frame
    position: int
    operands: Mapping[str, Array]

    def __getitem__(self, name: str) -> int:
        return int(self.operands[name][self.position, self.lane])

    def __contains__(self, name: str) -> bool:
        return name in self.operands

    def several(self, name: str, count: int) -> list[int]:
        """The values of operands that have one name and numbers."""
        return [self[f"{name}{i}"] for i in range(count)]


@dataclass(eq=False)
class Store(Transaction):
    """A copy of shared memory to global memory that one lane has started."""

    lane: int
    target: TensorMapArgument | ByteRange
    at: tuple[int, ...]
    chunks: Array
    source: SharedRead | None  # None without checks
    box: MemoryAccess | None
    made: MemoryAccess | None  # the read of its tensor map, where the kernel has made that
    read: bool = False


class BulkCopies(Groups[Store]):
    """The bulk transactions of a batch: loads, and groups of stores."""

    def __init__(
        self,
        shared: SharedMemory,
        memory: GlobalMemory,
        barriers: Mbarriers,
        reporter: Reporter,
        counter: TrafficCounter,
        maps: dict[int, TensorMapArgument],
        copies: CopyQueue,
    ) -> None:
        super().__init__(shared.clocks.known.shape[0], reporter)
        self.shared, self.memory, self.barriers, self.clocks = shared, memory, barriers, shared.clocks
        self.counter, self.maps, self.copies = counter, maps, copies
        self.warps = shared.clocks.warps_per_cta
        self.loads: list[Landing] = []
        self.made = MadeMaps(memory, reporter)

    # -- issue ---------------------------------------------------------------------------------------------------

    def start(self, call: Execution[Any]) -> None:
        """The acting lanes start transactions; a bulk copy should be started by one lane of its warp alone."""
        frame, op, effect = call.frame, call.op, call.effect
        wide = {name: frame.full(array) for name, array in call.given.items()}
        for acting, _ in call.actors():
            position = int(np.nonzero(frame.rows == acting.row)[0][0])
            for lane in acting.each if isinstance(effect, fx.AsyncStore) else self._only(acting):
                by = Starter(op, acting.row, [lane], frame, position, wide)
                if isinstance(effect, fx.AsyncStore):
                    self._store_words(by, effect)
                elif isinstance(effect, fx.BulkTensorCopy):
                    self._copy_box(by, effect)
                elif isinstance(effect, fx.BulkStore):
                    self._store_bytes(by, effect)
                else:
                    self._load_bytes(by)

    def _only(self, acting: Actor) -> list[int]:
        """The lane that starts a copy; a finding if several of its warp do."""
        if len(acting.each) > 1:
            message = f"{len(acting.each)} threads of a warp start the same copy ({acting.name}): elect one"
            self.report.by("race", acting, message, count=len(acting.each))
        return [acting.lane]

    def _copy_box(self, by: Starter, copy: fx.BulkTensorCopy) -> None:
        source, made = self.maps.get(by["tensor_map"]), None
        if source is None:
            source, made = self.made.find(by["tensor_map"], by)
        if source is None:
            return
        at = tuple(by.several("coordinates", len(copy.coordinates)))
        if len(at) != len(source.spec.box):
            message = f"{by.name} gives {len(at)} coordinates for a tensor of {len(source.spec.box)} dimensions: give "
            message += "one for each, the innermost first (a place of Boxes leaves the columns out: those of the tile)"
            self.report.by("bounds", by, message)
            return
        beyond = source.outside(at)
        if beyond is not None:
            message = f"{by.name} reaches byte {beyond} of {source.buffer_name}, outside the array: its coordinates "
            self.report.by("bounds", by, message + "say that rows exist which do not")
            return
        place, size, moved = by["shared"], source.spec.box_bytes, source.bytes_inside(at)
        chunks = self._inside(by, place, source.chunk_addresses(place), size, _BOX_ALIGNMENT)
        if chunks is not None and self.shared.checks:
            self._check_tile(by, source, place - SHARED_BASE, int(chunks.max()) + CHUNK - place)
        if "barrier" in by:
            ctas = self._receivers(by) if "multicast" in by else [by.row // self.warps]
            self.counter.engine("tma.load", size * len(ctas), moved)  # multicast: read once
            for cta in ctas:
                self._start_load(by, source, at, chunks, by["barrier"] - SHARED_BASE, cta, made)
        elif chunks is not None:
            self.counter.engine("tma.store", size, moved)
            self._start_store(by, source.combining(copy.reduction), at, chunks, made)

    def _store_bytes(self, by: Starter, store: fx.BulkStore) -> None:
        """A copy of consecutive bytes to global memory."""
        size, place = store.bytes if store.sized is None else by["sized"], by["shared"]
        if not self._is_whole(by, size):
            return
        span = self._span(by, "target", size, store.adds)
        chunks = self._inside(by, place, place + np.arange(0, size, CHUNK), size, CHUNK)
        if span and chunks is not None:
            self.counter.engine("tma.store", size, size)
            self._start_store(by, span, (), chunks)

    def _is_whole(self, by: Starter, size: int) -> bool:
        """Whether a bulk copy can move so many bytes; else a finding."""
        if size % CHUNK == 0 and size > 0:
            return True
        message = f"{by.name} of {size} bytes: a bulk copy moves a positive multiple of {CHUNK}"
        self.report.by("misaligned", by, message)
        return False

    def _load_bytes(self, by: Starter) -> None:
        """A copy of consecutive bytes to shared memory."""
        size, to = by["bytes"], self._to(by, "shared")
        if not self._is_whole(by, size) or to is None:
            return
        cta, place, barrier = to
        span = self._span(by, "source", size)
        chunks = self._inside(by, place, place + np.arange(0, size, CHUNK), size, CHUNK)
        ctas = self._receivers(by) if "multicast" in by else [cta]
        if span:
            self.counter.engine("tma.load", size * len(ctas), size)
            for receiver in ctas:
                self._start_load(by, span, (), chunks, barrier, receiver)

    def _store_words(self, by: Starter, store: fx.AsyncStore) -> None:
        """A store of one thread's registers into a CTA of the cluster."""
        to = self._to(by, "target")
        if to is not None:
            cta, place, barrier = to
            words = np.array(by.several("values", len(store.values)), f"u{store.word_bytes}")
            chunks = self._inside(by, place, np.array([place]), words.nbytes, words.nbytes, words.nbytes)
            self._start_load(by, StoredWords(words), (), chunks, barrier, cta)

    def _span(self, by: Starter, name: str, size: int, adds: bool = False) -> ByteRange | None:
        """The bytes of global memory that one lane names; None and a finding outside of it."""
        alone = np.zeros((by.frame.n, 32), np.bool_)
        alone[by.position, by.lane] = True
        address = by.operands[name].astype(np.int64)
        numbers, offsets, good = self.memory.locate(by.frame, address, size, by.op, alone, CHUNK)
        if not good.any():
            return None
        at = by.position, by.lane
        return ByteRange(self.memory.buffers[int(numbers[at])], int(offsets[at]), size, adds)

    def _to(self, by: Starter, name: str) -> tuple[int, int, int] | None:
        """The CTA (of the batch) of an address and of the mbarrier, the first within it, and the mbarrier's byte.

        None, and a finding, where they are of two CTAs.
        """
        (owner, at), (cta, where) = (self.barriers.window(by[which], by) for which in (name, "barrier"))
        if owner != cta:
            message = f"{by.name} stores to one CTA and completes on an mbarrier of another"
            self.report.by("mbarrier", by, message)
            return None
        return cta, at, where - SHARED_BASE

    def _receivers(self, by: Starter) -> list[int]:
        """The CTAs (of the batch) that a mask names; a finding for those that the cluster does not have."""
        together, mask = self.clocks.places.together, by["multicast"]
        if mask == 0 or mask >> together:
            message = f"{by.name} has the mask {mask:#b}: it must name CTAs of the cluster, which has {together}"
            self.report.by("bounds", by, message)
        first = by.row // self.clocks.domain * together
        return [first + rank for rank in range(together) if mask >> rank & 1]

    def _inside(
        self, by: Starter, place: int, chunks: Array, moved: int, alignment: int, chunk_bytes: int = CHUNK
    ) -> Array | None:
        """The chunks, if they lie in shared memory and the address that the copy names is aligned; else a finding.

        A swizzle moves chunks by bits of their addresses: the first one need not lie at the tile's address ``place``.
        """
        size, where = self.shared.size, place - SHARED_BASE
        if place % alignment:
            message = f"{by.name} at byte {where} of shared memory: it starts at a multiple of {alignment} bytes"
            self.report.by("misaligned", by, message, address=where)
            return None
        if int(chunks.min()) < SHARED_BASE or int(chunks.max()) + chunk_bytes > SHARED_BASE + size:
            message = f"{by.name} moves {moved} bytes at byte {where}, outside the {size} bytes of shared memory: "
            message += "correct the address, or ask for more shared memory"
            self.report.by("bounds", by, message, address=where)
            return None
        return chunks

    def _check_tile(self, by: Starter, source: TensorMapArgument, place: int, extent: int) -> None:
        """The tensor map and the tile must lay the same elements out alike."""
        tile = by.op.tile(0)
        if tile is None:
            return
        spec = source.spec
        inner = spec.box[0] * spec.dtype.bytes
        pitch = spec.swizzle_bytes or inner
        laid_out = tile.layout is not None  # of an array that PTX declares, its readers alone know the swizzle
        if laid_out and tile.swizzle_bytes != spec.swizzle_bytes and extent > CHUNK:
            has = "no swizzle" if tile.swizzle_bytes == 0 else f"swizzled rows of {tile.swizzle_bytes} bytes"
            has = "a swizzle that the TMA does not have" if tile.swizzle_bytes is None else has
            wants = f"swizzles {spec.swizzle_bytes} bytes" if spec.swizzle_bytes else "does not swizzle"
            message = f"{by.name}: the tile {tile.name!r} has {has}, its tensor map {wants}: "
            fits = tile.swizzle_bytes is not None and (tile.swizzle_bytes == 0 or inner <= tile.swizzle_bytes)
            message += f"make the map with swizzle_bytes={tile.swizzle_bytes}" if fits else "make them agree"
            self.report.by("layout", by, message)
        elif tile.row_bytes and spec.box_bytes > inner and pitch != tile.row_bytes:
            message = f"{by.name}: rows of the tile {tile.name!r} are {tile.row_bytes} bytes apart, those of the "
            message += f"box {pitch}: copy whole rows, or panels (panel_cols) as wide as the box"
            self.report.by("layout", by, message)
        if extent > tile.room(place) > 0:  # outside of the tile altogether is told already
            message = f"{by.name} moves a box of {spec.box_bytes} bytes to where the tile {tile.name!r} has "
            message += f"{tile.room(place)}: make the box smaller, or the tile larger"
            self.report.by("bounds", by, message)

    def _start_load(
        self,
        by: Starter,
        source: TensorMapArgument | ByteRange | StoredWords,
        at: tuple[int, ...],
        chunks: Array | None,
        barrier: int,
        cta: int,
        made: MemoryAccess | None = None,
    ) -> None:
        """Data comes to ``chunks`` of a CTA (of the batch) and completes its bytes on an mbarrier there.

        ``made`` is the read of a tensor map that the kernel has made.
        """
        row, lane, op, clocks = by.row, by.lane, by.op, self.clocks
        bar = self.barriers.find(barrier, by, cta)
        if bar is None:
            return
        if not (bar.fenced and self.barriers.is_known(bar, by, bar.fenced)):
            message = (
                f"{by.name} completes on {self.barriers.name(barrier)}, whose initialisation the async proxy may not "
                "see: fence (fence.mbarrier_init) after mbarrier.init in the thread that runs it"
            )
            self.report.by("mbarrier", by, message, other=bar.made.op.where, address=barrier, relies_on=SEEN)
        if chunks is None:
            return
        shared, memory, unit = self.shared, self.memory, min(CHUNK, source.box_bytes)
        history, number, reads, passed = shared.history, 0, list[MemoryAccess](), None
        index = self._index(chunks, cta, unit)
        cells = cells_of(index, unit, history)
        if shared.checks:
            self.barriers.check_follows(bar, by)
            history.check(history.of([row], lane, cells, op, "write", proxy=True))
            number = self.clocks.stamp(op)
            history.begin(cells, number)
            box = None if isinstance(source, StoredWords) else self._begin_globally(by, source, at, "read")
            reads = [replace(read) for read in (box, made) if read is not None]
            passed = self.clocks.passed(row)

        def deliver(queue: int) -> dict[int, int]:
            marks = None if isinstance(source, StoredWords) or source.buffer is None else memory.marks(source.buffer)
            spoiled = None if marks is None else replace(source, buffer=marks).load(at)
            shared.put(index, source.load(at), spoiled)
            if not self.shared.checks:
                return {}
            history.land(number, queue, cells, op)
            if marks is not None:
                shared.origins[clocks.now] = op.where, f"a copy of {marks.name}, some of which nobody has written"
            ended = dict[int, int]()
            for read in reads:
                loads = self._agent("load", cta, barrier, read)
                assert memory.history is not None
                memory.history.end_read(read)
                ended[loads] = read.stamp
            return ended

        self._take_off(Landing(by, bar, passed, deliver, source.box_bytes))

    def _take_off(self, landing: Landing) -> None:
        self.loads.append(landing)
        self.report.recorder.takes_off(landing)

    def track_copies(self, call: Execution[fx.CopyArrival]) -> None:
        """The active lanes arrive at an mbarrier when the ``cp.async`` that they have under way land."""
        for by, (place,) in call.actors("address"):
            bar = self.barriers.find(place - SHARED_BASE, by)
            if bar is None:
                continue
            self.barriers.check_follows(bar, by)
            if not call.effect.counted:
                bar.pending += len(by.each)
            passed = self.clocks.passed(by.row) if self.shared.checks else None
            deliver = partial(self._deliver_copies, self.copies.of_lanes(by.row, by.lanes))
            self._take_off(Landing(by, bar, passed, deliver))

    def _deliver_copies(self, parts: list[tuple[Copies, Array]], queue: int) -> dict[int, int]:
        for copies, lanes in parts:
            self.copies.land(copies, lanes)
            if self.shared.checks:
                size, history = copies.data.dtype.itemsize * copies.data.shape[2], self.shared.history
                history.land(copies.number, queue, cells_of(copies.index[lanes], size, history), copies.op)
        return {}

    def _start_store(
        self,
        by: Starter,
        target: TensorMapArgument | ByteRange,
        at: tuple[int, ...],
        chunks: Array,
        made: MemoryAccess | None = None,
    ) -> None:
        row, lane, op = by.row, by.lane, by.op
        source, box = None, None
        if self.shared.checks:
            cells = cells_of(self._index(chunks, row // self.warps), CHUNK, self.shared.history)
            source = SharedRead(self.shared.history, op, self._queue(row), cells, self.clocks.stamp(op))
            source.begin([row], lane)
            box = self._begin_globally(by, target, at, "atomic" if target.adds else "write")
        under_way = (np.arange(32) == lane)[None]
        self.add(Store(op, np.array([row]), under_way, lane, target, at, chunks, source, box, made))

    def _begin_globally(
        self, by: Starter, tensor: TensorMapArgument | ByteRange, at: tuple[int, ...], what: str
    ) -> MemoryAccess | None:
        """The access to global memory of a load ("read"), store ("write") or reduction ("atomic") that a lane starts.

        Until a store's group has been waited for, nobody may touch its cells. None where the kernel writes nothing.
        """
        history, buffer = self.memory.history, tensor.buffer
        if history is None or buffer is None:
            return None
        offsets = tensor.element_offsets(at)[:, None] + np.arange(0, tensor.element_bytes, self.memory.granule)
        mine = self.memory.reach(by.op, what, buffer, offsets, by.row, by.lane)
        if mine is None:
            return None
        mine.proxy, mine.strong = True, what == "atomic"
        history.check(mine)
        if what == "write":
            history.begin(mine.cells, mine.stamp)
        if what == "atomic":  # in a name that only a wait for the group makes known
            self._agent("reduction", by.row // self.warps, 32 * (by.row % self.warps) + by.lane, mine)
            history.note(mine)
        return mine

    def _agent(self, kind: str, cta: int, number: int, access: MemoryAccess) -> int:
        """Let a queue, of a CTA of the batch, make an access to global memory. Returns the queue's column."""
        column = self.clocks.queue(kind, self.clocks.first // self.warps + cta, number)
        access.agent = int(self.clocks.agents(np.array(column), access.rows[0][0]))
        return column

    def _index(self, chunks: Array, cta: int, unit: int = CHUNK) -> Array:
        """Where chunks of a CTA, of ``unit`` bytes, are among those of the batch."""
        return (chunks - SHARED_BASE + cta * self.shared.stride) // unit

    # -- completion ----------------------------------------------------------------------------------------------

    def land(self, rng: random.Random | None) -> bool:
        """Let one load land: the oldest, or any. Returns whether there was one."""
        if not self.loads:
            return False
        landing, clocks = self.loads.pop(0 if rng is None else rng.randrange(len(self.loads))), self.clocks
        self.report.recorder.lands(landing)
        bar = landing.barrier
        queue = clocks.queue("mbarrier", bar.cta, bar.address)
        more = landing.deliver(queue)
        known = clocks.ended({queue: clocks.now, **more}, passed=landing.passed)
        self.barriers.land(bar, landing.by, known, queue, landing.size)
        return True

    def _queue(self, row: int) -> int:
        """The column of the bulk stores of a warp."""
        return self.clocks.queue("bulk", row // self.warps, row % self.warps)

    def wait(self, call: Execution[fx.WaitGroup]) -> None:
        """Stores of all but the newest groups of each active lane end, at this last moment."""
        over, reads_only = self.over(call.frame, call.effect.pending), call.effect.reads_only
        for store, _ in over:
            if not store.read:
                row, store.read = int(store.rows[0]), True
                self._write(store)
                if store.source is not None:
                    known = self.clocks.ended({store.source.queue: store.source.stamp})
                    self.clocks.acquire(row, [store.lane], known)
                if store.made is not None and self.memory.history is not None:
                    self.memory.history.end_read(store.made)
            if not reads_only:
                self._written(store)
        if not reads_only:
            self.close(over, call.op)

    def _written(self, store: Store) -> None:
        """The thread of a store knows that it has written global memory, or the kernel has ended."""
        box, row = store.box, int(store.rows[0])
        if box is not None and box.agent:
            column = int(self.clocks.column_of(np.array(box.agent), row))
            self.clocks.acquire(row, [store.lane], self.clocks.ended({column: box.stamp}))
        elif box is not None and self.memory.history is not None:
            self.memory.history.land(box)

    def _write(self, store: Store) -> None:
        """Shared memory is read, and global memory written, now."""
        shared, target, row, name = self.shared, store.target, int(store.rows[0]), store.op.instruction.mnemonic
        index = self._index(store.chunks, row // self.warps)
        if store.source is not None:
            store.source.end(row, store.lane)
            if shared.shadow is not None and shared.shadow.reshape(-1, CHUNK)[index].any():
                message = f"{name} stores to global memory what depends on data nobody wrote: write it before, or "
                self.report.add("uninitialised", store.op.where, message + "wait for its data", row, store.lane)
        assert target.buffer is not None
        if self.memory.may_write(store.op, target.buffer, row, store.lane):
            target.store(store.at, shared.data.reshape(-1, CHUNK)[index])

    def at_exit(self) -> None:
        """Copies under way when their CTA's shared memory goes to the next one."""
        for load in self.loads:
            message = f"the kernel ends while {load.by.name} is under way: wait for the phase of "
            self.report.by("leak", load.by, message + self.barriers.name(load.barrier.address))
        for store in self.open:
            if store.read:
                self._written(store)
            elif self.leak(store, "reads shared memory", "wait until it has read (wait_group.read)"):
                self._write(store)
