"""The table of asynchronous copies: ``cp.async`` (sm_80), bulk copies and reductions, tensor copies (sm_90, the TMA).

Of bulk copies and tensor copies the threads whose predicate holds (``guard``) issue one each; one thread should.

Sources: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy" (``cp.async``, commit and wait groups,
``cp.async.bulk``, ``cp.reduce.async.bulk``, ``cp.async.bulk.tensor``).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, Literal

from warploom.core.errors import VerifyError
from warploom.isa.base import Open, waits_for_groups
from warploom.isa.effects import (
    AsyncCopy,
    BulkLoad,
    BulkStore,
    BulkTensorCopy,
    CommitGroup,
    CopyArrival,
    WaitGroup,
)
from warploom.isa.form import Formed, form, instruction, named

Queue = Literal["cp.async", "bulk"]
Eviction = Literal["", "first", "last"]
POLICIES: dict[Eviction, int] = {"first": 0x12F0000000000000, "last": 0x14F0000000000000}
"""What createpolicy.fractional.L2::evict_{first,last} with a fraction of 1 returns (sm_90)."""
COPY: dict[str, Any] = {"asm": "volatile memory", "hint": "L2::cache_hint", "to": "shared::cluster shared::cta"}
BULK: dict[str, Any] = COPY | {"since": "sm_90"}


def _policy(eviction: Eviction) -> tuple[str, tuple[tuple[str, int], ...]]:
    return (".L2::cache_hint", (("policy", POLICIES[eviction]),)) if eviction else ("", ())


def _eviction(i: Formed) -> str:
    """The L2 priority in an instruction's name."""
    return next((f".L2::evict_{name}" for name, value in POLICIES.items() if i.hint and i.policy == value), "")


# Copies of a thread, in flight until it waits for their group, or until they arrive at an mbarrier


def _copied(i: Formed) -> dict[str, Any]:
    if i.bytes not in (4, 8, 16) or (i.cache == "cg" and i.bytes != 16):
        sizes = "16" if i.cache == "cg" else "4, 8 or 16"
        raise VerifyError(f"cp.async.{i.cache} copies {sizes} bytes a thread, not {i.bytes}")
    return {}


def _beyond(i: Formed) -> tuple[Open, ...]:
    """More bytes to read than the copy has."""
    size, what = i.bytes, f"reads {{}} bytes of a copy of {i.bytes}"
    return () if "valid" in i.left else (Open(2, lambda _, valid: valid > size, what, "clamp it (k.minimum)"),)


def _copy(i: Formed) -> tuple[AsyncCopy, ...]:
    valid = None if "valid" in i.left else 2
    return (AsyncCopy(0, 1, i.bytes, i.shared_offset, i.global_offset, valid),)


form(
    "cp.async.{cache}.{to}.global{.hint}{.prefetch} [shared]:u32, [global]:u64, #bytes, valid:u32?, #policy:hex?hint",
    cache="ca cg",
    prefetch="L2::64B L2::128B L2::256B",
    name=lambda i: ".".join(
        filter(None, (f"cp.async.{i.cache}.shared.global{_eviction(i)}", i.prefetch, str(i.bytes)))
    ),
    let=_copied,
    open=_beyond,
    effects=_copy,
    **(COPY | {"to": "shared shared::cta", "hint": "L2::cache_hint@sm_90"}),
)
form("cp.async.commit_group", effects=(CommitGroup("cp.async"),), **COPY)
form("cp.async.wait_all", effects=(CommitGroup("cp.async"), WaitGroup("cp.async", 0)), **COPY)
form(
    "cp.async.mbarrier.arrive{.noinc}.{space}.b64 [at]",
    space="shared shared::cta",
    name=lambda i: f"cp.async.mbarrier.arrive{'.noinc' if i.noinc else ''}",
    effects=lambda i: (CopyArrival(0, i.offset, bool(i.noinc)),),
    **COPY,
)
form("cp.async.bulk.commit_group", effects=(CommitGroup("bulk"),), **BULK)


def _waited(i: Formed) -> dict[str, Any]:
    waits_for_groups(i.pending)
    return {}


WAIT: dict[str, Any] = {"let": _waited, "name": lambda i: i.ptx_name}
form("cp.async.wait_group #pending", effects=lambda i: (WaitGroup("cp.async", i.pending),), **WAIT, **COPY)
form(
    "cp.async.bulk.wait_group{.read} #pending",
    effects=lambda i: (WaitGroup("bulk", i.pending, bool(i.read)),),
    **WAIT,
    **BULK,
)


def cp_async(
    size: int, cache: str = "cg", zero_fill: bool = False, prefetch: int = 0, eviction: Eviction = ""
) -> Formed:
    """``cp.async``: 4, 8 or 16 bytes a thread (``cg``: 16), past its registers.

    Operands: shared address, global address and, with ``zero_fill``, the count of bytes to read (the rest is zero).
    ``prefetch`` is the L2 prefetch size in bytes (64, 128, 256) or 0; ``eviction`` what the L2 drops first, or last.
    """
    hint, policy = _policy(eviction)
    ahead = f".L2::{prefetch}B" if prefetch else ""
    name = f"cp.async.{cache}.shared.global{hint}{ahead}"
    made = named(name, numbers=(("bytes", size), *policy))
    return instruction(made.form, made.words, made.numbers) if zero_fill else made


def commit_copies(queue: Queue = "cp.async") -> Formed:
    """Closes the group of copies, or of bulk stores, that this thread has issued; an empty group counts as one."""
    return named(f"cp.async{'.bulk' if queue == 'bulk' else ''}.commit_group")


def wait_copies(pending: int, queue: Queue = "cp.async", reads_only: bool = False) -> Formed:
    """Waits until at most ``pending`` of this thread's newest groups are unfinished, or have not read their sources.

    A barrier must follow before other threads read the data.
    """
    name = f"cp.async{'.bulk' if queue == 'bulk' else ''}.wait_group{'.read' if reads_only else ''}"
    return named(name, numbers=(("pending", pending),))


# Consecutive bytes, in multiples of 16


def _sixteens(i: Formed) -> dict[str, Any]:
    if i.bytes % 16 or i.bytes <= 0:
        raise VerifyError(f"a bulk copy moves a positive multiple of 16 bytes, not {i.bytes}")
    return {}


for opcode, adds in (("cp.async", ""), ("cp.reduce.async", ".add.f32")):
    form(
        f"{opcode}.bulk.global.shared::cta.bulk_group{adds}{{.hint}} "
        "[global]:u64, [shared]:u32, #bytes, policy:b64?hint, ^guard:pred",
        operands="shared global guard policy",
        name=f"{opcode}.bulk.global.shared::cta.bulk_group{adds}",
        let=_sixteens,
        effects=lambda i: (BulkStore(0, 1, i.bytes, i.shared_offset, i.global_offset, 2, i.words[1] == "reduce"),),
        **BULK,
    )
form(
    "cp.async.bulk.{to}.global.mbarrier::complete_tx::bytes{.hint} "
    "[shared]:u32, [global]:u64, bytes:u32, [barrier]:u32, policy:b64?hint, ^guard:pred",
    operands="shared global bytes barrier guard policy",
    name="cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    effects=lambda i: (BulkLoad(0, 1, 2, 3, 4, i.shared_offset, i.global_offset, i.barrier_offset),),
    **BULK,
)
form("cp.async.bulk.prefetch.L2.global{.hint} [at]:u64, bytes:u32, policy:b64?hint", **BULK)


def bulk_store(size: int, adds: bool = False) -> Formed:
    """``cp.async.bulk`` of ``size`` bytes to global memory; with ``adds`` f32 elements are added to what is there.

    Operands: shared address, global address, predicate. Its source is free, and its result there, when its group says.
    """
    name = f"cp{'.reduce' if adds else ''}.async.bulk.global.shared::cta.bulk_group{'.add.f32' if adds else ''}"
    return named(name, numbers=(("bytes", size),))


def bulk_load() -> Formed:
    """``cp.async.bulk`` to shared memory.

    Operands: shared address, global address, count of bytes, mbarrier address, predicate.
    """
    return named("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")


# Boxes of tensor maps

TENSOR: dict[str, Any] = BULK | {"rank": "1d 2d 3d 4d 5d", "multicast": "multicast::cluster"}


def _box(i: Formed) -> tuple[BulkTensorCopy, ...]:
    rank = int(i.rank[0])
    if "bulk_group" in i.words:
        at = tuple(range(3, 3 + rank))
        return (BulkTensorCopy("store", 1, 0, i.shared_offset, at, guard=2, reduction=i.fields.get("reduction", "")),)
    at, mask = tuple(range(4, 4 + rank)), 4 + rank if i.multicast else None
    return (BulkTensorCopy("load", 1, 0, i.shared_offset, at, 2, i.barrier_offset, 3, mask),)


for to, several, mask in (("shared::cluster", "{.multicast}", "ctas:u32=b16?multicast, "), ("shared::cta", "", "")):
    form(
        f"cp.async.bulk.tensor.{{rank}}.{to}.global{{.tile}}.mbarrier::complete_tx::bytes{several}{{.hint}} "
        f"[shared]:u32, [map, at*rank:s32], [barrier]:u32, {mask}#policy:hex?hint, ^guard:pred",
        operands="shared map barrier guard at ctas",
        default={"multicast": ""},
        name=lambda i: ".".join(filter(None, (f"cp.async.bulk.tensor.{i.rank}.load", i.multicast))) + _eviction(i),
        effects=_box,
        **TENSOR,
    )
for opcode, reduction in (("cp.async", ""), ("cp.reduce.async", ".{reduction}")):
    form(
        f"{opcode}.bulk.tensor.{{rank}}.global.shared::cta{reduction}{{.tile}}.bulk_group{{.hint}} "
        "[map, at*rank:s32], [shared]:u32, policy:b64?hint, ^guard:pred",
        operands="shared map guard at policy",
        reduction="add min max",
        name=f"{opcode}.bulk.tensor.{{rank}}.store{reduction}",
        effects=_box,
        **TENSOR,
    )
form("cp.async.bulk.prefetch.tensor.{rank}.L2.global{.tile}{.hint} [map, at*rank:s32], policy:b64?hint", **TENSOR)


def tensor_load(rank: int, eviction: Eviction = "", multicast: bool = False) -> Formed:
    """``cp.async.bulk.tensor`` to shared memory, whose bytes complete on the mbarrier.

    Operands: shared address, tensor map, mbarrier address, predicate, coordinates (innermost first) and, with
    ``multicast``, the mask of the cluster's CTAs that receive it (bit r: rank r), at the same place of each, on the
    mbarrier at the same place of each. What is read once goes first from the L2, what other CTAs read again goes last.
    """
    hint, policy = _policy(eviction)
    several = ".multicast::cluster" if multicast else ""
    name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{several}{hint}"
    return named(name, numbers=policy)


def tensor_store(rank: int, reduction: Literal["", "add", "min", "max"] = "") -> Formed:
    """``cp.async.bulk.tensor`` to global memory, where a ``reduction`` combines each element with what is there.

    Operands: shared address, tensor map, predicate, coordinates.
    """
    reduce, how = (".reduce", f".{reduction}.tile") if reduction else ("", "")
    return named(f"cp{reduce}.async.bulk.tensor.{rank}d.global.shared::cta{how}.bulk_group")
