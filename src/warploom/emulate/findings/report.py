"""Turns what the memories and barriers notice into findings with one clear message each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.findings import Finding, Findings, Kind
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import LOADS, REDUCTIONS
from warploom.ir.statements import NOWHERE, Op, SourceLine, Value
from warploom.isa.effects import Access

Array = NDArray[Any]


class Reporter:
    """Knows the batch's place in the grid, so that findings name CTA, warp and lane."""

    def __init__(self, findings: Findings, clocks: Clocks) -> None:
        self.findings, self.clocks = findings, clocks
        self.places, self.first, self.warps_per_cta = clocks.places, clocks.first, clocks.warps_per_cta
        self.loops: dict[tuple[SourceLine, int], tuple[Frame, Array]] = {}
        """The frame and the index of each loop that runs, by its line and its frame's first warp."""

    def add(
        self,
        kind: Kind,
        where: SourceLine,
        message: str,
        row: int,
        lane: int,
        *,
        other: SourceLine | None = None,
        count: int = 1,
        address: int | None = None,
        since: int | None = None,
        between: tuple[int, int] | None = None,
    ) -> None:
        """Record a finding in warp ``row`` of the batch; ``since`` as :meth:`Findings.add` takes it."""
        slot, local = divmod(self.first + row, self.warps_per_cta)
        cta, rank = self.places.linear(slot), self.places.rank(slot)
        loops = tuple(
            (line, int(frame.full(index)[frame.flat == row, lane][0]))
            for (line, _), (frame, index) in self.loops.items()
            if row in frame.flat
        )
        found = Finding(kind, message, where, other, count, cta, local, lane, address, rank, loops, between)
        self.findings.add(found, since)

    def cta(self, row: int) -> str:
        """How a message calls the CTA of a row: by its rank, in a cluster."""
        slot = (self.first + row) // self.warps_per_cta
        rank = self.places.rank(slot)
        return f"CTA {self.places.linear(slot)}" if rank is None else f"the CTA of rank {rank}"

    def line_of(self, stamp: int) -> SourceLine:
        """The line of the operation that a stamp was given to."""
        op = self.clocks.history[stamp]
        return op.where if op is not None else NOWHERE

    def name_of(self, stamp: int) -> str:
        """Its mnemonic."""
        op = self.clocks.history[stamp]
        return op.instruction.mnemonic if op is not None else "nothing"

    def races(
        self,
        op: Op,
        what: str,
        rows: Array,
        lanes: Array,
        agents: Array,
        stamps: Array,
        addresses: Array,
        past: str,
        buffer: GlobalBuffer | None = None,
    ) -> None:
        """Unordered pairs: one finding for each earlier operation. ``past`` tells what the earlier one did.

        The addresses are in shared memory, or in a ``buffer``.
        """
        for stamp in np.unique(stamps):
            these = stamps == stamp
            # Name another warp if there is one: that needs the stronger cure.
            i = int(np.argmax(np.where(agents == self.first + rows, 1, 2) * these))
            other = self.line_of(int(stamp))
            mine, agent = self.first + int(rows[i]), int(agents[i])
            verb = "writes" if what == "write" else ("updates" if what == "atomic" else "reads")
            if agent <= REDUCTIONS:
                whom, cure = "the TMA", "wait for its group until it is done (k.wait_bulk(0)), then meet at a barrier"
            elif agent <= LOADS:
                whom, cure = "the TMA", "wait for the phase of its mbarrier"
            elif agent < 0:
                whom, cure = self._queue(*self.clocks.queues[-1 - agent])
            elif mine == agent:
                whom, cure = "another lane of the same warp", "put a __syncwarp (or a barrier) between them"
            elif mine // self.warps_per_cta == agent // self.warps_per_cta:
                whom = f"warp {agent % self.warps_per_cta} of the same CTA"
                cure = "put a barrier (__syncthreads) between them"
            elif mine // self.places.domain == agent // self.places.domain:
                whom = f"{self.cta(agent - self.first)} of the same cluster"
                cure = "let the cluster meet (k.cluster_sync), or arrive and wait at an mbarrier with scope='cluster'"
            else:
                whom = f"CTA {self.places.linear(agent // self.warps_per_cta)}"
                cure = "order the CTAs by an atomic with release and acquire (or fences), or split the kernel"
            if what == "write" and other == op.where and self._loads(int(stamp)):
                word = "k.atomic, atomicAdd" if op.tile(0) is None else "tile.atomic"
                cure = f"update it in one step, by an atomic ({word}), or {cure}"
            byte = int(addresses[i])
            place = tile_at(byte, op, self.clocks.history[stamp]) if buffer is None else f" of {buffer.element(byte)}"
            message = (
                f"{op.instruction.mnemonic} {verb} byte {byte}{place} which "
                f"{self.name_of(int(stamp))} of {whom} {past}, and nothing orders the two: {cure}"
            )
            near = agent >= 0 and mine // self.warps_per_cta == agent // self.warps_per_cta
            between = (int(stamp), self.clocks.now) if near else None
            self.add(
                "race",
                op.where,
                message,
                int(rows[i]),
                int(lanes[i]),
                other=other,
                count=int(these.sum()),
                address=int(addresses[i]),
                between=between,
            )

    @staticmethod
    def _queue(kind: str, _cta: int, number: int) -> tuple[str, str]:
        """How a message calls a queue of transactions, and what orders an access after them."""
        if kind == "wgmma":
            cure = "wait for its group (wgmma.wait_group), then let the mbarrier or barrier tell"
            return f"warpgroup {number}", cure
        if kind == "bulk":
            return f"warp {number}", "wait for its group (cp.async.bulk.wait_group.read), then meet at a barrier"
        return "the TMA", "wait for the phase of its mbarrier"

    def _loads(self, stamp: int) -> bool:
        """Whether the operation that a stamp was given to reads memory and does no more."""
        op = self.clocks.history[stamp]
        return op is not None and all(isinstance(e, Access) and e.mode == "load" for e in op.instruction.effects())

    def observe(self, frame: Frame, value: Value, where: SourceLine, use: str, active: Array | None = None) -> bool:
        """Report poison in a register that is about to decide something. Returns whether there was any."""
        shadow = frame.shadows.get(value)
        if shadow is None:
            return False
        bad = frame.full(shadow) != 0
        mask = frame.active if active is None else active
        if mask is not None:
            bad = bad & mask
        if not bad.any():
            return False
        row, lane = (int(x[0]) for x in np.nonzero(bad))
        line, text = frame.origins.get(value, (NOWHERE, "a value"))
        message = f"{use} depends on {text}: write it before, or wait for its data"
        other = line if line != NOWHERE else None
        self.add("uninitialised", where, message, int(frame.flat[row]), lane, other=other, count=int(bad.sum()))
        return True


def tile_at(byte: int, *ops: Op | None) -> str:
    """ " of TILE, row 3, column 5," of a byte of shared memory, where one of the operations names its tile; else ""."""
    for tile in (tile for op in ops if op is not None for tile in op.within if tile is not None):
        if tile.offset <= byte < tile.offset + tile.bytes:
            return f" of {tile.names(byte)},"
    return ""
