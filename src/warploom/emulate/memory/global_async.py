"""Global memory as the TMA sees it, through the async proxy.

A load reads at any time until it lands, and whoever has waited for its mbarrier's phase knows that it has. A store is
whole when its thread has waited for its group; that its shared memory has been read says nothing about that. A
reduction is atomic, element by element: others may update the same elements meanwhile, but nobody may read or write
them until its thread has waited for its group and has told them. What ordinary instructions of the kernel wrote must
have been fenced (``fence.proxy.async``) before the TMA touches it.

Source: PTX ISA, "Async proxy", ``cp.async.bulk.wait_group``, ``cp.reduce.async.bulk``, ``fence.proxy``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import f32
from warploom.emulate.memory.access import Access
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.emulate.memory.global_history import FLYING, GlobalHistory, Mode
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.order.known import LOADS, ORDER, REDUCTIONS, Singles
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
        """The bytes that the copy moves."""
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
    """The 16 bytes that a thread stores asynchronously."""

    words: Array

    @property
    def box_bytes(self) -> int:
        """The bytes that the store moves."""
        return self.words.nbytes

    def load(self, _at: tuple[int, ...]) -> Array:
        """The bytes, (1, 16)."""
        return self.words.view(np.uint8).reshape(1, -1)


@dataclass(frozen=True, slots=True)
class Box:
    """What exists of a box in an array that the kernel writes, and the access that its copy makes."""

    history: GlobalHistory
    access: Access


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
        history, buffer = self.memory.history(tensor.buffer), tensor.buffer
        offsets = tensor.element_offsets(at) if history is not None else np.zeros(0, np.int64)
        if history is None or buffer is None or not offsets.size:
            return None
        per_element = max(1, tensor.element_bytes // self.memory.granule)
        cells = np.unique(history.cells(buffer, offsets)[:, None] + np.arange(per_element))
        mine = history.access(op, mode, buffer, cells, np.full(cells.shape, row), np.full(cells.shape, lane))
        history.check(mine)
        history.check_proxy(mine)
        if mode == "write":
            history.begin(mine)
        if mode == "atomic":  # in a name that only a wait for the group makes known
            mine.name, mine.strong = REDUCTIONS - (32 * (self.memory.clocks.first + row) + lane), True
            history.note(mine)
        return Box(history, mine)

    def end_read(self, box: Box, mbarrier: int) -> Singles:
        """A load lands on an mbarrier (its number in the grid). Returns what a wait for its phase makes known."""
        history, mine = box.history, box.access
        stamps = history.wrote[mine.cells]
        me = np.nonzero((stamps > mine.stamp) & (stamps < FLYING))[0]
        history.races(mine, me, history.writer[mine.cells[me]], stamps[me], "wrote")
        landed = replace(mine, name=LOADS - mbarrier, stamp=self.memory.clocks.stamp(mine.op))
        history.note(landed)
        return {(ORDER, landed.name, 0): landed.stamp}

    def end_write(self, box: Box) -> tuple[int, int] | None:
        """The thread of a store has waited for it, or the kernel has ended. Returns a name and the stamp that
        is known of it from now on, if the store has one."""
        if box.access.name:
            return box.access.name, box.access.stamp
        box.history.land(box.access)
        return None
