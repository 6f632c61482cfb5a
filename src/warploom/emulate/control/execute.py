"""Statements as steps: every instruction is prepared once, then runs on any frame of warps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import f32
from warploom.core.errors import EmulationError
from warploom.emulate.control.calls import abort_step, print_step
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import LANES, Frame
from warploom.emulate.control.graph import Graph
from warploom.emulate.control.lane_steps import ballot, collective_step, shuffle_step, sync_step
from warploom.emulate.control.undefined import WideAddresses, undefined
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory import shadows as poison
from warploom.emulate.memory.accesses import AccessSteps
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.memory.memory import LOCAL_BASE
from warploom.emulate.memory.shared_memory import SHARED_BASE
from warploom.emulate.transactions.engine_steps import engine_step
from warploom.emulate.transactions.warpgroups import WatchedRegisters
from warploom.ir.program import Program
from warploom.ir.statements import Op, Statement, Value
from warploom.isa import effects as fx
from warploom.isa.matrix import FragmentSlot

Array = NDArray[Any]

_KEPT_MATRICES = 96
_BASES = {"shared_base": SHARED_BASE, "local_base": LOCAL_BASE}


class Executor(Context):
    """Builds the steps of statements and runs them on frames: of one launch after another."""

    def __init__(self, program: Program, checks: bool, across: bool, large: bool) -> None:
        super().__init__(checks, across)
        self.watched = WatchedRegisters(program)
        self.counts: list[tuple[Op, list[int]]] = []
        self._steps = self._makers(AccessSteps(self))
        self._wide = WideAddresses(self, program) if large else None
        self._matrices: dict[tuple[Any, ...], tuple[tuple[Array, ...], Array]] = {}
        self.graph = Graph(self, program, self._prepare, self._is_lanewise)

    def _makers(self, accesses: AccessSteps) -> dict[type[fx.Effect], Callable[[Op, Any], Step]]:
        """Map each effect to the function that makes its step, but for those of the asynchronous engines."""
        return {
            fx.Access: accesses.step,
            fx.MatrixAccess: accesses.step,
            fx.AsyncCopy: accesses.copy_step,
            fx.TensorMapWrite: accesses.map_step,
            fx.GlobalWait: accesses.wait_step,
            fx.WarpSync: partial(sync_step, self),
            fx.Fence: self._fence,
            fx.ReadSpecial: self._read_special,
            fx.Printed: partial(print_step, self),
            fx.Abort: partial(abort_step, self),
        }

    def begin(
        self,
        memory: GlobalMemory,
        counter: TrafficCounter,
        values: Mapping[Value, Array],
        rng: Random | None,
    ) -> None:
        """A launch begins with these parameters."""
        self.memory, self.counter, self.rng = memory, counter, rng
        self.constants.update(values)
        self.printed.clear()
        for _, count in self.counts:
            count[0] = 0
        for decision in self.decisions:
            decision.held, decision.failed, decision.rounds = False, False, 0

    def leave(self) -> None:
        """The launch is over: what it held is let go."""
        super().leave()
        self.forget()

    def forget(self) -> None:
        """Another batch begins: its registers are other arrays."""
        self._matrices.clear()

    def exited(self, rows: Array) -> None:
        """Warps have ended. In a structured kernel none may do so before a barrier of its CTA."""
        if not self.graph.structured:
            self.barriers.exited(rows)
        self.clusters.exited(rows)

    # -- instructions --------------------------------------------------------------------------------------------

    def _prepare(self, ops: Sequence[Op]) -> Step:
        """The step of an instruction, or of lanewise ones that follow each other."""
        if self._is_lanewise(ops[0]):
            check = self._watch(ops) if self.checks else None
            return self._counted(ops, [self._lanewise(ops)] if check is None else [check, self._lanewise(ops)])
        (op,) = ops
        checks = (self._watch([op]), undefined(self, op), self._wide_check(op)) if self.checks else ()
        parts: list[Step] = [check for check in checks if check is not None]
        effects = op.instruction.effects()
        parts += [self._effect(op, effect) for effect in effects]
        if op.results and all(isinstance(effect, fx.WarpSync) for effect in effects):
            parts.append(self._compute(op))
        return self._counted([op], parts)

    def _watch(self, ops: Sequence[Op]) -> Step | None:
        """The check of ordinary instructions that follow each other without a pause; None for none to be checked."""
        watched = self.watched.touched_by(ops)
        if not watched:
            return None
        registers = np.unique(np.concatenate([mine for _, mine in watched]))
        return lambda frame: self.warpgroups.registers.touch(frame, watched, registers)

    def _counted(self, ops: Sequence[Op], parts: Sequence[Step]) -> Step:
        """One step of several parts, that counts how many warps come by."""
        count = [0]
        self.counts += [(op, count) for op in ops]
        if len(parts) == 1:
            only = parts[0]

            def single(frame: Frame) -> Any:
                count[0] += frame.n
                return only(frame)

            return single

        def several(frame: Frame) -> Any:
            count[0] += frame.n
            blocked = None
            for part in parts:
                blocked = part(frame) or blocked
            return blocked

        return several

    def _wide_check(self, op: Op) -> Step | None:
        """The check that addresses of global memory have not wrapped; None where they cannot."""
        wide = self._wide
        if wide is None:
            return None
        for effect in op.instruction.effects():
            if isinstance(effect, fx.Access) and effect.space == "global":
                return partial(wide.check, op=op, operand=effect.address)
            if isinstance(effect, fx.AsyncCopy):
                return partial(wide.check, op=op, operand=effect.source)
        return None

    def _effect(self, op: Op, effect: fx.Effect) -> Step:
        make = self._steps.get(type(effect))
        step = engine_step(self, op, effect) if make is None else make(op, effect)
        if step is None:
            raise EmulationError(
                f"{op.where}: the emulator does not execute {op.instruction.mnemonic} ({type(effect).__name__}); "
                "run this kernel on a GPU"
            )
        return step

    def _fence(self, op: Op, effect: fx.Fence) -> Step:
        return lambda frame: self.ordering.fence(frame, op, effect) if self.across and self.checks else None

    def _read_special(self, op: Op, effect: fx.ReadSpecial) -> Step:
        return lambda frame: frame.write(op.results[0], self._special(frame, effect.register))

    def _special(self, frame: Frame, register: str) -> Array:
        if register in _BASES:
            return np.full((1, 1), _BASES[register], np.uint32)
        if register == "activemask":
            return ballot(frame.acting())
        if register == "clock64":
            return np.full((1, 1), self.clocks.now, np.uint64)
        if register == "tid.x":
            return (frame.local[:, None] * 32 + LANES).astype(np.uint32)
        cta = frame.cta[:, None] + self.report.first // self.report.warps_per_cta
        if register.startswith("n") or register == "cluster_nctarank" or (cta == cta[0]).all():
            cta = cta[:1]
        return self.report.places.special(register, cta).astype(np.uint32)

    # -- registers only ------------------------------------------------------------------------------------------

    def _compute(self, op: Op) -> Step:
        instruction, keys = op.instruction, self.keys(op)
        if instruction.slots is not None:
            return self._mma(op, instruction.slots, keys)
        if instruction.exchange is not None:
            return shuffle_step(self, op, instruction.exchange, keys)
        if not instruction.lanewise:
            self._must_have_meaning(op)
            return collective_step(self, op, keys)
        return self._lanewise([op])

    def _must_have_meaning(self, op: Op) -> None:
        if not op.instruction.has_meaning:
            name = op.instruction.mnemonic
            raise EmulationError(f"{op.where}: {name} is printed and read alone, the emulator does not execute it")

    def _is_lanewise(self, statement: Statement) -> bool:
        """Whether an instruction asks nothing but that each lane works out its results from registers."""
        if not isinstance(statement, Op) or not statement.results or statement.instruction.effects():
            return False
        instruction = statement.instruction
        alone = instruction.lanewise and instruction.exchange is None and instruction.slots is None
        return alone and (not self.checks or undefined(self, statement) is None)

    def _lanewise(self, ops: Sequence[Op]) -> Step:
        for op in ops:
            self._must_have_meaning(op)
        parts = [(op, op.instruction.meaning, self.keys(op), op.results, op.results[0]) for op in ops]

        def step(frame: Frame) -> None:
            env, shadows = frame.env, frame.shadows
            for op, meaning, keys, results, first in parts:
                values = [env[k] for k in keys]
                arrays = meaning(*values)
                if shadows and not (shadows.keys().isdisjoint(keys) and shadows.keys().isdisjoint(results)):
                    frame.write_all(results, arrays, keys, partial(op.instruction.shadow, values, results=arrays))
                elif len(results) == 1:
                    env[first] = arrays[0]
                else:
                    env.update(zip(results, arrays, strict=True))

        return step

    def _matrix(self, frame: Frame, slot: FragmentSlot, keys: tuple[Value, ...], which: tuple[str, ...]) -> Array:
        """An operand as matrices (warps, rows, columns), kept while its registers stay the same arrays."""
        arrays = tuple([frame.env[k] for k in keys])
        name = (*which, frame.n, *map(id, arrays))
        found = self._matrices.get(name)
        if found is None:
            if len(self._matrices) > _KEPT_MATRICES:
                for old in list(self._matrices)[: _KEPT_MATRICES // 2]:
                    del self._matrices[old]
            found = (arrays, np.ascontiguousarray(slot.matrix([frame.full(a) for a in arrays])))
            self._matrices[name] = found
        return found[1]

    def _mma(self, op: Op, slots: tuple[FragmentSlot, ...], keys: tuple[Value, ...]) -> Step:
        a, b, c = slots
        a_keys, b_keys, c_keys = (keys[s.first : s.first + s.count] for s in (a, b, c))
        of_a, of_b = ((which, slot.layout.name, slot.dtype.name) for which, slot in zip("AB", slots, strict=False))
        fast, meaning = c.dtype is f32, op.instruction.meaning

        def step(frame: Frame) -> None:
            env = frame.env
            if fast:
                product = np.matmul(self._matrix(frame, a, a_keys, of_a), self._matrix(frame, b, b_keys, of_b))
                parts = c.registers(product)
                results = tuple(p + env[k] for p, k in zip(parts, c_keys, strict=True))
            else:
                results = meaning(*[frame.full(env[k]) for k in keys])
            frame.write_all(op.results, results, keys, partial(spoiled, frame), op)

        def spoiled(frame: Frame, given: list[Array]) -> tuple[Array, ...]:
            return poison.mma(slots, [frame.full(x) for x in given])

        return step
