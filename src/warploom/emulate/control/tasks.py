"""Tasks: warps on their way through the graph of a program, as groups of lanes that part at branches and meet again.

Threads are independent, as the hardware's have been since sm_70. The group in the block of the lowest number goes on
first, so that lanes meet at the first block that all of them reach. Where it waits, its task does, and other tasks go
on; only where nothing else can, what need not wait goes ahead of it: warps as a task of their own, lanes of its own
warps as a group. Where an instruction needs lanes that are elsewhere (a barrier, a shuffle), a group is held until they
come; if none of them ever can, it goes on and is found divergent. So what is found holds for every order, not for this
one, and no launch runs twice.

Source: PTX ISA, "Independent Thread Scheduling"; CUDA C++ Programming Guide, "Compute Capability 7.x".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError
from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.context import Context
from warploom.emulate.control.frames import Frame, chosen_of
from warploom.emulate.control.graph import Graph, Meeting, StepBlock, looks
from warploom.emulate.control.lane_steps import lanes_that_miss
from warploom.emulate.transactions.warpgroups import WARPS
from warploom.ir.statements import Op, Role, SourceLine, Value, walk
from warploom.isa.effects import AsyncMatrix, MbarrierWait

Array = NDArray[Any]
_MOST_PASSES = 1 << 22
"""Of the loops of some warps together: half a minute at best."""
_MANY_PASSES = 1 << 10
"""From here on a loop may be one that waits by plain loads, in which nothing shows what others do but by luck."""


@dataclass(eq=False)
class LaneGroup:
    """Lanes (warps, 32) of a task at one place, before ``step`` of a block.

    ``frame`` has their registers, of which they have ``written`` some; without one, those of the task are theirs.
    ``held``: the step needs lanes that are elsewhere; ``forced``: it begins without them. ``ahead`` of groups that
    wait. ``resting`` at a loop by this instruction, which looks what other threads do; ``idle`` if its last pass, at
    the end of which registers were as in ``before`` and the clock at ``now``, has changed nothing.
    """

    block: StepBlock
    lanes: Array
    step: int = 0
    frame: Frame | None = None
    written: set[Value] = field(default_factory=set[Value])
    wait: Wait | None = None
    held: bool = False
    forced: bool = False
    ahead: bool = False
    resting: Op | None = None
    idle: bool = False
    before: dict[Value, Array | None] = field(default_factory=dict["Value", "Array | None"])
    now: int = -1

    @property
    def place(self) -> tuple[int, int]:
        """Its block's number and its step."""
        return self.block.number, self.step


class Task:
    """Warps that go on together. ``exited`` is told of those that have ended."""

    def __init__(
        self,
        context: Context,
        graph: Graph,
        frame: Frame,
        exited: Callable[[Array], None],
    ) -> None:
        self.context, self.graph, self.frame, self.exited = context, graph, frame, exited
        self.groups = [LaneGroup(graph.blocks[0], np.ones(frame.shape, np.bool_))]
        self.steps: int | None = None
        self.passes = 0  # of all loops

    @property
    def rows(self) -> Array:
        """The warps that run the task, as rows of the batch."""
        return self.frame.rows

    @property
    def busy(self) -> bool:
        """Whether a group can go on that does more than look what others do."""
        return self._next() is not None

    @property
    def resting(self) -> list[LaneGroup]:
        """Groups in loops that look what others do: these go first."""
        return [g for g in self.groups if g.resting is not None]

    def waits(self) -> Iterator[Wait]:
        """Its groups' waits that are not over, and loops that look what others do."""
        for group in self.groups:
            if group.resting is not None:
                yield Wait(group.resting, set(self.rows_of(group)))
            elif not self._ready(group):
                assert group.wait is not None
                yield replace(group.wait, rows=group.wait.rows & set(self.rows_of(group)))

    def loops(self, row: int, lane: int) -> tuple[tuple[SourceLine, int], ...]:
        """The loops that a lane of one of its warps is in, the outermost first, each with its index."""
        for group in self.groups:
            if group.lanes[self.rows == row, lane].any():
                frame = group.frame or self.frame
                mine = frame.rows == row
                indices = ((line, frame.full(frame.env[index])) for line, index in group.block.loops)
                return tuple((line, int(index[mine, lane][0])) for line, index in indices)
        return ()

    def rows_of(self, group: LaneGroup) -> list[int]:
        """The warps that have lanes in a group."""
        return self.rows[group.lanes.any(axis=1)].tolist()

    def _ready(self, group: LaneGroup) -> bool:
        return group.wait is None or group.wait.ready or group.wait.rows.isdisjoint(self.rows_of(group))

    def _next(self) -> LaneGroup | None:
        """The group that goes on; None if all wait for others."""
        free = [g for g in self.groups if not g.held and g.resting is None]
        if len(free) > 1:
            free.sort(key=lambda g: g.place)
        return next((g for i, g in enumerate(free) if (not i or g.ahead) and self._ready(g)), None)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, steps: int | None) -> list[Task]:
        """Go on until it waits, has ended, or has taken so many steps; returns the tasks that take its place, if any.

        It has ended when it has no groups.
        """
        if not self.busy:
            for group in self.groups:
                group.resting = None
        self.steps, recorder = steps, self.context.report.recorder
        while self.steps != 0 and (group := self._next()) is not None:
            recorder.goes_on(self, group)
            done = self._run_block(group)
            recorder.stops(group, done)
            if done:
                roles = group.block.roles
                self._leave(group)
                if roles:
                    return [self._only(rows) for rows in self._units(roles)]
        return []

    def _run_block(self, group: LaneGroup) -> bool:
        """Go on to the end of a block; returns whether it came there."""
        if group.frame is None:
            group.frame = self.frame if group.lanes.all() else self.frame.part(group.lanes)
        frame, points, wait = group.frame, group.block.points, group.wait
        group.wait = None
        if wait is not None and wait.then is not None:
            wait.then(frame)
        for number in range(group.step, len(points)):
            step, boundary, meeting = points[number]
            group.step = number
            if meeting is not None and frame.active is not None and not group.forced and self._may_come(group):
                missing = _missing(frame, meeting)
                if missing is not None:
                    self._hold(group, frame, missing)
                    return False
            group.forced = False
            wait = step(frame)
            if wait is not None:
                if not wait.ready:
                    wait.since = len(self.context.report.findings)
                    group.wait, group.step = wait, number + 1
                    return False
                if wait.then is not None:
                    wait.then(frame)
            if boundary and self.steps is not None:
                self.steps -= 1
                if not self.steps:
                    group.step = number + 1
                    return False
        return True

    def _may_come(self, group: LaneGroup) -> bool:
        """Whether other lanes may meet a group where it is: in structured control flow, those not beyond it."""
        return not self.graph.structured or any(g.place <= group.place for g in self.groups if g is not group)

    def split(self, last: bool) -> list[Task]:
        """Let go on what need not wait; returns the tasks that take its place, none where all of it waits.

        ``last``: nobody else will bring lanes that are missing.
        """
        waiting = set[int]().union(*(w.rows for w in self.waits()))
        held = np.isin(self.rows, list(waiting))
        if held.any() and not held.all():
            return [self._only(self.rows[~held]), self._only(self.rows[held])]
        free = [g for g in self.groups if not g.held and g.resting is None and not g.ahead and self._ready(g)]
        if not free and last:
            free = [g for g in self.groups if g.held and waiting.isdisjoint(self.rows_of(g))]
            free = sorted(free, key=lambda g: g.place)[:1]
        for group in free:
            group.held, group.forced, group.ahead = False, group.held, True
        return [self] if free else []

    def _units(self, roles: Sequence[Role]) -> list[Array]:
        """The warps of each task of roles.

        Those with ``wgmma`` go on together, and under a seed each warpgroup by itself. In other roles each warp may
        wait for something else, for what the others start when they get there.
        """
        local = self.frame.local
        unit = np.full(local.shape, -1)
        for role in roles:
            ops = [s for s in walk(role.body) if isinstance(s, Op)]
            multiplies = any(isinstance(e, AsyncMatrix) for op in ops for e in op.instruction.effects())
            size = 1 if not multiplies else role.last - role.first if self.context.rng is None else WARPS
            mine = (local >= role.first) & (local < role.last)
            unit[mine] = role.first + (local[mine] - role.first) // size
        return [self.rows[unit == number] for number in np.unique(unit)]

    def _only(self, rows: Array) -> Task:
        """The task of some of its warps, at the same places."""
        for group in self.groups:
            self._give_back(group)
        chosen = chosen_of(np.isin(self.rows, rows))
        task = Task(self.context, self.graph, self.frame.only(chosen), self.exited)
        task.passes = self.passes
        task.groups = [
            replace(g, lanes=lanes, frame=None, written=set(), before={})
            for g in self.groups
            if (lanes := np.ascontiguousarray(g.lanes[chosen])).any()
        ]
        return task

    def _lanes(self, frame: Frame, lanes: Array) -> Array:
        """Lanes of a group's frame as lanes of the task's."""
        wide = np.broadcast_to(lanes, frame.shape)
        return wide if frame is self.frame else frame.in_parent(wide, np.zeros((1, 1), np.bool_))

    def _give_back(self, group: LaneGroup) -> None:
        """The task's frame gets what a group has written."""
        frame, group.frame = group.frame, None
        if frame is None or frame is self.frame:
            return
        frame.merge_into_parent(group.written | group.block.writes if group.step else group.written)
        group.written = set()

    def _merge(self, groups: list[LaneGroup]) -> None:
        """Groups at one place become one, on the registers of the task's frame."""
        first = groups[0]
        for group in groups:
            self._give_back(group)
            self.groups.remove(group)
        self.groups.append(LaneGroup(first.block, np.logical_or.reduce([g.lanes for g in groups]), first.step))

    def _hold(self, group: LaneGroup, frame: Frame, missing: Array) -> None:
        """Warps of which lanes are missing are held, those that are complete go on."""
        lanes = group.lanes & self._lanes(frame, missing[:, None])
        if missing.all():
            group.held = True
        else:
            self._give_back(group)
            group.lanes = group.lanes & ~lanes
            self.groups.append(LaneGroup(group.block, lanes, group.step, held=True))
        same = [g for g in self.groups if g.held and g.place == group.place]
        if len(same) > 1:
            self._merge(same)

    # -- branches ------------------------------------------------------------------------------------------------

    def _leave(self, group: LaneGroup) -> None:
        """A group has done its block: where its lanes go on."""
        block, frame = group.block, group.frame
        assert frame is not None
        group.written |= block.writes
        parts = self._parts(frame, block)
        group.step = 0
        if len(parts) > 1:
            self._give_back(group)
            self.groups.remove(group)
            for target, takes in parts.items():
                part = LaneGroup(block, self._lanes(frame, takes), ahead=group.ahead)
                self.groups.append(part)
                self._go(part, self.graph.blocks[target])
        elif parts:
            self._go(group, self.graph.blocks[next(iter(parts))])
        else:
            self._end(group)

    def _parts(self, frame: Frame, block: StepBlock) -> dict[int, Array]:
        """Target → the lanes of a frame that go there; lanes without one are left out, and reported."""
        everyone = np.ones((1, 1), np.bool_)
        if block.choose is None:
            return dict.fromkeys(block.targets, everyone)
        chosen = block.choose(frame)
        two = chosen.dtype == np.bool_
        number = np.where(chosen, 0, 1) if two else chosen.astype(np.int64)
        if number.size == 1 and 0 <= int(number.flat[0]) < len(block.targets):
            return {block.targets[int(number.flat[0])]: everyone}
        parts: dict[int, Array] = {}
        for which in (0, 1) if two else np.unique(number).tolist():
            takes = number == which if frame.active is None else (number == which) & frame.active
            if not takes.any():
                continue
            if not 0 <= which < len(block.targets):
                text = f"an indirect branch by {which}, where its list has {len(block.targets)} targets: guard it"
                self.context.report.of_lanes("undefined", frame, block.where, frame.full(takes), text)
                continue
            target = block.targets[which]
            parts[target] = parts[target] | takes if target in parts else takes
        return parts

    def _go(self, group: LaneGroup, target: StepBlock) -> None:
        """A group goes to a block, and meets those that are there."""
        back = target.number <= group.block.number
        self.passes += back
        if self.passes > _MOST_PASSES:
            raise EmulationError(
                f"{group.block.where}: after {_MOST_PASSES} passes of its loops the kernel has not ended: it never "
                "does, or its loops are too long for the emulator: check a smaller problem"
            )
        if back:
            self._rest(group, self.graph.blocks[target.number : group.block.number + 1])
        group.block = target
        same = [g for g in self.groups if g.place == group.place and g.wait is None]
        if len(same) > 1:
            self._merge(same)

    def _rest(self, group: LaneGroup, loop: Sequence[StepBlock]) -> None:
        """After a pass of a loop that looks what others do, or may and has changed nothing, these go first."""
        shows = [op for block in loop for op in block.shows]
        strong = [op for op in shows if looks(op)]
        if not strong and (self.passes <= _MANY_PASSES or not shows):
            return
        frame, op = group.frame or self.frame, (strong or shows)[0]
        before, now = group.before, {value: frame.env.get(value) for block in loop for value in block.writes}
        group.before = now
        clock, group.now = group.now, self.context.clocks.now
        if any(isinstance(e, MbarrierWait) for e in op.instruction.effects()):
            group.idle = clock == group.now  # it may count its passes: nobody has touched memory meanwhile
        else:
            group.idle = before.keys() == now.keys() and all(_equal(before[x], now[x]) for x in now)
        group.resting = op if strong or group.idle else None

    def _end(self, group: LaneGroup) -> None:
        """The lanes of a group have ended."""
        self.groups.remove(group)
        gone = self.frame.gone
        self.frame.gone = gone = group.lanes if gone is None else gone | group.lanes
        for other in self.groups:
            other.held = False  # whom it was held for may have ended
        rows = self.rows[gone.all(axis=1) & group.lanes.any(axis=1)]
        if rows.size:
            self.exited(rows)


def _missing(frame: Frame, meeting: Meeting) -> Array | None:
    """The warps of which lanes that an instruction needs are neither here nor at their end; None for none."""
    lanes = lanes_that_miss(frame, frame.full(frame.env[meeting])) if isinstance(meeting, Value) else frame.absent
    return None if lanes is None or not lanes.any() else np.asarray(lanes.any(axis=1))


def _equal(a: Array | None, b: Array | None) -> bool:
    """Whether a register is as it was a pass before."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))
