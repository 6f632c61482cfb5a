"""mbarriers: phases, pending arrivals and transaction bytes, and what waiting for a phase makes known.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier" (phases, tx-count, parity waits).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.acting import Lanes, by_both, lanes_of, split
from warploom.emulate.barriers import Wait
from warploom.emulate.clocks import Clocks, Singles
from warploom.emulate.frames import Frame
from warploom.emulate.report import Reporter
from warploom.emulate.shared_memory import SHARED_BASE
from warploom.ir.program import Program
from warploom.ir.statements import Op
from warploom.isa.cluster import WINDOW_BITS
from warploom.isa.effects import ClusterScope, MbarrierArrive

Array = NDArray[Any]
BYTES = 8


@dataclass(eq=False)
class Far:
    """What other CTAs released at the scope of the cluster, for waits at that scope; ``done``: in completed phases."""

    clock: Array | None = None
    singles: Singles = field(default_factory=dict[tuple[int, int], int])
    done: tuple[Array, Singles] | None = None

    def learn(self, clock: Array, singles: Singles) -> None:
        """One more arrival."""
        self.clock = clock.copy() if self.clock is None else np.maximum(self.clock, clock)
        self.singles = _newest(self.singles, singles)

    def complete(self) -> None:
        """The phase completes."""
        if self.clock is not None:
            self.done = self.clock, self.singles


@dataclass(frozen=True, slots=True)
class Remote:
    """An arrival from another CTA: who, when, and at what."""

    bar: Mbarrier
    row: int
    lanes: Lanes
    stamp: int
    op: Op


def _newest(first: Singles, second: Singles) -> Singles:
    return {key: max(first.get(key, 0), second.get(key, 0)) for key in first.keys() | second.keys()}


@dataclass(eq=False)
class Mbarrier:
    """One mbarrier. ``phase`` counts completed phases, ``observed`` those that somebody has waited for."""

    cta: int
    address: int
    count: int
    op: Op
    row: int
    lane: int
    stamp: int
    pending: int
    fenced: bool = False
    tx: int = 0
    phase: int = 0
    observed: int = 0
    clock: Array | None = None
    singles: Singles = field(default_factory=dict[tuple[int, int], int])
    done_clock: Array | None = None
    done_singles: Singles = field(default_factory=dict[tuple[int, int], int])
    far: Far = field(default_factory=lambda: Far())
    waiters: list[_Waiter] = field(default_factory=list["_Waiter"])
    arrival: Op | None = None
    copy: Op | None = None
    copied_phase: int = -1

    @property
    def idle(self) -> bool:
        """Nothing has happened in the current phase."""
        return self.pending == self.count and self.tx == 0


@dataclass(eq=False)
class _Waiter:
    """Lanes of a warp that wait for the phase of a parity to complete."""

    wait: Wait
    left: list[_Waiter]  # the waiters of the same warp's execution that are not done
    row: int
    lanes: Lanes
    parity: int
    far: bool


class Mbarriers:
    """All mbarriers of a batch, by (CTA of the batch, byte in shared memory)."""

    def __init__(self, clocks: Clocks, reporter: Reporter, program: Program) -> None:
        self.clocks = clocks
        self.report = reporter
        self.program = program
        self.all: dict[tuple[int, int], Mbarrier] = {}
        self.remote: list[Remote] = []

    def name(self, address: int) -> str:
        """The author's name of the mbarrier at a byte of shared memory."""
        for region in self.program.shared:
            if region.name and region.offset <= address < region.offset + region.bytes:
                index = (address - region.offset) // BYTES
                return f"{region.name}[{index}]" if region.bytes > BYTES else region.name
        return f"byte {address}"

    def describe(self, row: int) -> str:
        """The state of the mbarriers of a warp's cluster that are in the middle of a phase or waited for."""
        parts: list[str] = []
        for (owner, address), bar in self.all.items():
            first = owner * self.clocks.warps_per_cta
            if first // self.clocks.domain == row // self.clocks.domain and (bar.waiters or not bar.idle):
                whose = f" of {self.report.cta(first)}" if self.clocks.clustered else ""
                state = f"{self.name(address)}{whose} is in phase {bar.phase} (parity {bar.phase & 1}), "
                state += f"{bar.pending} of {bar.count} arrivals and {max(0, bar.tx)} bytes missing"
                if bar.tx < 0:
                    state += f", {-bar.tx} bytes more than expected have landed"
                if bar.tx and not bar.pending:
                    state += " (expect exactly the bytes of the boxes that complete on it in a phase)"
                if bar.idle and bar.phase == 0 and any(w.parity == 0 for w in bar.waiters):
                    state += " (nothing has arrived yet)"
                waiting = sorted({f"warp {w.row % self.clocks.warps_per_cta} (parity {w.parity})" for w in bar.waiters})
                parts.append(state + (f", waited for by {', '.join(waiting)}" if waiting else ""))
        return "; ".join(parts)

    # -- life ----------------------------------------------------------------------------------------------------

    def initialise(self, frame: Frame, address: Array, count: int, op: Op) -> None:
        """``mbarrier.init`` by the active lanes."""
        places = frame.full(address).astype(np.int64)
        for i, row, lanes in lanes_of(frame, None):
            for place, group in split(places[i], lanes):
                where = place - SHARED_BASE
                lane = 0 if group is None else group[0]
                if not self._fits(where, row, lane, op):
                    continue
                if group is None or len(group) > 1:
                    message = f"several threads initialise the mbarrier {self.name(where)}: let one do it"
                    self.report.add("mbarrier", op.where, message, row, lane, address=where)
                key = (row // self.clocks.warps_per_cta, where)
                earlier = self.all.get(key)
                if earlier is not None and not (earlier.idle and earlier.phase == 0):
                    message = f"the mbarrier {self.name(where)} is initialised again while in use: initialise it once"
                    self.report.add("mbarrier", op.where, message, row, lane, other=earlier.op.where, address=where)
                self.all[key] = Mbarrier(*key, count, op, row, lane, self.clocks.stamp(op), count)

    def _fits(self, where: int, row: int, lane: int, op: Op) -> bool:
        if where % BYTES == 0 and 0 <= where <= self.program.shared_bytes - BYTES:
            return True
        kind = "misaligned" if where % BYTES else "bounds"
        message = f"{op.instruction.mnemonic}: no mbarrier can be at byte {where} of shared memory: correct the address"
        self.report.add(kind, op.where, message, row, lane, address=where)
        return False

    def fence(self, frame: Frame) -> None:
        """The active lanes make the mbarriers they initialised visible to the async proxy."""
        for _, row, lanes in lanes_of(frame, None):
            for bar in self.all.values():
                if bar.row == row and (lanes is None or bar.lane in lanes):
                    bar.fenced = True

    def find(self, where: int, row: int, lane: int, op: Op, cta: int | None = None) -> Mbarrier | None:
        """The mbarrier that a lane uses; a finding (and None) unless its initialisation is known to the lane.

        ``cta`` is the batch's number of the CTA it is in, if that is another than the lane's.
        """
        if not self._fits(where, row, lane, op):
            return None
        own = row // self.clocks.warps_per_cta
        far = cta is not None and cta != own
        bar = self.all.get((own if cta is None else cta, where))
        whose = f" of {self.report.cta(cta * self.clocks.warps_per_cta)}" if cta is not None and far else ""
        meeting = "the cluster's barrier (k.cluster_sync)" if far else "a barrier (__syncthreads)"
        if bar is None:
            message = f"{op.instruction.mnemonic} uses {self.name(where)}{whose}, which is no initialised mbarrier: "
            message += f"initialise it, fence, and meet at {meeting} before its first use"
            self.report.add("mbarrier", op.where, message, row, lane, address=where)
            return None
        if bar.row == row and bar.lane == lane:
            return bar
        known = int(self.clocks.reach(row, lane)[bar.row % self.clocks.domain])
        if bar.stamp > known:
            agent = (self.report.first + bar.row, bar.lane)
            if bar.stamp > self.clocks.single.get(row, {}).get(agent, 0):
                message = f"{op.instruction.mnemonic} uses {self.name(where)}{whose}, and nothing orders its "
                message += f"initialisation before: put {meeting} between them"
                self.report.add("mbarrier", op.where, message, row, lane, other=bar.op.where, address=where)
        return bar

    # -- arrivals ------------------------------------------------------------------------------------------------

    def arrive(self, frame: Frame, address: Array, effect: MbarrierArrive, guard: Array | None, op: Op) -> None:
        """One arrival for each acting lane."""
        places = frame.full(address).astype(np.int64)
        for i, row, lanes in lanes_of(frame, guard):
            self.clocks.stamp(op)
            for place, group in split(places[i], lanes):
                lane = 0 if group is None else group[0]
                cta, where = self._window(place, row, lane, op) if effect.remote else (None, place)
                bar = self.find(where - SHARED_BASE, row, lane, op, cta)
                if bar is None:
                    continue
                self._release(bar, row, group, effect.scope, op)
                bar.arrival = op
                for number in range(32) if group is None else group:
                    self._arrive(bar, effect.expected_bytes or 0, row, number, op)

    def _window(self, place: int, row: int, lane: int, op: Op) -> tuple[int | None, int]:
        """The CTA (of the batch) and the address within it of a shared::cluster address; its own without a rank."""
        rank, where = (place >> WINDOW_BITS) - 1, place & (1 << WINDOW_BITS) - 1
        if rank < 0:
            return None, where
        together = self.clocks.domain // self.clocks.warps_per_cta
        if rank >= together:
            message = f"{op.instruction.mnemonic} goes to a CTA of rank {rank}: the cluster has {together}"
            self.report.add("bounds", op.where, message, row, lane)
            return None, -1
        return row // self.clocks.domain * together + rank, where

    def _release(self, bar: Mbarrier, row: int, group: Lanes, scope: ClusterScope, op: Op) -> None:
        """What an arrival makes known; across CTAs, writes become visible at the scope of the cluster alone."""
        clock, singles = self.clocks.release(row, group)
        if bar.cta != row // self.clocks.warps_per_cta:
            self.remote.append(Remote(bar, row, group, self.clocks.now, op))
            if scope == "cluster":
                bar.far.learn(clock, singles)
            clock, singles = self.clocks.near_only(clock, singles)
        self._learn(bar, clock, singles)

    def _learn(self, bar: Mbarrier, clock: Array, singles: dict[tuple[int, int], int]) -> None:
        bar.clock = clock if bar.clock is None else np.maximum(bar.clock, clock)
        for key, stamp in singles.items():
            bar.singles[key] = max(stamp, bar.singles.get(key, 0))

    def _arrive(self, bar: Mbarrier, expected: int, row: int, lane: int, op: Op) -> None:
        if bar.pending == 0:
            message = (
                f"{op.instruction.mnemonic} arrives at {self.name(bar.address)} in a phase that has all its "
                f"{bar.count} arrivals and still misses {bar.tx} bytes: arrive once for each expected arrival"
            )
            self.report.add("mbarrier", op.where, message, row, lane, other=bar.op.where, address=bar.address)
            bar.pending += 1
        bar.tx += expected
        bar.pending -= 1
        self._complete(bar, op, row, lane)

    def complete_bytes(self, bar: Mbarrier, size: int, engine: int, stamp: int, singles: Singles, op: Op) -> None:
        """A copy of ``size`` bytes has landed at ``stamp``; ``singles`` is what else that makes known."""
        width = self.clocks.known.shape[1]
        clock = np.zeros(width, np.int64)
        clock[self.clocks.warps + engine] = stamp
        self._learn(bar, clock, singles)
        bar.tx -= size
        bar.copy, bar.copied_phase = op, bar.phase
        self._complete(bar, op, bar.row, bar.lane)

    def _complete(self, bar: Mbarrier, op: Op, row: int, lane: int) -> None:
        if bar.pending or bar.tx:
            return
        if bar.phase > bar.observed:
            message = (
                f"phase {bar.phase} of {self.name(bar.address)} completes before anybody has waited for phase "
                f"{bar.phase - 1}, so that a wait by parity mistakes one for the other: more arrivals reach it than "
                f"the {bar.count} it was initialised for, or a wait is missing"
            )
            self.report.add("mbarrier", op.where, message, row, lane, other=bar.op.where, address=bar.address)
            bar.observed = bar.phase
        bar.phase += 1
        bar.pending = bar.count
        assert bar.clock is not None
        bar.done_clock = bar.clock  # later releases add to it: a later phase implies the earlier ones
        bar.done_singles = dict(bar.singles)
        bar.far.complete()
        ready = [w for w in bar.waiters if w.parity != bar.phase & 1]
        bar.waiters = [w for w in bar.waiters if w.parity == bar.phase & 1]
        for waiter in ready:
            self._acquire(bar, waiter.row, waiter.lanes, waiter.far)
            waiter.left.remove(waiter)
            if not waiter.left:
                waiter.wait.rows.discard(waiter.row)

    # -- waits ---------------------------------------------------------------------------------------------------

    def _acquire(self, bar: Mbarrier, row: int, lanes: Lanes, far: bool) -> None:
        bar.observed = bar.phase
        if bar.done_clock is not None:
            self.clocks.acquire(row, lanes, bar.done_clock, bar.done_singles)
        if far and bar.far.done is not None:
            self.clocks.acquire(row, lanes, *bar.far.done)

    def wait(self, frame: Frame, address: Array, parity: Array, far: bool, op: Op) -> Wait | None:
        """``try_wait.parity`` in a loop: what the frame has to wait for, or None."""
        places, parities = frame.full(address).astype(np.int64), frame.full(parity).astype(np.int64)
        wait = Wait(op, set())
        for i, row, lanes in lanes_of(frame, None):
            left: list[_Waiter] = []
            for (place, odd), group in by_both(places[i], parities[i], lanes):
                bar = self.find(place - SHARED_BASE, row, 0 if group is None else group[0], op)
                if bar is None:
                    continue
                if bar.phase & 1 != odd & 1:
                    self._acquire(bar, row, group, far)
                    continue
                waiter = _Waiter(wait, left, row, group, odd & 1, far)
                left.append(waiter)
                bar.waiters.append(waiter)
            if left:
                wait.rows.add(row)
        return None if wait.ready else wait

    def at_exit(self) -> None:
        """A phase that is left half done, copies that nobody waited for, arrivals at a CTA that may have gone."""
        warps = self.clocks.warps_per_cta
        for remote in self.remote:
            bar = remote.bar
            lanes = [None] if remote.lanes is None else remote.lanes
            rows = np.arange(bar.cta * warps, (bar.cta + 1) * warps)
            if all(self.clocks.reached(rows, remote.row, lane, remote.stamp) for lane in lanes):
                continue
            message = (
                f"{remote.op.instruction.mnemonic} may reach {self.name(bar.address)} of {self.report.cta(bar.row)} "
                "when that CTA has exited and its shared memory is another's: let it wait for this arrival, or let "
                "the cluster meet (k.cluster_sync) at the end"
            )
            self.report.add("cluster", remote.op.where, message, remote.row, lanes[0] or 0, address=bar.address)
        for bar in self.all.values():
            if bar.tx == 0 and bar.pending != bar.count:
                line = bar.arrival or bar.op
                message = (
                    f"the kernel ends in the middle of a phase of {self.name(bar.address)}: {bar.count - bar.pending} "
                    f"of {bar.count} arrivals; initialise it for as many as there are, and let all arrive"
                )
                self.report.add("mbarrier", line.where, message, bar.row, bar.lane, other=bar.op.where,
                                address=bar.address)  # fmt: skip
            if bar.copy is not None and bar.copied_phase >= bar.observed:
                message = (
                    f"the kernel ends and nobody has waited for the phase of {self.name(bar.address)} in which "
                    f"{bar.copy.instruction.mnemonic} lands: wait for every copy that is started"
                )
                self.report.add("leak", bar.copy.where, message, bar.row, bar.lane, address=bar.address)
