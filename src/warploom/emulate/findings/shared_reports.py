"""What shared memory finds, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import Reporter, tile_at
from warploom.ir.statements import Op
from warploom.isa.effects import BulkTensorCopy

Array = NDArray[Any]

MBARRIER = -1
"""In place of the copy that is writing a cell: it belongs to an mbarrier."""


def _how_to_wait(started: Op) -> str:
    bulk = any(isinstance(e, BulkTensorCopy) for e in started.instruction.effects())
    return "wait for the phase of its mbarrier (by its parity)" if bulk else "commit and wait for its group"


def _place(byte: int, *ops: Op) -> str:
    return f"{byte}{tile_at(int(byte), *ops) or ' of shared memory'}"


class SharedReports:
    """Findings about shared memory, one for each cause that an access meets."""

    def __init__(self, report: Reporter) -> None:
        self.first, self.races, self._add, self.cta = report.first, report.races, report.add, report.cta

    def refused(
        self, kind: Kind, op: Op, who: tuple[int, int, int], byte: int, size: int, extent: tuple[int, int], total: int
    ) -> None:
        """An address outside of its tile (or of all shared memory), or not aligned; ``who``: row, lane, how many."""
        name, tile, (first, end) = op.instruction.mnemonic, op.tile(0), extent
        if kind == "misaligned":
            text = f"{name} at byte {byte} of shared memory is not aligned to its {size} bytes: correct the address"
        elif tile is None:
            text = f"{name} of {size} bytes at byte {byte} is outside the {total} bytes of shared memory: "
            text += "correct the address, or ask for more shared memory"
        else:
            text = f"{name} of {size} bytes at byte {byte} of shared memory is outside the tile {tile.name} (bytes "
            text += f"{first} to {end - 1}): correct the row, column or stage"
        row, lane, count = who
        self._add(kind, op.where, text, row, lane, count=count, address=byte)

    def gone(self, op: Op, row: int, lane: int, owner: int) -> None:
        """An access to the memory of another CTA (of the warp ``owner``) that may have exited."""
        message = (
            f"{op.instruction.mnemonic} may reach the shared memory of {self.cta(owner)} when that CTA has exited: let "
            "the cluster meet (barrier.cluster) at the end"
        )
        self._add("cluster", op.where, message, row, lane)

    def absent(self, op: Op, row: int, lane: int, owner: int) -> None:
        """An access to the memory of another CTA (of the warp ``owner``) that may not have begun."""
        message = (
            f"{op.instruction.mnemonic} may reach the shared memory of {self.cta(owner)} before that CTA has begun: "
            "let the cluster meet (barrier.cluster) before"
        )
        self._add("cluster", op.where, message, row, lane)

    def clash(self, op: Op, rows: Array, lanes: Array, addresses: Array) -> None:
        """Threads that write different values to one byte at once."""
        message = (
            f"several threads write byte {_place(addresses[0], op)} in one execution of "
            f"{op.instruction.mnemonic}, and nothing says whose value stays: give each thread its own address"
        )
        self._add(
            "race",
            op.where,
            message,
            int(rows[0]),
            int(lanes[0]),
            other=op.where,
            count=rows.size,
            address=int(addresses[0]),
        )

    def unset(self, op: Op, rows: Array, lanes: Array, addresses: Array) -> None:
        """An atomic update of bytes that nobody has written."""
        message = (
            f"{op.instruction.mnemonic} updates byte {_place(addresses[0], op)}, never written: initialise "
            "it, and order that before"
        )
        self._add(
            "uninitialised", op.where, message, int(rows[0]), int(lanes[0]), count=rows.size, address=int(addresses[0])
        )

    def in_flight(
        self,
        op: Op,
        what: str,
        rows: Array,
        lanes: Array,
        numbers: Array,
        addresses: Array,
        copies: list[tuple[Op, int]],
    ) -> None:
        """One finding for each of the ``copies`` that is still writing at these addresses, and for mbarriers.

        ``numbers`` are 1 + the index of the copy, or MBARRIER.
        """
        for number in np.unique(numbers):
            these = numbers == number
            i = int(np.argmax(these))
            where = int(rows[i]), int(lanes[i])
            if number == MBARRIER:
                message = (
                    f"{op.instruction.mnemonic} {what}s byte {int(addresses[i])} of shared memory, where an mbarrier "
                    "is: only its own instructions may touch it; correct the address"
                )
                self._add("mbarrier", op.where, message, *where, count=int(these.sum()), address=int(addresses[i]))
                continue
            started = copies[int(number) - 1][0]
            verb = "reads" if what == "read" else "overwrites"
            message = (
                f"{op.instruction.mnemonic} {verb} byte {_place(addresses[i], op, started)} while "
                f"{started.instruction.mnemonic} is still copying there: {_how_to_wait(started)} first"
            )
            self._add(
                "in_flight",
                op.where,
                message,
                *where,
                other=started.where,
                count=int(these.sum()),
                address=int(addresses[i]),
            )
