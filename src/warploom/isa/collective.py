"""The table of what the lanes of a warp do together: shuffles, votes, matches, reductions, transposition.

The last operand is the mask of the members, which meet; only they count.

Sources: PTX ISA, "Parallel Synchronization and Communication Instructions" (``shfl.sync``, ``vote.sync``,
``match.sync``, ``redux.sync``, ``activemask``, ``bar.warp.sync``) and "Warp-level matrix transpose instruction".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DType, f32, s32, u32
from warploom.isa.cpp import Expression, called
from warploom.isa.effects import ReadSpecial, WarpSync
from warploom.isa.form import Array, Open, common, form, takes, viewed
from warploom.isa.instruction import Instruction, named
from warploom.isa.meanings import BINARY_MEANINGS, flagged

_LANES = np.arange(32, dtype=np.uint32)
Mode = Literal["xor", "idx", "up", "down"]
Exchange = Callable[[Array], tuple[Array, Array]]


# Shuffles. The clamp is the last lane to read from (for up the first), and from bit 8 on it has the bits of a lane that
# make groups which exchange among themselves.


def _whole_warp(mode: str) -> int:
    return 0 if mode == "up" else 31


def exchange(i: Instruction) -> Exchange:
    """A function of the lane operand, of 5 bits: which lane each lane reads, and whether that is in its group.

    A lane whose source lies outside keeps its own value.
    """
    group = i.clamp >> 8 & 31

    def source(argument: Array) -> tuple[Array, Array]:
        lane = np.broadcast_to(_LANES, argument.shape).astype(np.int64)
        n = argument.astype(np.int64) & 31
        first, last = lane & group, (lane & group) | (i.clamp & 31 & ~group)
        wanted = {"bfly": lane ^ n, "idx": first | (n & ~group), "up": lane - n, "down": lane + n}[i.mode]
        inside = wanted >= last if i.mode == "up" else wanted <= last
        return np.where(inside, wanted, lane), inside

    return source


def shuffled(i: Instruction) -> Callable[..., Any]:
    """Each lane's value of its source lane, bit for bit, and whether that lies in its group."""
    source = exchange(i)

    def meaning(values: Array, lane: Array, _: Array) -> tuple[Array, ...]:
        lanes, inside = source(lane)
        return (np.take_along_axis(values, lanes, axis=1), inside)[: len(i.result_types)]

    return meaning


def _shuffle_name(i: Instruction) -> str:
    groups = "" if i.clamp == _whole_warp(i.mode) else f".{i.clamp:#x}"
    return f"shfl.sync.{i.mode}.{i.home}{groups}"


def _shuffle_call(i: Instruction) -> Expression | None:
    """CUDA's calls are for the whole warp."""
    if i.clamp != _whole_warp(i.mode) or len(i.result_types) > 1:
        return None
    names = {"bfly": "__shfl_xor_sync", "idx": "__shfl_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync"}
    return called(f"{names[i.mode]}({{2}}, {{0}}, {{1}})", 3)


BEYOND = Open(1, lambda _, n: n > 31, "names distance {} of 32", "the hardware takes it modulo 32; keep it below")
for _modes, _open in (("idx", ()), ("bfly up down", (BEYOND,))):  # CUDA C++ defines a lane beyond 31: modulo 32
    form(
        "shfl.sync.{mode}.b32 d|p:pred?, a, lane:u32, #clamp:hex, mask:u32",
        mode=_modes,
        registers="home",
        name=_shuffle_name,
        choose=shuffled,
        exchange=exchange,
        call=_shuffle_call,
        open=_open,
        moves_bits=True,
        effects=(WarpSync(mask=2),),
        asm="volatile",
    )


def shuffle(mode: Mode, dtype: DType, clamp: int | None = None) -> Instruction:
    """``shfl.sync`` of values of a type (u32, s32 or f32); without ``clamp`` of the whole warp."""
    takes("shfl", dtype, (u32, s32, f32))
    clamp = _whole_warp(mode) if clamp is None else clamp
    return named(f"shfl.sync.{'bfly' if mode == 'xor' else mode}.b32", dtype, numbers=(("clamp", clamp),))


# Votes, matches, reductions


def _members(mask: Array) -> Array:
    """Which lanes each lane's mask names, bool (warps, lane, member)."""
    return ((mask[:, :, None] >> _LANES) & 1).astype(np.bool_)


def _bits(holds: Array) -> Array:
    """(warps, lane, member) as masks, (warps, lane)."""
    return (holds.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32)


def _vote(mode: str) -> Callable[[Array, Array], Array]:
    def vote(holds: Array, mask: Array) -> Array:
        member, votes = _members(mask), holds[:, None, :]
        some, every = (member & votes).any(axis=2), (~member | votes).all(axis=2)
        return np.asarray({"any": some, "all": every, "uni": every | ~some}[mode])

    return vote


def _matched(i: Instruction) -> Callable[..., Any]:
    """The members that have the lane's value; of ``all`` the mask if all have one, else 0, and whether they have."""

    def match(values: Array, mask: Array) -> tuple[Array, ...]:
        member = _members(mask)
        same = member & (values[:, :, None] == values[:, None, :])
        if i.mode == "any":
            return (_bits(same),)
        equal = (same == member).all(axis=2)
        return (np.where(equal, _bits(same), np.uint32(0)), equal)[: len(i.result_types)]

    return match


def _reduction(i: Instruction) -> Callable[[Array, Array], Array]:
    """The reduction over the lanes of each lane's mask, in which it is itself."""
    combine = flagged(i, BINARY_MEANINGS[i.rop])

    def reduced(values: Array, mask: Array) -> Array:
        values = np.abs(values) if i.fields.get("abs") else values
        none = 0 if i.rop in ("add", "xor") else values[:, :, None]
        wide = np.where(_members(mask), values[:, None, :], none)
        return reduce(combine, np.moveaxis(wide, 2, 0))

    return reduced


def _transposed(x: Array) -> Array:
    """Lane 4·i + j holds elements 2·j and 2·j + 1 of row i, before and after."""
    rows = viewed(x, np.uint16).reshape(-1, 8, 8)
    return viewed(rows.transpose(0, 2, 1), np.uint32).reshape(rows.shape[0], 32)


MEET = common(effects=(WarpSync(mask=1),), asm="volatile")
form(
    "vote.sync.{mode}.pred d, a, mask:u32",
    MEET,
    mode="any all uni",
    name="vote.sync.{mode}",
    choose=lambda i: _vote(i.mode),
    call=lambda i: called(f"__{i.mode}_sync({{1}}, {{0}})", 2),
)
form(
    "vote.sync.ballot.b32 d, a:pred, mask:u32",
    MEET,
    name="vote.sync.ballot",
    meaning=lambda holds, mask: _bits(_members(mask) & holds[:, None, :]),
    call=lambda _: called("__ballot_sync({1}, {0})", 2),
)
form("match.{mode}.sync.{bits} d:b32, a, mask:u32", MEET, mode="any", bits="b32 b64", choose=_matched)
form("match.{mode}.sync.{bits} d:b32|p:pred?, a, mask:u32", MEET, mode="all", bits="b32 b64", choose=_matched)
form("redux.sync.{rop}.{int} d, a, mask:u32", MEET, rop="add min max", int="u32 s32", choose=_reduction)
form("redux.sync.{rop}{.abs}{.NaN}.f32 d, a, mask:u32", MEET, rop="min max", choose=_reduction, since="sm_100a")
form("redux.sync.{rop}.b32 d, a, mask:u32", MEET, rop="and or xor", choose=_reduction)
form(
    "activemask.b32 d",
    call=lambda _: called("__activemask()", 0),
    effects=(ReadSpecial("activemask"),),
    asm="volatile memory",
)
form(
    "bar.warp.sync mask:u32",
    call=lambda _: called("__syncwarp({0})", 1),
    effects=(WarpSync(mask=0, orders_memory=True),),
    asm="volatile memory",
)
form(
    "movmatrix.sync.aligned.m8n8.trans.b16 d:b32, a:b32",
    meaning=_transposed,
    moves_bits=True,
    effects=(WarpSync(aligned=True),),
    asm="plain",
)
