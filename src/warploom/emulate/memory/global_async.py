"""Global memory as the TMA sees it, through the async proxy.

A load reads at any time until it lands, and whoever has waited for its mbarrier's phase knows that it has. A store is
whole when its thread has waited for its group; that its shared memory has been read says nothing about that. A
reduction is atomic, element by element: others may update the same elements meanwhile, but nobody may read or write
them until its thread has waited for its group and has told them. What ordinary instructions of the kernel wrote must
have been fenced (``fence.proxy.async``) before the TMA touches it.

Source: PTX ISA, "Async proxy", ``cp.async.bulk.wait_group``, ``cp.reduce.async.bulk``, ``fence.proxy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import f32
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.emulate.memory.global_memory import Event, GlobalMemory, Mode, Record
from warploom.emulate.order.known import FENCED_GLOBALLY, LOADS, ORDER, REDUCTIONS, Singles
from warploom.emulate.transactions.tensor_maps import TensorMapArgument
from warploom.ir.statements import Op

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Span:
    """``size`` bytes of a buffer from ``first`` on; ``adds``: what is stored is added to the f32 there."""

    buffer: GlobalBuffer
    first: int
    size: int
    adds: bool = False

    @property
    def box_bytes(self) -> int:
        """What a copy moves."""
        return self.size

    @property
    def element_bytes(self) -> int:
        """Of what one access reaches."""
        return f32.bytes

    def element_offsets(self, _at: tuple[int, ...]) -> Array:
        """Byte offsets in the buffer of the elements."""
        return np.arange(self.first, self.first + self.size, f32.bytes)

    def load(self, _at: tuple[int, ...]) -> Array:
        """The bytes, (chunks, 16)."""
        return self.buffer.data[self.first : self.first + self.size].reshape(-1, 16)

    def store(self, _at: tuple[int, ...], chunks: Array) -> None:
        """Write the bytes, or add them."""
        target, source = self.buffer.data[self.first : self.first + self.size], chunks.reshape(-1)
        if self.adds:
            target.view(np.float32)[:] += source.view(np.float32)
        else:
            target[:] = source


@dataclass(frozen=True, eq=False)
class Words:
    """What a thread stores asynchronously: 16 bytes."""

    words: Array

    @property
    def box_bytes(self) -> int:
        """What the store moves."""
        return self.words.nbytes

    def load(self, _at: tuple[int, ...]) -> Array:
        """The bytes, (1, 16)."""
        return self.words.view(np.uint8).reshape(1, -1)


@dataclass(frozen=True, slots=True)
class Box:
    """What exists of a box in an array that the kernel writes, and the access that its copy makes."""

    record: Record
    access: Event


class AsyncGlobal:
    """Checks and records of one batch; ``memory`` is the launch's."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory

    def begin(
        self, tensor: TensorMapArgument | Span, at: tuple[int, ...], mode: Mode, row: int, lane: int, op: Op
    ) -> Box | None:
        """A lane starts a load ("read"), store ("write") or reduction ("atomic"); None where the kernel writes nothing.

        Until a store's group has been waited for, nobody may touch its cells.
        """
        memory, buffer, size = self.memory, tensor.buffer, tensor.element_bytes
        assert buffer is not None
        record = memory.records.get(buffer.region) if memory.checks and buffer.region is not None else None
        offsets = tensor.element_offsets(at) if record is not None else np.zeros(0, np.int64)
        if record is None or not offsets.size:
            return None
        cells = np.unique((offsets + (buffer.real - record.region.real)) // memory.granule)
        if size > memory.granule:
            cells = np.unique(cells[:, None] + np.arange(size // memory.granule))
        access = memory.event(op, mode, buffer, cells, np.full(cells.shape, row), np.full(cells.shape, lane))
        memory.check(record, access)
        self._check_proxy(record, access)
        if mode == "write":
            record.flying[cells] = access.stamp
        if mode == "atomic":  # in the name of somebody whom only a wait for the group makes known
            access.agents = np.full(cells.shape, _adder(access))
            access.lanes = np.zeros_like(access.lanes)
            access.strong = True
            memory.note(record, access)
        return Box(record, access)

    def _check_proxy(self, record: Record, mine: Event) -> None:
        """What ordinary instructions wrote must be fenced against the async proxy."""
        cells, report = mine.cells[record.generic[mine.cells]], self.memory.report
        agents, lanes, stamps = record.write_agent[cells], record.write_lane[cells], record.write_stamp[cells]
        updates = None if mine.mode == "atomic" else record.updates.of(mine.cells, lambda _: False)
        if updates is not None:
            ordinary = updates[1][updates[1].agents >= 0]
            cells, agents = np.concatenate([cells, ordinary.cells]), np.concatenate([agents, ordinary.agents])
            lanes, stamps = np.concatenate([lanes, ordinary.lanes]), np.concatenate([stamps, ordinary.stamps])
        if not cells.size:
            return
        row, lane = int(mine.rows[0]), int(mine.lanes[0])
        clocks, rows, mine_lanes = self.memory.clocks, np.full(cells.shape, row), np.full(cells.shape, lane)
        columns = clocks.column_of(agents, row)
        fine = clocks.ordered(rows, mine_lanes, False, columns, lanes, stamps, plane=FENCED_GLOBALLY)
        for stamp in np.unique(stamps[~fine]).tolist():
            these = np.nonzero(~fine & (stamps == stamp))[0]
            where = self.memory.byte(mine.buffer, cells[these[0]])
            message = (
                f"{mine.op.instruction.mnemonic} {mine.mode}s byte {where} of {mine.buffer.name} through the async "
                f"proxy, which {report.name_of(stamp)} wrote through the generic proxy: fence "
                "(k.fence_async('global')) in the writing threads before they signal"
            )
            other = report.line_of(stamp)
            report.add("proxy", mine.op.where, message, row, lane, other=other, count=these.size, address=where)

    def end_read(self, box: Box, mbarrier: int) -> Singles:
        """A load lands on an mbarrier (its number in the grid). Returns what a wait for its phase makes known."""
        memory, record, mine = self.memory, box.record, box.access
        stamps = record.write_stamp[mine.cells]
        everything = np.arange(mine.cells.size)
        memory.conflicts(mine, everything, stamps > mine.stamp, record.write_agent[mine.cells], stamps, "wrote")
        agent, nobody = LOADS - mbarrier, np.zeros(mine.cells.shape, np.int64)
        landed = memory.event(mine.op, "read", mine.buffer, mine.cells, mine.rows, nobody)
        landed.agents = nobody + agent
        memory.note(record, landed)
        return {(ORDER, agent, 0): landed.stamp}

    def end_write(self, box: Box) -> tuple[int, int] | None:
        """The thread of a store has waited for it, or the kernel has ended. Returns a name and the stamp that
        is known of it from now on, if the store has one."""
        record, mine = box.record, box.access
        if mine.mode == "atomic":
            return int(mine.agents[0]), mine.stamp
        still = record.flying[mine.cells] == mine.stamp
        cells = mine.cells[still]
        record.flying[cells] = 0
        record.write_stamp[cells] = self.memory.clocks.stamp(mine.op)
        record.write_agent[cells], record.write_lane[cells] = mine.agents[still], mine.lanes[still]
        record.generic[cells] = False
        record.reads.forget(cells)
        record.updates.forget(cells)
        return None


def _adder(access: Event) -> int:
    """The agent that the reductions of one thread are recorded for."""
    row, lane = int(access.agents[0]), int(access.lanes[0])
    return REDUCTIONS - (32 * row + lane)
