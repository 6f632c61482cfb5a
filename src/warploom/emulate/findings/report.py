"""Turns what the memories and barriers notice into findings with one clear message each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Actor, Frame
from warploom.emulate.findings.findings import Finding, Findings, Kind
from warploom.emulate.findings.recorder import RunListener
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.order.clocks import Clocks
from warploom.ir.statements import NOWHERE, Op, SourceLine
from warploom.isa import effects as fx

Array = NDArray[Any]
Loops: TypeAlias = Callable[[int, int], tuple[tuple[SourceLine, int], ...]]
"""Of a warp and a lane, the lines and indices of the loops that they are in."""


def tile_at(byte: int, *ops: Op | None) -> str:
    """ " of TILE, row 3, column 5," of a byte of shared memory, where one of the operations names its tile; else ""."""
    for tile in (tile for op in ops if op is not None for tile in op.within if tile is not None):
        if tile.offset <= byte < tile.offset + tile.bytes:
            return f" of {tile.names(byte)},"
    return ""


def _how_to_wait(mine: MemoryAccess, started: Op | None) -> str:
    if mine.buffers is not None:
        return "wait for its group until that is done (k.wait_bulk(0), not reads_only), then meet at a barrier, first"
    kinds = fx.BulkTensorCopy | fx.BulkLoad | fx.AsyncStore
    bulk = started is not None and any(isinstance(e, kinds) for e in started.instruction.effects())
    return f"{'wait for the phase of its mbarrier (by its parity)' if bulk else 'commit and wait for its group'} first"


def _byte(mine: MemoryAccess, byte: int, *others: Op | None) -> str:
    """A byte that an access reaches, as messages name it."""
    if (buffer := mine.buffer()) is not None:
        return f"byte {byte} of {buffer.element(byte)}"
    return f"byte {byte}{tile_at(byte, mine.op, *others) or ' of shared memory'}"


_SEVERAL = (
    "several threads write {at} in one execution of {name}, this one and {whom}, and nothing says whose value stays: "
    "give each thread its own address"
)
_VERBS = {"read": "reads", "write": "writes", "atomic": "updates"}
_TEXTS: dict[str, tuple[Kind, str]] = {
    "several": ("race", _SEVERAL),
    "several, rounded": ("race", _SEVERAL),
    "not fenced": (
        "proxy",
        "{name} {does} {at} through the async proxy, which {earlier} wrote through the generic proxy: fence ({fence}) "
        "in the writing threads before they signal",
    ),
    "read, not fenced": (
        "proxy",
        "{name} overwrites {at} through the async proxy, which {earlier} read through the generic proxy: fence "
        "({fence}) in the reading threads before they give it back, or in this one after it has waited for them",
    ),
    "never written": (
        "uninitialised",
        "{name} {does} {at}, which nobody has written: initialise it, or wait for its data, and order that before",
    ),
    "changed": (
        "in_flight",
        "{name} may still read {at} when {earlier} writes there: before that, wait for the copy and meet at a barrier",
    ),
    "overwritten": (
        "race",
        "{name} may still read {at} when {earlier} overwrites it: wait until it has read, for its group or the phase "
        "of its mbarrier, before the memory is given away",
    ),
    "cached": (
        "race",
        "{name} reads {at}, which this kernel writes, through a cache that does not see it: load it without nc",
    ),
    "in flight": ("in_flight", "{name} {does} {at} while {earlier} is still copying there: {wait}"),
    "an mbarrier": (
        "mbarrier",
        "{name} {does} {at}, where an mbarrier is: only its own instructions may touch it; correct the address",
    ),
}
"""Findings of an access to bytes: kind, and message."""


IN_STEP = "it relies on the lanes of a warp running in step, as they do on GPUs until they part."
ELECTED = "it relies on elect.sync electing lane 0, as GPUs do where that lane takes part."
SEEN = "it relies on the TMA seeing what a thread initialised before the CTA met, as it does on GPUs, without a fence."
REUSED = "it relies on memory where an mbarrier was being free for other use without mbarrier.inval, as it is on GPUs."
"""What code relies on that GPUs do and PTX does not promise. Compilers may know; authors have no reason to do so."""
ROUNDED = (
    "it relies on any of the values being as good as another: they differ as sums of the same numbers by rounding."
)
REPEATED = (
    "it relies on warps using nothing of a block that they load again, being smaller than the CTA, once the warp that "
    "it belongs to has stored over it."
)
READ = (
    "it relies on reads having ended when their threads give the memory back, as where what they read was used before; "
    "PTX orders them before writes of the async proxy by a fence of the proxies alone."
)
"""What authors rely on as well: rings whose consumers read by ldmatrix, of CUTLASS and others, have no such fence."""


_RELIES = {"an mbarrier": REUSED, "read, not fenced": READ, "several, rounded": ROUNDED}


def _only_loads(op: Op | None) -> bool:
    """Whether an operation reads memory and does no more."""
    return op is not None and all(isinstance(e, fx.Access) and e.mode == "load" for e in op.instruction.effects())


class Reporter:
    """Knows the batch's place in the grid, so that findings name CTA, warp and lane.

    ``compiled``: shared memory and what synchronises it are a compiler's choice, not the author's.
    """

    def __init__(
        self, findings: Findings, clocks: Clocks, loops: Loops, *, compiled: bool, recorder: RunListener
    ) -> None:
        self.recorder = recorder
        self.findings, self.clocks, self.loops, self.compiled = findings, clocks, loops, compiled
        self.places, self.first, self.warps_per_cta = clocks.places, clocks.first, clocks.warps_per_cta
        # The fence that has published what an agent did at a stamp, and the way to wait for a warp's copy of a stamp.
        self.published: Callable[[int, int], Op | None] = lambda agent, stamp: None
        self.waits: Callable[[int, int], str] = lambda row, begun: ""

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
        relies_on: str = "",
        reach: int = 0,
    ) -> None:
        """Record a finding in warp ``row`` of the batch; ``since`` as :meth:`Findings.add` takes it.

        ``relies_on``: what the code relies on; what compilers alone may know counts if a compiler has made it.
        """
        slot, local = divmod(self.first + row, self.warps_per_cta)
        cta, rank = self.places.linear(slot), self.places.rank(slot)
        loops = self.loops(row, lane)
        relies_on = relies_on if self.compiled or relies_on == READ else ""
        found = Finding(kind, message, where, other, count, cta, local, lane, address, rank, loops, between, relies_on)
        self.recorder.finds(found, row)
        self.findings.add(found, since, reach)

    def by(
        self,
        kind: Kind,
        actor: Actor,
        message: str,
        *,
        other: SourceLine | None = None,
        count: int = 1,
        address: int | None = None,
        relies_on: str = "",
    ) -> None:
        """Record a finding in what some lanes execute."""
        row, lane, where = actor.row, actor.lane, actor.op.where
        self.add(kind, where, message, row, lane, other=other, count=count, address=address, relies_on=relies_on)

    def cta(self, row: int) -> str:
        """The CTA of a row as messages name it: by its rank, in a cluster."""
        slot = (self.first + row) // self.warps_per_cta
        rank = self.places.rank(slot)
        return f"CTA {self.places.linear(slot)}" if rank is None else f"the CTA of rank {rank}"

    def line_of(self, stamp: int) -> SourceLine:
        """The line of the operation that a stamp was given to."""
        op = self.clocks.history[stamp]
        return op.where if op is not None else NOWHERE

    def name_of(self, stamp: int) -> str:
        """Return the mnemonic of the instruction that was executed at a stamp."""
        op = self.clocks.history[stamp]
        return op.instruction.mnemonic if op is not None else "nothing"

    def of_lanes(
        self,
        kind: Kind,
        frame: Frame,
        where: SourceLine,
        bad: Array,
        message: str,
        *values: Array,
        other: SourceLine | None = None,
        address: Array | None = None,
    ) -> None:
        """Record a finding of the lanes (warps, 32) that are ``bad``, if there are any.

        The message is formatted with what the first one of them has in ``values``.
        """
        if not bad.any():
            return
        i, lane = (int(x[0]) for x in np.nonzero(bad))
        first = [int(frame.full(x)[i, lane]) for x in values]
        place = None if address is None else int(frame.full(address)[i, lane])
        message, count = message.format(*first) if first else message, int(bad.sum())
        self.add(kind, where, message, int(frame.rows[i]), lane, other=other, count=count, address=place)

    # -- accesses to shared and global memory ------------------------------------------------------------------------

    def unreachable(self, op: Op, row: int, lane: int, owner: int, what: str, when: str) -> None:
        """An access to ``what`` another CTA (of the warp ``owner``) has, ``when`` that may not be there."""
        message = f"{op.instruction.mnemonic} may reach {what} of {self.cta(owner)} {when}"
        self.add("cluster", op.where, message, row, lane)

    def races(
        self, mine: MemoryAccess, agents: Array, stamps: Array, addresses: Array, past: str, repeated: Array
    ) -> None:
        """Accesses of others (agents, stamps), to the same cells, that are not ordered with an access.

        One finding for each earlier operation; ``past`` tells what it did. ``repeated`` are reads of what the
        accessing warp has read by the same instruction.
        """
        op, rows = mine.op, mine.rows[0]
        for stamp in np.unique(stamps).tolist():
            these = stamps == stamp
            # Name another warp if there is one: that needs the stronger cure.
            i = int(np.argmax(np.where(agents == self.first + rows, 1, 2) * these))
            row, agent, byte = int(rows[i]), int(agents[i]), int(addresses[i])
            earlier, other = self.clocks.history[stamp], self.line_of(stamp)
            near, whom, cure = self._whom(self.first + row, agent)
            if not near and agent >= 0 and mine.buffers is not None and past.startswith("wrote"):
                cure = self._fences(self.first + row, agent, stamp) or cure
            if mine.proxy and near and mine.what == "write":
                cure = "all that have read it arrive at the mbarrier that is waited for before this copy, or meet "
                cure += "(__syncwarp, __syncthreads) before one of them arrives for all"
            reach = int(agent != self.first + row) + (not near)
            if mine.what == "write" and other == op.where and _only_loads(earlier):
                reach = 3
                word = "k.atomic, atomicAdd" if op.tile(0) is None else "tile.atomic"
                cure = f"update it in one step, by an atomic ({word}), or {cure}"
            buffer = mine.buffer(i)
            place = tile_at(byte, op, earlier) if buffer is None else f" of {buffer.element(byte)}"
            message = (
                f"{op.instruction.mnemonic} {_VERBS[mine.what]} byte {byte}{place} which {self.name_of(stamp)} of "
                f"{whom} {past}, and nothing orders the two: {cure}"
            )
            between = (stamp, self.clocks.now) if near else None
            who, count = (row, int(mine.lane_of_each[i, 0])), int(these.sum())
            relies = IN_STEP if buffer is None and agent == self.first + row else ""
            relies = REPEATED if near and repeated[these].all() else relies
            where = {"other": other, "count": count, "address": byte, "between": between, "relies_on": relies}
            self.add("race", op.where, message, *who, **where, reach=reach)

    def _fences(self, mine: int, agent: int, stamp: int) -> str:
        """Name the missing fence between two CTAs where only one of them has fenced; else return an empty text."""
        fence, own = self.published(agent, stamp), self.published(mine, 0)
        if fence is not None and own in (None, fence):
            return (
                f"the fence at {fence.where} publishes it, and the other side acquires nothing: fence "
                "(__threadfence()) there too, after what tells that it is done and before this access"
            )
        if fence is None and own is not None:
            return (
                f"the fence at {own.where} acquires, and nothing is published: fence (__threadfence()) after the "
                "write, and before what tells that it is done"
            )
        return ""

    def _whom(self, mine: int, agent: int) -> tuple[bool, str, str]:
        """Whether an agent is a warp of the same CTA; how a message calls it, and what orders an access after its."""
        warps, domain = self.warps_per_cta, self.places.domain
        if agent < 0:
            kind, _, number = self.clocks.queue_of(agent)
            if kind == "launch":
                earlier = self.clocks.earlier
                cure = "order the launches: put them on one stream, or let an event tell the end of the first"
                if number in earlier.awaited:
                    cure = "let every thread wait for it before (griddepcontrol.wait, cudaGridDependencySynchronize)"
                return False, f"launch {number}, {earlier.kernels[number]},", cure
            if kind == "reduction":
                cure = "wait for its group until it is done (k.wait_bulk(0)), then meet at a barrier"
                return False, "the TMA", cure
            if kind == "wgmma":
                cure = "wait for its group (wgmma.wait_group), then arrive at the barrier that orders the two"
                return False, f"warpgroup {number}", cure
            if kind == "bulk":
                cure = "wait for its group (cp.async.bulk.wait_group.read), then meet at a barrier"
                return False, f"warp {number}", cure
            return False, "the TMA", "wait for the phase of its mbarrier"
        if mine == agent:
            return True, "another lane of the same warp", "put a __syncwarp (or a barrier) between them"
        if mine // warps == agent // warps:
            return True, f"warp {agent % warps} of the same CTA", "put a barrier (__syncthreads) between them"
        if mine // domain == agent // domain:
            cure = "let the cluster meet (k.cluster_sync), or arrive and wait at an mbarrier with scope='cluster'"
            return False, f"{self.cta(agent - self.first)} of the same cluster", cure
        cure = "order the CTAs by an atomic with release and acquire (or fences), or split the kernel"
        return False, f"CTA {self.places.linear(agent // warps)}", cure

    def in_flight(self, mine: MemoryAccess, begun: Array, addresses: Array) -> None:
        """One finding for each copy, by the stamp at which it has begun, that is still writing at these addresses."""
        for stamp in np.unique(begun).tolist():
            these = begun == stamp
            self.tell("in flight", mine[these], addresses[these], stamp)

    def tell(
        self, what: str, mine: MemoryAccess, addresses: Array, stamp: int | None = None, agent: int | None = None
    ) -> None:
        """A finding of :data:`_TEXTS`, of an access to bytes, the earlier operation of a stamp, and another agent."""
        byte, (kind, text) = int(addresses[0]), _TEXTS[what]
        earlier, other = (None, None) if stamp is None else (self.clocks.history[stamp], self.line_of(stamp))
        if what == "read, not fenced" and earlier is not None and earlier.relies_on:
            return
        message = text.format(
            name=mine.op.instruction.mnemonic,
            does=_VERBS[mine.what],
            at=_byte(mine, byte, earlier),
            earlier="" if earlier is None else earlier.instruction.mnemonic,
            fence="fence.proxy.async" if mine.buffers is None else "k.fence_async('global')",
            wait=(stamp is not None and self.waits(mine.first[0], stamp)) or _how_to_wait(mine, earlier),
            whom="" if agent is None else self._whom(self.first + mine.first[0], agent)[1],
        )
        relies, size = "" if what == "an mbarrier" and not mine.proxy else _RELIES.get(what, ""), mine.cells.size
        self.add(kind, mine.op.where, message, *mine.first, other=other, count=size, address=byte, relies_on=relies)
