"""Tensor maps that a kernel makes in global memory: when a copy may use them, and what they say.

The generic proxy writes a map; the TMA reads it through a proxy of its own. A thread that knows of the writes must
publish them (``tensormap.cp_fenceproxy``, or ``fence.proxy.tensormap::generic.release``), one that knows of that must
take them in (``fence.proxy.tensormap::generic.acquire`` of the map's address), and whoever starts a copy must know of
that one. A map counts as read when the copy starts.

Source: PTX ISA, "Tensor-Map modification", "membar / fence", "Proxy-preserved base causality order".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.emulate.control.frames import Actor, Execution
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer
from warploom.emulate.memory.global_history import FLYING, GlobalHistory
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.order.clocks import BITS, LANES
from warploom.emulate.order.planes import FAR, ORDER
from warploom.emulate.transactions.tensor_maps import TensorMapArgument
from warploom.isa.async_copy import MAP_BYTES, decoded
from warploom.isa.effects import TensorMapFence

Array = NDArray[Any]
_ALIGNMENT = 64  # of a tensor map


@dataclass(frozen=True, slots=True)
class _Release:
    """A lane has published what was ``known`` to it."""

    row: int
    lane: int
    stamp: int
    known: Array


class MadeMaps:
    """The maps of one batch."""

    def __init__(self, memory: GlobalMemory, report: Reporter) -> None:
        self.memory, self.report, self.clocks = memory, report, memory.clocks
        self.published: list[_Release] = []
        self._known: dict[bytes, TensorMapArgument] = {}

    # -- fences --------------------------------------------------------------------------------------------------

    def fence(self, call: Execution[TensorMapFence]) -> None:
        """One of the halves."""
        if call.effect.acquired is None:
            self._release(call)
        else:
            self._acquire(call)

    def _release(self, call: Execution[TensorMapFence]) -> None:
        """The active lanes publish what they have written."""
        stamp = self.clocks.stamp(call.op)
        for by, _ in call.actors():
            for lane in by.each:
                known = self.clocks.release(by.row, [lane])
                self.published.append(_Release(by.row, lane, stamp, known))

    def _acquire(self, call: Execution[TensorMapFence]) -> None:
        """The active lanes take in the maps at their addresses, as far as they know that they were published."""
        for by, (place,) in call.actors("acquired"):
            stamp, found, history = self.clocks.stamp(call.op), self._read(place, by), self.memory.history
            if found is not None and history is not None and self._published(history, found.cells, by):
                self.clocks.acquire(by.row, by.lanes, self.clocks.ended({self._acquires(place): stamp}))

    def _published(self, history: GlobalHistory, cells: Array, by: Actor) -> bool:
        """Whether each of some lanes knows that the last writes of cells were published."""
        for agent, record in set(zip(history.writer[cells].tolist(), history.wrote[cells].tolist(), strict=True)):
            written, written_by = record >> BITS, record & LANES - 1
            if written and not any(
                self.clocks.has(release.known, ORDER, self._column(agent, release.row), written_by, written)
                and self.clocks.lanes_know(
                    by.row, by.lanes, int(self.clocks.columns[release.row]), release.lane, release.stamp, FAR
                )
                for release in reversed(self.published)
            ):
                return False
        return True

    def _column(self, agent: int, row: int) -> int:
        return int(self.clocks.column_of(np.array(agent), row))

    def _acquires(self, address: int) -> int:
        """The column in which acquires of the map at an address are known."""
        return self.clocks.queue("map", 0, address)

    # -- use -----------------------------------------------------------------------------------------------------

    def find(self, address: int, by: Actor) -> TensorMapArgument | None:
        """The map at an address, for a copy that a lane starts; None, and a finding, if there is none."""
        place = self._place(address)
        if place is None:
            self.report.by("bounds", by, f"{by.name}: address {address:#x} is no tensor map of the kernel's")
            return None
        buffer, offset = place
        if self.memory.checks:
            self._check(address, by)
        data = buffer.data[offset : offset + MAP_BYTES].tobytes()
        if data not in self._known:
            found = self._argument(data)
            if isinstance(found, str):
                message = f"{by.name}: at byte {offset} of {buffer.name} is no tensor map that can be used: {found}"
                self.report.by("layout", by, message, address=offset)
                return None
            self._known[data] = found
        return self._known[data]

    def _place(self, address: int) -> tuple[GlobalBuffer, int] | None:
        """Where a map lies; None if nowhere, or askew."""
        buffer = self.memory.buffers.get(address >> ADDRESS_BITS)
        if buffer is None or address % _ALIGNMENT or not 0 <= address - buffer.start <= buffer.data.size - MAP_BYTES:
            return None
        return buffer, address - buffer.start

    def _read(self, address: int, by: Actor) -> MemoryAccess | None:
        """A read of a map by some lanes; None where the kernel does not write its memory."""
        place = self._place(address)
        if place is None:
            return None
        offsets = place[1] + np.arange(0, MAP_BYTES, self.memory.granule)
        return self.memory.reach(by.op, "read", place[0], offsets, by.row, by.lane)

    def _check(self, address: int, by: Actor) -> None:
        """The map must be there for the copy: ordered before it, and fenced against the proxy that reads it."""
        access, history = self._read(address, by), self.memory.history
        if access is None or history is None:
            return
        history.check(access)
        history.note(access)
        buffer, written = self.memory.buffers[address >> ADDRESS_BITS], int(history.wrote[access.cells].max() >> BITS)
        written %= FLYING
        if written and not self.clocks.lanes_know(by.row, by.lanes, self._acquires(address), 0, written + 1):
            message = (
                f"{by.name} reads its tensor map, at byte {address - buffer.start} of {buffer.name}, "
                f"which {self.report.name_of(written)} wrote through the generic proxy: publish it after that "
                "(tensormap.cp_fenceproxy, or fence.proxy.tensormap::generic.release), then take it in before the copy "
                "(fence.proxy.tensormap::generic.acquire of its address)"
            )
            other = self.report.line_of(written)
            self.report.by("proxy", by, message, other=other, address=address - buffer.start)

    def _argument(self, data: bytes) -> TensorMapArgument | str:
        """The tensor map that 128 bytes encode, or the reason why they encode none."""
        try:
            address, spec = decoded(data)
        except LayoutError as error:
            return str(error)
        buffer = self.memory.buffers.get(address >> ADDRESS_BITS)
        offset = 0 if buffer is None else address - buffer.start
        if buffer is None or not 0 <= offset < buffer.data.size:
            return f"the tensor's address {address:#x} is in no array"
        part = GlobalBuffer(
            buffer.name,
            buffer.data[offset:],
            buffer.address,
            address % 256,
            buffer.real + offset,
            buffer.writable,
        )
        found = TensorMapArgument(part.data, spec, part)
        return found.refusal or found
