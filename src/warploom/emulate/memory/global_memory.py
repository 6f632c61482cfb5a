"""Global memory: the buffers of the arguments, bounds, and races on what the kernel writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, Turns, apply_in_turn, displaced, in_turn
from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer, Region
from warploom.emulate.memory.last_access import Accesses, LastAccesses
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import FAR
from warploom.ir.statements import Op
from warploom.isa.base import Instruction
from warploom.isa.effects import Access
from warploom.layout.fragments import WARP_SIZE

Array = NDArray[Any]


Mode = Literal["read", "write", "atomic"]
STRONG, CTA_ONLY = 1, 2
"""Kinds of reads and updates: not weak; with a scope that ends at the CTA."""


@dataclass(slots=True)
class Event:
    """One access, kept for as long as a later one may conflict with it. All arrays are flat, one entry per cell.

    ``rows`` are the warps as the batch of the access counts them, ``agents`` as the whole grid does.
    """

    op: Op
    mode: Mode
    buffer: GlobalBuffer
    cells: Array
    rows: Array
    agents: Array
    lanes: Array
    stamp: int
    strong: bool = False
    cta_only: bool = False


class Record:
    """Who wrote, read and updated each cell of a region: the last write, and all reads and updates since."""

    def __init__(self, region: Region, granule: int) -> None:
        self.region = region
        count = -(-region.bytes // granule) + 1
        self.write_stamp = np.zeros(count, np.int64)
        self.write_agent = np.zeros(count, np.int64)
        self.write_lane = np.zeros(count, np.int8)
        self.generic = np.zeros(count, np.bool_)  # last written by an ordinary instruction
        self.flying = np.zeros(count, np.int64)  # the stamp of the bulk store that is writing there, or 0
        self.reads = LastAccesses(self.write_stamp)
        self.updates = LastAccesses(self.write_stamp)


@dataclass(slots=True)
class Target:
    """The lanes of an access that go to one buffer: positions among the flattened lanes, and byte offsets."""

    buffer: GlobalBuffer
    positions: Array | None  # None: all lanes
    offsets: Array

    def of(self, which: Array) -> Target:
        """The same of some of its lanes alone."""
        positions = np.arange(self.offsets.size) if self.positions is None else self.positions
        return Target(self.buffer, positions[which], self.offsets[which])


@dataclass(slots=True)
class GlobalPlace:
    """Where the lanes of a frame access ``size`` bytes each (an array where they differ), by buffer."""

    frame: Frame
    op: Op
    size: Array | int
    address: Array
    targets: list[Target]

    def of(self, lanes: Array) -> GlobalPlace:
        """The same of some lanes (warps, lanes) alone."""
        flat = lanes.reshape(-1)
        targets = [t.of(flat if t.positions is None else flat[t.positions]) for t in self.targets]
        return GlobalPlace(self.frame, self.op, self.size, self.address, targets)

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count the sectors."""
        counter.global_access(name, self.op.where, self.address.view(np.int64), self.size, self.frame.active)


def _harmless(mine: Event, past: str, kind: int) -> bool:
    """Whether an access may be unordered with an earlier one of this kind."""
    if mine.mode != "atomic":
        return False
    return bool(kind & STRONG) if past == "read" else not (kind & CTA_ONLY or mine.cta_only)


class GlobalMemory:
    """All buffers of a launch. Lives for the whole grid; ``clocks`` and ``report`` change with the batch."""

    def __init__(self, buffers: list[GlobalBuffer], written: set[str] | None, granule: int, checks: bool) -> None:
        self.buffers = {b.address >> ADDRESS_BITS: b for b in buffers}
        self.granule = granule
        self.checks = checks
        self.records: dict[Region, Record] = {}
        self.clocks: Clocks
        self.report: Reporter
        if checks:
            self._make_regions(buffers, written)

    def _make_regions(self, buffers: list[GlobalBuffer], written: set[str] | None) -> None:
        """Join overlapping buffers into regions; keep those that may be written."""
        for buffer in buffers:
            buffer.region = None
        groups: list[list[GlobalBuffer]] = []
        for buffer in sorted((b for b in buffers if b.data.size), key=lambda b: b.real):
            if groups and buffer.real < max(b.real + b.data.size for b in groups[-1]):
                groups[-1].append(buffer)
            else:
                groups.append([buffer])
        for group in groups:
            if written is not None and not any(b.name in written for b in group):
                continue
            # Cells must not straddle accesses: count them from a multiple of 16 bytes below the first buffer's start.
            real = group[0].real - group[0].skew % 16
            region = Region(real, max(b.real + b.data.size for b in group) - real)
            self.records[region] = Record(region, self.granule)
            for buffer in group:
                buffer.region = region

    # -- addresses -----------------------------------------------------------------------------------------------

    def place(self, frame: Frame, address: Array, op: Op, access: Access, size: Array | int = 0) -> GlobalPlace:
        """Where the active lanes go; ``size`` in bytes if not all of the access. Who is out of bounds is left out."""
        size = access.bytes if isinstance(size, int) and not size else size
        at = frame.full(displaced(address, access.offset))
        return GlobalPlace(frame, op, size, at, self.resolve(frame, at, size, op, frame.active, access.bytes))

    def names(self, place: GlobalPlace) -> Array:
        """What tells the addresses of a place from all others, (warps, lanes)."""
        return place.address

    def resolve(
        self, frame: Frame, address: Array, size: Array | int, op: Op, active: Array | None, alignment: int
    ) -> list[Target]:
        """Which buffers the active lanes go to. Lanes out of bounds or misaligned are reported and left out."""
        flat = address.reshape(-1)
        if flat.size == 0:
            return []
        buffer = self.buffers.get(int(flat[0]) >> ADDRESS_BITS)
        if buffer is not None and active is None:
            offsets = (flat - np.uint64(buffer.start)).view(np.int64)
            longest = size if isinstance(size, int) else int(size.max())
            low, high = int(offsets.min()), int(offsets.max())
            aligned = not ((offsets + buffer.skew) & (alignment - 1)).any()
            if low >= 0 and high + longest <= buffer.data.size and aligned:
                self._check_gaps(frame, whole := Target(buffer, None, offsets), size, op)
                return [whole]
        return self._resolve_slowly(
            frame, flat, np.broadcast_to(size, address.shape).reshape(-1), op, active, alignment
        )

    def _resolve_slowly(
        self, frame: Frame, flat: Array, size: Array, op: Op, active: Array | None, alignment: int
    ) -> list[Target]:
        acting = np.ones(flat.size, np.bool_) if active is None else active.reshape(-1)
        acting = acting & (size > 0)
        number = flat >> np.uint64(ADDRESS_BITS)
        targets: list[Target] = []
        lanes = flat.size // frame.n
        for which in np.unique(number[acting]):
            positions = np.nonzero(acting & (number == which))[0]
            buffer = self.buffers.get(int(which))
            if buffer is None:
                # A pointer below its array reaches into the gap after the previous one.
                near = self.buffers.get(int(which) + 1)
                self._report_bounds(frame, positions, flat[positions], lanes, op, near)
                continue
            offsets = (flat[positions] - np.uint64(buffer.start)).view(np.int64)
            inside = (offsets >= 0) & (offsets + size[positions] <= buffer.data.size)
            if not inside.all():
                self._report_bounds(frame, positions[~inside], flat[positions[~inside]], lanes, op, buffer)
            skewed = ((offsets + buffer.skew) & (alignment - 1)) != 0
            wrong = inside & skewed
            if wrong.any():
                row, lane = divmod(int(positions[wrong][0]), lanes)
                at = int(offsets[wrong][0])
                message = f"{op.instruction.mnemonic} at byte {at} of {buffer.element(at)} is not aligned to "
                message += f"{alignment} bytes: correct the address, or use a narrower access"
                self.report.add(
                    "misaligned", op.where, message, int(frame.flat[row]), lane, count=int(wrong.sum()), address=at
                )
            good = inside & ~skewed
            if good.any():
                targets.append(Target(buffer, positions[good], offsets[good]))
                self._check_gaps(frame, targets[-1], size[positions[good]], op)
        return targets

    def _check_gaps(self, frame: Frame, target: Target, size: Array | int, op: Op) -> None:
        """Accesses between the elements of a view: the kernel takes it for an array without gaps."""
        wrong = target.buffer.in_gaps(target.offsets, size)
        if wrong.size and self.checks:
            lane = wrong[0] if target.positions is None else target.positions[wrong[0]]
            row, lane, at = *divmod(int(lane), WARP_SIZE), int(target.offsets[wrong[0]])
            message = f"{op.instruction.mnemonic} at byte {at} of {target.buffer.name} reaches between its elements, "
            message += f"which lie apart: take its strides (Strided[…, {len(target.buffer.shape)}]), or pass it "
            message += "through np.ascontiguousarray"
            self.report.add("bounds", op.where, message, int(frame.flat[row]), lane, count=wrong.size, address=at)

    def _report_bounds(
        self, frame: Frame, positions: Array, addresses: Array, lanes: int, op: Op, buffer: GlobalBuffer | None
    ) -> None:
        row, lane = divmod(int(positions[0]), lanes)
        count = positions.size
        if buffer is None:
            text = f"{op.instruction.mnemonic} at address {int(addresses[0]):#x}, which is in no array"
            where = int(addresses[0])
        else:
            where = int(addresses[0]) - buffer.start
            has = f"shape {buffer.shape}" if buffer.shape else f"{buffer.data.size} bytes"
            text = f"{op.instruction.mnemonic} at byte {where} of {buffer.element(where)}, where {buffer.name} has "
            text += has
        text += ": correct the address, or guard the access"
        self.report.add("bounds", op.where, text, int(frame.flat[row]), lane, count=count, address=where)

    @staticmethod
    def words(buffer: GlobalBuffer, word: np.dtype[Any], words: int) -> tuple[Array, int]:
        """The buffer as rows of words, and the byte offset of row 0 (views of skewed buffers start inside)."""
        size = word.itemsize * words
        first = -buffer.skew % size
        usable = max(0, (buffer.data.size - first) // size * size)
        return buffer.data[first : first + usable].view(word).reshape(-1, words), first

    def text(self, address: int) -> str:
        """The string that ends by 0 at an address; "?" where none is."""
        buffer = self.buffers.get(address >> ADDRESS_BITS)
        start = 0 if buffer is None else address - buffer.start
        if buffer is None or not 0 <= start < buffer.data.size:
            return "?"
        return buffer.data[start:].tobytes().split(b"\0", 1)[0].decode(errors="replace")

    # -- accesses ------------------------------------------------------------------------------------------------

    def load(self, place: GlobalPlace, access: Access) -> tuple[Array, None, None]:
        """The words read, (warps, lanes, words); global memory has no poison."""
        self.track(place, "read", access)
        return self.read(place, np.dtype(f"u{access.bytes // access.words}"), access.words), None, None

    def read(self, place: GlobalPlace, word: np.dtype[Any], words: int) -> Array:
        """Words (warps, lanes, words) as they are; zeros where a lane reads nothing."""
        size, shape, targets = word.itemsize * words, (place.frame.n, WARP_SIZE), place.targets
        if len(targets) == 1 and targets[0].positions is None:
            rows, first = self.words(targets[0].buffer, word, words)
            return rows.take((targets[0].offsets - first) // size, axis=0).reshape(*shape, words)
        out = np.zeros((shape[0] * shape[1], words), word)
        for target in targets:
            rows, first = self.words(target.buffer, word, words)
            out[target.positions] = rows[(target.offsets - first) // size]
        return out.reshape(*shape, words)

    def take(self, place: GlobalPlace, word: np.dtype[Any], words: int) -> tuple[list[GlobalPlace], Array]:
        """What a copy reads now, and where it will be checked to have read once more; zeros beyond a lane's size."""
        whole = word.itemsize * words
        sizes = np.broadcast_to(place.size, place.address.shape).reshape(-1)
        if (sizes == whole).all():
            whole_place = replace(place, size=whole)
            self.track(whole_place, "read")
            return [whole_place], self.read(whole_place, word, words)
        data, parts = np.zeros((sizes.size, whole), np.uint8), list[GlobalPlace]()
        for target in place.targets:
            mine = sizes if target.positions is None else sizes[target.positions]
            for length in np.unique(mine[mine > 0]).tolist():
                part = target.of(mine == length)
                data[part.positions, :length] = target.buffer.data[part.offsets[:, None] + np.arange(length)]
                parts.append(replace(place, size=length, targets=[part]))
                self.track(parts[-1], "read")
        return parts, data.view(word).reshape(place.frame.n, WARP_SIZE, words)

    def store(
        self, place: GlobalPlace, access: Access, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write words (warps, lanes, words); of lanes that write one address the last wins, as the check reports."""
        self.track(place, "write" if access.order == "weak" else "atomic", access, data=data)
        flat = data.reshape(-1, data.shape[2])
        for target in place.targets:
            if self.may_write(place.frame, target, place.op):
                rows, first = self.words(target.buffer, data.dtype, data.shape[2])
                index = (target.offsets - first) // (data.dtype.itemsize * data.shape[2])
                rows[index] = flat if target.positions is None else flat[target.positions]

    def begin_update(self, place: GlobalPlace, access: Access) -> None:
        """Check and record an atomic update."""
        self.track(place, "atomic", access, strong=True)

    def update(
        self, place: GlobalPlace, access: Access, instruction: Instruction, values: list[Array], turns: Turns
    ) -> Array:
        """Lanes take turns to update each element of a vector. Returns the old values, (elements, warps, lanes)."""
        old = np.zeros((access.words, place.frame.n * WARP_SIZE), instruction.operand_types[1].numpy)
        for target in place.targets:
            if not self.may_write(place.frame, target, place.op):
                continue
            rows, first = self.words(target.buffer, old.dtype, 1)
            where = slice(None) if target.positions is None else target.positions
            picked = [v.reshape(-1)[where] for v in values]
            index, order = (target.offsets - first) // rows.itemsize, in_turn(np.arange(old.shape[1])[where], turns)
            for i in range(access.words):
                operands = picked[i :: access.words]
                old[i][where] = apply_in_turn(instruction, rows[:, 0], index + i, operands, order)
        return old.reshape(-1, place.frame.n, WARP_SIZE)

    def may_write(self, frame: Frame, target: Target, op: Op) -> bool:
        """Whether the buffer is writable; a finding if not."""
        if target.buffer.writable:
            return True
        message = f"{op.instruction.mnemonic} writes {target.buffer.name}, a read-only array: pass a writable one"
        self.report.add("bounds", op.where, message, int(frame.flat[0]), 0, count=target.offsets.size)
        return False

    # -- races ---------------------------------------------------------------------------------------------------

    def track(
        self,
        place: GlobalPlace,
        mode: Mode,
        access: Access | None = None,
        *,
        data: Array | None = None,
        strong: bool = False,
        since: int | None = None,
    ) -> None:
        """Check an access against the unordered ones before it, and record it; without an ``access`` a weak one.

        A read ``since`` a stamp has gone on from there: what was written later conflicts with it, ordered or not.
        """
        if not self.checks:
            return
        frame, op, size = place.frame, place.op, int(np.max(place.size))
        strong |= access is not None and access.order != "weak"
        cta_only, read_only = access is not None and access.scope == "cta", access is not None and access.read_only
        for target in place.targets:
            buffer = target.buffer
            record = self.records.get(buffer.region) if buffer.region is not None else None
            if record is None:
                continue
            positions = np.arange(frame.n * WARP_SIZE) if target.positions is None else target.positions
            per_lane = max(1, size // self.granule)
            first = (target.offsets + (buffer.real - record.region.real)) // self.granule
            cells = (first[:, None] + np.arange(per_lane)).reshape(-1)
            rows, lanes = (np.repeat(x, per_lane) for x in (frame.flat[positions // WARP_SIZE], positions % WARP_SIZE))
            mine = self.event(op, mode, buffer, cells, rows, lanes)
            mine.strong, mine.cta_only = strong, cta_only
            self.check(record, mine)
            if read_only:
                self._check_unwritten(record, mine)
            if since is not None:
                self._check_unchanged(record, mine, since)
            self.note(record, mine)
            if mode == "atomic" and cta_only:
                self._check_scope(mine)
            if mode == "write" and not strong and data is not None:
                self._check_clash(record, mine, data.reshape(-1, data.shape[2])[positions], per_lane)

    def event(self, op: Op, mode: Mode, buffer: GlobalBuffer, cells: Array, rows: Array, lanes: Array) -> Event:
        """An access of these rows and lanes (one entry per cell), made now."""
        return Event(op, mode, buffer, cells, rows, self.report.first + rows, lanes, self.clocks.stamp(op))

    def check(self, record: Record, mine: Event) -> None:
        """Compare an access with all unordered ones before it."""
        cells, mode = mine.cells, mine.mode
        if record.flying[cells].any():
            self._in_flight(record, mine)
        write_stamp = record.write_stamp[cells]
        if write_stamp.any():
            agents, lanes = record.write_agent[cells], record.write_lane[cells]
            columns = self.clocks.column_of(agents, mine.rows)
            fine = self.clocks.ordered(mine.rows, mine.lanes, False, columns, lanes, write_stamp, plane=FAR)
            wrong = ~fine & (write_stamp > 0)  # nobody has written the others
            self.conflicts(mine, np.arange(cells.size), wrong, agents, write_stamp, "wrote")
        if mode in ("write", "atomic"):
            self._against(record.reads, mine, "read")
        if mode != "read" or not mine.strong:
            self._against(record.updates, mine, "updated")

    @staticmethod
    def note(record: Record, mine: Event) -> None:
        """Record an access for those that come after it."""
        cells = mine.cells
        if mine.mode == "write":
            record.write_stamp[cells], record.write_agent[cells] = mine.stamp, mine.agents
            record.write_lane[cells], record.generic[cells] = mine.lanes, True
            record.reads.forget(cells)
            record.updates.forget(cells)
            return
        kind = np.full(cells.shape, mine.strong * STRONG + mine.cta_only * CTA_ONLY, np.int8)
        accesses = Accesses(cells, mine.agents, mine.lanes, np.full(cells.shape, mine.stamp), kind)
        (record.reads if mine.mode == "read" else record.updates).note(accesses)

    def _check_unwritten(self, record: Record, mine: Event) -> None:
        """A cache for what the kernel does not write is read."""
        written = (record.write_stamp[mine.cells] > 0) | record.updates.touched(mine.cells)
        if written.any():
            message = "which this kernel writes, through a cache that does not see it: load it without nc"
            self._told("race", mine, written, int(record.write_stamp[mine.cells][written][0]), f"reads {{}}, {message}")

    def _check_unchanged(self, record: Record, mine: Event, since: int) -> None:
        """Nobody has written what was being read all the time."""
        stamps = record.write_stamp[mine.cells]
        changed = stamps > since
        if changed.any():
            stamp = int(stamps[changed][0])
            message = f"may still read {{}} when {self.report.name_of(stamp)} writes there"
            cure = "wait for the copy, then meet at a barrier, before that"
            self._told("in_flight", mine, changed, stamp, f"{message}: {cure}")

    def _in_flight(self, record: Record, mine: Event) -> None:
        """An access to what a bulk store is still writing."""
        flying = record.flying[mine.cells]
        for stamp in np.unique(flying[flying > 0]).tolist():
            message = f"{mine.mode}s {{}} while {self.report.name_of(stamp)} is still writing there"
            cure = "wait for its group until that is done (k.wait_bulk(0), not reads_only), then meet at a barrier"
            self._told("in_flight", mine, flying == stamp, stamp, f"{message}: {cure}")

    def _told(self, kind: Kind, mine: Event, which: Array, stamp: int, said: str) -> None:
        """One finding about ``which`` cells of an access and what has a stamp; ``said`` has room for the first byte."""
        i = int(np.argmax(which))
        where = self.byte(mine.buffer, mine.cells[i])
        message = f"{mine.op.instruction.mnemonic} {said.format(f'byte {where} of {mine.buffer.name}')}"
        self.report.add(
            kind,
            mine.op.where,
            message,
            int(mine.rows[i]),
            int(mine.lanes[i]),
            other=self.report.line_of(stamp),
            count=int(which.sum()),
            address=where,
        )

    def byte(self, buffer: GlobalBuffer, cell: Any) -> int:
        """The byte of a buffer that a cell of its region starts at."""
        assert buffer.region is not None
        return int(cell) * self.granule + buffer.region.real - buffer.real

    def _against(self, earlier: LastAccesses, mine: Event, past: str) -> None:
        """Compare with reads or updates. Atomics conflict with none that is strong, unless a scope leaves a CTA out."""
        found = earlier.of(mine.cells, lambda kind: _harmless(mine, past, kind))
        if found is None:
            return
        me, theirs = found
        rows = mine.rows[me]
        columns = self.clocks.column_of(theirs.agents, rows)
        fine = self.clocks.ordered(rows, mine.lanes[me], False, columns, theirs.lanes, theirs.stamps, plane=FAR)
        if mine.mode == "atomic":
            fine |= np.array([_harmless(mine, past, kind) for kind in range(STRONG + CTA_ONLY + 1)])[theirs.kinds]
            if past == "updated":
                fine |= theirs.agents // self.clocks.warps_per_cta == mine.agents[me] // self.clocks.warps_per_cta
        self.conflicts(mine, me, ~fine, theirs.agents, theirs.stamps, past)

    def _check_scope(self, mine: Event) -> None:
        """Updates of one cell in one execution by CTAs that its scope leaves out."""
        ctas = mine.agents // self.clocks.warps_per_cta
        order = np.lexsort((ctas, mine.cells))
        first, then = order[:-1], order[1:]
        meet = (mine.cells[first] == mine.cells[then]) & (ctas[first] != ctas[then])
        me, others = then[meet], mine.agents[first[meet]]
        self.conflicts(mine, me, np.ones(me.shape, np.bool_), others, np.full(me.shape, mine.stamp), "updated")

    def conflicts(self, mine: Event, me: Array, wrong: Array, agents: Array, stamps: Array, past: str) -> None:
        """The conflicts that are ``wrong`` of the cells at ``me`` with accesses of others, at those cells."""
        if not wrong.any():
            return
        region, at = mine.buffer.region, me[wrong]
        assert region is not None
        addresses = mine.cells[at] * self.granule + region.real - mine.buffer.real
        rows, lanes = mine.rows[at], mine.lanes[at]
        self.report.races(mine.op, mine.mode, rows, lanes, agents[wrong], stamps[wrong], addresses, past, mine.buffer)

    def _check_clash(self, record: Record, mine: Event, data: Array, per_lane: int) -> None:
        """Several threads storing to one address in one execution: fine only within a warp and with equal bits."""
        cells = mine.cells
        last_agent, last_lane = record.write_agent[cells], record.write_lane[cells]
        across = last_agent != mine.agents
        if not (across | (last_lane != mine.lanes)).any():
            return
        unique, first = np.unique(cells[::per_lane], return_index=True)
        group = np.searchsorted(unique, cells[::per_lane])
        differs = (data != data[first[group]]).any(axis=1)
        bad = (across.reshape(-1, per_lane).any(axis=1)) | (np.bincount(group, differs, unique.size) > 0)[group]
        bad &= np.bincount(group)[group] > 1
        if bad.any():
            i = int(np.argmax(bad)) * per_lane
            where = mine.op.where
            message = (
                f"several threads write one address in one execution of {mine.op.instruction.mnemonic}, and nothing "
                "says whose value stays: give each thread its own address"
            )
            row, lane = int(mine.rows[i]), int(mine.lanes[i])
            self.report.add("race", where, message, row, lane, other=where, count=int(bad.sum()))
