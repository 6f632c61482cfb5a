"""Steps of instructions in which the lanes of a warp meet: shuffles, votes, ``__syncwarp``; who must be there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import LANES, Frame, all_ones, unmarked
from warploom.ir.statements import Op, Value
from warploom.isa import effects as fx
from warploom.isa.collective import Exchange

Array = NDArray[Any]
_FULL_MASK = 0xFFFFFFFF


def collective_step(run: Context, op: Op, keys: tuple[Value, ...]) -> Step:
    """Votes and elections: every operand decides, lanes that are not here have no say."""

    def step(frame: Frame) -> None:
        values = [frame.full(run.observe(frame, k, op, "an operand")) for k in keys]
        if frame.active is not None and len(values) == 2:
            values[1] = values[1] & ballot(frame.active)  # inactive lanes have no vote
        for value, array in zip(op.results, op.instruction.meaning(*values), strict=True):
            frame.write(value, array)

    return step


def shuffle_step(run: Context, op: Op, exchange: Exchange, keys: tuple[Value, ...]) -> Step:
    """A shuffle; the lane it reads from decides, and a second result says whether that is in its group."""
    data, lane, mask = keys

    def step(frame: Frame) -> None:
        argument, given = run.observe(frame, lane, op, "the lane"), frame.env[data]
        if argument.size == 1:  # every warp exchanges alike
            source, inside = exchange(np.broadcast_to(argument, (1, 32)))
            result = np.broadcast_to(given, (given.shape[0], 32))[:, source[0]]
        else:
            source, inside = exchange(frame.full(argument))
            result = np.take_along_axis(frame.full(given), source, axis=1)
        members = frame.env[mask]
        partial = frame.active is not None or members.size > 1 or int(members.flat[0]) != _FULL_MASK
        shadow = _shuffle_shadow(frame, data, members, source) if frame.shadows or partial else None
        origin = frame.origins.get(data, (op.where, "a lane that takes no part in the shuffle"))
        frame.write(op.results[0], result, shadow, origin)
        for value in op.results[1:]:
            frame.write(value, inside)

    return step


def _shuffle_shadow(frame: Frame, data: Value, members: Array, source: Array) -> Array | None:
    """Poison of the source lanes; a lane that does not take part gives poison."""
    none, wide = unmarked(frame.env[data]), np.broadcast_to(source, frame.shape)
    shadow = np.take_along_axis(frame.full(frame.shadows.get(data, none)), wide, axis=1)
    absent = (frame.full(members) >> wide.astype(np.uint32)) & 1 == 0
    if frame.active is not None:
        absent |= ~np.take_along_axis(frame.active, wide, axis=1)
    shadow = np.where(absent, all_ones(none.dtype), shadow)
    return shadow if shadow.any() else None


def sync_step(run: Context, op: Op, sync: fx.WarpSync) -> Step:
    """The lanes named by a mask (all of them without one) meet, and order their memory accesses if so said."""
    mask_key = None if sync.mask is None else run.key(op.operands[sync.mask])
    barrier = any(isinstance(e, fx.Barrier | fx.ClusterBarrier) for e in op.instruction.effects())

    def step(frame: Frame) -> None:
        if sync.aligned and frame.active is not None:
            _divergent(run, frame, op, barrier)
        elif mask_key is None and frame.absent is not None:
            raise EmulationError(
                f"{op.where}: the emulator does not execute {op.instruction.mnemonic} by a part of a warp: "
                "run this kernel on a GPU"
            )
        partial: Array | None = None
        if mask_key is not None:
            members = run.observe(frame, mask_key, op, "the member mask")
            if members.size != 1 or int(members.flat[0]) != _FULL_MASK or frame.active is not None:
                partial = frame.full(members)
                _check_members(run, frame, op, partial)
        if sync.orders_memory and run.checks:
            run.clocks.stamp(op)
            if partial is None or (partial == _FULL_MASK).all():
                run.clocks.sync_warps(frame.rows)
            else:
                _sync_groups(run, frame, partial)

    return step


def _sync_groups(run: Context, frame: Frame, members: Array) -> None:
    active = frame.acting()
    for i, row in enumerate(frame.rows.tolist()):
        for mask in np.unique(members[i][active[i]]).tolist():
            lanes = np.nonzero((mask >> LANES) & 1)[0]
            run.clocks.sync_lanes(row, lanes)


def _divergent(run: Context, frame: Frame, op: Op, barrier: bool) -> None:
    missing = frame.absent if barrier else ~frame.acting()  # a barrier is for the lanes that have not ended
    if missing is None:
        return
    message = f"{op.instruction.mnemonic} needs all 32 lanes of a warp; {{}} are not here: move it out of the "
    message += "divergent branch or loop"
    run.report.of_lanes("divergence", frame, op.where, missing, message, missing.sum(axis=1, keepdims=True))


def _check_members(run: Context, frame: Frame, op: Op, members: Array) -> None:
    active, named = frame.acting(), lanes_named(members)
    itself = named[:, LANES, LANES]
    agree = members[:, :, None] == members[:, None, :]
    absent = lanes_that_miss(frame, members)
    unequal = (named & active[:, None, :] & ~agree).any(axis=2) & active
    for bad, text in (
        (~itself & active, "a lane executes it that its own member mask leaves out: name the executing lanes"),
        (absent, "the member mask names lanes that are not here: use the mask of the lanes that take this branch"),
        (unequal, "lanes of one group give different member masks: all members must give the same"),
    ):
        if bad.any():
            message = f"{op.instruction.mnemonic} with mask {{:#010x}}: {text}"
            run.report.of_lanes("member_mask", frame, op.where, bad, message, members)
            return


def ballot(active: Array) -> Array:
    """The mask of the active lanes of each warp, u32 (warps, 1)."""
    bits = active.astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return bits.sum(axis=1, keepdims=True).astype(np.uint32)


def lanes_that_miss(frame: Frame, masks: Array) -> Array:
    """The active lanes whose masks, (warps, 32), name lanes that are elsewhere."""
    absent = frame.absent
    if absent is None:
        return np.zeros((frame.n, 32), np.bool_)
    return (lanes_named(masks) & absent[:, None, :]).any(axis=2) & frame.acting()


def lanes_named(masks: Array) -> Array:
    """Which lanes the mask of each lane names, (warps, lane, named lane)."""
    return ((masks[:, :, None] >> LANES.astype(np.uint32)) & 1).astype(np.bool_)
