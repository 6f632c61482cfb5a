"""Control flow over frames: loops, branches and warp roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.context import Context
from warploom.emulate.control.frames import Frame, Parts
from warploom.emulate.control.tasks import Activation, Block, Division, Step
from warploom.emulate.transactions.products import WARPS
from warploom.ir.program import Program
from warploom.ir.statements import Loop, Op, Operand, Register, Role, Roles, SourceLine, Statement, Value, When, walk
from warploom.isa.effects import AsyncMatrix

Array = NDArray[Any]


_MOST_ROUNDS = 2**31  # of a loop that is not meant to count around


def written_registers(body: tuple[Statement, ...]) -> tuple[Value, ...]:
    """The mutable registers that a block may write."""
    found = {r: None for s in walk(body) if isinstance(s, Op) for r in s.results if isinstance(r, Register)}
    return tuple(found)


class Control:
    """Builds the steps of control statements, of blocks that ``build`` prepares."""

    def __init__(self, context: Context, program: Program, build: Callable[[tuple[Statement, ...]], Block]) -> None:
        self.context, self.program, self.build = context, program, build
        self.begin(None)

    def begin(self, progress: Callable[[float], None] | None) -> None:
        """Another batch begins; ``progress`` is told how far its first outermost loop has come."""
        self.progress = progress
        self.told: _Passes | None = None

    def _watch(self, frame: Frame, operand: Operand, where: SourceLine, what: str) -> Array:
        key = self.context.key(operand)
        array = frame.env[key]
        if frame.shadows and self.context.checks:
            self.context.report.observe(frame, key, where, what)
        return array

    def loop(self, statement: Loop) -> Step:
        """``for``: warps and lanes leave as their condition fails; the others go on."""
        body = self.build(statement.body)
        registers = written_registers(statement.body)

        def step(frame: Frame) -> list[Activation]:
            start, stop, by = (
                self._watch(frame, x, statement.where, f"the {name} of a loop")
                for x, name in ((statement.start, "start"), (statement.stop, "end"), (statement.step, "step"))
            )
            loop = _Passes(self, statement, body, registers, frame, start, stop, by)
            loop.stays = self._ends(frame, statement, start, stop, by)
            if not loop.begins():
                return []
            self.told = self.told or loop
            return [loop]

        return step

    def _ends(self, frame: Frame, loop: Loop, start: Array, stop: Array, step: Array) -> Array | None:
        """The lanes that may enter (None: all); one whose index would pass the end of its type is a finding."""
        exact = np.int64 if stop.dtype.itemsize < 8 else np.float64
        begin, end, by = (x.astype(exact) for x in (start, stop, step))
        rounds = np.where(by > 0, -((begin - end) // np.maximum(by, 1)), _MOST_ROUNDS)
        endless = (start < stop) & ((begin + rounds * by > np.iinfo(stop.dtype).max) | (rounds >= _MOST_ROUNDS))
        if not endless.any():
            return frame.mask
        acting = frame.full(endless) & (True if frame.active is None else frame.active)
        if acting.any() and self.context.checks:
            row, lane = (int(x[0]) for x in np.nonzero(acting))
            first, beyond = (int(frame.full(x)[row, lane]) for x in (start, stop))
            message = (
                f"a loop from {first} to {beyond} does not end: its bound has wrapped around below 0, its step is 0, "
                "or its index wraps around; guard it with k.when"
            )
            report, count = self.context.report, int(acting.sum())
            report.add("overflow", loop.where, message, int(frame.flat[row]), lane, count=count)
        may = ~endless
        return may if frame.mask is None else may & frame.mask

    def when(self, statement: When) -> Step:
        """``if``: each side runs on the warps with a lane that takes it, the second one after the first."""
        sides = [(self.build(b), written_registers(b)) if b else None for b in (statement.otherwise, statement.body)]

        def step(frame: Frame) -> list[Activation]:
            condition = self._watch(frame, statement.condition, statement.where, "a condition")
            if statement.uniform and condition.shape[2] > 1:
                self.check_uniform(frame, condition, statement.where)
            begun: list[Activation] = []
            for side, takes in zip(sides, (~condition, condition), strict=True):
                if side is None:
                    continue
                block, registers = side
                if frame.mask is not None:
                    takes = takes & frame.mask
                if takes.all() or (frame.mask is not None and bool((takes == frame.mask).all())):
                    begun.append(Activation(block, frame))
                elif takes.any():
                    inner = frame.child(np.broadcast_to(takes, (*frame.shape, 32)))
                    begun.append(Activation(block, inner, registers))
            return begun

        return step

    def check_uniform(self, frame: Frame, condition: Array, where: SourceLine) -> None:
        """Lanes of one warp that disagree on a condition that was declared uniform."""
        wide = frame.full(condition)
        active = np.ones_like(wide) if frame.active is None else frame.active
        mixed = (wide & active).any(axis=1) & (~wide & active).any(axis=1)
        if mixed.any():
            row = int(np.argmax(mixed))
            lane = int(np.argmax(wide[row] != wide[row, 0]))
            message = "the lanes of a warp disagree on a condition that was declared uniform: drop `uniform`, or vote"
            self.context.report.add("divergence", where, message, int(frame.flat[row]), lane, count=int(mixed.sum()))

    def roles(self, statement: Roles) -> Step:
        """Warp roles: their warps go on in tasks of their own."""
        branches = [(b, _multiplies(b), self.build(self._with_budget(b))) for b in statement.branches]

        def step(frame: Frame) -> Division:
            tasks: list[tuple[Array, Block | None]] = []
            others = np.ones(frame.n, np.bool_)
            for role, multiplies, block in branches:
                count = role.last - role.first
                size = 1 if not multiplies else count if self.context.rng is None else WARPS
                for first in range(role.first, role.last, size):
                    takes = (frame.local >= first) & (frame.local < min(first + size, role.last))
                    others &= ~takes
                    if takes.any():
                        tasks.append((frame.flat[takes], block))
            if others.any():
                tasks.insert(0, (frame.flat[others], None))
            return Division(tasks)

        return step

    def _with_budget(self, role: Role) -> tuple[Statement, ...]:
        change = self.program.register_change(role)
        return role.body if change is None else (Op(change, (), (), role.where), *role.body)


def _multiplies(role: Role) -> bool:
    """Whether a role has ``wgmma``: its warpgroups go on together, and under a seed each by itself.

    In other roles each warp may wait for something else, for what the others start when they get there.
    """
    return any(
        isinstance(e, AsyncMatrix) for s in walk(role.body) if isinstance(s, Op) for e in s.instruction.effects()
    )


class _Passes(Activation):
    """A loop under way: its body on the warps and lanes of ``base`` that have not left it."""

    def __init__(
        self,
        control: Control,
        statement: Loop,
        body: Block,
        registers: tuple[Value, ...],
        base: Frame,
        start: Array,
        stop: Array,
        step: Array,
    ) -> None:
        super().__init__(body, base, registers)
        self.control, self.statement, self.base = control, statement, base
        self.start, self.index, self.stop, self.step = start, start, stop, step
        self.stays: Array | None = None
        self.last: Array | None = None

    def begins(self) -> bool:
        """Whether another pass begins, on the lanes whose index is not at its end."""
        base, index, inner = self.base, self.index, self.frame
        goes_on = index < self.stop
        if self.stays is not None:
            goes_on = goes_on & self.stays
        if self.stop.size > 1 or index.size > 1 or self.step.size > 1:
            self.stays = goes_on  # who has left stays out, also when the index wraps around
        loops, key = self.control.context.report.loops, self._key()
        if not goes_on.any():
            loops.pop(key, None)
            if inner is not base:
                inner.merge_into_parent(self.registers)
            return False
        if goes_on.all() or (base.mask is not None and bool((goes_on == base.mask).all())):
            if inner is not base:  # those that had left are a task of their own now
                inner.merge_into_parent(self.registers)
            self.frame, self.last = base, None
        else:
            goes_on = np.broadcast_to(goes_on, (*base.shape, 32))
            if self.last is None or not np.array_equal(self.last, goes_on):
                if inner is not base:
                    inner.merge_into_parent(self.registers)
                self.frame, self.last = base.child(goes_on), goes_on
        inner = self.frame
        base.env[self.statement.index] = index
        if inner is not base and inner.env is not base.env:
            inner.env.pop(self.statement.index, None)
        loops[key] = base, index
        self.next = 0
        return True

    def ends(self) -> bool:
        """A pass is over: whether it was the last one."""
        self.index = self.index + self.step
        goes_on = self.begins()
        if self.control.told is self:
            if self.control.progress is not None and self.stop.size == 1:
                first = int(self.start.flat[0])
                self.control.progress((int(self.index.flat[0]) - first) / max(1, int(self.stop.flat[0]) - first))
            self.control.told = self if goes_on else None
        return not goes_on

    def part(self, parts: Parts) -> Activation:
        """The loop of some of the warps."""
        part = super().part(parts)
        assert isinstance(part, _Passes)
        part.base, part.last = parts.of(self.base), None
        part.start, part.index, part.stop, part.step = (
            parts.array(x, self.base, part.base) for x in (self.start, self.index, self.stop, self.step)
        )
        part.stays = None if self.stays is None else parts.array(self.stays, self.base, part.base)
        if self.control.told is self:
            self.control.told = part
        loops = self.control.context.report.loops
        if self._key() in loops and loops[self._key()][0] is self.base:
            del loops[self._key()]
        loops[part._key()] = part.base, part.index
        return part

    def _key(self) -> tuple[SourceLine, int]:
        return self.statement.where, int(self.base.flat[0])
