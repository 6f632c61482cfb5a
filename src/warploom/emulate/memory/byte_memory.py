"""Memories that hold bytes at offsets, and local memory: bytes of each thread's own, which nobody else sees."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, displaced
from warploom.emulate.findings.report import MemoryReports, Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.access import MemoryAccess
from warploom.ir.statements import Op
from warploom.isa.effects import Access as Effect
from warploom.isa.memory import MOST_BYTES

Array = NDArray[Any]
LOCAL_BASE = 16  # 0 is no address


class ByteMemory:
    """Bytes of all who have some of their own, ``size`` each, ``stride`` apart; ``shadow`` says which are poison."""

    def __init__(self, owners: int, size: int, stride: int, report: MemoryReports | Reporter) -> None:
        self.size, self.stride, self.report = size, stride, report
        self.data = np.zeros(owners * stride, np.uint8)
        self.shadow: Array | None = None  # allocated when poison is first stored

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


class LocalAccess(MemoryAccess):
    """An access to local memory."""

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count nothing: caches hold local memory."""


class LocalMemory(ByteMemory):
    """The local memory of all threads of a batch, ``size`` bytes each. What was never written there is poison."""

    def __init__(self, rows: int, size: int, report: Reporter) -> None:
        super().__init__(rows * 32, size, -(-size // MOST_BYTES) * MOST_BYTES, report)
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
        return LocalAccess(op=op, what=access.mode, rows=(frame.rows,), index=index, active=active)

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

    def store(
        self, place: LocalAccess, access: Effect, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write words, (warps, 32, words)."""
        acting = ... if place.active is None else place.active
        self.put(place.units, data[acting], None if shadow is None else shadow[acting])
