"""mbarriers: phases, pending arrivals and transaction bytes, and what waiting for a phase makes known.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier" (phases, tx-count, parity waits).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Phase, Wait, warps_text, whereabouts
from warploom.emulate.control.frames import Actor, Execution
from warploom.emulate.findings.report import ELECTED, REUSED, Reporter
from warploom.emulate.memory.shared_memory import SHARED_BASE, SharedMemory
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.ordering import Ordering, Told
from warploom.emulate.order.planes import CONTROL, FAR, MAPS, joined, only_control
from warploom.ir.program import Program
from warploom.ir.statements import Op, SourceLine
from warploom.isa.effects import (
    BulkLoad,
    BulkTensorCopy,
    MbarrierArrive,
    MbarrierFence,
    MbarrierInit,
    MbarrierInvalidate,
    MbarrierWait,
    ProxyFence,
)
from warploom.isa.memory import WINDOW_BITS

Array = NDArray[Any]
BYTES = 8


@dataclass(eq=False)
class MbarrierPhase(Phase):
    """A phase of an mbarrier. Phases add to what is ``known``: a later one implies the earlier ones.

    ``far`` is what other CTAs have made known at the scope of the cluster, for waits at that scope. ``seen``: when
    warps saw the end of this phase, by their columns.
    """

    far: Array | None = None
    seen: dict[int, int] = field(default_factory=dict[int, int])

    def next(self) -> MbarrierPhase:
        """The phase after this one, in which nothing has happened."""
        return MbarrierPhase(known=self.known, far=self.far)


@dataclass(eq=False)
class Mbarrier:
    """One mbarrier, and who has initialised it (``made``) when.

    ``phase`` counts completed phases, ``observed`` those that somebody has waited for.
    """

    cta: int
    address: int
    count: int
    made: Actor
    stamp: int
    pending: int
    fenced: int = 0  # when its initialisation was made visible to the async proxy
    tx: int = 0
    expected: int = 0  # bytes, of the current phase
    phase: int = 0
    observed: int = 0
    current: MbarrierPhase = field(default_factory=MbarrierPhase)
    last: MbarrierPhase = field(default_factory=MbarrierPhase)
    before: MbarrierPhase = field(default_factory=MbarrierPhase)  # the phase before the last one
    waiters: list[Waiter] = field(default_factory=list["Waiter"])
    arrival: Op | None = None
    copy: Op | None = None
    copied_phase: int = -1

    @property
    def idle(self) -> bool:
        """Nothing has happened in the current phase."""
        return self.pending == self.count and self.tx == 0

    def expect(self, size: int) -> None:
        """The current phase takes ``size`` more bytes of copies."""
        self.tx += size
        self.expected += size

    def complete(self) -> None:
        """End the current phase: the pending arrivals are counted from the mbarrier's initial count again."""
        self.phase += 1
        self.pending, self.expected = self.count, 0
        self.before, self.last, self.current = self.last, self.current, self.current.next()


@dataclass(eq=False)
class Waiter:
    """Lanes of a warp that wait for the phase of a parity to complete."""

    wait: Wait
    left: list[Waiter]  # the waiters of the same warp's execution that are not done
    by: Actor
    parity: int
    effect: MbarrierWait


_Look: TypeAlias = tuple[Actor, Mbarrier, int, bool]
"""Who looks, mbarrier, parity, and whether the phase of that parity is over."""


class Mbarriers:
    """All mbarriers of a batch, by (CTA of the batch, byte in shared memory)."""

    def __init__(
        self, clocks: Clocks, reporter: Reporter, program: Program, shared: SharedMemory, ordering: Ordering
    ) -> None:
        self.clocks, self.ordering = clocks, ordering
        self.shared = shared
        self.report = reporter
        self.program = program
        self.all: dict[tuple[int, int], Mbarrier] = {}

    def name(self, address: int) -> str:
        """The author's name of the mbarrier at a byte of shared memory."""
        for region in self.program.shared:
            if region.name and region.offset <= address < region.offset + region.bytes:
                index = (address - region.offset) // BYTES
                return f"{region.name}[{index}]" if region.bytes > BYTES else region.name
        return f"byte {address}"

    def _region(self, bar: Mbarrier) -> str:
        """The author's name of the mbarriers that one is among, the stages of a ring."""
        return self.name(bar.address).partition("[")[0]

    def describe(self, row: int, waits: Mapping[int, SourceLine]) -> str:
        """The mbarriers of a warp's cluster that are in the middle of a phase or waited for; rows wait at ``waits``.

        Those that some have arrived at come first: whoever does not is what the others wait for.
        """
        parts: list[tuple[bool, str]] = []
        for (owner, address), bar in self.all.items():
            first = owner * self.clocks.warps_per_cta
            if first // self.clocks.domain == row // self.clocks.domain and (bar.waiters or not bar.idle):
                whose = f" of {self.report.cta(first)}" if self.clocks.clustered else ""
                parts.append((bar.idle, f"{self.name(address)}{whose} {self._state(bar, waits)}"))
        return "; ".join(text for _, text in sorted(parts, key=lambda part: part[0]))

    def _state(self, bar: Mbarrier, waits: Mapping[int, SourceLine]) -> str:
        """The phase of an mbarrier, what is missing, and who waits for it."""
        text, warps = f"is in phase {bar.phase} (parity {bar.phase & 1})", self.clocks.warps_per_cta
        if bar.pending:
            text += f", {bar.pending} of {bar.count} arrivals missing ({self._who_came(bar, waits)})"
            text += self._rounds(bar)
        if bar.tx:
            of = f"{bar.tx} of" if bar.tx > 0 else f"{-bar.tx} more than"
            text += f", {of} {bar.expected} expected bytes {'missing' if bar.tx > 0 else 'have come'}"
            text += "" if bar.copy is None else f" (the last came from {bar.copy.where.stack})"
        for parity in (0, 1):
            rows = {w.by.row for w in bar.waiters if w.parity == parity}
            text += f", waited for by {warps_text(rows, warps)} (parity {parity})" if rows else ""
        return text

    def _rounds(self, bar: Mbarrier) -> str:
        """Say how many phases of a ring are complete, where the next has not begun; else return an empty str."""
        if bar.arrival is None or bar.current.came:
            return ""
        rounds = sum(b.phase for b in self.all.values() if b.cta == bar.cta and self._region(b) == self._region(bar))
        return f" after {rounds} completed phases of {self._region(bar)}, the last from {bar.arrival.where.stack}"

    def _who_came(self, bar: Mbarrier, waits: Mapping[int, SourceLine]) -> str:
        """Name the warps that have come in the current phase, and where those are that came only in the last one."""
        if bar.arrival is None:
            return "nothing has arrived yet"
        clocks = self.clocks
        first = -clocks.first if clocks.across else bar.made.row // clocks.domain * clocks.domain
        now, last = ({first + c for c in events if c < clocks.warps} for events in (bar.current.came, bar.last.came))
        parts = [f"{warps_text(now, clocks.warps_per_cta)} came at {bar.arrival.where.stack}"] if now else []
        for row in sorted(last - now)[:4]:
            name = warps_text({row}, clocks.warps_per_cta)
            parts.append(f"{name} came for the phase before and {whereabouts({row}, waits)}")
        return ", ".join(parts)

    def progress(self, row: int) -> int:
        """Rate the phase that a row waits for: 2 if only bytes are missing, 1 if something has arrived, else 0."""
        bars = [bar for bar in self.all.values() if any(w.by.row == row for w in bar.waiters)]
        return max((0 if bar.idle else 1 + (bar.pending == 0) for bar in bars), default=0)

    # -- life ----------------------------------------------------------------------------------------------------

    def initialise(self, call: Execution[MbarrierInit]) -> None:
        """``mbarrier.init`` by the active lanes."""
        op = call.op
        for by, place, count, _ in self._counted(call):
            where = place - SHARED_BASE
            if not self._fits(where, by):
                continue
            if not 0 < count < 1 << 20:
                message = f"{by.name} initialises {self.name(where)} for {count} arrivals: it counts 1 to 1048575"
                self.report.by("mbarrier", by, message, address=where)
                continue
            if len(by.each) > 1:
                message = f"several threads initialise the mbarrier {self.name(where)}: let one do it"
                self.report.by("mbarrier", by, message, address=where)
            key = (by.row // self.clocks.warps_per_cta, where)
            if key in self.all:
                message = f"{self.name(where)} is an mbarrier already: initialise it once, by one thread"
                self._found(self.all[key], by, message, REUSED)
            if self.shared.checks:
                self.shared.history.claim(*key, BYTES, by.row, by.lane, op)
            made = Actor(op, by.row, [by.lane])
            self.all[key] = Mbarrier(*key, count, made, self.clocks.stamp(op), count)

    def _counted(
        self, call: Execution[MbarrierInit] | Execution[MbarrierArrive]
    ) -> Iterator[tuple[Actor, int, int, int]]:
        """The lanes that give one address, one count of arrivals and one of bytes: of registers, or the effect's."""
        fixed = {"counted": call.effect.count, "expects": getattr(call.effect, "expected_bytes", None) or 0}
        names = [name for name in fixed if name in call.given]
        for by, (place, *numbers) in call.actors("address", *names):
            given = fixed | dict(zip(names, numbers, strict=True))
            yield by, place, given["counted"], given["expects"]

    def _found(self, bar: Mbarrier, by: Actor, message: str, relies_on: str = "") -> None:
        """A finding of an mbarrier, which names the line of its initialisation as well."""
        other = bar.made.op.where
        self.report.by("mbarrier", by, message, other=other, address=bar.address, relies_on=relies_on)

    def _fits(self, where: int, by: Actor) -> bool:
        if where % BYTES == 0 and 0 <= where <= self.program.shared_bytes - BYTES:
            return True
        message = f"{by.name}: no mbarrier can be at byte {where} of shared memory: correct the address"
        self.report.by("misaligned" if where % BYTES else "bounds", by, message, address=where)
        return False

    def fence(self, call: Execution[MbarrierFence | ProxyFence]) -> None:
        """The active lanes make the mbarriers they initialised visible to the async proxy, and to the cluster."""
        stamp, publishes = self.clocks.stamp(call.op), isinstance(call.effect, MbarrierFence)
        for by, _ in call.actors():
            for bar in self.all.values():
                if bar.made.row != by.row or bar.made.lane not in by.each:
                    continue
                bar.fenced = bar.fenced or stamp
                if publishes and self.clocks.clustered:
                    known = self.clocks.ended({self._published(bar): stamp}, plane=CONTROL)
                    self.clocks.acquire(by.row, bar.made.lanes, known)

    def _published(self, bar: Mbarrier) -> int:
        """The column in which it is known that an mbarrier's initialisation was published."""
        return self.clocks.queue("published", bar.cta, bar.address)

    def is_known(self, bar: Mbarrier, by: Actor, stamp: int) -> bool:
        """Whether some lanes know of an mbarrier's initialisation (of a stamp), or that it was published."""
        clocks, maker = self.clocks, int(self.clocks.columns[bar.made.row])
        return clocks.lanes_know(by.row, by.lanes, maker, bar.made.lane, stamp) or clocks.lanes_know(
            by.row, by.lanes, self._published(bar), 0, stamp, CONTROL
        )

    def find(self, where: int, by: Actor, cta: int | None = None) -> Mbarrier | None:
        """The mbarrier that some lanes use; a finding (and None) unless its initialisation is known to each.

        ``cta`` is the batch's number of the CTA it is in, if that is another than the lanes'.
        """
        if not self._fits(where, by):
            return None
        own = by.row // self.clocks.warps_per_cta
        far = cta is not None and cta != own
        bar = self.all.get((own if cta is None else cta, where))
        whose = f" of {self.report.cta(cta * self.clocks.warps_per_cta)}" if cta is not None and far else ""
        meeting = "the cluster's barrier (k.cluster_sync)" if far else "a barrier (__syncthreads)"
        if bar is None:
            message = f"{by.name} uses {self.name(where)}{whose}, which is no initialised mbarrier: initialise it, "
            message += f"fence, and meet at {meeting} before its first use"
            self.report.by("mbarrier", by, message, address=where)
        elif not self.is_known(bar, by, bar.stamp):
            message = f"{by.name} uses {self.name(where)}{whose}, and nothing orders its initialisation before: put "
            relies_on = ELECTED if bar.made.row == by.row else ""
            self._found(bar, by, f"{message}{meeting} between them", relies_on)
        return bar

    # -- arrivals ------------------------------------------------------------------------------------------------

    def arrive(self, call: Execution[MbarrierArrive]) -> None:
        """One arrival for each acting lane."""
        op, effect = call.op, call.effect
        for by, place, count, size in self._counted(call):
            self.clocks.stamp(op)
            cta, where = self.window(place, by) if effect.remote else (None, place)
            bar = self.find(where - SHARED_BASE, by, cta)
            if bar is None:
                continue
            self.check_follows(bar, by)
            if effect.count == 0:
                bar.expect(size * len(by.each))
                self._complete(bar, by)
                continue
            if not effect.completes and bar.pending <= count * len(by.each):
                self._found(bar, by, f"{by.name} ends a phase of {self.name(bar.address)}: let another do so")
            self._release(bar, by, effect)
            bar.arrival = op
            for lane in [*by.each] * count:
                bar.count -= effect.drops
                self._arrive(bar, size, Actor(op, by.row, [lane]))

    def window(self, place: int, by: Actor) -> tuple[int, int]:
        """The CTA (of the batch) and the address within it of a shared::cluster address; its own without a rank."""
        rank, where = (place >> WINDOW_BITS) - 1, place & (1 << WINDOW_BITS) - 1
        own, together = by.row // self.clocks.warps_per_cta, self.clocks.domain // self.clocks.warps_per_cta
        if rank >= together:
            message = f"{by.name} goes to a CTA of rank {rank}: the cluster has {together}"
            self.report.by("bounds", by, message)
            return own, -1
        return own if rank < 0 else own // together * together + rank, where

    def _release(self, bar: Mbarrier, by: Actor, arrival: MbarrierArrive) -> None:
        """Let an arrival make known what its lanes know; other CTAs see writes only if its scope is the cluster.

        A relaxed one tells how far control has come, and of those accesses to memory alone that each lane has fenced.
        """
        known = self.clocks.release(by.row, by.lanes)
        if not arrival.releases:
            known = only_control(known)
            cta = self.clocks.first // self.clocks.warps_per_cta + bar.cta
            known = joined(known, *self.ordering.fenced(by.row, by.lanes, cta))
        if bar.cta != by.row // self.clocks.warps_per_cta:
            name = partial(self.name, bar.address)
            self.shared.afar.reach(by.op, by.row, by.lane, bar.cta, self.clocks.now, name)
            if arrival.scope == "cluster":
                bar.current.far = known if bar.current.far is None else joined(bar.current.far, known)
            known = known.copy()
            known[FAR : FAR + 1], known[MAPS:] = 0, 0
        bar.current.arrive(int(self.clocks.columns[by.row]), self.clocks.now, known)

    def _arrive(self, bar: Mbarrier, expected: int, by: Actor) -> None:
        if bar.pending == 0:
            message = (
                f"{by.name} arrives at {self.name(bar.address)} in a phase that has its {bar.count} "
                f"arrival{'s' * (bar.count > 1)} and still misses {bar.tx} bytes: arrive once for each expected arrival"
            )
            self._found(bar, by, message)
            bar.pending += 1
        bar.expect(expected)
        bar.pending -= 1
        self._complete(bar, by)

    def land(self, bar: Mbarrier, by: Actor, known: Array, queue: int, size: int) -> None:
        """A transaction of some lanes has landed, of a queue, which makes this ``known``.

        It completes ``size`` bytes, or, where that is 0, is an arrival of each lane.
        """
        bar.current.arrive(queue, self.clocks.now, known)
        bar.copy, bar.copied_phase = by.op, bar.phase
        if size:
            bar.tx -= size
            self._complete(bar, Actor(by.op, bar.made.row, bar.made.lanes))
            return
        for lane in by.each:
            self._arrive(bar, 0, Actor(by.op, by.row, [lane]))

    def _complete(self, bar: Mbarrier, by: Actor) -> None:
        if bar.pending or bar.tx:
            return
        if bar.phase > bar.observed:
            message = (
                f"phase {bar.phase} of {self.name(bar.address)} completes before anybody has waited for phase "
                f"{bar.phase - 1}, so that a wait by parity mistakes one for the other: more arrivals reach it than "
                f"the {bar.count} it was initialised for, or a wait is missing"
            )
            self._found(bar, by, message)
            bar.observed = bar.phase
        self._check_waits(bar, by)
        bar.complete()
        ready = [w for w in bar.waiters if w.parity != bar.phase & 1]
        bar.waiters = [w for w in bar.waiters if w.parity == bar.phase & 1]
        self.report.recorder.ends_waits([waiter.by.row for waiter in ready], by.row)
        for waiter in ready:
            self._acquire(bar, waiter.by, waiter.effect)
            waiter.left.remove(waiter)
            if not waiter.left:
                waiter.wait.rows.discard(waiter.by.row)

    # -- waits ---------------------------------------------------------------------------------------------------

    def _acquire(self, bar: Mbarrier, by: Actor, wait: MbarrierWait) -> None:
        """Lanes learn what the phases so far have told, or (of a relaxed wait) may take it in by a fence."""
        bar.observed = bar.phase
        bar.last.seen[int(self.clocks.columns[by.row])] = self.clocks.stamp(by.op)
        known = [clock for clock in (bar.last.known, bar.last.far) if clock is not None]
        if wait.scope != "cluster" and bar.last.known is not None:
            known = [bar.last.known]
        if not wait.acquires:
            self.ordering.saw(by.row, by.lanes, Told(bar, known), wait.scope)
            known = [only_control(clock) for clock in known]
        for clock in known:
            self.clocks.acquire(by.row, by.lanes, clock)

    # -- phases in every order -------------------------------------------------------------------------------------

    def _check_over(self, bar: Mbarrier, earlier: Phase, phase: int, does: str, by: Actor) -> None:
        """All that counted for the phase before must be known to be over; else a finding: what it ``does`` earlier."""
        if not earlier.unordered(self.clocks, by.row):
            return
        cure = f"initialise it for all that arrive, not {bar.count}, if they are more"
        if any(isinstance(e, BulkLoad | BulkTensorCopy) for e in by.op.instruction.effects()):
            cure = "let each phase expect the bytes of all copies to it"
        message = (
            f"{by.name} for phase {phase} of {self.name(bar.address)} is not ordered after the end of phase "
            f"{phase - 1}: in another order it {does}. Wait for the phase before, or for what follows it, and {cure}"
        )
        self._found(bar, by, message)

    def check_follows(self, bar: Mbarrier, by: Actor) -> None:
        """An arrival or a copy must be ordered after the last phase: in another order it would count for that one."""
        self._check_over(bar, bar.last, bar.phase, "counts for that one", by)

    def _check_waits(self, bar: Mbarrier, by: Actor) -> None:
        """All that wait for a phase must have seen its end before the next phase, of the other parity, ends."""
        for waiter, stamp in bar.last.seen.items():
            if bar.current.known is None or bar.current.known[CONTROL, waiter] >= stamp:
                continue
            warp = waiter % self.clocks.warps_per_cta
            seen = f"the end of phase {bar.phase - 1}" if bar.phase else "that it begins empty (its first wait)"
            message = (
                f"phase {bar.phase} of {self.name(bar.address)} may end before warp {warp} has seen {seen}, and would "
                "then wait for the wrong phase: "
                "order the arrivals after that wait (is a stage released twice for one wait?)"
            )
            self._found(bar, by, message)

    def _looks(self, call: Execution[MbarrierWait]) -> Iterator[_Look]:
        """Each mbarrier that active lanes look at, and whether the phase of their parity is over.

        A finding if in another order it passes for the phase two before.
        """
        for by, (place, odd) in call.actors("address", "parity"):
            bar = self.find(place - SHARED_BASE, by)
            if bar is not None:
                over = bar.phase & 1 != odd & 1
                earlier = bar.before if over else bar.last
                self._check_over(bar, earlier, bar.phase - over, "comes before that, and passes at once", by)
                yield by, bar, odd & 1, over

    def wait(self, call: Execution[MbarrierWait]) -> Wait | None:
        """``try_wait.parity`` in a loop: what the frame has to wait for, or None. A test tells whether it is over."""
        effect, frame, done = call.effect, call.frame, np.zeros(call.frame.shape, np.bool_)
        wait, left = Wait(call.op, set()), dict[int, list[Waiter]]()
        for by, bar, odd, over in self._looks(call):
            if over:
                done[frame.rows == by.row, by.each] = True
                if effect.acquires or effect.blocks:
                    self._acquire(bar, by, effect)
            elif effect.blocks:
                waiter = Waiter(wait, left.setdefault(by.row, []), by, odd, effect)
                waiter.left.append(waiter)
                bar.waiters.append(waiter)
                wait.rows.add(by.row)
        if not effect.blocks:
            frame.write(call.op.results[0], done)
        return None if wait.ready else wait

    def invalidate(self, call: Execution[MbarrierInvalidate]) -> None:
        """``mbarrier.inval`` by the active lanes: all that use it must be known to have done so."""
        for by, (place,) in call.actors("address"):
            bar = self.find(place - SHARED_BASE, by)
            if bar is None:
                continue
            self._check_left(bar)
            passed, events = self.clocks.passed(by.row), (*bar.current.came.items(), *bar.last.seen.items())
            used = [(warp, stamp) for warp, stamp in events if warp < self.clocks.warps]
            if bar.waiters or bar.tx or any(passed[warp] < stamp for warp, stamp in used):
                message = (
                    f"{by.name} ends {self.name(bar.address)} while others may still wait for it, or bytes are on "
                    "their way to it: let all that use it meet before"
                )
                self._found(bar, by, message)
            del self.all[(bar.cta, bar.address)]
            if self.shared.checks:
                stamp = self.clocks.stamp(call.op)
                self.shared.history.disclaim(bar.cta, bar.address, BYTES, by.row, by.lane, stamp)

    def at_exit(self) -> None:
        """Phases that are left half done, and copies that nobody has waited for."""
        for bar in self.all.values():
            self._check_left(bar)

    def _check_left(self, bar: Mbarrier) -> None:
        """An mbarrier that ends: a phase in the middle, a copy that nobody has waited for."""
        if not bar.idle:
            line = Actor(bar.arrival or bar.made.op, bar.made.row, bar.made.lanes)
            missing = f" and {bar.tx} bytes missing" if bar.tx else ""
            message = (
                f"the kernel ends in the middle of a phase of {self.name(bar.address)}: {bar.count - bar.pending} "
                f"of {bar.count} arrivals{missing}; initialise it for as many as there are, and let all come"
            )
            self._found(bar, line, message)
        if bar.copy is not None and bar.copied_phase >= bar.observed:
            message = (
                f"the kernel ends and nobody has waited for the phase of {self.name(bar.address)} in which "
                f"{bar.copy.instruction.mnemonic} lands: wait for every copy that is started"
            )
            self.report.by("leak", Actor(bar.copy, bar.made.row, bar.made.lanes), message, address=bar.address)
