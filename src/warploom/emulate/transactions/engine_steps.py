"""Steps of the instructions that work through engines: mbarriers, bulk copies, ``wgmma``, proxy fences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.barriers.cluster_barrier import ClusterBarriers
from warploom.emulate.barriers.mbarriers import Mbarriers
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import Frame, displaced, lanes_of
from warploom.emulate.memory.shared_memory import SHARED_BASE
from warploom.emulate.order.known import FENCED, FENCED_GLOBALLY
from warploom.emulate.transactions.bulk import BulkCopies
from warploom.emulate.transactions.registers import RegisterPools, WatchedRegisters
from warploom.emulate.transactions.warpgroups import Warpgroups
from warploom.ir.program import Program
from warploom.ir.statements import Op, Tile, Value
from warploom.isa import effects as fx
from warploom.isa.cluster import WINDOW_BITS

Array = NDArray[Any]
_WINDOW = np.uint32((1 << WINDOW_BITS) - 1)


@dataclass
class EngineState:
    """What the engines of a batch of CTAs are at."""

    mbarriers: Mbarriers
    bulk: BulkCopies
    warpgroups: Warpgroups
    clusters: ClusterBarriers
    registers: RegisterPools


class EngineSteps:
    """Builds the steps; ``state`` is the current batch's."""

    def __init__(self, context: Context, program: Program) -> None:
        self.run = context
        self.watched = WatchedRegisters(program)
        self.state: EngineState

    def watch(self, op: Op) -> Step | None:
        """The check of an ordinary instruction that accesses registers of a ``wgmma``; None for all others."""
        run, registers = self.watched.run_of(op), self.watched.of(op)
        if run is None or registers is None:
            return None

        def check(frame: Frame) -> None:
            flight = self.state.warpgroups.registers
            if op is run.first:
                flight.begin_run(frame, run)
            flight.access(frame, registers, op)

        return check

    def step(self, op: Op, effect: fx.Effect) -> Step | None:
        """The step of an effect; None for one that no engine has to do with."""
        keys = self.run.keys(op)
        if isinstance(effect, fx.MbarrierInit | fx.MbarrierFence | fx.MbarrierArrive | fx.MbarrierWait):
            return self._mbarrier(op, effect, keys)
        if isinstance(effect, fx.MbarrierInvalidate):
            return self._invalidate(op, effect)
        if isinstance(effect, fx.BulkTensorCopy | fx.BulkStore | fx.BulkLoad | fx.AsyncStore):
            return self._bulk(op, effect, keys)
        if isinstance(effect, fx.CopyArrival):
            return self._copies_arrive(op, effect)
        if isinstance(effect, fx.ClusterBarrier):
            if effect.waits:
                return lambda frame: self.state.clusters.wait(frame, op)
            return lambda frame: self.state.clusters.arrive(frame, op, effect.relaxed)
        if isinstance(effect, fx.ProxyFence):
            return self._proxy_fence(op, effect)
        if isinstance(effect, fx.TensorMapFence):
            return self._map_fence(op, effect)
        if isinstance(effect, fx.RegisterBudget):
            return self._budget(op, effect)
        if isinstance(effect, fx.WarpgroupFence):
            return lambda frame: self.state.warpgroups.registers.fence(frame)
        if isinstance(effect, fx.AsyncMatrix):
            return self._matrix(op, keys)
        if isinstance(effect, fx.CommitGroup):
            if effect.queue == "bulk":
                return lambda frame: self.state.bulk.stores.commit(frame)
            return lambda frame: self.state.warpgroups.commit(frame)
        if isinstance(effect, fx.WaitGroup):
            if effect.queue == "bulk":
                return lambda frame: self.state.bulk.wait(frame, effect.pending, effect.reads_only)
            registers = self.watched.of(op)
            return lambda frame: self.state.warpgroups.wait(frame, effect.pending, op, registers)
        return None

    def _address(self, frame: Frame, op: Op, operand: int, offset: int, guard: Array | None = None) -> Array:
        """The shared address in an operand; one that has left the tile it was formed from is a finding."""
        key = self.run.key(op.operands[operand])
        self.run.observe(frame, key, op, "an address")
        address = displaced(frame.env[key], offset)
        tile = op.tile(operand)
        if tile is not None and self.run.checks:
            place = (address & _WINDOW).astype(np.int64) - SHARED_BASE - tile.offset
            outside = (place < 0) | (place >= tile.bytes)
            if outside.any():
                acting = outside if guard is None else outside & guard
                self._report_outside(frame, op, tile, frame.full(place), frame.full(acting))
        return address

    def _report_outside(self, frame: Frame, op: Op, tile: Tile, place: Array, acting: Array) -> None:
        if frame.active is not None:
            acting = acting & frame.active
        if not acting.any():
            return
        row, lane = (int(x[0]) for x in np.nonzero(acting))
        where = int(place[row, lane]) + tile.offset
        message = f"{op.instruction.mnemonic} at byte {where} of shared memory is outside {tile.name} (bytes "
        message += f"{tile.offset} to {tile.offset + tile.bytes - 1}): correct the number or the stage"
        self.run.report.add(
            "bounds", op.where, message, int(frame.flat[row]), lane, count=int(acting.sum()), address=where
        )

    def _mbarrier(
        self,
        op: Op,
        effect: fx.MbarrierInit | fx.MbarrierFence | fx.MbarrierArrive | fx.MbarrierWait,
        keys: tuple[Value, ...],
    ) -> Step:
        if isinstance(effect, fx.MbarrierFence):
            return lambda frame: self.state.mbarriers.fence(frame, op, publishes=True)
        if isinstance(effect, fx.MbarrierInit):

            def initialise(frame: Frame) -> None:
                address = self._address(frame, op, effect.address, effect.offset)
                self.state.mbarriers.initialise(frame, address, effect.count, op)

            return initialise
        if isinstance(effect, fx.MbarrierArrive):

            def arrive(frame: Frame) -> None:
                guard = self._guard(frame, op, effect.guard, keys)
                address = self._address(frame, op, effect.address, effect.offset, guard)
                self.state.mbarriers.arrive(frame, address, effect, guard, op)

            return arrive

        far = effect.scope == "cluster"

        def wait(frame: Frame) -> Any:
            address = self._address(frame, op, effect.address, effect.offset)
            self.run.observe(frame, keys[effect.parity], op, "the parity")
            parity = frame.env[keys[effect.parity]]
            if effect.blocks:
                return self.state.mbarriers.wait(frame, address, parity, far, op)
            done = self.state.mbarriers.test(frame, address, parity, effect, op)
            self.run.put(frame, op.results[0], frame.shaped(done), None, None)
            return None

        return wait

    def _invalidate(self, op: Op, effect: fx.MbarrierInvalidate) -> Step:
        def step(frame: Frame) -> None:
            address = self._address(frame, op, effect.address, effect.offset)
            self.state.mbarriers.invalidate(frame, address, op)

        return step

    def _guard(self, frame: Frame, op: Op, position: int | None, keys: tuple[Value, ...]) -> Array | None:
        if position is None:
            return None
        self.run.observe(frame, keys[position], op, "the predicate")
        guard = frame.env[keys[position]]
        return None if guard.all() else guard

    def _bulk(
        self, op: Op, effect: fx.BulkTensorCopy | fx.BulkStore | fx.BulkLoad | fx.AsyncStore, keys: tuple[Value, ...]
    ) -> Step:
        """A transaction of single lanes: its operands by the names that :class:`BulkCopies` gives them."""
        here: dict[str, tuple[int, int]] = {}  # addresses of shared memory: operand and offset
        there: dict[str, tuple[int, int]] = {}  # addresses of global memory
        plain: dict[str, int] = {}
        if isinstance(effect, fx.AsyncStore):
            here["target"] = effect.target, effect.target_offset
            plain |= {f"word{i}": effect.values + i for i in range(len(keys) - effect.values)}
        else:
            here["shared"] = effect.shared, effect.shared_offset
        if not isinstance(effect, fx.BulkStore) and effect.barrier is not None:
            here["barrier"] = effect.barrier, effect.barrier_offset
        if isinstance(effect, fx.BulkStore):
            there["target"] = effect.target, effect.target_offset
        if isinstance(effect, fx.BulkLoad):
            there["source"] = effect.source, effect.source_offset
            plain["bytes"] = effect.bytes
        if isinstance(effect, fx.BulkTensorCopy):
            plain |= {"tensor_map": effect.tensor_map} | {f"coordinate{i}": c for i, c in enumerate(effect.coordinates)}
            if effect.multicast is not None:
                plain["multicast"] = effect.multicast

        def step(frame: Frame) -> None:
            for key in keys:
                self.run.observe(frame, key, op, "an operand")
            guard = self._guard(frame, op, getattr(effect, "guard", None), keys)
            operands = {name: self._address(frame, op, *where, guard) for name, where in here.items()}
            operands |= {name: displaced(frame.env[keys[at]], offset) for name, (at, offset) in there.items()}
            operands |= {name: frame.env[keys[at]] for name, at in plain.items()}
            self.state.bulk.start(frame, op, effect, operands, guard)

        return step

    def _copies_arrive(self, op: Op, arrival: fx.CopyArrival) -> Step:
        def step(frame: Frame) -> None:
            barrier = self._address(frame, op, arrival.address, arrival.offset)
            self.state.bulk.track_copies(frame, op, barrier, self.run.copies, counted=arrival.counted)

        return step

    def _proxy_fence(self, op: Op, fence: fx.ProxyFence) -> Step:
        def step(frame: Frame) -> None:
            clocks = self.run.clocks
            clocks.stamp(op)
            for _, row, lanes in lanes_of(frame, None):
                if fence.space != "global":
                    clocks.proxy_fence(row, lanes, FENCED)
                if fence.space != "shared":
                    clocks.proxy_fence(row, lanes, FENCED_GLOBALLY)
            if fence.space != "global":
                self.state.mbarriers.fence(frame, op)

        return step

    def _map_fence(self, op: Op, fence: fx.TensorMapFence) -> Step | None:
        if fence.acquired is None:
            return lambda frame: self.state.bulk.made.release(frame, op)
        key = self.run.key(op.operands[fence.acquired])

        def acquire(frame: Frame) -> None:
            self.run.observe(frame, key, op, "an address")
            self.state.bulk.made.acquire(frame, frame.env[key], op)

        return acquire

    def _budget(self, op: Op, budget: fx.RegisterBudget) -> Step:
        def step(frame: Frame) -> Wait | None:
            self.state.warpgroups.meet(frame, op)
            return self.state.registers.change(frame, budget, op)

        return step

    def _matrix(self, op: Op, keys: tuple[Value, ...]) -> Step:
        instruction = op.instruction.warpgroup_product
        first = instruction.a_count if instruction.a_source == "registers" else 0
        decisive = keys[first : instruction.a_count + 2]

        def step(frame: Frame) -> None:
            for key in decisive:
                self.run.observe(frame, key, op, "a descriptor or predicate")
            self.state.warpgroups.meet(frame, op)
            self.state.warpgroups.issue(frame, op, keys)

        return step
