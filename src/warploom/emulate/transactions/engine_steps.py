"""Steps of the instructions that work through engines: barriers, mbarriers, bulk copies, ``wgmma``, proxy fences.

An effect names its operands; a row of :data:`_ENGINES` says which of them an engine gets, and which engine it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import Execution, Frame, displaced, lanes_of
from warploom.emulate.memory.shared_memory import SHARED_BASE
from warploom.emulate.order.planes import FENCED, FENCED_GLOBALLY
from warploom.ir.statements import Op
from warploom.isa import effects as fx
from warploom.isa.memory import WINDOW_BITS

Array = NDArray[Any]
_WINDOW = np.uint32((1 << WINDOW_BITS) - 1)


class Engine(NamedTuple):
    """A method that carries an effect out, and the operands that it gets: shared addresses, and values."""

    carries_out: Callable[[Context, Any], Callable[[Execution[Any]], Wait | None]]
    addresses: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


class Named(NamedTuple):
    """An operand of an operation by the name that an effect has for it; all of them decide something."""

    name: str
    position: int
    offset: int
    use: str

    @classmethod
    def of(cls, effect: fx.Effect, engine: Engine) -> list[Named]:
        """Return the operands that an engine gets, by name; operands of one name are numbered."""
        found: list[Named] = []
        for name in ("guard", *engine.values, *engine.addresses):
            which, offset = getattr(effect, name, None), "offset" if name == "address" else f"{name}_offset"
            use = "an address" if name in engine.addresses else "the predicate" if name == "guard" else "an operand"
            which = {name: which} if not isinstance(which, tuple) else {f"{name}{i}": x for i, x in enumerate(which)}
            found += [cls(n, x, getattr(effect, offset, 0), use) for n, x in which.items() if x is not None]
        return found


def engine_step(run: Context, op: Op, effect: fx.Effect) -> Step | None:
    """The step of an effect; None for one that no engine has to do with."""
    engine = _ENGINES.get(type(effect))
    if engine is None:
        return None
    operands = [(run.key(op.operands[named.position]), named) for named in Named.of(effect, engine)]

    def step(frame: Frame) -> Wait | None:
        given = dict[str, Array]()
        for key, named in operands:
            given[named.name] = displaced(run.observe(frame, key, op, named.use), named.offset)
            if named.name in engine.addresses and run.checks:
                _check_tile(run, frame, op, named.position, given[named.name], given.get("guard"))
        if "guard" in given and given["guard"].all():
            del given["guard"]
        return engine.carries_out(run, effect)(Execution(frame, op, effect, given))

    return step


def _check_tile(run: Context, frame: Frame, op: Op, operand: int, address: Array, among: Array | None) -> None:
    """A shared address that has left the tile it was formed from is a finding."""
    tile = op.tile(operand)
    if tile is None:
        return
    place = (address & _WINDOW).astype(np.int64) - SHARED_BASE - tile.offset
    outside = (place < 0) | (place >= tile.bytes)
    if outside.any():
        message = f"{op.instruction.mnemonic} at byte {{}} of shared memory is outside {tile.name} (bytes "
        message += f"{tile.offset} to {tile.offset + tile.bytes - 1}): correct the number or the stage"
        acting, where = frame.acting(outside if among is None else outside & among), place + tile.offset
        run.report.of_lanes("bounds", frame, op.where, acting, message, where, address=where)


def _multiply(run: Context, call: Execution[fx.AsyncMatrix]) -> None:
    frame, op, instruction = call.frame, call.op, call.op.instruction.warpgroup_product
    for position in range(0 if instruction.a_source == "shared" else instruction.a_count, instruction.a_count + 2):
        run.observe(frame, run.key(op.operands[position]), op, "a descriptor or predicate")
    run.warpgroups.meet(frame, op)
    run.warpgroups.issue(frame, op, tuple(run.key(x) for x in op.operands[: instruction.a_count + 2]))


def _change_budget(run: Context, call: Execution[fx.RegisterBudget]) -> Wait | None:
    run.warpgroups.meet(call.frame, call.op)
    return run.registers.change(call)


def _fence_proxy(run: Context, call: Execution[fx.ProxyFence]) -> None:
    space = call.effect.space
    run.clocks.stamp(call.op)
    for _, row, lanes in lanes_of(call.frame, None):
        if space != "global":
            run.clocks.proxy_fence(row, lanes, FENCED)
        if space != "shared":
            run.clocks.proxy_fence(row, lanes, FENCED_GLOBALLY)
    if space != "global":
        run.mbarriers.fence(call)


def _await_launches(run: Context, call: Execution[fx.LaunchWait]) -> None:
    for by, _ in call.actors():
        run.clocks.await_launches(by.row, by.lanes)


_ENGINES: dict[type[fx.Effect], Engine] = {
    fx.Barrier: Engine(lambda run, _: run.barriers.arrive, values=("barrier", "holds")),
    fx.ClusterBarrier: Engine(lambda run, _: run.clusters.meet),
    fx.MbarrierInit: Engine(lambda run, _: run.mbarriers.initialise, ("address",), ("counted",)),
    fx.MbarrierInvalidate: Engine(lambda run, _: run.mbarriers.invalidate, ("address",)),
    fx.MbarrierFence: Engine(lambda run, _: run.mbarriers.fence),
    fx.MbarrierArrive: Engine(lambda run, _: run.mbarriers.arrive, ("address",), ("counted", "expects")),
    fx.MbarrierWait: Engine(lambda run, _: run.mbarriers.wait, ("address",), ("parity",)),
    fx.BulkTensorCopy: Engine(
        lambda run, _: run.bulk.start, ("shared", "barrier"), ("tensor_map", "multicast", "coordinates")
    ),
    fx.BulkLoad: Engine(lambda run, _: run.bulk.start, ("shared", "barrier"), ("source", "bytes", "multicast")),
    fx.BulkStore: Engine(lambda run, _: run.bulk.start, ("shared",), ("target", "sized")),
    fx.AsyncStore: Engine(lambda run, _: run.bulk.start, ("target", "barrier"), ("values",)),
    fx.CopyArrival: Engine(lambda run, _: run.bulk.track_copies, ("address",)),
    fx.CommitGroup: Engine(lambda run, effect: run.groups[effect.queue].commit),
    fx.WaitGroup: Engine(lambda run, effect: run.groups[effect.queue].wait),
    fx.AsyncMatrix: Engine(lambda run, _: partial(_multiply, run)),
    fx.WarpgroupFence: Engine(lambda run, _: run.warpgroups.registers.fence),
    fx.RegisterBudget: Engine(lambda run, _: partial(_change_budget, run)),
    fx.ProxyFence: Engine(lambda run, _: partial(_fence_proxy, run)),
    fx.LaunchWait: Engine(lambda run, _: partial(_await_launches, run)),
    fx.TensorMapFence: Engine(lambda run, _: run.bulk.made.fence, values=("acquired",)),
}
