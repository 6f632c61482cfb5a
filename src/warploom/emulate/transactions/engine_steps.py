"""Steps of the instructions that work through engines: mbarriers, bulk copies, ``wgmma``, proxy fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import Frame, displaced, lanes_of
from warploom.emulate.memory.shared_memory import SHARED_BASE
from warploom.emulate.order.planes import FENCED, FENCED_GLOBALLY
from warploom.emulate.transactions.registers import WatchedRegisters
from warploom.ir.program import Program
from warploom.ir.statements import Op
from warploom.isa import effects as fx
from warploom.isa.memory import WINDOW_BITS

Array = NDArray[Any]
_WINDOW = np.uint32((1 << WINDOW_BITS) - 1)


class EngineSteps:
    """Builds the steps."""

    def __init__(self, context: Context, program: Program) -> None:
        self.run = context
        self.watched = WatchedRegisters(program)

    def watch(self, ops: Sequence[Op]) -> Step | None:
        """The check of ordinary instructions that follow each other without a pause; None for none to be checked."""
        watched = self.watched.touched_by(ops)
        if not watched:
            return None
        registers = np.unique(np.concatenate([mine for _, mine in watched]))
        return lambda frame: self.run.warpgroups.registers.touch(frame, watched, registers)

    def step(self, op: Op, effect: fx.Effect) -> Step | None:
        """The step of an effect; None for one that no engine has to do with."""
        found = _STEPS.get(type(effect))
        if found is None:
            return None
        return lambda frame: found(self, frame, op, effect)

    # -- operands ------------------------------------------------------------------------------------------------

    def _operand(self, frame: Frame, op: Op, position: int, use: str) -> Array:
        """A register that decides something."""
        return self.run.observe(frame, self.run.key(op.operands[position]), op, use)

    def _guard(self, frame: Frame, op: Op, position: int | None) -> Array | None:
        guard = None if position is None else self._operand(frame, op, position, "the predicate")
        return None if guard is None or guard.all() else guard

    def _address(self, frame: Frame, op: Op, operand: int, offset: int, guard: Array | None = None) -> Array:
        """The shared address in an operand; one that has left the tile it was formed from is a finding."""
        address = displaced(self._operand(frame, op, operand, "an address"), offset)
        tile = op.tile(operand)
        if tile is not None and self.run.checks:
            place = (address & _WINDOW).astype(np.int64) - SHARED_BASE - tile.offset
            outside = (place < 0) | (place >= tile.bytes)
            if outside.any():
                message = f"{op.instruction.mnemonic} at byte {{}} of shared memory is outside {tile.name} (bytes "
                message += f"{tile.offset} to {tile.offset + tile.bytes - 1}): correct the number or the stage"
                acting, where = frame.acting(outside if guard is None else outside & guard), place + tile.offset
                self.run.report.of_lanes("bounds", frame, op.where, acting, message, where, address=where)
        return address

    # -- mbarriers and clusters ----------------------------------------------------------------------------------

    def _initialise(self, frame: Frame, op: Op, init: fx.MbarrierInit) -> None:
        self.run.mbarriers.initialise(frame, self._address(frame, op, init.address, init.offset), init.count, op)

    def _invalidate(self, frame: Frame, op: Op, effect: fx.MbarrierInvalidate) -> None:
        self.run.mbarriers.invalidate(frame, self._address(frame, op, effect.address, effect.offset), op)

    def _publish(self, frame: Frame, op: Op, _fence: fx.MbarrierFence) -> None:
        self.run.mbarriers.fence(frame, op, publishes=True)

    def _arrive(self, frame: Frame, op: Op, arrival: fx.MbarrierArrive) -> None:
        guard = self._guard(frame, op, arrival.guard)
        address = self._address(frame, op, arrival.address, arrival.offset, guard)
        self.run.mbarriers.arrive(frame, address, arrival, guard, op)

    def _await(self, frame: Frame, op: Op, wait: fx.MbarrierWait) -> Wait | None:
        address = self._address(frame, op, wait.address, wait.offset)
        parity = self._operand(frame, op, wait.parity, "the parity")
        if wait.blocks:
            return self.run.mbarriers.wait(frame, address, parity, wait.scope == "cluster", op)
        done = self.run.mbarriers.test(frame, address, parity, wait, op)
        frame.write(op.results[0], done)
        return None

    def _cluster(self, frame: Frame, op: Op, barrier: fx.ClusterBarrier) -> Wait | None:
        if barrier.waits:
            return self.run.clusters.wait(frame, op)
        return self.run.clusters.arrive(frame, op, barrier.relaxed)

    # -- transactions --------------------------------------------------------------------------------------------

    def _bulk(
        self, frame: Frame, op: Op, effect: fx.BulkTensorCopy | fx.BulkStore | fx.BulkLoad | fx.AsyncStore
    ) -> None:
        """A transaction of single lanes: its operands by the names that the effect gives them."""
        given = [self._operand(frame, op, i, "an operand") for i in range(len(op.operands))]
        guard = None if isinstance(effect, fx.AsyncStore) else self._guard(frame, op, effect.guard)
        operands, shared = dict[str, Array](), ("shared", "barrier")
        if isinstance(effect, fx.AsyncStore):
            shared = "target", "barrier"
            operands |= {f"word{i}": word for i, word in enumerate(given[effect.values :])}
        for name in ("shared", "target", "source", "barrier", "tensor_map", "multicast"):
            position, offset = getattr(effect, name, None), getattr(effect, f"{name}_offset", 0)
            if position is not None and name in shared:
                operands[name] = self._address(frame, op, position, offset, guard)
            elif position is not None:
                operands[name] = displaced(given[position], offset)
        if isinstance(effect, fx.BulkLoad):
            operands["bytes"] = given[effect.bytes]
        if isinstance(effect, fx.BulkTensorCopy):
            operands |= {f"coordinate{i}": given[c] for i, c in enumerate(effect.coordinates)}
        self.run.bulk.start(frame, op, effect, operands, guard)

    def _copies_arrive(self, frame: Frame, op: Op, arrival: fx.CopyArrival) -> None:
        barrier = self._address(frame, op, arrival.address, arrival.offset)
        self.run.bulk.track_copies(frame, op, barrier, self.run.copies, counted=arrival.counted)

    def _commit(self, frame: Frame, _op: Op, commit: fx.CommitGroup) -> None:
        groups = {"cp.async": self.run.copies, "bulk": self.run.bulk.stores, "wgmma": self.run.warpgroups}
        groups[commit.queue].commit(frame)

    def _wait_group(self, frame: Frame, op: Op, wait: fx.WaitGroup) -> Wait | None:
        if wait.queue == "wgmma":
            return self.run.warpgroups.wait(frame, wait.pending, op, self.watched.of.get(id(op)))
        if wait.queue == "bulk":
            return self.run.bulk.wait(frame, wait.pending, wait.reads_only)
        return self.run.copies.wait(frame, wait.pending)

    def _multiply(self, frame: Frame, op: Op, _effect: fx.AsyncMatrix) -> None:
        instruction = op.instruction.warpgroup_product
        for position in range(0 if instruction.a_source == "shared" else instruction.a_count, instruction.a_count + 2):
            self._operand(frame, op, position, "a descriptor or predicate")
        self.run.warpgroups.meet(frame, op)
        keys = tuple(self.run.key(x) for x in op.operands[: instruction.a_count + 2])
        self.run.warpgroups.issue(frame, op, keys)

    def _budget(self, frame: Frame, op: Op, budget: fx.RegisterBudget) -> Wait | None:
        self.run.warpgroups.meet(frame, op)
        return self.run.registers.change(frame, budget, op)

    # -- fences --------------------------------------------------------------------------------------------------

    def _fence_registers(self, frame: Frame, _op: Op, _fence: fx.WarpgroupFence) -> None:
        self.run.warpgroups.registers.fence(frame)

    def _fence_proxy(self, frame: Frame, op: Op, fence: fx.ProxyFence) -> None:
        clocks = self.run.clocks
        clocks.stamp(op)
        for _, row, lanes in lanes_of(frame, None):
            if fence.space != "global":
                clocks.proxy_fence(row, lanes, FENCED)
            if fence.space != "shared":
                clocks.proxy_fence(row, lanes, FENCED_GLOBALLY)
        if fence.space != "global":
            self.run.mbarriers.fence(frame, op)

    def _fence_map(self, frame: Frame, op: Op, fence: fx.TensorMapFence) -> None:
        made = self.run.bulk.made
        if fence.acquired is None:
            made.release(frame, op)
        else:
            made.acquire(frame, self._operand(frame, op, fence.acquired, "an address"), op)


_STEPS: dict[type[fx.Effect], Callable[[EngineSteps, Frame, Op, Any], Wait | None]] = {
    fx.MbarrierInit: EngineSteps._initialise,
    fx.MbarrierInvalidate: EngineSteps._invalidate,
    fx.MbarrierFence: EngineSteps._publish,
    fx.MbarrierArrive: EngineSteps._arrive,
    fx.MbarrierWait: EngineSteps._await,
    fx.ClusterBarrier: EngineSteps._cluster,
    **dict.fromkeys((fx.BulkTensorCopy, fx.BulkStore, fx.BulkLoad, fx.AsyncStore), EngineSteps._bulk),
    fx.CopyArrival: EngineSteps._copies_arrive,
    fx.CommitGroup: EngineSteps._commit,
    fx.WaitGroup: EngineSteps._wait_group,
    fx.AsyncMatrix: EngineSteps._multiply,
    fx.RegisterBudget: EngineSteps._budget,
    fx.WarpgroupFence: EngineSteps._fence_registers,
    fx.ProxyFence: EngineSteps._fence_proxy,
    fx.TensorMapFence: EngineSteps._fence_map,
}
"""The method that carries an effect out."""
