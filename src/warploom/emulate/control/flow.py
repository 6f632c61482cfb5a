"""Control flow without a structure: groups of lanes that part at branches and meet again where their ways join.

Threads are independent, as the hardware's have been since sm_70. Of the groups that can go on, the one in the block of
the lowest number does, so that lanes meet at the first block that all of them reach. Where an instruction needs lanes
that are elsewhere (a barrier, a shuffle), a group is held until they come; only if none of them ever can, it goes on
and is found divergent. So what is found holds for every order, not for this one.

Source: PTX ISA, "Independent Thread Scheduling"; CUDA C++ Programming Guide, "Compute Capability 7.x".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError
from warploom.emulate.barriers.barriers import Either, Wait
from warploom.emulate.control.context import Context
from warploom.emulate.control.control import Control
from warploom.emulate.control.frames import Frame, Parts
from warploom.emulate.control.lane_steps import lanes_named
from warploom.emulate.control.tasks import ENDED, Activation, Begun, Block, Found, Step, Task
from warploom.ir.liveness import live_registers
from warploom.ir.statements import Branch, Flow, Op, Register, Statement, Value, results_of, walk
from warploom.isa.effects import Access, MbarrierWait, WarpSync

Array = NDArray[Any]
Meeting: TypeAlias = Value | Literal["warp"] | None
"""Whom an instruction needs: the lanes of a mask (its key), the whole warp, or nobody."""
Registers = frozenset[Register]
_MOST_PASSES = 1 << 22
"""Of the loops of some warps together: half a minute at best."""
_MANY_PASSES = 1 << 10
"""From here on a loop may be one that waits by plain loads, in which nothing shows what others do but by luck."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A prepared block: ``live`` are the registers that it or a later one reads before they are written."""

    body: tuple[Statement, ...]
    steps: Block
    branch: Branch
    writes: Registers
    live: Registers


@dataclass(frozen=True, slots=True)
class _Looks:
    """An instruction by which a loop sees what other threads do, ``strong`` or by luck alone, and all that it reads."""

    op: Op
    strong: bool
    values: Sequence[Value]


class _Held(Wait):
    """Lanes that an instruction needs are elsewhere. ``missing`` says of which warps; ``step`` is the instruction's."""

    def __init__(self, op: Op, missing: Array, step: Step) -> None:
        super().__init__(op, {-1})
        self.missing, self.step = missing, step


@dataclass(eq=False)
class _Group:
    """Lanes at one place, before ``step`` of a block. ``frame`` has their registers; without one, those of the flow's
    own frame are theirs.

    ``written`` are the registers that differ from those. ``held`` is the step that it may not begin, as lanes are
    elsewhere, ``forced`` one that it begins without them. ``resting`` at a loop that looks what other threads do,
    ``idle`` if its last pass changed nothing; ``now`` is when it ended.
    """

    block: int
    lanes: Array
    step: int = 0
    frame: Frame | None = None
    written: set[Register] = field(default_factory=set[Register])
    task: Task | None = None
    held: Step | None = None
    forced: Step | None = None
    resting: Op | None = None
    idle: bool = False
    before: list[Array | None] | None = None
    now: int = -1


class FlowSteps:
    """The step of one Flow, on any frame. ``build`` prepares blocks, ``exited`` is told of warps that have ended."""

    def __init__(
        self,
        context: Context,
        control: Control,
        build: Callable[[tuple[Statement, ...]], Block],
        exited: Callable[[Array], None],
        flow: Flow,
    ) -> None:
        self.context, self.control, self.build, self.exited = context, control, build, exited
        live = live_registers(flow)
        self.blocks = [self._block(body, live[number]) for number, body in enumerate(flow.blocks)]
        self._reads = [[s for s in walk(b) if isinstance(s, Op) and _reads(s)] for b in flow.blocks]
        self._looks: dict[tuple[int, int], _Looks | None] = {}

    def _block(self, body: tuple[Statement, ...], live: Registers) -> _Block:
        branch = body[-1]
        assert isinstance(branch, Branch)
        writes = frozenset(r for s in walk(body) for r in results_of(s) if isinstance(r, Register))
        steps = [
            (self._met(s, step), boundary) for s, (step, boundary) in zip(body, self.build(body[:-1]), strict=False)
        ]
        return _Block(body[:-1], steps, branch, writes, live)

    def _met(self, statement: Statement, step: Step) -> Step:
        """A step that is held while lanes that it needs are elsewhere."""
        meeting = self._meeting(statement)
        if meeting is None:
            return step
        assert isinstance(statement, Op)

        def met(frame: Frame) -> Begun:
            if frame.mask is not None:
                missing = _missing(frame, meeting)
                if missing is not None:
                    return _Held(statement, missing, step)
            return step(frame)

        return met

    def _meeting(self, statement: Statement) -> Meeting:
        for effect in statement.instruction.effects() if isinstance(statement, Op) else ():
            if isinstance(effect, WarpSync):
                assert isinstance(statement, Op)
                return "warp" if effect.mask is None else self.context.key(statement.operands[effect.mask])
        return None

    def looks(self, first: int, last: int) -> _Looks | None:
        """How a loop over these blocks sees what other threads do meanwhile, if it does."""
        if (first, last) not in self._looks:
            ops = [op for block in self._reads[first : last + 1] for op in block]
            strong = [op for op in ops if _looks(op)]
            values = [value for op in ops for value in op.results]
            self._looks[first, last] = _Looks((strong or ops)[0], bool(strong), values) if ops else None
        return self._looks[first, last]

    def __call__(self, frame: Frame) -> Sequence[Activation]:
        return [_Run(self, frame)]


class _Run(Activation):
    """One execution of a flow by the warps of a frame."""

    def __init__(self, steps: FlowSteps, frame: Frame) -> None:
        super().__init__([], frame)
        self.steps, self.context = steps, steps.context
        everyone = np.ones((1, 1, 1), np.bool_) if frame.mask is None else frame.mask
        self.everyone = np.broadcast_to(everyone, (*frame.shape, 32))
        self.groups = [_Group(0, self.everyone)]
        self.passes = 0  # of all loops

    def run(self, seeded: bool) -> Found:
        """Until all lanes have ended, or all groups wait."""
        while self.groups:
            group = self._next()
            if group is None:
                return self._pause()
            task = group.task or self._start(group)
            task.run(1 if seeded else None)
            if not task.stack:
                group.task = None
                self._leave(group)
            elif isinstance(task.wait, _Held):
                self._hold(group, task.wait)
            elif task.wait is None:
                return None
        return ENDED

    def split(self) -> bool:
        """Divide a group of which some warps wait for others."""
        for group in self.groups:
            if group.task is None:
                continue
            tasks = group.task.split(partial(self._parts_of, group))
            if tasks:
                self.groups.remove(group)
                for task in tasks:
                    lanes = group.lanes & np.isin(self.frame.rows, task.rows)[:, :, None]
                    frame, written = task.stack[0].frame, set(group.written)
                    self.groups.append(_Group(group.block, lanes, group.step, frame, written, task))
                return True
        return False

    def _lanes(self, frame: Frame, lanes: Array) -> Array:
        """Lanes of a group's frame as lanes of the flow's own."""
        wide = np.broadcast_to(lanes, (*frame.shape, 32))
        return wide if frame is self.frame else frame.in_parent(wide)

    def _parts_of(self, group: _Group, rows: Array) -> Parts:
        """Frames of a group cut down to some of its rows; what the group has of the flow's own frame becomes a part."""
        whole = self.frame
        if group.frame is whole:
            return Parts(rows, whole, whole.part(group.lanes & np.isin(whole.rows, rows)[:, :, None]))
        return Parts(rows, whole, whole)

    # -- which group goes on -----------------------------------------------------------------------------------------

    def _next(self) -> _Group | None:
        """The group in the lowest block of those that can go on; None if all of them wait."""
        ready = [g for g in self.groups if g.held is None and g.resting is None and (g.task is None or g.task.ready)]
        if not ready and all(g.held for g in self.groups):
            ready = [min(self.groups, key=lambda g: (g.block, g.step))]
            ready[0].held, ready[0].forced = None, ready[0].held
        if not ready:
            return None
        return min(ready, key=lambda g: (g.block, g.step)) if len(ready) > 1 else ready[0]

    def _pause(self) -> Wait:
        """What all groups wait for; loops that look again and again for what others do let these go first."""
        looking: list[Wait] = []
        idle = True
        for group in self.groups:
            if group.resting is not None:
                looking.append(Wait(group.resting, set(self.frame.rows[group.lanes.any(axis=2)].tolist())))
                idle &= group.idle
                group.resting = None
        return Either([w for g in self.groups if (w := g.task and g.task.wait) is not None], looking, idle)

    def _hold(self, group: _Group, held: _Held) -> None:
        """Warps of which lanes are missing are held, those that are complete go on."""
        frame, task, missing = group.frame, group.task, held.missing
        assert frame is not None
        assert task is not None
        group.task, group.step = None, task.stack[0].next - 1
        if missing.all():
            group.held = held.step
        else:
            lanes = group.lanes & self._lanes(frame, missing.reshape(*frame.shape, 1))
            self._give_back(group, self.steps.blocks[group.block].live, group.step)
            self.groups.remove(group)
            self.groups.append(_Group(group.block, group.lanes & ~lanes, group.step))
            group = _Group(group.block, lanes, group.step, held=held.step)
            self.groups.append(group)
        same = [g for g in self.groups if g.held and (g.block, g.step) == (group.block, group.step)]
        if len(same) > 1:
            self._merge(same)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _start(self, group: _Group) -> Task:
        """The task of a group, on the steps of its block."""
        if group.frame is None:
            alone = len(self.groups) == 1 and bool((group.lanes == self.everyone).all())
            group.frame = self.frame if alone else self.frame.part(group.lanes)
        stack = [Activation(self.steps.blocks[group.block].steps, group.frame)]
        stack[0].next = group.step
        if group.forced is not None:
            stack[0].next += 1
            stack.append(Activation([(group.forced, False)], group.frame))
            group.forced = None
        group.task = Task(stack)
        return group.task

    def _merge(self, groups: list[_Group]) -> None:
        """Groups at one place become one, on the registers of the flow's frame."""
        first = groups[0]
        for group in groups:
            self._give_back(group, self.steps.blocks[first.block].live, first.step)
        self.groups = [g for g in self.groups if g not in groups]
        lanes = np.logical_or.reduce([g.lanes for g in groups])
        self.groups.append(_Group(first.block, lanes, first.step))

    def _give_back(self, group: _Group, live: Registers, step: int = 0) -> None:
        """The flow's frame gets the registers that a group has written, and the values of a block it is amidst."""
        if group.frame is None or group.frame is self.frame:
            return
        values: list[Value] = [r for r in group.written if r in live]
        for s in walk(self.steps.blocks[group.block].body[:step]) if step else ():
            values += results_of(s)
        group.frame.merge_into_parent(values)

    # -- branches ------------------------------------------------------------------------------------------------------

    def _leave(self, group: _Group) -> None:
        """A group has done its block: where its lanes go on."""
        block, frame = self.steps.blocks[group.block], group.frame
        assert frame is not None
        group.written |= block.writes
        targets = block.branch.targets
        if len(targets) > 1:
            parts = self._parts(frame, block.branch)
            if len(parts) > 1:
                self._part(group, parts)
                return
            targets = tuple(parts)
        if targets:
            self._go(group, targets[0])
        else:
            self._end(group)

    def _parts(self, frame: Frame, branch: Branch) -> dict[int, Array]:
        """Target → the lanes of a frame that go there; lanes without one are left out, and reported."""
        context = self.context
        assert branch.condition is not None
        key = context.key(branch.condition)
        chosen = frame.env[key]
        if frame.shadows and context.checks:
            context.report.observe(frame, key, branch.where, "a condition")
        number = np.where(chosen, 0, 1) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        if number.size == 1 and 0 <= int(number.flat[0]) < len(branch.targets):
            return {branch.targets[int(number.flat[0])]: np.ones((1, 1, 1), np.bool_)}
        parts: dict[int, Array] = {}
        for which in np.unique(number).tolist():
            takes = number == which if frame.mask is None else (number == which) & frame.mask
            if not takes.any():
                continue
            if not 0 <= which < len(branch.targets):
                text = f"an indirect branch by {which}, where its list has {len(branch.targets)} targets: guard it"
                context.report.add("undefined", branch.where, text, int(frame.flat[0]), 0)
                continue
            target = branch.targets[which]
            parts[target] = parts[target] | takes if target in parts else takes
        if branch.uniform and len(parts) > 1:
            self.steps.control.check_uniform(frame, next(iter(parts.values())), branch.where)
        return parts

    def _part(self, group: _Group, parts: dict[int, Array]) -> None:
        frame = group.frame
        assert frame is not None
        self._give_back(group, frozenset[Register]().union(*(self.steps.blocks[t].live for t in parts)))
        self.groups.remove(group)
        for target, takes in parts.items():
            part = _Group(group.block, self._lanes(frame, takes))
            self.groups.append(part)
            self._go(part, target)

    def _go(self, group: _Group, target: int) -> None:
        self.passes += target <= group.block
        if self.passes > _MOST_PASSES:
            where = self.steps.blocks[group.block].branch.where
            raise EmulationError(
                f"{where}: after {_MOST_PASSES} passes of its loops the kernel has not ended: it does "
                "not end, or its loops are too long for the emulator, for which small problems are "
                "enough"
            )
        looks = self.steps.looks(target, group.block) if target <= group.block else None
        group.block, group.step = target, 0
        if looks is not None and (looks.strong or self.passes > _MANY_PASSES):
            self._rest(group, looks)
        same = [g for g in self.groups if g.block == target and g.step == 0 and g.task is None]
        if len(same) > 1:
            self._merge(same)

    def _rest(self, group: _Group, looks: _Looks) -> None:
        """After a pass of a loop that looks what others do, or may and has changed nothing, these go first."""
        frame = group.frame or self.frame
        now = [frame.env.get(x) for x in (*self.steps.blocks[group.block].live, *looks.values)]
        before, group.before = group.before, now
        clock, group.now = group.now, self.context.clocks.now
        if any(isinstance(e, MbarrierWait) for e in looks.op.instruction.effects()):
            group.idle = clock == group.now  # it may count its passes: nobody has touched memory meanwhile
        else:
            group.idle = before is not None and len(before) == len(now) and all(map(_equal, before, now))
        group.resting = looks.op if looks.strong or group.idle else None

    def _end(self, group: _Group) -> None:
        """The lanes of a group have ended."""
        self.groups.remove(group)
        gone = self.frame.gone
        gone = group.lanes.copy() if gone is None else gone | group.lanes
        self.frame.gone = gone
        for other in self.groups:
            if other.frame is not None:
                other.frame.know_gone()
            other.held = None  # whom it was held for may have ended
        all_gone = (gone | ~self.everyone).all(axis=2) & group.lanes.any(axis=2)
        rows = self.frame.rows[all_gone]
        if rows.size:
            self.steps.exited(rows)


def _missing(frame: Frame, meeting: Meeting) -> Array | None:
    """The warps of which lanes that an instruction needs are neither here nor at their end; None for none."""
    absent = frame.absent
    if absent is None:
        return None
    if isinstance(meeting, str):
        return np.asarray(absent.any(axis=1))
    assert meeting is not None
    assert frame.active is not None
    named = lanes_named(frame.full(frame.env[meeting]))
    missing = np.asarray((named & frame.active[:, :, None] & absent[:, None, :]).any(axis=(1, 2)))
    return missing if missing.any() else None


def _equal(a: Array | None, b: Array | None) -> bool:
    """Whether a register is as it was a pass before."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _reads(op: Op) -> bool:
    """Whether an instruction shows what memory or an mbarrier holds."""
    return _looks(op) or any(isinstance(e, Access) and e.mode == "load" for e in op.instruction.effects())


def _looks(op: Op) -> bool:
    """Whether an instruction may show what other threads have done meanwhile."""
    effects = op.instruction.effects()
    return any(
        (isinstance(e, Access) and (e.mode == "atomic" or e.order != "weak" or e.volatile))
        or (isinstance(e, MbarrierWait) and e.acquires and not e.blocks)
        for e in effects
    )
