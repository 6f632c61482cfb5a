"""The base class of all memories, and local memory: bytes of each thread's own, which nobody else sees.

A memory is asked where an access goes (``place``), and then to load, store or update there: its bytes are read or
changed, and the access is compared with its history and written down there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, apply_in_turn, displaced, in_turn
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.memory.history import ALIKE
from warploom.emulate.order.clocks import Clocks
from warploom.ir.statements import Op
from warploom.isa.effects import Access as Effect
from warploom.isa.instruction import Instruction
from warploom.isa.memory import MOST_BYTES

Array = NDArray[Any]
LOCAL_BASE = 16  # 0 is no address
MODES = {"load": "read", "store": "write", "atomic": "atomic"}
"""What an access does, by the mode of its effect."""


_ROUNDING = 1e-5  # relative: sums of the same numbers in other orders


class Memory:
    """Bytes, of which ``shadow`` says which are poison, and the history with which ``checks`` compare accesses."""

    report: Reporter
    clocks: Clocks
    checks = False
    shadow: Array | None = None  # allocated when poison is first stored

    def __init__(self, data: Array, history: Any) -> None:
        self.data, self.history = data, history

    def words(self, table: Array, place: MemoryAccess, access: Effect) -> Array:
        """The words (warps, lanes, words) of ``data`` or ``shadow`` that an access reads; 0 where a lane reads none."""
        word = np.dtype(f"u{access.bytes // access.words}")
        found = table.view(word).reshape(-1, access.words).take(place.index, axis=0)
        if place.active is not None:
            found[~place.active] = 0
        return found

    def put(self, units: Array, data: Array, shadow: Array | None = None) -> None:
        """Set the bytes of units (…, words), and what of them is poison."""
        self.data.view(data.dtype).reshape(-1, data.shape[-1])[units] = data
        if shadow is not None and self.shadow is None:
            self.shadow = np.zeros_like(self.data)
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, data.shape[-1])[units] = 0 if shadow is None else shadow

    def tracked(self, place: Any) -> MemoryAccess | None:
        """Return the part of an access that is compared with earlier ones, at the current stamp, or None."""
        if not self.checks:
            return None
        place.stamp = self.clocks.stamp(place.op)
        return place

    # -- stores and updates ----------------------------------------------------------------------------------------

    def store(
        self, place: Any, access: Effect, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write ``data`` (warps, lanes, words) now."""
        at, same, acting = None, None, ... if place.active is None else place.active
        if place.strong:
            self.begin_update(place)
        elif (at := self.tracked(place)) is not None:
            _, same = self.history.check(at, lambda: self._holds(at, place, data, shadow))
        self.put(place.units, data[acting], None if shadow is None else shadow[acting])
        if at is not None:
            self._note_store(at, place, data, same)

    def _holds(self, at: MemoryAccess, place: MemoryAccess, data: Array, shadow: Array | None) -> Array:
        """The cells (warps, lanes, parts) into which a store put what is to be stored, none of it poison."""
        size = data.shape[-1] * data.itemsize
        shape = (*at.index.shape, at.parts, size // at.parts)
        units = at.index if at.active is None else np.where(at.active, at.index, 0)
        same = self.history.stored(units[..., None] * at.parts + np.arange(at.parts))
        now = self.data.reshape(-1, size).take(place.index, axis=0).reshape(shape)
        same &= (now == np.ascontiguousarray(data).view(np.uint8).reshape(shape)).all(axis=-1)
        if self.shadow is not None:
            same &= ~self.shadow.reshape(-1, size).take(place.index, axis=0).reshape(shape).any(axis=-1)
        if shadow is not None:
            same &= ~np.ascontiguousarray(shadow).view(np.uint8).reshape(shape).any(axis=-1)
        return same

    def _note_store(self, at: MemoryAccess, place: MemoryAccess, data: Array, same: Array | None) -> None:
        """Note a store; of the ``same`` values that are there, and of several threads at once, as one of many."""
        history, alike = self.history, np.zeros(at.index.shape, np.bool_)
        if same is not None:
            alike |= same.any(axis=2)
        cells = np.zeros(0, np.int64) if same is None else at.among(same).cells
        kept = history.wrote[cells], history.writer[cells]
        several = history.write(at)
        history.wrote[cells], history.writer[cells] = kept
        if several is not None:
            alike[... if at.active is None else at.active] |= np.isin(at.units, at.units[several[0]])
            bad = several[0] & self.differs(at, place, data)
            rounded = bad.any() and not (bad & ~self._rounded(at, place, data)).any()
            self.check_clash(at, bad, "several, rounded" if rounded else "several")
        if alike.any():
            history.table(ALIKE).note(replace(at, active=alike))

    def differs(self, at: MemoryAccess, place: MemoryAccess, data: Array) -> Array:
        """Which of the units of ``at``, a part of a store, have other bytes than those stored (warps, lanes, words)."""
        found = (self.data.view(data.dtype).reshape(-1, data.shape[-1])[place.index] != data).any(axis=-1)
        return found if at.active is None else found[at.active]

    def _rounded(self, at: MemoryAccess, place: MemoryAccess, data: Array) -> Array:
        """Which of the units of ``at`` have, as f32, what is stored but for rounding."""
        if data.itemsize != 4:
            return np.zeros(at.units.shape, np.bool_)
        words = self.data.view(data.dtype).reshape(-1, data.shape[-1])[place.index]
        now, stored = (np.ascontiguousarray(x).view(np.float32) for x in (words, data))
        found: Array = np.all(np.abs(now - stored) <= _ROUNDING * np.maximum(np.abs(now), np.abs(stored)), axis=-1)
        return found if at.active is None else found[at.active]

    def check_clash(self, at: MemoryAccess, bad: Array, what: str = "several") -> None:
        """Report, as ``what``, threads that have written different values to one place at once."""
        if bad.any():
            wide = np.zeros(at.index.shape, np.bool_)
            wide[... if at.active is None else at.active] = bad
            mine = at.among(wide[..., None] & (np.arange(at.parts) == 0))
            first = mine.cells[:1]
            (agent,) = self.history.agents(self.history.writer[first], mine.rows[0][:1]).tolist()
            self.report.tell(what, mine, self.history.bytes(mine), self.clocks.now, agent)

    def begin_update(self, place: Any) -> None:
        """Check and record a strong write, such as an atomic update."""
        at, history = self.tracked(place), self.history
        if at is None:
            return
        if at.narrow:  # threads of other CTAs may update the same now
            history.note(at)
            history.check(at)
        else:
            history.check(at)
            history.note(at)

    def update(self, place: Any, access: Effect, instruction: Instruction, values: list[Array]) -> Array:
        """Lanes take turns to update each element of a vector. Returns the old values, (elements, warps, lanes)."""
        acting = np.arange(place.index.size) if place.active is None else np.nonzero(place.active.reshape(-1))[0]
        order, count = acting[in_turn(acting, place.turns)], access.words
        view, first = self.data.view(instruction.operand_types[1].numpy), place.index * count
        old = [apply_in_turn(instruction, view, first + i, values[i::count], order) for i in range(count)]
        return np.stack(old)


class OwnedMemory(Memory):
    """Bytes of all who have some of their own, ``size`` each, ``stride`` apart."""

    def __init__(self, owners: int, size: int, stride: int, report: Reporter, history: Any) -> None:
        super().__init__(np.zeros(owners * stride, np.uint8), history)
        self.size, self.stride, self.report = size, stride, report

    def refuse(self, frame: Frame, op: Op, place: Array, bad: Array, outside: Array, size: int, whose: str) -> Array:
        """Report active lanes whose ``place`` is bad: ``outside`` of what they have, or else not aligned.

        Returns the lanes (warps, 32) that may go on.
        """
        wrong, outside = frame.acting(bad), frame.full(outside)
        name, report = f"{op.instruction.mnemonic} of {size} bytes at byte {{}}", self.report.of_lanes
        report("bounds", frame, op.where, wrong & outside, f"{name} is outside {whose}", place, address=place)
        name += " is not aligned to its size: correct the address"
        report("misaligned", frame, op.where, wrong & ~outside, name, place, address=place)
        return frame.acting(~bad)


class LocalAccess(MemoryAccess):
    """An access to local memory."""

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count nothing: caches hold local memory."""


class LocalMemory(OwnedMemory):
    """The local memory of all threads of a batch, ``size`` bytes each. What was never written there is poison."""

    def __init__(self, rows: int, size: int, report: Reporter) -> None:
        super().__init__(rows * 32, size, -(-size // MOST_BYTES) * MOST_BYTES, report, None)
        self.shadow = np.full(self.data.shape, 0xFF, np.uint8)

    def place(self, frame: Frame, address: Array, op: Op, access: Effect) -> LocalAccess:
        """Where an access goes; addresses elsewhere, or not aligned, are found and left out."""
        place, size = frame.full(displaced(address, access.offset)).astype(np.int64) - LOCAL_BASE, access.bytes
        outside, active = (place < 0) | (place + size > self.size), frame.active
        bad = outside | (place % size != 0)
        if bad.any():
            whose = f"the thread's {self.size} bytes of local memory: correct the address"
            active, place = self.refuse(frame, op, place, bad, outside, size, whose), np.where(bad, 0, place)
        thread = frame.rows[:, None] * 32 + np.arange(32)
        index = (thread * self.stride + place) // size
        return LocalAccess(op=op, what=MODES[access.mode], rows=(frame.rows,), index=index, active=active)

    def thread_bytes(self, row: int, lane: int, address: int, size: int, op: Op) -> bytes:
        """Bytes of one thread, for what reads them outside of the kernel; zeros where it has none."""
        place, start = address - LOCAL_BASE, (row * 32 + lane) * self.stride
        if not 0 <= place <= self.size - size:
            message = f"{op.instruction.mnemonic} reads byte {place} of the thread's {self.size} bytes of local memory"
            self.report.add("bounds", op.where, f"{message}: pass an argument for each directive", row, lane)
            return bytes(size)
        where = slice(start + place, start + place + size)
        if self.shadow is not None and self.shadow[where].any():
            message = f"{op.instruction.mnemonic} reads local memory that was never written: write it before"
            self.report.add("uninitialised", op.where, message, row, lane)
        return self.data[where].tobytes()

    def load(self, place: LocalAccess, access: Effect) -> tuple[Array, Array | None, Origin | None]:
        """The words read, (warps, 32, words), and their shadow if any of it is poison."""
        assert self.shadow is not None
        data, shadow = (self.words(table, place, access) for table in (self.data, self.shadow))
        return data, shadow if shadow.any() else None, (place.op.where, "local memory that was never written")
