"""Local memory: bytes of each thread's own, which nobody else sees. What was never written there is poison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, displaced
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.ir.statements import Op
from warploom.isa.effects import Access
from warploom.isa.memory import MOST_BYTES

Array = NDArray[Any]
LOCAL_BASE = 16  # 0 is no address


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """Numbers of the units of an access, (warps, 32), and the lanes that make it (None: all)."""

    op: Op
    index: Array
    active: Array | None

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count nothing: caches hold local memory."""


class LocalMemory:
    """The local memory of all threads of a batch, ``size`` bytes each."""

    def __init__(self, rows: int, size: int, report: Reporter) -> None:
        self.size, self.report = size, report
        self.stride = -(-size // MOST_BYTES) * MOST_BYTES
        self.data = np.zeros(rows * 32 * self.stride, np.uint8)
        self.shadow = np.full(self.data.shape, 0xFF, np.uint8)

    def place(self, frame: Frame, address: Array, op: Op, access: Access) -> LocalPlace:
        """Where an access goes; addresses elsewhere, or not aligned, are found and left out."""
        place, size = frame.full(displaced(address, access.offset)).astype(np.int64) - LOCAL_BASE, access.bytes
        bad = (place < 0) | (place + size > self.size) | (place % size != 0)
        active = frame.active
        if bad.any():
            wrong = bad if active is None else bad & active
            if wrong.any():
                row, lane = (int(x[0]) for x in np.nonzero(wrong))
                at = int(place[row, lane])
                kind = "misaligned" if 0 <= at <= self.size - size else "bounds"
                text = f"{op.instruction.mnemonic} of {size} bytes at byte {at} of the thread's {self.size} bytes of "
                text += f"local memory{' is not aligned' if kind == 'misaligned' else ''}: correct the address"
                self.report.add(kind, op.where, text, int(frame.flat[row]), lane, count=int(wrong.sum()), address=at)
            active = ~bad if active is None else active & ~bad
            place = np.where(bad, 0, place)
        thread = frame.flat[:, None] * 32 + np.arange(32)
        return LocalPlace(op, (thread * self.stride + place) // size, active)

    def thread_bytes(self, row: int, lane: int, address: int, size: int, op: Op) -> bytes:
        """Bytes of one thread, for what reads them outside of the kernel; zeros where it has none."""
        place, start = address - LOCAL_BASE, (row * 32 + lane) * self.stride
        if not 0 <= place <= self.size - size:
            message = f"{op.instruction.mnemonic} reads byte {place} of the thread's {self.size} bytes of local memory"
            self.report.add("bounds", op.where, f"{message}: pass an argument for each directive", row, lane)
            return bytes(size)
        where = slice(start + place, start + place + size)
        if self.shadow[where].any():
            message = f"{op.instruction.mnemonic} reads local memory that was never written: write it before"
            self.report.add("uninitialised", op.where, message, row, lane)
        return self.data[where].tobytes()

    def load(self, place: LocalPlace, access: Access) -> tuple[Array, Array | None, Origin | None]:
        """The words read, (warps, 32, words), and their shadow if any of it is poison."""
        word, active = np.dtype(f"u{access.bytes // access.words}"), place.active
        data, shadow = (x.view(word).reshape(-1, access.words)[place.index] for x in (self.data, self.shadow))
        if active is not None:
            data[~active], shadow[~active] = 0, 0
        if not shadow.any():
            return data, None, None
        return data, shadow, (place.op.where, "local memory that was never written")

    def store(
        self, place: LocalPlace, access: Access, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write words, (warps, 32, words)."""
        where = slice(None) if place.active is None else place.active
        for table, values in ((self.data, data), (self.shadow, np.zeros_like(data) if shadow is None else shadow)):
            table.view(data.dtype).reshape(-1, data.shape[2])[place.index[where]] = values[where]
