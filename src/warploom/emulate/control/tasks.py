"""Tasks: blocks under way on sets of warps.

A task is a stack of blocks: what a step begins (a side of a condition, the passes of a loop) comes on top of the block
that it stands in. All warps of a task go on together. Warp roles divide it at once. Elsewhere it is divided only where
some of its warps wait for what others of them do later: those that need not wait go on as a task of their own. So
nothing is stuck that runs on a GPU, and no launch runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Frame, Parts
from warploom.ir.statements import Value

Array = NDArray[Any]


class Activation:
    """A block under way on a frame. At its end the frame's parent gets ``registers``."""

    def __init__(self, block: Block, frame: Frame, registers: Sequence[Value] = ()) -> None:
        self.block, self.frame, self.registers, self.next = block, frame, registers, 0

    def run(self, seeded: bool) -> Found:
        """Run on from the next step; returns what a step found, ENDED at the end.

        None says that a step is over after which other tasks may go ahead, where a seed lets them.
        """
        block, frame = self.block, self.frame
        for number in range(self.next, len(block)):
            step, boundary = block[number]
            found = step(frame)
            if found is not None or (seeded and boundary):
                self.next = number + 1
                return found
        return ENDED

    def ends(self) -> bool:
        """The block has been run: whether it is over (a loop goes on)."""
        self.frame.merge_into_parent(self.registers)
        return True

    def part(self, parts: Parts) -> Activation:
        """The same for some of the warps."""
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.frame = parts.of(self.frame)
        return part

    def split(self) -> bool:
        """Divide what waits within this block by itself; whether something can go on now."""
        return False


@dataclass(frozen=True)
class Division:
    """What warp roles begin: the rows of each new task, and the block that it runs first, if any."""

    tasks: Sequence[tuple[Array, Block | None]]


class _Ended:
    """The type of ENDED."""


ENDED: Final = _Ended()
Begun: TypeAlias = Wait | Division | Sequence[Activation] | None
"""What a step has to wait for, or the blocks that it begins: the last one runs first."""
Step: TypeAlias = Callable[[Frame], Begun]
"""A statement prepared to run on any frame."""
Block: TypeAlias = list[tuple[Step, bool]]
"""The steps of a block; the flag marks those after which another task may be let ahead."""
Found: TypeAlias = Begun | _Ended


class Task:
    """Warps that go on together: the blocks that they are in, the innermost one last, and what they wait for."""

    def __init__(self, stack: list[Activation], wait: Wait | None = None) -> None:
        self.stack, self.wait = stack, wait

    @property
    def rows(self) -> Array:
        """All its warps."""
        return self.stack[0].frame.flat

    @property
    def ready(self) -> bool:
        """Whether it can go on."""
        return self.wait is None or self.wait.ready

    def run(self, steps: int | None) -> list[Task]:
        """Go on until it waits, has ended, or has taken so many steps; returns the tasks that take its place, if any.

        It has ended when its stack is empty.
        """
        stack, wait, seeded = self.stack, self.wait, steps is not None
        self.wait = None
        if wait is not None and wait.then is not None:
            wait.then(stack[-1].frame)
        while stack:
            top = stack[-1]
            found = top.run(seeded)
            if found is None:
                assert steps is not None
                steps -= 1
                if not steps:
                    return []
            elif isinstance(found, _Ended):
                if top.ends():
                    stack.pop()
            elif isinstance(found, Wait):
                if not found.ready or found.yields:
                    self.wait = found
                    return []
                if found.then is not None:
                    found.then(top.frame)
            elif isinstance(found, Division):
                return self._divided(found)
            else:
                stack += found
        return []

    def _divided(self, division: Division) -> list[Task]:
        tasks: list[Task] = []
        for rows, block in division.tasks:
            task = self.only(Parts(rows))
            if block is not None:
                task.stack.append(Activation(block, task.stack[-1].frame))
            tasks.append(task)
        return tasks

    def only(self, parts: Parts) -> Task:
        """The task of some of its warps, at the same place. Blocks that none of these is in are left out."""
        return Task([a.part(parts) for a in self.stack if parts.some(a.frame)], self.wait)

    def split(self, parts: Callable[[Array], Parts] = Parts) -> list[Task]:
        """The tasks that take its place, of which the first can go on; none where all of it waits.

        ``parts`` makes the frames of some of its rows.
        """
        wait = self.wait
        if wait is None:
            return []
        if self.stack[-1].split():
            self.wait = None
            return [self]
        held = np.isin(self.rows, list(wait.rows))
        if not wait.rows or held.all():
            return []
        free, waits = (self.only(parts(self.rows[which])) for which in (~held, held))
        inside = len(free.stack) == len(self.stack)
        free.wait = Wait(wait.op, set(), then=wait.then) if inside else None
        return [free, waits]
