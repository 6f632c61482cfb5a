"""Tensor maps that a kernel makes in global memory: when a copy may use them, and what they say.

The generic proxy writes a map; the TMA reads it through a proxy of its own. A thread that knows of the writes must
publish them (``tensormap.cp_fenceproxy``, or ``fence.proxy.tensormap::generic.release``), one that knows of that must
take them in (``fence.proxy.tensormap::generic.acquire`` of the map's address), and whoever starts a copy must know of
that one. A map is read until the copy has ended, or a store has read its shared memory.

Source: PTX ISA, "Tensor-Map modification", "membar / fence", "Proxy-preserved base causality order".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.emulate.control.frames import Actor, Execution
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer
from warploom.emulate.memory.global_history import FLYING
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.order.clocks import BITS, LANES
from warploom.emulate.order.planes import MAPS
from warploom.emulate.transactions.tensor_maps import TensorMapArgument
from warploom.isa.async_copy import MAP_BYTES, decoded
from warploom.isa.effects import TensorMapFence

Array = NDArray[Any]
_ALIGNMENT = 64  # of a tensor map


class MadeMaps:
    """The maps of one batch."""

    def __init__(self, memory: GlobalMemory, report: Reporter) -> None:
        self.memory, self.report, self.clocks = memory, report, memory.clocks
        self._known: dict[bytes, TensorMapArgument] = {}

    # -- fences --------------------------------------------------------------------------------------------------

    def fence(self, call: Execution[TensorMapFence]) -> None:
        """The active lanes publish what they know of, or take in the maps at their addresses, as far as published."""
        stamp = self.clocks.stamp(call.op)
        if call.effect.acquired is None:
            for by, _ in call.actors():
                self.clocks.proxy_fence(by.row, by.lanes, MAPS)
            return
        for by, (place,) in call.actors("acquired"):
            if self._is_published(place, by):
                self.clocks.acquire(by.row, by.lanes, self.clocks.ended({self._acquires(place): stamp}))

    def _is_published(self, address: int, by: Actor) -> bool:
        """Whether each of some lanes knows that the last writes of a map's cells were published."""
        access, history = self._read(address, by), self.memory.history
        if access is None or history is None:
            return False
        columns = self.clocks.column_of(history.writer[access.cells], by.row)
        writes = set(zip(columns.tolist(), history.wrote[access.cells].tolist(), strict=True))
        know = partial(self.clocks.lanes_know, by.row, by.lanes, plane=MAPS)
        begun = self.clocks.earlier.begun
        return all(r >> BITS <= begun or know(column, r & LANES - 1, r >> BITS) for column, r in writes)

    def _acquires(self, address: int) -> int:
        """The column in which acquires of the map at an address are known."""
        return self.clocks.queue("map", 0, address)

    # -- use -----------------------------------------------------------------------------------------------------

    def find(self, address: int, by: Actor) -> tuple[TensorMapArgument | None, MemoryAccess | None]:
        """The map at an address, for a copy that a lane starts, and its read; None, and a finding, if there is none."""
        place, read = self._place(address), None
        if place is None:
            self.report.by("bounds", by, f"{by.name}: address {address:#x} is no tensor map of the kernel's")
            return None, None
        buffer, offset = place
        if self.memory.checks:
            read = self._check(address, by)
        data = buffer.data[offset : offset + MAP_BYTES].tobytes()
        if data not in self._known:
            found = self._argument(data)
            if isinstance(found, str):
                message = f"{by.name}: at byte {offset} of {buffer.name} is no tensor map that can be used: {found}"
                self.report.by("layout", by, message, address=offset)
                return None, None
            self._known[data] = found
        return self._known[data], read

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

    def _check(self, address: int, by: Actor) -> MemoryAccess | None:
        """The map must be there for the copy: ordered before it, and fenced against the proxy that reads it."""
        access, history = self._read(address, by), self.memory.history
        if access is None or history is None:
            return None
        history.check(access)
        buffer, written = self.memory.buffers[address >> ADDRESS_BITS], int(history.wrote[access.cells].max() >> BITS)
        written %= FLYING
        taken = partial(self.clocks.lanes_know, by.row, by.lanes, self._acquires(address), 0)
        if written > self.clocks.earlier.begun and not taken(written + 1):
            message = (
                f"{by.name} reads its tensor map, at byte {address - buffer.start} of {buffer.name}, "
                f"which {self.report.name_of(written)} wrote through the generic proxy: publish it after that "
                "(tensormap.cp_fenceproxy, or fence.proxy.tensormap::generic.release), then take it in before the copy "
                "(fence.proxy.tensormap::generic.acquire of its address)"
            )
            other = self.report.line_of(written)
            self.report.by("proxy", by, message, other=other, address=address - buffer.start)
        return access

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
