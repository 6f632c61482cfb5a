"""Global memory: the buffers of the arguments, bounds, and races on what the kernel writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, Turns, apply_in_turn, displaced, in_turn
from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer, Region
from warploom.emulate.memory.global_history import GlobalHistory
from warploom.emulate.order.clocks import Clocks
from warploom.ir.statements import Op
from warploom.isa.effects import Access as Effect
from warploom.isa.instruction import Instruction
from warploom.layout.fragments import WARP_SIZE

Array = NDArray[Any]


@dataclass(slots=True)
class BufferLanes:
    """The lanes of an access that go to one buffer: positions among the flattened lanes, and byte offsets."""

    buffer: GlobalBuffer
    positions: Array
    offsets: Array

    def some(self, which: Array) -> BufferLanes:
        """Select some of the lanes."""
        return BufferLanes(self.buffer, self.positions[which], self.offsets[which])


@dataclass(slots=True)
class GlobalPlace:
    """Where the lanes of a frame access ``size`` bytes each (an array where they differ), by buffer."""

    frame: Frame
    op: Op
    size: Array | int
    address: Array
    targets: list[BufferLanes]

    def of(self, lanes: Array) -> GlobalPlace:
        """Select some lanes (warps, lanes)."""
        flat = lanes.reshape(-1)
        return replace(self, targets=[target.some(flat[target.positions]) for target in self.targets])

    def sizes(self, target: BufferLanes) -> Array:
        """The bytes that each lane of a target accesses."""
        return np.broadcast_to(self.size, self.address.shape).reshape(-1)[target.positions]

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count the sectors."""
        counter.global_access(name, self.op.where, self.address.view(np.int64), self.size, self.frame.active)


class GlobalMemory:
    """All buffers of a launch. Lives for the whole grid; ``clocks`` and ``report`` change with the batch."""

    def __init__(self, buffers: list[GlobalBuffer], written: set[str] | None, granule: int, checks: bool) -> None:
        self.buffers = {b.address >> ADDRESS_BITS: b for b in buffers}
        self.granule = granule
        self.checks = checks
        self.histories: dict[Region, GlobalHistory] = {}
        self.clocks: Clocks
        self.report: MemoryReports
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
            self.histories[region] = GlobalHistory(region, self.granule)
            for buffer in group:
                buffer.region = region

    # -- addresses -----------------------------------------------------------------------------------------------

    def place(self, frame: Frame, address: Array, op: Op, access: Effect, size: Array | int = 0) -> GlobalPlace:
        """Where the active lanes go; ``size`` in bytes if not all of the access. Who is out of bounds is left out."""
        size = access.bytes if isinstance(size, int) and not size else size
        at = frame.full(displaced(address, access.offset))
        return GlobalPlace(frame, op, size, at, self.resolve(frame, at, size, op, frame.active, access.bytes))

    def names(self, place: GlobalPlace) -> Array:
        """A number (warps, lanes) for each address, which no other address of the launch has."""
        return place.address

    def resolve(
        self, frame: Frame, address: Array, size: Array | int, op: Op, active: Array | None, alignment: int
    ) -> list[BufferLanes]:
        """Which buffers the active lanes go to. Lanes out of bounds or misaligned are reported and left out."""
        sizes, flat = np.broadcast_to(size, address.shape).reshape(-1), address.reshape(-1)
        acting = sizes > 0 if active is None else (sizes > 0) & active.reshape(-1)
        number, targets = (flat >> np.uint64(ADDRESS_BITS)).astype(np.int64), list[BufferLanes]()
        for which in np.unique(number[acting]).tolist():
            positions = np.nonzero(acting & (number == which))[0]
            buffer = self.buffers.get(which)
            # A pointer below its array reaches into the gap after the previous one.
            near = buffer or self.buffers.get(which + 1)
            offsets = (flat[positions] - np.uint64(0 if near is None else near.start)).view(np.int64)
            end = -1 if buffer is None else buffer.data.size
            inside = (offsets >= 0) & (offsets + sizes[positions] <= end)
            skewed = inside & (((offsets + (0 if near is None else near.skew)) & (alignment - 1)) != 0)
            kinds: tuple[tuple[Kind, Array], ...] = (("bounds", ~inside), ("misaligned", skewed))
            for kind, wrong in kinds:
                if np.count_nonzero(wrong):
                    self._refuse(kind, frame, positions[wrong], offsets[wrong], op, near, alignment)
            good = inside & ~skewed
            if buffer is not None and np.count_nonzero(good):
                targets.append(BufferLanes(buffer, positions[good], offsets[good]))
                self._check_gaps(frame, targets[-1], sizes[positions[good]], op)
        return targets

    def _refuse(
        self,
        kind: Kind,
        frame: Frame,
        positions: Array,
        offsets: Array,
        op: Op,
        buffer: GlobalBuffer | None,
        alignment: int,
    ) -> None:
        """Report lanes whose addresses are outside of a buffer (or near none), or not aligned."""
        at, name = int(offsets[0]), op.instruction.mnemonic
        where = f"byte {at} of {buffer.element(at)}" if buffer else f"address {at:#x}, which is in no array"
        if kind == "misaligned":
            message = f"{name} at {where} is not aligned to {alignment} bytes: correct the address, or use a narrower "
            message += "access"
        else:
            has = "" if buffer is None else f"shape {buffer.shape}" if buffer.shape else f"{buffer.data.size} bytes"
            message = f"{name} at {where}{f', where {buffer.name} has {has}' if buffer else ''}: correct the address, "
            message += "or guard the access"
        self._report(kind, frame, positions, op, message, at)

    def _report(self, kind: Kind, frame: Frame, positions: Array, op: Op, message: str, address: int) -> None:
        row, lane = divmod(int(positions[0]), WARP_SIZE)
        self.report.add(kind, op.where, message, int(frame.rows[row]), lane, count=positions.size, address=address)

    def _check_gaps(self, frame: Frame, target: BufferLanes, size: Array, op: Op) -> None:
        """Report accesses between the elements of a view: the kernel takes it for an array without gaps."""
        wrong = target.buffer.in_gaps(target.offsets, size)
        if wrong.size and self.checks:
            at, name = int(target.offsets[wrong[0]]), target.buffer.name
            message = f"{op.instruction.mnemonic} at byte {at} of {name} reaches between its elements, "
            message += f"which lie apart: take its strides (Strided[…, {len(target.buffer.shape)}]), or pass it "
            self._report("bounds", frame, target.positions[wrong], op, message + "through np.ascontiguousarray", at)

    @staticmethod
    def units(buffer: GlobalBuffer, dtype: str | np.dtype[Any]) -> Array:
        """The values of a type that begin at each byte of a buffer: they overlap."""
        size = np.dtype(dtype).itemsize
        return np.ndarray((max(0, buffer.data.size - size + 1),), dtype, buffer.data, 0, (1,))  # type: ignore[arg-type]

    def text(self, address: int) -> str:
        """The string that ends by 0 at an address; "?" where none is."""
        buffer = self.buffers.get(address >> ADDRESS_BITS)
        start = 0 if buffer is None else address - buffer.start
        if buffer is None or not 0 <= start < buffer.data.size:
            return "?"
        return buffer.data[start:].tobytes().split(b"\0", 1)[0].decode(errors="replace")

    # -- accesses ------------------------------------------------------------------------------------------------

    def load(self, place: GlobalPlace, access: Effect) -> tuple[Array, None, None]:
        """The words read, (warps, lanes, words); global memory has no poison."""
        self.track(place, "read", access)
        return self.read(place, np.dtype(f"u{access.bytes // access.words}"), access.words), None, None

    def read(self, place: GlobalPlace, word: np.dtype[Any], words: int) -> Array:
        """Words (warps, lanes, words) as they are; zeros where a lane reads nothing, and beyond its size."""
        whole = word.itemsize * words
        out = np.zeros((place.frame.n * WARP_SIZE, words), word)
        for target in place.targets:
            sizes = place.sizes(target)
            if (sizes == whole).all():
                found = self.units(target.buffer, f"V{whole}")[target.offsets]
            else:
                reach, data = np.arange(whole), target.buffer.data
                found = data[np.minimum(target.offsets[:, None] + reach, data.size - 1)]
                found[reach >= sizes[:, None]] = 0
            out[target.positions] = found.view(word).reshape(-1, words)
        return out.reshape(place.frame.n, WARP_SIZE, words)

    def store(
        self, place: GlobalPlace, access: Effect, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write words (warps, lanes, words); of lanes that write one address the last wins, as the check reports."""
        size = data.dtype.itemsize * data.shape[2]
        units = np.ascontiguousarray(data).reshape(-1, data.shape[2]).view(f"V{size}")[:, 0]
        weak = access.order == "weak"
        if not weak:
            self.track(place, "atomic", access)
        for target in place.targets:
            found = self._access(place, target, "write", access) if weak else None
            if found is not None:
                found[0].check(found[1])
            if not self.may_write(place.op, target.buffer, int(place.frame.rows[0]), 0, target.offsets.size):
                continue
            stored, wanted = self.units(target.buffer, units.dtype), units[target.positions]
            stored[target.offsets] = wanted
            if found is not None:
                now, wanted = (x.view(np.uint8).reshape(-1, size) for x in (stored[target.offsets], wanted))
                self._write(*found, (now != wanted).any(axis=1))

    def _write(self, history: GlobalHistory, mine: MemoryAccess, differs: Array) -> None:
        """Record a write. Of threads that write one place at once all must be of one warp, and none be overwritten."""
        several = history.store(mine)
        if several is not None:
            clash, elsewhere = (x.reshape(differs.size, -1).any(axis=1) for x in several)
            bad = np.nonzero(elsewhere | (clash & differs))[0] * (mine.cells.size // differs.size)
            if bad.size:
                self.report.tell("several", mine[bad], history.bytes(mine)[bad], self.clocks.now)

    def begin_update(self, place: GlobalPlace, access: Effect) -> None:
        """Check and record an atomic update."""
        self.track(place, "atomic", access)

    def update(
        self, place: GlobalPlace, access: Effect, instruction: Instruction, values: list[Array], turns: Turns
    ) -> Array:
        """Lanes take turns to update each element of a vector. Returns the old values, (elements, warps, lanes)."""
        old = np.zeros((access.words, place.frame.n * WARP_SIZE), instruction.operand_types[1].numpy)
        for target in place.targets:
            if not self.may_write(place.op, target.buffer, int(place.frame.rows[0]), 0, target.offsets.size):
                continue
            view, order = self.units(target.buffer, old.dtype), in_turn(target.positions, turns)
            picked = [v.reshape(-1)[target.positions] for v in values]
            for i in range(access.words):
                operands, index = picked[i :: access.words], target.offsets + i * old.itemsize
                old[i][target.positions] = apply_in_turn(instruction, view, index, operands, order)
        return old.reshape(-1, place.frame.n, WARP_SIZE)

    def may_write(self, op: Op, buffer: GlobalBuffer, row: int, lane: int, count: int = 1) -> bool:
        """Whether a buffer is writable; a finding if not."""
        if not buffer.writable:
            message = f"{op.instruction.mnemonic} writes {buffer.name}, a read-only array: pass a writable one"
            self.report.add("bounds", op.where, message, row, lane, count=count)
        return buffer.writable

    # -- races ---------------------------------------------------------------------------------------------------

    def enter(self, clocks: Clocks, report: MemoryReports) -> None:
        """Work for this batch from now on."""
        self.clocks, self.report = clocks, report
        for history in self.histories.values():
            history.clocks, history.report = clocks, report

    def history(self, buffer: GlobalBuffer | None) -> GlobalHistory | None:
        """The history of a buffer's memory; None where the kernel does not write it."""
        return self.histories.get(buffer.region) if buffer is not None and buffer.region is not None else None

    def _access(
        self, place: GlobalPlace, target: BufferLanes, what: str, access: Effect | None
    ) -> tuple[GlobalHistory, MemoryAccess] | None:
        """The history that an access to a buffer is compared with, and its cells; without an ``access`` a weak one."""
        history = self.history(target.buffer) if self.checks else None
        if history is None:
            return None
        within = np.arange(0, int(np.max(place.size)), self.granule)
        which, part = np.nonzero(within < place.sizes(target)[:, None])
        rows, lanes = place.frame.rows[target.positions // WARP_SIZE], target.positions % WARP_SIZE
        offsets = target.offsets[which] + within[part]
        mine = history.access(place.op, what, target.buffer, offsets, rows[which], lanes[which])
        mine.strong = what == "atomic" or (access is not None and access.order != "weak")
        mine.narrow = access is not None and access.scope == "cta"
        return history, mine

    def track(self, place: GlobalPlace, what: str, access: Effect | None = None, *, since: int | None = None) -> None:
        """Check and record a read or an update.

        A read ``since`` a stamp has gone on from there: what was written later conflicts with it, ordered or not.
        """
        for target in place.targets:
            found = self._access(place, target, what, access)
            if found is None:
                continue
            history, mine = found
            if what == "atomic" and mine.narrow:  # threads of other CTAs may update the same now
                history.note(mine)
                history.check(mine)
            else:
                history.check(mine)
                history.note(mine)
            if access is not None and access.read_only:
                history.check_unwritten(mine)
            if since is not None:
                history.check_unchanged(mine, since)
