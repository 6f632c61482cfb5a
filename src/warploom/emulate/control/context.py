"""What the steps of a program work with: registers of frames, and the memories and clocks of the batch that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Barriers, ClusterBarriers, Wait
from warploom.emulate.barriers.mbarriers import Mbarriers
from warploom.emulate.control.frames import ASCENDING, Frame, Turns, constant_array
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.memory.memory import LocalMemory
from warploom.emulate.memory.shared_memory import SharedMemory
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.ordering import Ordering
from warploom.emulate.transactions.bulk import BulkCopies
from warploom.emulate.transactions.transaction import CopyQueue, Groups
from warploom.emulate.transactions.warpgroups import RegisterPools, Warpgroups
from warploom.ir.statements import NOWHERE, Const, Loop, Op, SourceLine, Statement, Value

Array = NDArray[Any]
Step: TypeAlias = Callable[[Frame], Wait | None]
"""Instructions prepared to run on any frame. Returns what their warps have to wait for."""


@dataclass(eq=False)
class Decision:
    """The outcomes that a launch has seen at a condition, a loop or a copy of masked bytes.

    It ``held`` for some lanes and ``failed`` for some (a copy holds where it copies all its bytes); a loop took at most
    so many ``rounds``.
    """

    statement: Statement
    held: bool = False
    failed: bool = False
    rounds: int = 0

    def note(self, frame: Frame, holds: Array) -> None:
        """Note what the active lanes of a frame decide."""
        if self.held and self.failed:
            return
        if holds.all():
            self.held = True
            return
        acting = frame.acting()
        self.held |= bool((acting & holds).any())
        self.failed |= bool((acting & ~holds).any())


class Context:
    """Settings, and what belongs to a launch, or to its current batch of CTAs."""

    memory: GlobalMemory
    rng: Random | None
    counter: TrafficCounter
    clocks: Clocks
    report: Reporter
    shared: SharedMemory
    local: LocalMemory
    ordering: Ordering
    barriers: Barriers
    clusters: ClusterBarriers
    mbarriers: Mbarriers
    copies: CopyQueue
    bulk: BulkCopies
    warpgroups: Warpgroups
    registers: RegisterPools

    def __init__(self, checks: bool, across: bool) -> None:
        self.checks = checks
        self.across = across
        self.progress: Callable[[float], None] | None = None
        self._leader: Loop | None = None
        self.printed: list[tuple[int, str]] = []
        """The number of a warp in the grid, and what one of its threads prints."""
        self.decisions: list[Decision] = []
        self.constants: dict[Value, Array] = {}
        self._interned: dict[tuple[str, str], Value] = {}

    def decision(self, statement: Statement) -> Decision:
        """A new record of what lanes decide at a statement."""
        self.decisions.append(Decision(statement))
        return self.decisions[-1]

    def leave(self) -> None:
        """The launch is over: what it held is let go."""
        if "memory" in self.__dict__:
            self.memory.leave()
        for name in Context.__annotations__:
            self.__dict__.pop(name, None)
        self.progress = self._leader = None

    @property
    def memories(self) -> dict[str, Any]:
        """The memories of the batch by their state spaces: all have places, loads, stores and updates."""
        return {"shared": self.shared, "global": self.memory, "local": self.local}

    @property
    def groups(self) -> dict[str, Groups[Any]]:
        """The transactions that threads commit to groups, by their kinds."""
        return {"cp.async": self.copies, "bulk": self.bulk, "wgmma": self.warpgroups}

    def passed(self, frame: Frame, loop: Loop) -> None:
        """A pass of an outermost loop is over: the first one that has begun tells how far it has come."""
        stop = frame.env[self.key(loop.stop)]
        if self.progress is None or stop.size > 1 or self._leader not in (None, loop):
            return
        first, index, last = (int(frame.env[self.key(x)].flat[0]) for x in (loop.start, loop.index, loop.stop))
        self._leader = loop if index < last else None
        self.progress(min(1.0, (index - first) / max(1, last - first)))

    def turns(self) -> Turns:
        """Whose turn it is at an atomic: PTX leaves it open, and a seed chooses."""
        return ASCENDING if self.rng is None else self.rng.sample(ASCENDING, len(ASCENDING))

    def key(self, operand: Value | Const) -> Value:
        """The value an operand is looked up by; constants get one of their own."""
        if not isinstance(operand, Const):
            return operand
        name = (operand.dtype.name, repr(operand.value))
        if name not in self._interned:
            value = Value(-1 - len(self._interned), operand.dtype)
            self._interned[name] = value
            self.constants[value] = constant_array(operand.dtype, operand.value)
        return self._interned[name]

    def keys(self, op: Op) -> tuple[Value, ...]:
        """The keys of all operands."""
        return tuple(self.key(x) for x in op.operands)

    def observe(self, frame: Frame, key: Value, op: Op, use: str) -> Array:
        """An operand that decides something. Poison in it is a finding."""
        array = frame.env[key]
        if frame.shadows and key in frame.shadows:
            self.decides(frame, key, op.where, f"{use} of {op.instruction.mnemonic}")
        return array

    def decides(self, frame: Frame, key: Value, where: SourceLine, use: str) -> Array:
        """The value of a register that is about to decide something. Poison in it is a finding."""
        array = frame.env[key]
        shadow = frame.shadows.get(key) if self.checks and frame.shadows else None
        if shadow is not None:
            line, text = frame.origins.get(key, (NOWHERE, "a value"))
            message = f"{use} depends on {text}: write it before, or wait for its data"
            bad = frame.acting(shadow != 0)
            other = None if line == NOWHERE else line
            self.report.of_lanes("uninitialised", frame, where, bad, message, other=other)
        return array
