"""What shared memory finds, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import Reporter, tile_at
from warploom.emulate.memory.access import Access
from warploom.ir.statements import Op, SourceLine
from warploom.isa.effects import BulkTensorCopy

Array = NDArray[Any]


def _how_to_wait(started: Op) -> str:
    bulk = any(isinstance(e, BulkTensorCopy) for e in started.instruction.effects())
    return "wait for the phase of its mbarrier (by its parity)" if bulk else "commit and wait for its group"


def _place(byte: int, *ops: Op) -> str:
    return f"{byte}{tile_at(int(byte), *ops) or ' of shared memory'}"


class SharedReports:
    """Findings about shared memory, one for each cause that an access meets."""

    def __init__(self, report: Reporter) -> None:
        self._report, self._add, self.cta = report, report.add, report.cta

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

    def races(self, mine: Access, agents: Array, stamps: Array, addresses: Array, past: str) -> None:
        """Accesses of others (agents, stamps), to the same cells, that are not ordered with an access."""
        self._report.races(mine.op, mine.what, mine.rows[0], mine.lanes, agents, stamps, addresses, past)

    def unfenced(self, mine: Access, stamp: int, addresses: Array) -> None:
        """A transaction on what an ordinary instruction wrote at a stamp."""
        where = int(addresses[0])
        message = (
            f"{mine.op.instruction.mnemonic} {mine.what}s byte {where} of shared memory through the async proxy, which "
            f"{self._report.name_of(stamp)} wrote through the generic proxy: fence (fence.proxy.async) in the "
            "writing threads before they signal"
        )
        self._tell("proxy", mine, message, where, self._report.line_of(stamp))

    def unset(self, mine: Access, addresses: Array) -> None:
        """An atomic update, or a transaction's read, of bytes that nobody has written."""
        name, where = mine.op.instruction.mnemonic, int(addresses[0])
        if mine.proxy:
            message = (
                f"{name} reads byte {where} of shared memory, which nobody has written: write it, or wait for its "
            )
            message += "data, before"
        else:
            message = (
                f"{name} updates byte {_place(where, mine.op)}, never written: initialise it, and order that before"
            )
        self._tell("uninitialised", mine, message, where)

    def overwritten(self, op: Op, other: Op, row: int, lane: int, count: int, where: int) -> None:
        """A transaction that may still read what another operation writes."""
        message = (
            f"{op.instruction.mnemonic} may still read byte {where} of shared memory when {other.instruction.mnemonic} "
            "overwrites it: wait for its group before the memory is given away"
        )
        self._add("race", op.where, message, row, lane, other=other.where, count=count, address=where)

    def _tell(self, kind: Kind, mine: Access, message: str, where: int, other: SourceLine | None = None) -> None:
        row, lane = int(mine.rows[0][0]), int(mine.lanes[0])
        self._add(kind, mine.op.where, message, row, lane, other=other, count=mine.cells.size, address=where)

    def in_flight(self, mine: Access, numbers: Array, addresses: Array, copies: list[Op | None]) -> None:
        """One finding for each of the ``copies`` that is still writing at these addresses, and for mbarriers."""
        for number in np.unique(numbers).tolist():
            these = numbers == number
            where, part = int(addresses[these][0]), mine[these]
            name, started = mine.op.instruction.mnemonic, copies[number]
            if started is None:
                message = (
                    f"{name} {mine.what}s byte {where} of shared memory, where an mbarrier is: only its own "
                    "instructions may touch it; correct the address"
                )
                self._tell("mbarrier", part, message, where)
                continue
            verb = "reads" if mine.what == "read" else "overwrites"
            message = (
                f"{name} {verb} byte {_place(where, mine.op, started)} while {started.instruction.mnemonic} is still "
                f"copying there: {_how_to_wait(started)} first"
            )
            self._tell("in_flight", part, message, where, started.where)
