"""The control flow of a Program, structured or not, as one graph of basic blocks of prepared steps.

Blocks are numbered so that only loops lead back: lanes that have parted meet again at the first block that all of them
reach. A condition over instructions that neither wait nor need other lanes is no branch: they run under a predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.context import Context, Decision, Step
from warploom.emulate.control.frames import Frame
from warploom.ir.program import Program
from warploom.ir.statements import (
    NOWHERE,
    Branch,
    Flow,
    Loop,
    Op,
    Operand,
    Register,
    Role,
    Roles,
    SourceLine,
    Statement,
    Value,
    When,
    results_of,
    walk,
)
from warploom.isa import effects as fx

Array = NDArray[Any]
Meeting: TypeAlias = Value | Literal["warp"] | None
"""Whom an instruction needs: the lanes of a mask (its key), the whole warp, or nobody."""
_STOPS = (
    fx.WarpSync,
    fx.Barrier,
    fx.ClusterBarrier,
    fx.MbarrierWait,
    fx.WaitGroup,
    fx.GlobalWait,
    fx.RegisterBudget,
)
"""Effects of instructions that may wait, or that need other lanes."""
_MOST_ROUNDS = 2**31  # of a loop that is not meant to count around


class Point(NamedTuple):
    """A prepared instruction, or several; ``boundary``: another task may be let ahead after it."""

    step: Step
    boundary: bool
    meeting: Meeting = None


@dataclass(eq=False)
class StepBlock:
    """Steps, then the choice of a target for each lane: True is the first one. Without targets the lanes end.

    ``loops`` are the lines and indices of the loops around it, the outermost first. It ``writes`` these values,
    ``shows`` are the instructions that show what memory holds, in control flow
    without a structure. ``roles`` divide its warps into tasks.
    """

    number: int
    loops: tuple[tuple[SourceLine, Value], ...]
    where: SourceLine = NOWHERE
    points: list[Point] = field(default_factory=list[Point])
    targets: tuple[int, ...] = ()
    choose: Callable[[Frame], Array] | None = None
    roles: tuple[Role, ...] = ()
    shows: list[Op] = field(default_factory=list[Op])
    writes: set[Value] = field(default_factory=set[Value])


class Graph:
    """The blocks of a program; ``prepare`` makes the step of an instruction or of several that are ``lanewise``."""

    def __init__(
        self,
        context: Context,
        program: Program,
        prepare: Callable[[Sequence[Op]], Step],
        lanewise: Callable[[Statement], bool],
    ) -> None:
        self.context, self.program, self.prepare, self.lanewise = context, program, prepare, lanewise
        self.blocks: list[StepBlock] = []
        self.structured = True
        self._open(())
        self._body(program.body)
        if self.structured:
            self.blocks[-1].points.append(Point(lambda frame: None, False, "warp"))  # warps end as a whole

    def _open(self, loops: tuple[tuple[SourceLine, Value], ...] | None = None) -> StepBlock:
        block = StepBlock(len(self.blocks), self.blocks[-1].loops if loops is None else loops)
        self.blocks.append(block)
        return block

    # -- statements ----------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[Statement]) -> None:
        branches = {When: self._when, Loop: self._loop, Roles: self._roles, Flow: self._flow}
        for straight, group in groupby(body, _is_straight):
            if straight:
                self._straight(tuple(group))
                continue
            for statement in group:
                branches[type(statement)](statement)  # type: ignore[index]

    def _straight(self, body: Sequence[Statement]) -> None:
        """Statements that are no branches."""
        block = self.blocks[-1]
        block.points += self._points(body)
        for s in body:
            block.writes.update(r for inner in walk((s,)) for r in results_of(inner))
            if not self.structured:
                block.shows += [op for op in walk((s,)) if isinstance(op, Op) and _shows(op)]

    def _points(self, body: Sequence[Statement]) -> list[Point]:
        points: list[Point] = []
        for lanewise, group in groupby(body, self.lanewise):
            if lanewise:
                points.append(Point(self.prepare([s for s in group if isinstance(s, Op)]), False))
                continue
            for s in group:
                if isinstance(s, When):
                    points.append(Point(self._predicated(s), True))
                else:
                    assert isinstance(s, Op)
                    points.append(Point(self.prepare([s]), bool(s.instruction.effects()), self._meeting(s)))
        return points

    def _meeting(self, op: Op) -> Meeting:
        for effect in op.instruction.effects():
            if isinstance(effect, fx.WarpSync):
                return "warp" if effect.mask is None else self.context.key(op.operands[effect.mask])
        return None

    def _predicated(self, statement: When) -> Step:
        """A condition whose sides run one after the other, each on the lanes that take it."""
        condition = self._condition(statement, statement.condition)
        sides = [
            (self._points(body), {r for s in walk(body) for r in results_of(s) if isinstance(r, Register)})
            for body in (statement.body, statement.otherwise)
        ]

        def step(frame: Frame) -> None:
            holds = condition(frame)
            for (points, written), takes in zip(sides, (holds, ~holds), strict=True):
                takes = takes if frame.active is None else takes & frame.active
                if not points or not takes.any():
                    continue
                everyone = takes.all() or (frame.active is not None and np.array_equal(takes, frame.active))
                inner = frame if everyone else frame.part(np.broadcast_to(takes, frame.shape))
                for point in points:
                    point.step(inner)
                if inner is not frame:
                    inner.merge_into_parent(written)

        return step

    def _condition(self, statement: When | Branch, operand: Operand) -> Callable[[Frame], Array]:
        """The value that decides where lanes go."""
        context, key = self.context, self.context.key(operand)
        where, uniform, decision = statement.where, statement.uniform, context.decision(statement)

        def condition(frame: Frame) -> Array:
            array = context.decides(frame, key, where, "a condition")
            if uniform and array.shape[1] > 1:
                wide, active = frame.full(array), frame.acting()
                first = wide[np.arange(frame.n), active.argmax(axis=1)]
                message = (
                    "the lanes of a warp disagree on a condition that was declared uniform: drop `uniform`, or vote"
                )
                context.report.of_lanes("divergence", frame, where, (wide != first[:, None]) & active, message)
            decision.note(frame, array != 0)
            return array

        return condition

    # -- branches ------------------------------------------------------------------------------------------------

    def _when(self, s: When) -> None:
        head = self.blocks[-1]
        head.where, head.choose = s.where, self._condition(s, s.condition)
        ends: list[StepBlock] = []
        sides = [body for body in (s.body, s.otherwise) if body]
        for body in sides:
            head.targets += (self._open().number,)
            self._body(body)
            ends.append(self.blocks[-1])
        join = self._open(head.loops).number
        if len(sides) == 1:
            head.targets += (join,)
        if not s.body:
            head.targets = head.targets[::-1]
        for end in ends:
            end.targets = (join,)

    def _loop(self, s: Loop) -> None:
        """``for``: warps and lanes leave as their condition fails; the others go on."""
        start, stop, by = (self.context.key(x) for x in (s.start, s.stop, s.step))
        entry = self.blocks[-1]
        outermost = not entry.loops
        entry.where, entry.choose = s.where, partial(self._begin, s, (start, stop, by), self.context.decision(s))
        entry.writes.add(s.index)
        header = self._open((*entry.loops, (s.where, s.index)))
        header.where, header.choose = s.where, lambda frame: frame.env[s.index] < frame.env[stop]
        body = self._open()
        self._body(s.body)

        def advance(frame: Frame) -> None:
            frame.env[s.index] = frame.env[s.index] + frame.env[by]
            if outermost:
                self.context.passed(frame, s)

        latch = self.blocks[-1]
        latch.points.append(Point(advance, False))
        latch.writes.add(s.index)
        latch.targets = (header.number,)
        after = self._open(entry.loops)
        entry.targets, header.targets = (header.number, after.number), (body.number, after.number)

    def _begin(self, loop: Loop, keys: Sequence[Value], decision: Decision, frame: Frame) -> Array:
        """Whether lanes may enter a loop: one whose index would pass the end of its type is a finding."""
        context = self.context
        start, stop, step = (
            context.decides(frame, key, loop.where, f"the {name} of a loop")
            for key, name in zip(keys, ("start", "end", "step"), strict=True)
        )
        frame.write(loop.index, start, None, None)
        exact = np.int64 if stop.dtype.itemsize < 8 else np.float64
        begin, end, by = (x.astype(exact) for x in (start, stop, step))
        rounds = np.where(by > 0, -((begin - end) // np.maximum(by, 1)), _MOST_ROUNDS)
        decision.rounds = max(decision.rounds, int(np.where(frame.acting(), rounds, 0).max()))
        endless = (start < stop) & ((begin + rounds * by > np.iinfo(stop.dtype).max) | (rounds >= _MOST_ROUNDS))
        if endless.any() and context.checks:
            message = (
                "a loop from {} to {} does not end: its bound has wrapped around below 0, its step is 0, or its index "
                "wraps around; guard it with k.when"
            )
            context.report.of_lanes("overflow", frame, loop.where, frame.acting(endless), message, start, stop)
        return ~endless

    def _roles(self, s: Roles) -> None:
        """Warp roles: a branch by the number of the warp, whose sides are tasks of their own."""
        head = self.blocks[-1]
        bounds = np.array([(role.first, role.last) for role in s.branches])

        def role_of(frame: Frame) -> Array:
            mine = (frame.local[:, None] >= bounds[:, 0]) & (frame.local[:, None] < bounds[:, 1])
            return np.where(mine.any(axis=1), mine.argmax(axis=1), len(bounds))[:, None]

        head.where, head.choose, head.roles = s.where, role_of, s.branches
        ends: list[StepBlock] = []
        for role in s.branches:
            head.targets += (self._open(head.loops).number,)
            change = self.program.register_change(role)
            if change is not None:
                self._straight((Op(change, (), (), role.where),))
            self._body(role.body)
            ends.append(self.blocks[-1])
        join = self._open(head.loops).number
        head.targets += (join,)
        for end in ends:
            end.targets = (join,)

    def _flow(self, flow: Flow) -> None:
        """Blocks that end with branches: the end of a program."""
        self.structured = False
        before, starts, ends = self.blocks[-1], list[int](), list[StepBlock]()
        for body in flow.blocks:
            starts.append(self._open().number)
            self._body(body[:-1])
            ends.append(self.blocks[-1])
        before.targets = (starts[0],)
        for end, (*_, branch) in zip(ends, flow.blocks, strict=True):
            assert not isinstance(branch, Op | Loop | When | Roles | Flow)
            end.where, end.targets = branch.where, tuple(starts[t] for t in branch.targets)
            if branch.condition is not None:
                end.choose = self._condition(branch, branch.condition)


def _is_straight(statement: Statement) -> bool:
    """Whether a statement is an instruction, or a condition over some that neither wait nor need other lanes."""
    if isinstance(statement, When):
        return all(_is_straight(s) and not _stops(s) for body in (statement.body, statement.otherwise) for s in body)
    return isinstance(statement, Op)


def _stops(statement: Statement) -> bool:
    return isinstance(statement, Op) and any(isinstance(e, _STOPS) for e in statement.instruction.effects())


def _shows(op: Op) -> bool:
    """Whether an instruction shows what memory or an mbarrier holds."""
    return looks(op) or any(isinstance(e, fx.Access) and e.mode == "load" for e in op.instruction.effects())


def looks(op: Op) -> bool:
    """Whether an instruction may show what other threads have done meanwhile."""
    return any(
        (isinstance(e, fx.Access) and (e.mode == "atomic" or e.order != "weak" or e.volatile))
        or (isinstance(e, fx.MbarrierWait) and e.acquires and not e.blocks)
        for e in op.instruction.effects()
    )
