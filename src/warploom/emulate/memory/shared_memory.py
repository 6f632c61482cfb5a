"""Shared memory of a batch of CTAs: bytes, who wrote and read each cell when, what is poison or still on its way.

Sources for the memory of other CTAs of a cluster: PTX ISA, "mapa", "State Spaces" (``.shared::cluster``); CUDA
Programming Guide, "Distributed Shared Memory".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, displaced, widened
from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.shared_reports import MBARRIER, SharedReports
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import FAR, ORDER
from warploom.ir.statements import Op
from warploom.isa.cluster import WINDOW_BITS

Array = NDArray[Any]


_NOWHERE = np.uint32(1 << 31)  # beyond all shared memory


class RemoteAccesses:
    """Accesses of a batch to other CTAs' shared memory: where they go, and whether those CTAs are there by then.

    Each CTA's memory begins ``stride`` bytes after that of the one before it.
    """

    def __init__(self, clocks: Clocks, report: SharedReports, stride: int) -> None:
        self.clocks, self.report, self.stride = clocks, report, stride
        self.last: dict[tuple[int, int], tuple[Op, int, int]] = {}  # (row, CTA) → operation, lane, stamp

    def locate(self, frame: Frame, address: Array, lanes: int, op: Op) -> tuple[Array, Array]:
        """Addresses within their CTA, and where its memory begins; an address that none has for a rank too high."""
        rank = np.broadcast_to((address >> np.uint32(WINDOW_BITS)).astype(np.int64) - 1, (*frame.shape, 32))
        together = self.clocks.domain // self.clocks.warps_per_cta
        own, exists = frame.cta[:, :, None], rank < together
        number = np.where(exists & (rank >= 0), own // together * together + rank, own)
        self._note(frame, number, op)
        place = np.where(exists, address & np.uint32((1 << WINDOW_BITS) - 1), _NOWHERE)
        return place, (number * self.stride)[..., :lanes]

    def _note(self, frame: Frame, number: Array, op: Op) -> None:
        for position, row in enumerate(frame.flat.tolist()):
            theirs = number.reshape(-1, 32)[position]
            acting = np.ones(32, np.bool_) if frame.active is None else frame.active[position]
            for cta in np.unique(theirs[acting]).tolist():
                if cta != row // self.clocks.warps_per_cta:
                    lane = int(np.nonzero(acting & (theirs == cta))[0][0])
                    if (row, cta) not in self.last and not self._has_begun(row, cta):
                        self.report.absent(op, row, lane, cta * self.clocks.warps_per_cta)
                    self.last[row, cta] = op, lane, self.clocks.now + 1

    def _has_begun(self, row: int, cta: int) -> bool:
        """Whether a warp knows of anything that a CTA of its cluster has done."""
        warps = np.arange(cta * self.clocks.warps_per_cta, (cta + 1) * self.clocks.warps_per_cta)
        return bool(self.clocks.passed(row)[self.clocks.columns[warps]].any())

    def at_exit(self) -> None:
        """Accesses to the memory of a CTA that may have exited: none of its threads knows of them."""
        warps = self.clocks.warps_per_cta
        for (row, cta), (op, lane, stamp) in self.last.items():
            rows = np.arange(cta * warps, (cta + 1) * warps)
            if not any(self.clocks.anybody_knows(rows, row, who, stamp) for who in (None, lane)):
                self.report.gone(op, row, lane, int(rows[0]))


# A record is stamp · 64 + lane; MANY stands for several lanes or a collective access.
LANE_BITS = 6
MANY = 32


class LaneReads:
    """Which lanes MANY stands for, where part of a warp may meet: cell → lane → stamp of its last read.

    A cell that is not here was read by all lanes at once.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._of: dict[int, dict[int, int]] = {}

    def forget(self, cells: Array) -> None:
        """All lanes of a warp read these together."""
        if self._of:
            for cell in cells.tolist():
                self._of.pop(cell, None)

    def note(self, many: Array, first: Array, lane: Array, old: Array, stamp: int) -> None:
        """The reads of single lanes, with what was there before them."""
        for i, part in zip(*np.nonzero(many), strict=True):
            cell, before = int(first[i]) + int(part), int(old[i, part])
            if cell not in self._of:
                lanes = range(32) if before & 63 == MANY else (before & 63,)
                self._of[cell] = dict.fromkeys(lanes, before >> LANE_BITS) if before else {}
            elif before & 63 != MANY:
                self._of[cell][before & 63] = before >> LANE_BITS
            self._of[cell][int(lane[i])] = stamp

    def judge(self, fine: Array, accesses: tuple[Array, ...], cells: Array, many: Array, collective: bool) -> None:
        """Reads of several lanes are ordered where each lane's is, though not all of their warp have met.

        ``fine`` says which of the accesses (rows, lanes, columns, stamps) are ordered, and is mended in place.
        """
        for i in np.nonzero(~fine & many)[0]:
            row, lane, column, stamp = (int(x[i]) for x in accesses)
            read = self._of.get(int(cells[i]), dict.fromkeys(range(32), stamp))
            lanes, stamps = np.array(list(read)), np.array(list(read.values()))
            rows, mine, columns = (np.full(lanes.shape, x) for x in (row, lane, column))
            fine[i] = self._clocks.ordered(rows, mine, collective, columns, lanes, stamps).all()


SHARED_BASE = 1024
"""Where dynamic shared memory starts in the shared window: not 0, so that a kernel that forgets the base is found."""

NEVER = np.int32(0x7FFFFFFF)  # the writer's record of cells that hold no data: never written, in flight, an mbarrier's


@dataclass(slots=True)
class Place:
    """Where ``op`` accesses ``size`` bytes a lane: the lanes that act, and whether for the whole warp (``collective``).

    Local byte ``addresses`` (broadcast shape); unit ``index`` (warps, lanes).
    """

    frame: Frame
    op: Op
    size: int
    collective: bool
    addresses: Array
    index: Array
    active: Array | None


def _with_others(old: Array, record: Array, epoch: Array) -> tuple[Array, Array]:
    """The record to keep of a warp's accesses of a cell, and whether it stands for several lanes: other lanes than its
    own have accessed the cell after the warp last met, at ``epoch``.
    """
    others = (old > epoch) & ((old ^ record) & 63 != 0)
    return np.where(others, record & ~63 | MANY, record).astype(np.int32), others


class SharedMemory:
    """``size`` bytes for each of ``ctas`` CTAs; cells of ``granule`` bytes, the smallest access of the program.

    ``parts``: part of a warp may meet, so that it matters which lanes have read a cell.
    """

    def __init__(
        self,
        ctas: int,
        size: int,
        granule: int,
        clocks: Clocks,
        report: SharedReports,
        checks: bool,
        parts: bool,
    ) -> None:
        self.size = size
        self.stride = -(-max(size, 16) // 16) * 16
        self.granule = granule
        self.clocks = clocks
        self.report = report
        self.checks = checks
        self.warps = clocks.home  # those that have tables, of a CTA's memory
        self.afar = RemoteAccesses(clocks, report, self.stride)
        self.data = np.zeros(ctas * self.stride, np.uint8)
        self.shadow: Array | None = None  # allocated when poison is first stored
        self.origins: dict[int, Origin] = {}  # stamp of a store → where its poison came from
        cells = ctas * self.stride // granule
        self.cells = cells
        if checks:
            self.writer = np.full(cells, NEVER, np.int32)
            self.writer_column = np.zeros(cells, np.int32)
            self.readers = np.zeros((self.warps, cells), np.int32)
            # The same of strong accesses, such as atomics, which do not conflict with each other.
            self.strong: dict[str, Array] = {}
            # The newest write of each warp, where several warps have stored equal values and nothing orders them.
            self.alike: Array | None = None
            self.each = LaneReads(clocks) if parts else None
            self.queue_readers: dict[int, Array] = {}  # column → last read of each cell
            self.in_flight = np.zeros(cells, np.int32)  # 1 + index into copies
            self.copies: list[tuple[Op, int]] = []

    # -- addresses -----------------------------------------------------------------------------------------------

    def cta_base(self, frame: Frame) -> Array:
        """Byte offset of each warp's CTA, (A, B, 1)."""
        base = frame.seen.get(-1)
        if base is None:
            base = (frame.cta[:, :, None] * self.stride).astype(np.int64)
            frame.seen[-1] = base
        return base

    def locate(
        self,
        frame: Frame,
        address: Array,
        offset: int,
        size: int,
        lanes: int,
        op: Op,
        *,
        remote: bool = False,
        collective: bool = False,
    ) -> Place:
        """Check bounds and alignment; ``index`` counts units of ``size`` bytes over the whole batch.

        ``remote``: addresses may be those of other CTAs of the cluster.
        """
        base, address = self.cta_base(frame), displaced(address, offset)
        if remote:
            address, base = self.afar.locate(frame, address, lanes, op)
        local = address.astype(np.int64) - SHARED_BASE
        local = widened(local, (*local.shape[:2], 32))[..., :lanes]
        active = None if frame.mask is None else frame.mask[..., :lanes]
        first, end = self._extent(op)
        bad = (local < first) | (local > end - size) | ((local & (size - 1)) != 0)
        if np.count_nonzero(bad):  # faster than any()
            active = self._refuse(frame, local, bad, active, size, op)
            local = np.where(bad, 0, local)
        unit = (local + base) >> (size.bit_length() - 1)
        index = widened(unit, (*frame.shape, lanes)).reshape(frame.n, lanes)
        if active is not None:
            active = widened(active, (*frame.shape, lanes)).reshape(frame.n, lanes)
        return Place(frame, op, size, collective, local, index, active)

    def _extent(self, op: Op) -> tuple[int, int]:
        """First and last byte + 1 that an access may reach: its tile's, if it was formed from one."""
        tile = op.tile(0)  # where every instruction has the address of its access
        return (0, self.size) if tile is None else (tile.offset, min(self.size, tile.offset + tile.bytes))

    def _refuse(self, frame: Frame, local: Array, bad: Array, active: Array | None, size: int, op: Op) -> Array:
        """Report the lanes whose addresses are wrong. Returns those that may go on."""
        wide = np.broadcast_to(bad, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        everywhere = np.broadcast_to(local, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        acting = np.ones_like(wide)
        if active is not None:
            acting = np.broadcast_to(active, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        first, end = self._extent(op)
        outside = (everywhere < first) | (everywhere > end - size)
        kinds: tuple[tuple[Kind, Array], ...] = (("bounds", outside), ("misaligned", ~outside))
        for kind, part in kinds:
            which = wide & acting & part
            if which.any():
                row, lane = (int(x[0]) for x in np.nonzero(which))
                who = int(frame.flat[row]), lane, int(which.sum())
                self.report.refused(kind, op, who, int(everywhere[row, lane]), size, (first, end), self.size)
        return (acting & ~wide).reshape(*frame.shape, -1)

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, place: Place, words: int, *, strong: bool = False) -> tuple[Array, Array | None, Origin | None]:
        """The words read (warps, lanes, words), their shadow if any is poison, and where the poison comes from."""
        op, word = place.op, np.dtype(f"u{place.size // words}")
        data = self.data.view(word).reshape(-1, words).take(place.index, axis=0)
        if not self.checks:
            return data, None, None
        shadow: Array | None = None
        origin: Origin | None = None
        stamp, cells = self.clocks.stamp(op), place.size // self.granule
        limit = self._limit(place.frame)
        suspicious = self._later(self.writer, place, limit)
        if self.shadow is not None:
            shadow = self.shadow.view(word).reshape(-1, words).take(place.index, axis=0)
            if shadow.any():
                which = np.nonzero(shadow.any(axis=2))
                cell = place.index[which][0] * cells
                origin = self.origins.get(int(self.writer[cell]) >> LANE_BITS, (op.where, "poisoned shared memory"))
            else:
                shadow = None
        if np.count_nonzero(suspicious):
            self._compare_alike(place, suspicious, "read")
            empty = self._examine_write(place, suspicious, "read")
            if empty is not None:
                poison = np.repeat(empty.view(np.uint8) * np.uint8(255), self.granule, axis=2)
                poison = np.ascontiguousarray(poison).view(word)
                shadow = poison if shadow is None else shadow | poison
                flying = self.in_flight.reshape(-1, cells).take(place.index, axis=0)[empty].all()
                why = "are still being copied" if flying else "nobody has written"
                origin = (op.where, f"bytes of shared memory that {why}, read by {op.instruction.mnemonic}")
        if not strong:
            self._compare(place, self._tables("wrote"), limit, "read")
        self._record(self._strong("read") if strong else self.readers, place, stamp)
        return data, shadow, origin

    def _limit(self, frame: Frame) -> Array:
        """Records up to here are ordered before the next access of each warp, whatever they are; 0: ask."""
        return ((self.clocks.limit[frame.flat] << LANE_BITS) | 63)[:, None, None]

    def _later(self, records: Array, place: Place, limit: Array) -> Array:
        """Which cells (warps, lanes, cells) of an access have records beyond a limit."""
        found = records.reshape(-1, place.size // self.granule).take(place.index, axis=0) > limit
        if place.active is not None:
            found &= place.active[:, :, None]
        return found

    def _strong(self, past: str) -> Array:
        """Strong reads, or strong writes, of each warp."""
        if past not in self.strong:
            self.strong[past] = np.zeros_like(self.readers)
        return self.strong[past]

    def _record(self, records: Array, place: Place, stamp: int) -> None:
        """Note an access in the table of its kind (warps, cells)."""
        frame, cells = place.frame, place.size // self.granule
        table = records.reshape(-1, cells)
        where = place.index + (frame.flat % self.warps * (self.cells // cells))[:, None]
        each = self.each if records is self.readers else None
        if place.collective:
            if place.active is not None:
                where = where[place.active]
            table[where] = stamp << LANE_BITS | MANY
            if each is not None:
                each.forget((where.reshape(-1, 1) * cells + np.arange(cells)).reshape(-1))
            return
        lane = np.broadcast_to(np.arange(where.shape[1], dtype=np.int32), where.shape)
        epoch = np.broadcast_to(self._epoch(frame.flat)[:, None], where.shape)
        if place.active is not None:
            where, lane, epoch = where[place.active], lane[place.active], epoch[place.active]
        old = table[where]
        code, others = _with_others(old, stamp << LANE_BITS | lane[..., None], epoch[..., None])
        table[where] = code
        shared = table[where] != code  # several lanes of the warp come to the cell in this access
        if shared.any():
            table[where] = np.where(shared.any(axis=-1, keepdims=True), stamp << LANE_BITS | MANY, table[where])
        if each is not None:
            many = ((others | shared) & (lane[..., None] < MANY)).reshape(-1, cells)
            each.note(many, where.reshape(-1) * cells, lane.reshape(-1), old.reshape(-1, cells), stamp)

    def _epoch(self, rows: Array) -> Array:
        """Records of a row up to here are of accesses that all its lanes know of."""
        return (self.clocks.met(rows) << LANE_BITS) | 63

    # -- stores --------------------------------------------------------------------------------------------------

    def check_write(
        self,
        place: Place,
        data: Array | None = None,
        shadow: Array | None = None,
        *,
        what: str = "write",
        strong: bool = False,
    ) -> Array | None:
        """Compare a write (or the start of a copy) with every unordered access before it.

        Stores of ``data`` do not conflict with unordered ones of the same values. Returns which of them (warps, lanes)
        there are, None for none.
        """
        limit = self._limit(place.frame)
        suspicious = self._later(self.writer, place, limit)
        alike: Array | None = None
        if np.count_nonzero(suspicious):
            same = None if data is None else suspicious & self._holds(place, data, shadow)
            self._compare_alike(place, suspicious if same is None else suspicious & ~same, what)
            self._examine_write(place, suspicious, what, same)
            alike = None if same is None or not same.any() else np.asarray(same.any(axis=2))
        tables: list[tuple[int, Array, str]] = [(warp, table, "read") for warp, table in enumerate(self.readers)]
        tables += [(column, table, "read") for column, table in self.queue_readers.items()]
        if not strong:
            tables += self._tables("read") + self._tables("wrote")
        self._compare(place, tables, limit, what)
        return alike

    def _holds(self, place: Place, data: Array, shadow: Array | None) -> Array:
        """The written cells (warps, lanes, cells) that hold what is to be stored, none of it poison."""
        cells = place.size // self.granule
        shape = (*place.index.shape, cells, self.granule)
        now = self.data.reshape(-1, place.size).take(place.index, axis=0).reshape(shape)
        same = (now == np.ascontiguousarray(data).view(np.uint8).reshape(shape)).all(axis=-1)
        same &= self.writer.reshape(-1, cells).take(place.index, axis=0) != NEVER
        if self.shadow is not None:
            same &= ~self.shadow.reshape(-1, place.size).take(place.index, axis=0).reshape(shape).any(axis=-1)
        if shadow is not None:
            same &= ~np.ascontiguousarray(shadow).view(np.uint8).reshape(shape).any(axis=-1)
        return same

    def _tables(self, past: str) -> list[tuple[int, Array, str]]:
        """The strong accesses of a kind, warp by warp."""
        return [(warp, table, past) for warp, table in enumerate(self.strong.get(past, ()))]

    def _compare_alike(self, place: Place, suspicious: Array, what: str) -> None:
        """Report writes of equal values that are not ordered, besides the last one, of cells (warps, lanes, cells)."""
        for warp, records in enumerate(() if self.alike is None else self.alike):
            found = suspicious & (records.reshape(-1, suspicious.shape[2]).take(place.index, axis=0) > 0)
            if np.count_nonzero(found):
                self._examine(place, found, (warp, records, "wrote"), what, plane=FAR)

    def _compare(self, place: Place, tables: list[tuple[int, Array, str]], limit: Array, what: str) -> None:
        """Report unordered accesses of these tables (a warp's number, or a queue's column; accesses; their kind)."""
        for table in tables:
            found = self._later(table[1], place, limit)
            if np.count_nonzero(found):
                self._examine(place, found, table, what)

    def store(
        self,
        place: Place,
        data: Array,
        shadow: Array | None = None,
        origin: Origin | None = None,
        *,
        strong: bool = False,
    ) -> None:
        """Write ``data`` (warps, lanes, words) now."""
        index, words = place.index, data.shape[2]
        lane = np.broadcast_to(np.arange(index.shape[1], dtype=np.int32), index.shape)
        rows = np.broadcast_to(place.frame.flat[:, None], index.shape)
        alike: Array | None = None
        if strong:
            self.begin_strong(place, what="write")
        elif self.checks:
            alike = self.check_write(place, data, shadow)
        if place.active is not None:
            index, lane, rows, data = (x[place.active] for x in (index, lane, rows, data))
            shadow = shadow[place.active] if shadow is not None else None
        view = self.data.view(data.dtype).reshape(-1, words)
        view[index] = data
        if not self.checks:
            return
        stamp = self.clocks.stamp(place.op)
        if shadow is not None and self.shadow is None:
            self.shadow = np.zeros_like(self.data)
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, words)[index] = 0 if shadow is None else shadow
            if shadow is not None and origin is not None:
                self.origins[stamp] = origin
        if strong:
            return
        several = self._record_write(index, rows, lane, data, stamp, place.op, collective=place.collective)
        if several is not None:
            wide = np.zeros(place.index.shape, np.bool_)
            wide[... if place.active is None else place.active] = several
            alike = wide if alike is None else alike | wide
        if alike is not None and alike.any():
            self._record(self._alike(), replace(place, active=alike), stamp)

    def _alike(self) -> Array:
        """The table of writes of equal values (warps, cells)."""
        if self.alike is None:
            self.alike = np.zeros_like(self.readers)
        return self.alike

    def _record_write(
        self, index: Array, rows: Array, lane: Array, data: Array, stamp: int, op: Op, *, collective: bool = False
    ) -> Array | None:
        """Note what was written: units and their words (…, words), and their threads.

        Returns which of them lie where another warp wrote the same at once, None for none.
        """
        words, size = data.shape[-1], data.shape[-1] * data.dtype.itemsize
        view, cells = self.data.view(data.dtype).reshape(-1, words), size // self.granule
        table, columns = self.writer.reshape(-1, cells), self.writer_column.reshape(-1, cells)
        code = (lane | np.int32(stamp << LANE_BITS))[..., None]
        mine = self.clocks.columns[rows][..., None]
        table[index] = code
        columns[index] = mine
        self.in_flight.reshape(-1, cells)[index] = 0
        several: Array | None = None
        clash = ((table[index] != code) | (columns[index] != mine)).any(axis=-1)
        if clash.any():
            bad = clash & (view[index] != data).any(axis=-1)
            if bad.any():
                self.report.clash(op, rows[bad], lane[bad], index[bad] * size % self.stride)
            table[index[clash]] = stamp << LANE_BITS | MANY
            elsewhere = (columns[index] != mine).any(axis=-1)
            several = np.isin(index, index[elsewhere]) if elsewhere.any() else None
        if collective:
            table[index] = stamp << LANE_BITS | MANY
        return several

    def begin_strong(self, place: Place, *, what: str) -> None:
        """Check and record a strong write, such as an atomic update: it conflicts with ordinary accesses only."""
        if not self.checks:
            return
        cells = place.size // self.granule
        self.check_write(place, what=what, strong=True)
        self._record(self._strong("wrote"), place, self.clocks.stamp(place.op))
        index = place.index if place.active is None else place.index[place.active]
        writer, flying = self.writer.reshape(-1, cells), self.in_flight.reshape(-1, cells)
        writer[index] = np.where((writer[index] == NEVER) & (flying[index] == 0), 0, writer[index])  # no longer empty

    # -- copies in flight ----------------------------------------------------------------------------------------

    def begin_copy(self, place: Place) -> int:
        """The cells hold nothing that may be used until the copy has landed and been waited for. Returns its number."""
        self.check_write(place)
        cells = place.size // self.granule
        self.copies.append((place.op, int(place.frame.flat[0])))
        index = place.index if place.active is None else place.index[place.active]
        self.in_flight.reshape(-1, cells)[index] = len(self.copies)
        self.writer.reshape(-1, cells)[index] = NEVER
        return len(self.copies)

    def land(self, rows: Array, lane: Array, index: Array, data: Array, op: Op) -> None:
        """A copy's data arrives: flat lists of units, their threads and their words (units, words)."""
        words = data.shape[1]
        view = self.data.view(data.dtype).reshape(-1, words)
        view[index] = data
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, words)[index] = 0
        several = self._record_write(index, rows, lane, data, self.clocks.stamp(op), op)
        if several is not None:  # copies are no stores: what one has brought, another one is still bringing
            self.report.clash(op, rows[several], lane[several], index[several] * words * data.itemsize % self.stride)

    def claim(self, cta: int, start: int, size: int, row: int, lane: int, op: Op) -> None:
        """A lane makes an mbarrier of some bytes of its CTA: nobody else may touch them now, or from here on."""
        first = (cta * self.stride + start) // self.granule
        cells = np.arange(first, first + max(1, size // self.granule))
        for past, column, table in (("wrote", None, self.writer), *self.others(row)):
            record = table[cells]
            columns = self.writer_column[cells] if column is None else np.full(cells.shape, column)
            rows, lanes = np.full(cells.shape, row), np.full(cells.shape, lane)
            stamps = record >> LANE_BITS
            wrong = (record > 0) & (record != NEVER)
            wrong &= ~self.clocks.ordered(rows, lanes, False, columns, record & 63, stamps)
            if wrong.any():
                where = (cells[wrong] * self.granule) % self.stride
                them = self.clocks.agents(columns[wrong], rows[wrong]), stamps[wrong]
                self.report.races(op, "write", rows[wrong], lanes[wrong], *them, where, past)
        self.writer[cells], self.in_flight[cells] = NEVER, MBARRIER

    def disclaim(self, cta: int, start: int, size: int, row: int, lane: int, stamp: int) -> None:
        """A lane ends an mbarrier: its bytes are ordinary memory to whoever knows of that."""
        first = (cta * self.stride + start) // self.granule
        cells = np.arange(first, first + max(1, size // self.granule))
        self.writer[cells], self.in_flight[cells] = np.int32(stamp << LANE_BITS | lane), 0
        self.writer_column[cells] = self.clocks.columns[row]

    def others(self, row: int, *, writes: bool = True) -> list[tuple[str, int, Array]]:
        """Accesses besides the last ordinary write: kind, column, and its table.

        ``row`` is a warp of the CTA; with ``writes=False`` only what a read conflicts with.
        """
        first = int(self.clocks.columns[row - row % self.warps])
        kinds = [("wrote", self.strong.get("wrote", ())), ("wrote", () if self.alike is None else self.alike)]
        kinds += [("read", self.readers), ("read", self.strong.get("read", ()))] if writes else []
        tables = [(past, first + warp, table) for past, tables in kinds for warp, table in enumerate(tables)]
        queues = self.queue_readers if writes else {}
        return tables + [("read", column, table) for column, table in queues.items()]

    # -- the slow path: some access is not ordered by a whole barrier ---------------------------------------------

    def _examine_write(self, place: Place, suspicious: Array, what: str, same: Array | None = None) -> Array | None:
        """Report conflicts with earlier writes. Returns which cells (warps, lanes, cells) were never written.

        Cells that hold what is to be stored, ``same``, conflict with no warp's write: only those where one is not
        ordered remain in ``same``, and it is noted.
        """
        op, (row, lane, part) = place.op, np.nonzero(suspicious)
        cell = place.index[row, lane] * suspicious.shape[2] + part
        record, copy = self.writer[cell], self.in_flight[cell]
        rows, bytes_at = place.frame.flat[row], (cell * self.granule) % self.stride
        flying = copy != 0
        if flying.any():
            self.report.in_flight(op, what, rows[flying], lane[flying], copy[flying], bytes_at[flying], self.copies)
        written = record != NEVER
        if written.any():
            mine = [x[written] for x in (rows, lane, cell, bytes_at)]
            stamps, lanes = record[written] >> LANE_BITS, record[written] & 63
            columns = self.writer_column[mine[2]]
            fine = self.clocks.ordered(mine[0], mine[1], place.collective, columns, lanes, stamps, plane=FAR)
            if same is not None:
                alike = ~fine & same[row, lane, part][written] & (columns < self.clocks.warps)
                same[...] = False
                same[row[written][alike], lane[written][alike], part[written][alike]] = True
                if alike.any():
                    theirs = self.clocks.agents(columns[alike], mine[0][alike]) - self.report.first
                    self._note_alike(mine[2][alike], theirs, record[written][alike])
                fine |= alike
            if not fine.all():
                who, bad_lanes, _, where = (x[~fine] for x in mine)
                agents = self.clocks.agents(columns[~fine], who)
                self.report.races(op, what, who, bad_lanes, agents, stamps[~fine], where, "wrote")
        empty = ~written
        unset = empty & ~flying
        if what == "atomic" and unset.any():
            self.report.unset(op, rows[unset], lane[unset], bytes_at[unset])
        if what != "read" or not empty.any():
            return None
        never = np.zeros(suspicious.shape, np.bool_)
        never[row[empty], lane[empty], part[empty]] = True
        return never

    def _note_alike(self, cells: Array, rows: Array, records: Array) -> None:
        """Keep the records of the last writers, of these rows, of cells that others store the same value to."""
        table = self._alike().reshape(-1)
        where = rows % self.warps * self.cells + cells
        table[where] = _with_others(table[where], records, self._epoch(rows))[0]

    def _examine(
        self, place: Place, found: Array, table: tuple[int, Array, str], what: str, *, plane: int = ORDER
    ) -> None:
        """Report conflicts with the accesses in one of the tables."""
        (number, records, past), collective = table, place.collective
        row, lane, part = np.nonzero(found)
        cell = place.index[row, lane] * found.shape[2] + part
        record, rows = records[cell], place.frame.flat[row]
        stamps, lanes = record >> LANE_BITS, record & 63
        columns = np.full(rows.shape, number)
        if number < self.warps:
            columns += self.clocks.columns[rows - rows % self.warps]
        fine = self.clocks.ordered(rows, lane, collective, columns, lanes, stamps, plane=plane)
        if self.each is not None and records.base is self.readers:
            self.each.judge(fine, (rows, lane, columns, stamps), number * self.cells + cell, lanes == MANY, collective)
        if not fine.all():
            wrong = ~fine
            self.report.races(
                place.op,
                what,
                rows[wrong],
                lane[wrong],
                self.clocks.agents(columns[wrong], rows[wrong]),
                stamps[wrong],
                (cell[wrong] * self.granule) % self.stride,
                past,
            )
