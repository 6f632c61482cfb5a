"""Global memory: the buffers of the arguments, bounds, and races on what the kernel writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, displaced
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import GlobalAccess, MemoryAccess
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer, align, memory_around, overlapping
from warploom.emulate.memory.global_history import UNWRITTEN, GlobalHistory
from warploom.emulate.memory.memory import MODES, Memory
from warploom.emulate.order.clocks import LANES, Clocks
from warploom.ir.statements import Op
from warploom.isa.effects import Access as Effect

Array = NDArray[Any]
_ALIGNMENT = 256  # of allocations, and of what is joined in the history


class GlobalMemory(Memory):
    """All buffers of a launch, by their numbers. Lives for the whole grid; clocks and reports are the batch's."""

    history: GlobalHistory | None = None
    marked = False
    """Whether there are arrays some of which nobody has written."""

    def __init__(self, buffers: list[GlobalBuffer], written: set[str] | None, granule: int, checks: bool) -> None:
        self.buffers = {b.address >> ADDRESS_BITS: b for b in buffers}
        self.granule, self.checks = granule, checks
        self._copies = align(buffers)
        # By number, with one behind the last: addresses, sizes (-1: no buffer), and where it is in this process.
        count = max(self.buffers, default=0) + 2
        self._start, self._size, self._real = (np.full(count, x) for x in (0, -1, 0))
        self._constant = [number for number, buffer in self.buffers.items() if not buffer.writable]
        for number, buffer in self.buffers.items():
            self._start[number], self._size[number], self._real[number] = buffer.start, buffer.data.size, buffer.real
        if checks:
            self._make_history(written, np.full(count, -1))
        self.first, data = memory_around([buffer for buffer in buffers if buffer.data.size])
        super().__init__(data, self.history)

    def _make_history(self, written: set[str] | None, base: Array) -> None:
        """Give a place in the history to buffers that may be written, and to those that they overlap."""
        total = 0
        for parts in overlapping(self.buffers.values()):
            marked = any(buffer.unwritten is not None for buffer in parts)
            if written is None or marked or any(buffer.name in written for buffer in parts):
                first = total + parts[0].skew - parts[0].real
                base[[b.address >> ADDRESS_BITS for b in parts]] = [first + b.real for b in parts]
                end = max(first + buffer.real + buffer.data.size for buffer in parts)
                total = -(-end // _ALIGNMENT) * _ALIGNMENT
        if total:
            self.history = GlobalHistory(total, self.granule, base)
            for number, buffer in self.buffers.items():
                if buffer.unwritten is not None:
                    self.marked = True
                    cells = np.arange(base[number], base[number] + buffer.data.size) // self.granule
                    some = cells[~buffer.unwritten]
                    self.history.wrote[cells], self.history.wrote[some] = UNWRITTEN, 0

    def leave(self) -> None:
        """The launch is over: arrays that were copied get what has been written."""
        for given, buffer in self._copies:
            if buffer.writable:
                given[:] = buffer.data

    def enter(self, clocks: Clocks, report: Reporter) -> None:
        """Work for this batch from now on."""
        self.clocks, self.report = clocks, report
        if self.history is not None:
            self.history.clocks, self.history.report = clocks, report

    # -- addresses -----------------------------------------------------------------------------------------------

    def place(self, frame: Frame, address: Array, op: Op, access: Effect, size: Array | int = 0) -> GlobalAccess:
        """Where the active lanes go; ``size`` in bytes if not all of the access. Who is out of bounds is left out."""
        size = access.bytes if isinstance(size, int) and not size else size
        at = frame.full(displaced(address, access.offset)).astype(np.int64)
        acting = frame.acting(None if isinstance(size, int) else size > 0)
        numbers, offsets, good = self.locate(frame, at, size, op, acting, access.bytes)
        for number in self._constant if access.mode != "load" else ():
            wrong = good & (numbers == number)
            if wrong.any():
                self.may_write(op, self.buffers[number], int(frame.rows[0]), 0, int(wrong.sum()))
                good &= ~wrong
        return GlobalAccess(
            op=op,
            what=MODES[access.mode],
            rows=(frame.rows,),
            index=np.where(good, self._real[numbers] - self.first + offsets, 0) // access.bytes,
            parts=access.bytes // self.granule,
            active=None if good.all() else good,
            bound=np.full(frame.n, LANES - 1),
            strong=access.mode == "atomic" or access.order != "weak",
            narrow={"cta": 1, "cluster": self.clocks.places.together}.get(access.scope, 0),
            width=access.bytes // access.words,
            buffers=self.buffers,
            numbers=numbers,
            frame=frame,
            size=size,
            addresses=at,
        )

    def names(self, place: GlobalAccess) -> Array:
        """A number (warps, lanes) for each address, which no other address of the launch has."""
        return place.addresses

    def locate(
        self, frame: Frame, address: Array, size: Array | int, op: Op, acting: Array, alignment: int
    ) -> tuple[Array, Array, Array]:
        """Numbers of the buffers that lanes go to, byte offsets in them, and the acting lanes that may do so.

        Lanes out of bounds or misaligned are reported.
        """
        numbers = np.minimum(np.maximum(address >> ADDRESS_BITS, 0), self._start.size - 1)  # faster than clip
        offsets = address - self._start[numbers]  # in their buffers
        inside = (offsets >= 0) & (offsets + size <= self._size[numbers])
        aligned = (address & (alignment - 1)) == 0
        good = acting & inside & aligned
        if np.count_nonzero(good) != np.count_nonzero(acting):
            self._refuse(frame, address, op, acting & ~inside, acting & inside & ~aligned, alignment)
        if self.checks:
            self._check_gaps(frame, numbers, offsets, size, good, op)
        return numbers, np.where(good, offsets, 0), good

    def _refuse(self, frame: Frame, address: Array, op: Op, beyond: Array, askew: Array, alignment: int) -> None:
        """Report lanes whose addresses are outside of a buffer (or near none), or not aligned."""
        for bad in (beyond, askew):
            if not bad.any():
                continue
            at, name = int(address[bad][0]), op.instruction.mnemonic
            number = at >> ADDRESS_BITS  # a pointer below its array reaches into the gap after the previous one
            near = self.buffers.get(number) or self.buffers.get(number + 1)
            byte = at - (0 if near is None else near.start)
            where = f"byte {byte} of {near.element(byte)}" if near else f"address {byte:#x}, which is in no array"
            message = f"{name} at {where} is not aligned to {alignment} bytes: correct the address, or use a narrower "
            message += "access"
            if bad is beyond:
                has = "" if near is None else f"shape {near.shape}" if near.shape else f"{near.data.size} bytes"
                message = f"{name} at {where}{f', where {near.name} has {has}' if near else ''}: correct the address, "
                message += "or guard the access"
            kind = "bounds" if bad is beyond else "misaligned"
            self.report.of_lanes(kind, frame, op.where, bad, message, address=np.array([[byte]]))

    def _check_gaps(self, frame: Frame, numbers: Array, offsets: Array, size: Array | int, good: Array, op: Op) -> None:
        """Report accesses between the elements of a view: the kernel takes it for an array without gaps."""
        for number, buffer in self.buffers.items():
            if buffer.between is None:
                continue
            bad = good & (numbers == number)
            if not bad.any():
                continue
            sizes = size if isinstance(size, int) else size[bad]
            wrong = np.zeros(np.count_nonzero(bad), np.bool_)
            wrong[buffer.in_gaps(offsets[bad], sizes)] = True
            bad[bad] = wrong
            message = f"{op.instruction.mnemonic} at byte {{}} of {buffer.name} reaches between its elements, "
            message += f"which lie apart: take its strides (Strided[…, {len(buffer.shape)}]), or pass it "
            message += "through np.ascontiguousarray"
            self.report.of_lanes("bounds", frame, op.where, bad, message, offsets, address=offsets)

    def text(self, address: int) -> str:
        """The string that ends by 0 at an address; "?" where none is."""
        buffer = self.buffers.get(address >> ADDRESS_BITS)
        start = 0 if buffer is None else address - buffer.start
        if buffer is None or not 0 <= start < buffer.data.size:
            return "?"
        return buffer.data[start:].tobytes().split(b"\0", 1)[0].decode(errors="replace")

    # -- accesses ------------------------------------------------------------------------------------------------

    def load(self, place: GlobalAccess, access: Effect) -> tuple[Array, Array | None, Origin | None]:
        """The words read (warps, lanes, words), their shadow if any is poison, and where the poison comes from."""
        at = self.track(place)
        if at is not None and self.history is not None and access.read_only:
            self.history.check_unwritten(at)
        return self.words(self.data, place, access), *self.unwritten(place, access)

    def unwritten(self, place: GlobalAccess, access: Effect) -> tuple[Array | None, Origin | None]:
        """The shadow of what an access reads, if nobody has written some of it, and where that poison comes from."""
        if self.history is None or place.numbers is None or not self.marked:
            return None, None
        base, parts = self.history.base[place.numbers], np.arange(0, access.bytes, self.granule)
        cells = (base + place.addresses - self._start[place.numbers])[..., None] + parts
        size = place.size if isinstance(place.size, int) else place.size[..., None]
        never = (base >= 0)[..., None] & (parts < size)
        if place.active is not None:
            never = never & place.active[..., None]
        never = never & (self.history.wrote[np.where(never, cells, 0) // self.granule] == UNWRITTEN)
        if not never.any():
            return None, None
        at = tuple(int(x[0]) for x in np.nonzero(never))
        buffer = self.buffers[int(place.numbers[at[:2]])]
        element = buffer.element(int(cells[at] - base[at[:2]]))
        shadow = np.repeat(never.view(np.uint8) * np.uint8(255), self.granule, axis=-1)
        return shadow.view(f"u{access.bytes // access.words}"), (place.op.where, f"{element}, which nobody has written")

    def marks(self, buffer: GlobalBuffer) -> GlobalBuffer | None:
        """A buffer whose bytes are the shadow of another one's; None if somebody has written all of that."""
        number = buffer.address >> ADDRESS_BITS
        if self.history is None or self.buffers[number].unwritten is None:
            return None
        start = int(self.history.base[number]) + buffer.real - self.buffers[number].real  # of a part of a buffer
        cells = np.arange(start, start + buffer.data.size) // self.granule
        return replace(buffer, data=(self.history.wrote[cells] == UNWRITTEN) * np.uint8(255))

    def words(self, table: Array, place: Any, access: Effect) -> Array:
        """The words (warps, lanes, words) that an access reads; zeros beyond its size."""
        found = super().words(table, place, access)
        if not isinstance(place.size, int):
            beyond = np.arange(access.bytes) >= place.size[..., None]
            found.view(np.uint8).reshape(beyond.shape)[beyond] = 0
        return found

    def may_write(self, op: Op, buffer: GlobalBuffer, row: int, lane: int, count: int = 1) -> bool:
        """Whether a buffer is writable; a finding if not."""
        if not buffer.writable:
            message = f"{op.instruction.mnemonic} writes {buffer.name}, a read-only array: pass a writable one"
            self.report.add("bounds", op.where, message, row, lane, count=count)
        return buffer.writable

    # -- races ---------------------------------------------------------------------------------------------------

    def tracked(self, place: Any) -> MemoryAccess | None:
        """Return the part of an access that goes to memory which the kernel writes, at the current stamp, or None."""
        if self.history is None:
            return None
        base, unit = self.history.base[place.numbers], place.parts * self.granule
        acting = base >= 0 if place.active is None else (base >= 0) & place.active
        if not np.count_nonzero(acting):
            return None
        shift = base + self.first - self._real[place.numbers]
        active = None if acting.all() else acting
        at = replace(place, index=np.where(acting, place.index + shift // unit, 0), active=active)
        at.stamp = self.clocks.stamp(place.op)
        if isinstance(place.size, int):
            return at
        within = np.arange(0, unit, self.granule)
        some = at.among(acting[..., None] & (within < place.size[..., None]))
        some.bound = np.full(some.index.shape[0], LANES - 1)
        return some

    def track(self, place: GlobalAccess, *, since: int | None = None) -> MemoryAccess | None:
        """Check and record a read. Returns what of it goes to memory that the kernel writes.

        A read ``since`` a stamp has gone on from there: what was written later conflicts with it, ordered or not.
        """
        at = self.tracked(place)
        if at is not None and self.history is not None:
            self.history.check(at)
            self.history.note(at)
            if since is not None:
                self.history.check_unchanged(at.flat, "changed", since)
        return at

    def reach(
        self, op: Op, what: str, buffer: GlobalBuffer, offsets: Array, row: int, lane: int
    ) -> MemoryAccess | None:
        """An access of one lane to cells at byte offsets in a buffer, now; None where the kernel does not write it."""
        number = buffer.address >> ADDRESS_BITS
        if self.history is None or self.history.base[number] < 0 or not offsets.size:
            return None
        start = self.history.base[number] + buffer.real - self.buffers[number].real  # of a part of a buffer
        cells = np.unique((start + offsets) // self.granule)[:, None]
        rows, lanes = np.full(cells.size, row), np.full(cells.size, lane)
        known, numbers, stamp = np.full(cells.size, LANES - 1), np.full(cells.shape, number), self.clocks.stamp(op)
        return MemoryAccess(
            op=op,
            what=what,
            rows=(rows,),
            index=cells,
            lanes=lanes,
            bound=known,
            stamp=stamp,
            buffers=self.buffers,
            numbers=numbers,
        )
