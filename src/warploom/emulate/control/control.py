"""Control flow over frames: loops, branches and warp roles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.context import Block, Context, Running, Step
from warploom.emulate.control.frames import Frame
from warploom.emulate.transactions.products import WARPS
from warploom.ir.program import Program
from warploom.ir.statements import Loop, Op, Operand, Register, Role, Roles, SourceLine, Statement, Value, When, walk
from warploom.isa.base import Instruction
from warploom.isa.effects import AsyncMatrix

Array = NDArray[Any]


_MOST_ROUNDS = 2**31  # of a loop that is not meant to count around


def written_registers(body: tuple[Statement, ...]) -> tuple[Value, ...]:
    """The mutable registers that a block may write."""
    found = {r: None for s in walk(body) if isinstance(s, Op) for r in s.results if isinstance(r, Register)}
    return tuple(found)


class Control:
    """Builds the steps of control statements, of blocks that ``build`` prepares and ``run`` runs on a frame."""

    def __init__(
        self,
        context: Context,
        program: Program,
        build: Callable[[tuple[Statement, ...]], Block],
        run: Callable[[Block, Frame], Running],
    ) -> None:
        self.context, self.program, self.build, self.run = context, program, build, run
        self.begin(None)

    def begin(self, spawn: Callable[[Running, Wait], None] | None) -> None:
        """Another launch begins; ``spawn`` starts a task of its own for a warp role."""
        self.spawn = spawn
        self.progress: Callable[[float], None] | None = None
        self._loops = 0

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

        def running(frame: Frame) -> Running:
            bounds = [
                self._watch(frame, x, statement.where, f"the {name} of a loop")
                for x, name in ((statement.start, "start"), (statement.stop, "end"), (statement.step, "step"))
            ]
            index, stop, step = bounds
            inner, last = frame, None
            self._loops += 1
            first = index.flat[0] if index.size else 0
            stays = self._ends(frame, statement, *bounds)
            loops, key = self.context.report.loops, (statement.where, int(frame.flat[0]))
            while True:
                goes_on = index < stop
                if stays is not None:
                    goes_on = goes_on & stays
                if stop.size > 1 or index.size > 1 or step.size > 1:
                    stays = goes_on  # who has left stays out, also when the index wraps around
                if not goes_on.any():
                    break
                if goes_on.all() or (frame.mask is not None and bool((goes_on == frame.mask).all())):
                    inner, last = frame, None
                else:
                    goes_on = np.broadcast_to(goes_on, (*frame.shape, 32))
                    if last is None or not np.array_equal(last, goes_on):
                        if inner is not frame:
                            inner.merge_into_parent(registers)
                        inner, last = frame.child(goes_on), goes_on
                self._set_index(statement.index, index, frame, inner)
                loops[key] = frame, index
                yield from self.run(body, inner)
                index = index + step
                if self.progress is not None and self._loops == 1 and stop.size == 1:
                    self.progress(float((index.flat[0] - first) / max(1, int(stop.flat[0]) - int(first))))
            self._loops -= 1
            loops.pop(key, None)
            if inner is not frame:
                inner.merge_into_parent(registers)

        return running

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

    @staticmethod
    def _set_index(value: Value, index: Array, frame: Frame, inner: Frame) -> None:
        frame.env[value] = index
        if inner is not frame and inner.env is not frame.env:
            inner.env.pop(value, None)

    def when(self, statement: When) -> Step:
        """``if``: each side runs on the warps with a lane that takes it."""
        sides = [(b, self.build(b), written_registers(b)) for b in (statement.body, statement.otherwise)]

        def running(frame: Frame) -> Running:
            condition = self._watch(frame, statement.condition, statement.where, "a condition")
            if statement.uniform and condition.shape[2] > 1:
                self.check_uniform(frame, condition, statement.where)
            for (source, block, registers), takes in zip(sides, (condition, ~condition), strict=True):
                if not source:
                    continue
                if frame.mask is not None:
                    takes = takes & frame.mask
                    if bool((takes == frame.mask).all()):
                        yield from self.run(block, frame)
                        continue
                if not takes.any():
                    continue
                if takes.all():
                    yield from self.run(block, frame)
                    continue
                inner = frame.child(np.broadcast_to(takes, (*frame.shape, 32)))
                yield from self.run(block, inner)
                inner.merge_into_parent(registers)

        def step(frame: Frame) -> Any:
            return running(frame)

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
        """Warp roles: their warps run in tasks of their own; they meet again (in order, not in time) after all."""
        branches = [
            (_parts(b), self.build(self._with_budget(b)), written_registers(b.body)) for b in statement.branches
        ]

        def running(frame: Frame) -> Running:
            warps = frame.local.reshape(frame.shape)[:, :, None]
            done = Wait(Op(_Join(), (), (), statement.where), set(), "the warp roles to end")
            children: list[tuple[Frame, tuple[Value, ...]]] = []
            for parts, block, registers in branches:
                for part in parts:
                    takes = np.broadcast_to((warps >= part.start) & (warps < part.stop), (*frame.shape, 32))
                    if frame.mask is not None:
                        takes = takes & frame.mask
                    if not takes.any():
                        continue
                    child = frame.child(takes)
                    children.append((child, registers))
                    done.rows.update(child.flat.tolist())
                    assert self.spawn is not None
                    self.spawn(_then(self.run(block, child), done, child), done)
            while not done.ready:
                yield done
            for child, registers in children:
                child.merge_into_parent(registers)

        return running

    def _with_budget(self, role: Role) -> tuple[Statement, ...]:
        change = self.program.register_change(role)
        return role.body if change is None else (Op(change, (), (), role.where), *role.body)


def _parts(role: Role) -> list[range]:
    """The warps of each task of a role: a warpgroup where it multiplies by ``wgmma``, else a single warp.

    Warps of one role may wait for different things, each for what the others start when they get there.
    """
    together = any(
        isinstance(e, AsyncMatrix) for s in walk(role.body) if isinstance(s, Op) for e in s.instruction.effects()
    )
    step = WARPS if together else 1
    return [range(first, min(first + step, role.last)) for first in range(role.first, role.last, step)]


def _then(body: Running, done: Wait, frame: Frame) -> Running:
    yield from body
    done.rows.difference_update(frame.flat.tolist())


@dataclass(frozen=True, slots=True)
class _Join(Instruction):
    """Stands for the end of warp roles where a wait names its instruction."""

    @property
    def mnemonic(self) -> str:
        return "warps(...)"
