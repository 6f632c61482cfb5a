"""Bulk tensor copies (the TMA): loads that land late and complete bytes on an mbarrier, stores that read late.

Copies of ``cp.async`` that complete on an mbarrier (``cp.async.mbarrier.arrive``) land like the TMA's: they are in no
group any more, and whoever waits for the phase knows that they are done, which no barrier of the CTA tells.

Sources: PTX ISA, ``cp.async.bulk.tensor``, "Async proxy", "Completion mechanisms for asynchronous copies".
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.mbarrier_state import Mbarrier
from warploom.emulate.barriers.mbarriers import Mbarriers
from warploom.emulate.control.frames import Frame, Lanes, lanes_of, split
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.global_async import AsyncGlobal, Box, Span, Words
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.memory.shared_memory import SHARED_BASE
from warploom.emulate.order.known import ORDER
from warploom.emulate.transactions.async_proxy import AsyncProxy
from warploom.emulate.transactions.copies import CopyQueue, Taken
from warploom.emulate.transactions.made_maps import MadeMaps
from warploom.emulate.transactions.tensor_maps import CHUNK, TensorMapArgument
from warploom.ir.statements import Op
from warploom.isa.effects import BulkStore, BulkTensorCopy

Array = NDArray[Any]


@dataclass(eq=False)
class TrackedCopies:
    """Copies that ``lanes`` of a warp have started, and their arrivals; ``passed``: how far others had come then."""

    op: Op
    row: int
    lane: int
    lanes: list[int]
    barrier: Mbarrier
    queue: CopyQueue
    parts: list[Taken]
    passed: NDArray[Any] | None

    def land(self, proxy: AsyncProxy, barriers: Mbarriers) -> None:
        """They are done: their lanes arrive."""
        bar, clocks = self.barrier, proxy.clocks
        queue = clocks.queue("mbarrier", bar.cta, bar.address)
        for part in self.parts:
            self.queue.land(part)
            if proxy.checks:
                per_unit = part.data.dtype.itemsize * part.data.shape[1] // proxy.shared.granule
                cells = (part.index[:, None] * per_unit + np.arange(per_unit)).reshape(-1)
                proxy.end_write(queue, cells, part.copy.number, part.copy.op)
        known = clocks.ended(queue, clocks.now, self.passed)
        barriers.arrive_for(bar, self.lanes, known, queue, self.row, self.op)


_ALIGNMENT = 128  # of a box in shared memory


@dataclass(eq=False)
class _Load:
    """``cta`` (of the batch) receives it; ``row`` has started it, in the same cluster."""

    op: Op
    row: int
    lane: int
    cta: int
    source: TensorMapArgument | Span | Words
    at: tuple[int, ...]
    chunks: Array
    cells: Array
    barrier: Mbarrier
    number: int
    box: Box | None
    passed: Array | None  # how far others had come when it was started


@dataclass(eq=False)
class _Store:
    op: Op
    row: int
    lane: int
    target: TensorMapArgument | Span
    at: tuple[int, ...]
    chunks: Array
    cells: Array
    before: Array
    stamp: int
    group: int
    box: Box | None


class BulkCopies:
    """The bulk tensor copies of a batch."""

    def __init__(
        self,
        proxy: AsyncProxy,
        memory: GlobalMemory,
        barriers: Mbarriers,
        reporter: Reporter,
        maps: dict[int, TensorMapArgument],
    ) -> None:
        self.proxy, self.memory, self.barriers, self.clocks = proxy, memory, barriers, proxy.clocks
        self.report, self.maps = reporter, maps
        self.warps = proxy.clocks.warps_per_cta
        self.loads: list[_Load | TrackedCopies] = []
        self.stores: list[_Store] = []  # those that still read
        self.writing: list[_Store] = []  # those that have read, and are not known to have written
        self.globally, self.made = AsyncGlobal(memory), MadeMaps(memory, reporter)
        self.committed: dict[tuple[int, int], int] = {}

    # -- issue ---------------------------------------------------------------------------------------------------

    def issue(
        self,
        frame: Frame,
        op: Op,
        copy: BulkTensorCopy,
        tensor_map: Array,
        shared: Array,
        coordinates: list[Array],
        barrier: Array | None,
        multicast: Array | None,
        guard: Array,
    ) -> None:
        """The acting lanes start a copy; each of them should be the only one of its CTA to do so."""
        maps, places = frame.full(tensor_map), frame.full(shared).astype(np.int64)
        where = [frame.full(c) for c in coordinates]
        bars = None if barrier is None else frame.full(barrier).astype(np.int64)
        masks = None if multicast is None else frame.full(multicast).astype(np.int64)
        for i, row, lanes in lanes_of(frame, guard):
            lane = self._only(row, lanes, op)
            source = self.maps.get(int(maps[i, lane])) or self.made.find(int(maps[i, lane]), row, lane, op)
            if source is None:
                continue
            at = tuple(int(c[i, lane]) for c in where)
            if len(at) != len(source.spec.box):
                message = f"{op.instruction.mnemonic} gives {len(at)} coordinates for a tensor of "
                message += f"{len(source.spec.box)} dimensions: give one for each, the innermost first"
                self.report.add("bounds", op.where, message, row, lane)
                continue
            beyond = source.outside(at)
            if beyond is not None:
                message = f"{op.instruction.mnemonic} reaches byte {beyond} of {source.buffer_name}, outside the array"
                message += ": its coordinates say that rows exist which do not"
                self.report.add("bounds", op.where, message, row, lane)
                continue
            chunks = self._box(source, int(places[i, lane]), row, lane, op)
            size, moved = source.spec.box_bytes, source.bytes_inside(at)
            if bars is not None:
                ctas = [row // self.warps] if masks is None else self._receivers(row, lane, int(masks[i, lane]), op)
                self.proxy.counter.engine("tma.load", size * len(ctas), moved)  # multicast: read once
                for cta in ctas:
                    self._start_load(row, lane, op, source, at, chunks, int(bars[i, lane]) - SHARED_BASE, cta)
            elif chunks is not None:
                self.proxy.counter.engine("tma.store", size, moved)
                self._start_store(row, lane, op, source.combining(copy.reduction), at, chunks)

    def issue_bytes(self, frame: Frame, op: Op, store: BulkStore, shared: Array, target: Array, guard: Array) -> None:
        """The acting lanes start a copy of consecutive bytes to global memory."""
        places, goals = frame.full(shared).astype(np.int64), frame.full(target)
        for i, row, lanes in lanes_of(frame, guard):
            lane = self._only(row, lanes, op)
            span = self._span(frame, goals, (i, lane), store.bytes, op, store.adds)
            address = int(places[i, lane])
            chunks = self._inside(address + np.arange(0, store.bytes, CHUNK), store.bytes, CHUNK, row, lane, op)
            if span and chunks is not None:
                self.proxy.counter.engine("tma.store", store.bytes, store.bytes)
                self._start_store(row, lane, op, span, (), chunks)

    def issue_load(
        self, frame: Frame, op: Op, shared: Array, source: Array, sizes: Array, barrier: Array, guard: Array
    ) -> None:
        """The acting lanes start a copy of consecutive bytes to their CTA's shared memory."""
        places, bars = (frame.full(x).astype(np.int64) for x in (shared, barrier))
        starts, counts = frame.full(source), frame.full(sizes).astype(np.int64)
        for i, row, lanes in lanes_of(frame, guard):
            lane = self._only(row, lanes, op)
            size, to = int(counts[i, lane]), self._to(int(places[i, lane]), int(bars[i, lane]), row, lane, op)
            if size % CHUNK or size <= 0:
                message = f"{op.instruction.mnemonic} of {size} bytes: a bulk copy moves a positive multiple of {CHUNK}"
                self.report.add("misaligned", op.where, message, row, lane)
                continue
            if to is None:
                continue
            cta, address, where = to
            span = self._span(frame, starts, (i, lane), size, op)
            chunks = self._inside(address + np.arange(0, size, CHUNK), size, CHUNK, row, lane, op)
            if span:
                self.proxy.counter.engine("tma.load", size, size)
                self._start_load(row, lane, op, span, (), chunks, where, cta)

    def _span(
        self, frame: Frame, addresses: Array, who: tuple[int, int], size: int, op: Op, adds: bool = False
    ) -> Span | None:
        """The bytes of global memory that one lane (of a warp of the frame) names; None and a finding outside of it."""
        alone = np.zeros((frame.n, 32), np.bool_)
        alone[who] = True
        found = self.memory.resolve(frame, addresses, size, op, alone, CHUNK)
        return Span(found[0].buffer, int(found[0].offsets[0]), size, adds) if found else None

    def issue_words(self, frame: Frame, op: Op, target: Array, barrier: Array, words: Array) -> None:
        """Each active lane stores its words (warps, lanes, words) into a CTA of the cluster."""
        places, bars = (frame.full(x).astype(np.int64) for x in (target, barrier))
        for i, row, lanes in lanes_of(frame, None):
            for lane in range(32) if lanes is None else lanes:
                to = self._to(int(places[i, lane]), int(bars[i, lane]), row, lane, op)
                if to is None:
                    continue
                cta, place, where = to
                chunks = self._inside(np.array([place]), CHUNK, CHUNK, row, lane, op)
                source = Words(np.ascontiguousarray(words[i, lane]))
                self._start_load(row, lane, op, source, (), chunks, where, cta)

    def _to(self, place: int, barrier: int, row: int, lane: int, op: Op) -> tuple[int, int, int] | None:
        """The CTA (of the batch) of two addresses of the cluster, the first within it, and the byte of the mbarrier.

        None, and a finding, where they are of two CTAs.
        """
        (owner, at), (cta, where) = (self.barriers.window(x, row, lane, op) for x in (place, barrier))
        if owner != cta:
            message = f"{op.instruction.mnemonic} stores to one CTA and completes on an mbarrier of another"
            self.report.add("mbarrier", op.where, message, row, lane)
            return None
        return cta, at, where - SHARED_BASE

    def track_copies(self, frame: Frame, op: Op, barrier: Array, copies: CopyQueue, *, counted: bool) -> None:
        """The active lanes arrive at an mbarrier when the copies that they have under way land."""
        places = frame.full(barrier).astype(np.int64)
        for i, row, lanes in lanes_of(frame, None):
            for place, group in split(places[i], lanes):
                bar = self.barriers.find(place - SHARED_BASE, row, group, op)
                if bar is None:
                    continue
                self.barriers.check_follows(bar, row, group, op)
                each = [*(range(32) if group is None else group)]
                if not counted:
                    bar.pending += len(each)
                passed = self.proxy.clocks.passed(row) if self.proxy.checks else None
                self.loads.append(TrackedCopies(op, row, each[0], each, bar, copies, copies.take(row, group), passed))

    def _receivers(self, row: int, lane: int, mask: int, op: Op) -> list[int]:
        """The CTAs (of the batch) that a mask names; a finding for those that the cluster does not have."""
        together = self.clocks.places.together
        if mask == 0 or mask >> together:
            message = f"{op.instruction.mnemonic} has the mask {mask:#b}: it must name CTAs of the cluster, which has "
            message += f"{together}"
            self.report.add("bounds", op.where, message, row, lane)
        first = row // self.clocks.domain * together
        return [first + rank for rank in range(together) if mask >> rank & 1]

    def _only(self, row: int, lanes: Lanes, op: Op) -> int:
        if lanes is not None and len(lanes) == 1:
            return lanes[0]
        count = 32 if lanes is None else len(lanes)
        message = f"{count} threads of a warp start the same copy ({op.instruction.mnemonic}): elect one"
        lane = 0 if lanes is None else lanes[0]
        self.report.add("race", op.where, message, row, lane, count=count)
        return lane

    def _box(self, source: TensorMapArgument, address: int, row: int, lane: int, op: Op) -> Array | None:
        """Addresses of the box's chunks in shared memory; None where it cannot lie there."""
        chunks = self._inside(source.chunk_addresses(address), source.spec.box_bytes, _ALIGNMENT, row, lane, op)
        if chunks is not None and self.proxy.checks:
            self._check_tile(source, address - SHARED_BASE, int(chunks.max()) + CHUNK - address, row, lane, op)
        return chunks

    def _inside(self, chunks: Array, moved: int, alignment: int, row: int, lane: int, op: Op) -> Array | None:
        """The chunks, if they lie in shared memory, aligned; else None and a finding."""
        size, where = self.proxy.shared.size, int(chunks[0]) - SHARED_BASE
        if int(chunks[0]) % alignment:
            message = f"{op.instruction.mnemonic} at byte {where} of shared memory: it starts at a multiple of "
            message += f"{alignment} bytes"
            self.report.add("misaligned", op.where, message, row, lane, address=where)
            return None
        if int(chunks.min()) < SHARED_BASE or int(chunks.max()) + CHUNK > SHARED_BASE + size:
            message = (
                f"{op.instruction.mnemonic} moves {moved} bytes at byte {where}, outside the {size} bytes of shared "
                "memory: correct the address, or ask for more shared memory"
            )
            self.report.add("bounds", op.where, message, row, lane, address=where)
            return None
        return chunks

    def _check_tile(self, source: TensorMapArgument, place: int, extent: int, row: int, lane: int, op: Op) -> None:
        """The tensor map and the tile must lay the same elements out alike."""
        tile = op.tile(0)
        if tile is None:
            return
        spec, name = source.spec, op.instruction.mnemonic
        inner = spec.box[0] * spec.dtype.bytes
        pitch = spec.swizzle_bytes or inner
        message = ""
        if tile.swizzle_bytes != spec.swizzle_bytes and extent > CHUNK:
            has = "no swizzle" if tile.swizzle_bytes == 0 else f"swizzled rows of {tile.swizzle_bytes} bytes"
            has = "a swizzle that the TMA does not have" if tile.swizzle_bytes is None else has
            wants = f"swizzles {spec.swizzle_bytes} bytes" if spec.swizzle_bytes else "does not swizzle"
            message = f"{name}: the tile {tile.name!r} has {has}, its tensor map {wants}: make them agree"
        elif tile.row_bytes and spec.box_bytes > inner and pitch != tile.row_bytes:
            message = (
                f"{name}: rows of the tile {tile.name!r} are {tile.row_bytes} bytes apart, those of the box {pitch}: "
            )
            message += "copy whole rows, or panels (panel_cols) as wide as the box"
        if message:
            self.report.add("layout", op.where, message, row, lane)
        if extent > tile.room(place) > 0:  # outside of the tile altogether is told already
            message = f"{name} moves a box of {spec.box_bytes} bytes to where the tile {tile.name!r} has "
            message += f"{tile.room(place)}: "
            message += "make the box smaller, or the tile larger"
            self.report.add("bounds", op.where, message, row, lane)

    def _start_load(
        self,
        row: int,
        lane: int,
        op: Op,
        source: TensorMapArgument | Span | Words,
        at: tuple[int, ...],
        chunks: Array | None,
        barrier: int,
        cta: int,
    ) -> None:
        bar = self.barriers.find(barrier, row, [lane], op, cta)
        if bar is None:
            return
        if not (bar.fenced and self.barriers.is_known(bar, row, [lane], bar.fenced)):
            message = (
                f"{op.instruction.mnemonic} completes on {self.barriers.name(barrier)}, whose initialisation the async "
                "proxy may not see: fence (fence.mbarrier_init) after mbarrier.init in the thread that runs it"
            )
            self.report.add("mbarrier", op.where, message, row, lane, other=bar.op.where, address=barrier)
        if chunks is None:
            return
        cells, number, box, passed = self.proxy.chunk_cells(chunks, cta), 0, None, None
        if self.proxy.checks:
            self.barriers.check_follows(bar, row, [lane], op)
            self.proxy.check(([row], lane), cells, "write", op)
            number = self.proxy.begin_write(row, cells, op)
            box = None if isinstance(source, Words) else self.globally.begin(source, at, "read", row, lane, op)
            passed = self.proxy.clocks.passed(row)
        self.loads.append(_Load(op, row, lane, cta, source, at, chunks, cells, bar, number, box, passed))

    def _start_store(
        self, row: int, lane: int, op: Op, target: TensorMapArgument | Span, at: tuple[int, ...], chunks: Array
    ) -> None:
        cells, before, stamp = self.proxy.chunk_cells(chunks, row // self.warps), np.zeros(0), 0
        box = None
        if self.proxy.checks:
            self.proxy.check(([row], lane), cells, "read", op)
            before, stamp = self.proxy.state(cells), self.proxy.clocks.stamp(op)
            self.proxy.record_read(self._queue(row), cells, stamp)
            box = self.globally.begin(target, at, "atomic" if target.adds else "write", row, lane, op)
        group = self.committed.get((row, lane), 0)
        self.stores.append(_Store(op, row, lane, target, at, chunks, cells, before, stamp, group, box))

    # -- completion ----------------------------------------------------------------------------------------------

    def land(self, rng: random.Random | None) -> bool:
        """Let one load land: the oldest, or any. Returns whether there was one."""
        if not self.loads:
            return False
        load = self.loads.pop(0 if rng is None else rng.randrange(len(self.loads)))
        if isinstance(load, TrackedCopies):
            load.land(self.proxy, self.barriers)
            return True
        source, shared = load.source, self.proxy.shared
        index = (load.chunks - SHARED_BASE + load.cta * shared.stride) // CHUNK
        shared.data.reshape(-1, CHUNK)[index] = source.load(load.at)
        clocks = self.clocks
        queue = clocks.queue("mbarrier", load.cta, load.barrier.address)
        known = clocks.ended(queue, clocks.now)
        if self.proxy.checks:
            if shared.shadow is not None:
                shared.shadow.reshape(-1, CHUNK)[index] = 0
            self.proxy.end_write(queue, load.cells, load.number, load.op)
            slot = (self.report.first // self.warps + load.cta) * shared.stride + load.barrier.address
            singles = {} if load.box is None else self.globally.end_read(load.box, slot)
            known = clocks.ended(queue, clocks.now, load.passed)
            known.singles = singles
        self.barriers.complete_bytes(load.barrier, source.box_bytes, known, queue, load.op)
        return True

    def commit(self, frame: Frame) -> None:
        """Each active lane closes its group of stores."""
        for _, row, lanes in lanes_of(frame, None):
            for lane in range(32) if lanes is None else lanes:
                self.committed[(row, lane)] = self.committed.get((row, lane), 0) + 1

    def wait(self, frame: Frame, pending: int, reads_only: bool) -> None:
        """Stores of all but the newest ``pending`` groups of each active lane end, at this last moment."""
        if not self.stores and not self.writing:
            return
        for _, row, lanes in lanes_of(frame, None):
            for lane in range(32) if lanes is None else lanes:
                done_below = self.committed.get((row, lane), 0) - pending
                done = [s for s in self.stores if s.row == row and s.lane == lane and s.group < done_below]
                if done:
                    self._end(done)
                if not reads_only:
                    self._written([s for s in self.writing if s.row == row and s.lane == lane and s.group < done_below])

    def _written(self, done: list[_Store]) -> None:
        for store in done:
            self.writing.remove(store)
            name = None if store.box is None else self.globally.end_write(store.box)
            if name is not None:
                self.clocks.acquire_single(store.row, [store.lane], ORDER, *name)

    def _end(self, done: list[_Store]) -> None:
        for store in done:
            self._write(store)
            self.stores.remove(store)
            self.writing.append(store)
        row, lane, newest = done[0].row, done[0].lane, max(s.stamp for s in done)
        self.clocks.acquire(row, [lane], self.clocks.ended(self._queue(row), newest))

    def _queue(self, row: int) -> int:
        """The column of the bulk stores of a warp."""
        return self.clocks.queue("bulk", row // self.warps, row % self.warps)

    def _write(self, store: _Store) -> None:
        shared, target = self.proxy.shared, store.target
        index = (store.chunks - SHARED_BASE + store.row // self.warps * shared.stride) // CHUNK
        if self.proxy.checks:
            self.proxy.unchanged(store.row, store.lane, store.cells, store.before, store.op)
            if shared.shadow is not None and shared.shadow.reshape(-1, CHUNK)[index].any():
                message = f"{store.op.instruction.mnemonic} stores to global memory what depends on data nobody wrote: "
                message += "write it before, or wait for its data"
                self.report.add("uninitialised", store.op.where, message, store.row, store.lane)
        assert target.buffer is not None
        if not target.buffer.writable:
            message = f"{store.op.instruction.mnemonic} writes {target.buffer.name}, a read-only array: pass a writable"
            self.report.add("bounds", store.op.where, message + " one", store.row, store.lane)
            return
        target.store(store.at, shared.data.reshape(-1, CHUNK)[index])

    def at_exit(self) -> None:
        """Copies under way when their CTA's shared memory goes to the next one."""
        for load in self.loads:
            message = f"the kernel ends while {load.op.instruction.mnemonic} is under way: wait for the phase of "
            message += self.barriers.name(load.barrier.address)
            self.report.add("leak", load.op.where, message, load.row, load.lane)
        for store in self.stores:
            uncommitted = store.group >= self.committed.get((store.row, store.lane), 0)
            what = "was never committed to a group" if uncommitted else "was never waited for"
            cure = "commit it and wait for its group" if uncommitted else "wait until it has read (wait_group.read)"
            message = f"the kernel ends while {store.op.instruction.mnemonic} reads shared memory; it {what}: {cure}"
            self.report.add("leak", store.op.where, message, store.row, store.lane)
            if not uncommitted:
                self._write(store)
        self._written(list(self.writing))
