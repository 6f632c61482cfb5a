"""The table of asynchronous copies: ``cp.async`` (sm_80), bulk copies and tensor copies (sm_90, the TMA), tensor maps.

Of bulk copies and tensor copies the threads whose predicate holds (``guard``) issue one each; one thread should.

Sources: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy" (``cp.async``, commit and wait groups,
``cp.async.bulk``, ``cp.reduce.async.bulk``, ``cp.async.bulk.tensor``),
``tensormap``, "membar / fence" (``fence.proxy.tensormap::generic``), "Tensor-Map modification".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s32, s64, u8, u16, u32, u64
from warploom.core.errors import LayoutError, VerifyError
from warploom.isa.effects import (
    AsyncCopy,
    BulkLoad,
    BulkStore,
    BulkTensorCopy,
    CommitGroup,
    CopyArrival,
    Effect,
    TensorMapFence,
    TensorMapWrite,
    WaitGroup,
    WarpSync,
)
from warploom.isa.form import Open, common, form, waits_for_groups
from warploom.isa.instruction import Instruction, instruction, named
from warploom.isa.meanings import as_words
from warploom.layout.tensor_map import TensorMapSpec

Eviction = Literal["", "first", "last"]
POLICIES: dict[Eviction, int] = {"first": 0x12F0000000000000, "last": 0x14F0000000000000}
"""What createpolicy.fractional.L2::evict_{first,last} with a fraction of 1 returns (sm_90)."""
COPY = common(asm="volatile memory", hint="L2::cache_hint", to="shared::cluster shared::cta")
BULK = COPY | common(since="sm_90")
RECEIVERS = ("shared::cluster", "{.multicast}", "ctas:u32=b16?multicast, "), ("shared::cta", "", "")
"""Where bulk copies go, the word for several CTAs of a cluster, and the operand that names them."""


def _policy(eviction: Eviction) -> tuple[str, tuple[tuple[str, int], ...]]:
    return (".L2::cache_hint", (("policy", POLICIES[eviction]),)) if eviction else ("", ())


def _eviction(i: Instruction) -> str:
    """The L2 priority in an instruction's name."""
    return next((f".L2::evict_{name}" for name, value in POLICIES.items() if i.hint and i.policy == value), "")


# Copies of a thread, in flight until it waits for their group, or until they arrive at an mbarrier


def _copied(i: Instruction) -> dict[str, Any]:
    if i.bytes not in (4, 8, 16) or (i.cache == "cg" and i.bytes != 16):
        sizes = "16" if i.cache == "cg" else "4, 8 or 16"
        raise VerifyError(f"cp.async.{i.cache} copies {sizes} bytes a thread, not {i.bytes}")
    return {}


def _beyond(i: Instruction) -> tuple[Open, ...]:
    """More bytes to read than the copy has."""
    size, what = i.bytes, f"reads {{}} bytes of a copy of {i.bytes}"
    return () if "valid" in i.left else (Open(2, lambda _, valid: valid > size, what, "clamp it (k.minimum)"),)


def _copy(i: Instruction) -> tuple[AsyncCopy, ...]:
    valid = None if "valid" in i.left else 2
    return (AsyncCopy(0, 1, i.bytes, i.shared_offset, i.global_offset, valid),)


form(
    "cp.async.{cache}.{to}.global{.hint}{.prefetch} [shared]:u32, [global]:u64, #bytes, valid:u32?, #policy:hex?hint",
    COPY,
    cache="ca cg",
    prefetch="L2::64B L2::128B L2::256B",
    name=lambda i: ".".join(
        filter(None, (f"cp.async.{i.cache}.shared.global{_eviction(i)}", i.prefetch, str(i.bytes)))
    ),
    let=_copied,
    open=_beyond,
    effects=_copy,
    to="shared shared::cta",
    hint="L2::cache_hint@sm_90",
)
# Groups: an empty one counts as one. A barrier must follow a wait before other threads read the data.
form("cp.async.commit_group", COPY, effects=(CommitGroup("cp.async"),))
form("cp.async.wait_all", COPY, effects=(CommitGroup("cp.async"), WaitGroup("cp.async", 0)))
form(
    "cp.async.mbarrier.arrive{.noinc}.{space}.b64 [at]",
    COPY,
    space="shared shared::cta",
    name=lambda i: f"cp.async.mbarrier.arrive{'.noinc' if i.noinc else ''}",
    effects=lambda i: (CopyArrival(0, i.offset, bool(i.noinc)),),
)
form("cp.async.bulk.commit_group", BULK, effects=(CommitGroup("bulk"),))


def _waited(i: Instruction) -> dict[str, Any]:
    waits_for_groups(i.pending)
    return {}


WAIT = common(let=_waited, name=lambda i: i.ptx_name)
form("cp.async.wait_group #pending", WAIT, COPY, effects=lambda i: (WaitGroup("cp.async", i.pending),))
form(
    "cp.async.bulk.wait_group{.read} #pending",
    WAIT,
    BULK,
    effects=lambda i: (WaitGroup("bulk", i.pending, bool(i.read)),),
)


def cp_async(
    size: int, cache: str = "cg", zero_fill: bool = False, prefetch: int = 0, eviction: Eviction = ""
) -> Instruction:
    """``cp.async``: 4, 8 or 16 bytes a thread (``cg``: 16), past its registers.

    Operands: shared address, global address and, with ``zero_fill``, the count of bytes to read (the rest is zero).
    ``prefetch`` is the L2 prefetch size in bytes (64, 128, 256) or 0; ``eviction`` what the L2 drops first, or last.
    """
    hint, policy = _policy(eviction)
    ahead = f".L2::{prefetch}B" if prefetch else ""
    name = f"cp.async.{cache}.shared.global{hint}{ahead}"
    made = named(name, numbers=(("bytes", size), *policy))
    return instruction(made.form, made.words, made.numbers) if zero_fill else made


# Consecutive bytes, in multiples of 16


def _sixteens(i: Instruction) -> dict[str, Any]:
    if i.bytes % 16 or i.bytes <= 0:
        raise VerifyError(f"a bulk copy moves a positive multiple of 16 bytes, not {i.bytes}")
    return {}


def _stored(i: Instruction) -> tuple[BulkStore, ...]:
    adds, sized = i.words[1] == "reduce", i.position("bytes")
    return (BulkStore(0, 1, i.bytes, i.shared_offset, i.global_offset, 2, adds, sized),)


for opcode, adds in (("cp.async", ""), ("cp.reduce.async", ".add.f32")):
    for size in ("#bytes", "bytes:u32"):
        form(
            f"{opcode}.bulk.global.shared::cta.bulk_group{adds}{{.hint}} "
            f"[global]:u64, [shared]:u32, {size}, policy:b64?hint, ^guard:pred",
            BULK,
            operands="shared global guard bytes policy",
            default={"bytes": 16},
            name=f"{opcode}.bulk.global.shared::cta.bulk_group{adds}",
            let=_sixteens,
            effects=_stored,
        )


def _fetched(i: Instruction) -> tuple[BulkLoad, ...]:
    offsets = i.shared_offset, i.global_offset, i.barrier_offset
    return (BulkLoad(0, 1, 2, 3, 4, *offsets, i.position("ctas")),)


for to, several, mask in RECEIVERS:
    form(
        f"cp.async.bulk.{to}.global.mbarrier::complete_tx::bytes{several}{{.hint}} "
        f"[shared]:u32, [global]:u64, bytes:u32, [barrier]:u32, {mask}policy:b64?hint, ^guard:pred",
        BULK,
        multicast="multicast::cluster",
        operands="shared global bytes barrier guard ctas policy",
        name="cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        effects=_fetched,
    )
form("cp.async.bulk.prefetch.L2.global{.hint} [at]:u64, bytes:u32, policy:b64?hint", BULK)


def bulk_store(size: int, adds: bool = False) -> Instruction:
    """``cp.async.bulk`` of ``size`` bytes to global memory; with ``adds`` f32 elements are added to what is there.

    Operands: shared address, global address, predicate. Its source is free, and its result there, when its group says.
    """
    name = f"cp{'.reduce' if adds else ''}.async.bulk.global.shared::cta.bulk_group{'.add.f32' if adds else ''}"
    return named(name, numbers=(("bytes", size),))


# Boxes of tensor maps

TENSOR = BULK | common(rank="1d 2d 3d 4d 5d", multicast="multicast::cluster")


def _box(i: Instruction) -> tuple[BulkTensorCopy, ...]:
    rank = int(i.rank[0])
    if "bulk_group" in i.words:
        at = tuple(range(3, 3 + rank))
        return (BulkTensorCopy("store", 1, 0, i.shared_offset, at, guard=2, reduction=i.fields.get("reduction", "")),)
    at, mask = tuple(range(4, 4 + rank)), 4 + rank if i.multicast else None
    return (BulkTensorCopy("load", 1, 0, i.shared_offset, at, 2, i.barrier_offset, 3, mask),)


for to, several, mask in RECEIVERS:
    form(
        f"cp.async.bulk.tensor.{{rank}}.{to}.global{{.tile}}.mbarrier::complete_tx::bytes{several}{{.hint}} "
        f"[shared]:u32, [map, at*rank:s32], [barrier]:u32, {mask}#policy:hex?hint, ^guard:pred",
        TENSOR,
        operands="shared map barrier guard at ctas",
        default={"multicast": ""},
        name=lambda i: ".".join(filter(None, (f"cp.async.bulk.tensor.{i.rank}.load", i.multicast))) + _eviction(i),
        effects=_box,
    )
for opcode, reduction in (("cp.async", ""), ("cp.reduce.async", ".{reduction}")):
    form(
        f"{opcode}.bulk.tensor.{{rank}}.global.shared::cta{reduction}{{.tile}}.bulk_group{{.hint}} "
        "[map, at*rank:s32], [shared]:u32, policy:b64?hint, ^guard:pred",
        TENSOR,
        operands="shared map guard at policy",
        reduction="add min max",
        name=f"{opcode}.bulk.tensor.{{rank}}.store{reduction}",
        effects=_box,
    )
form("cp.async.bulk.prefetch.tensor.{rank}.L2.global{.tile}{.hint} [map, at*rank:s32], policy:b64?hint", TENSOR)


def tensor_load(rank: int, eviction: Eviction = "", multicast: bool = False) -> Instruction:
    """``cp.async.bulk.tensor`` to shared memory, whose bytes complete on the mbarrier.

    Operands: shared address, tensor map, mbarrier address, predicate, coordinates (innermost first) and, with
    ``multicast``, the mask of the cluster's CTAs that receive it (bit r: rank r), at the same place of each, on the
    mbarrier at the same place of each. What is read once goes first from the L2, what other CTAs read again goes last.
    """
    hint, policy = _policy(eviction)
    several = ".multicast::cluster" if multicast else ""
    name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{several}{hint}"
    return named(name, numbers=policy)


def tensor_store(rank: int) -> Instruction:
    """``cp.async.bulk.tensor`` to global memory. Operands: shared address, tensor map, predicate, coordinates."""
    return named(f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group")


# Tensor maps that a kernel makes (sm_90a). A tensor map is 128 opaque bytes in memory. What the hardware keeps where in
# them is its own affair; here each field has the place that :data:`FIELDS` gives it.


MAP_BYTES = 128


def whole_map(i: Instruction) -> dict[str, Any]:
    """Refuse another size than that of a tensor map."""
    if i.size != MAP_BYTES:
        raise VerifyError(f"a tensor map has {MAP_BYTES} bytes")
    return {}


@dataclass(frozen=True, slots=True)
class Field:
    """Where a field lies in a tensor map: ``count`` values of ``dtype``; ``immediate``: PTX takes constants alone."""

    place: int
    dtype: DType = u32
    count: int = 1
    immediate: bool = False

    @property
    def operands(self) -> tuple[str, str]:
        """PTX's type of a value, and the operands after the map's address."""
        return f"b{self.dtype.bits}", "#value" if self.immediate else "#index, value" if self.count > 1 else "value"


FIELDS = {
    "global_address": Field(0, u64),
    "rank": Field(8),
    "box_dim": Field(12, count=5),
    "global_dim": Field(32, count=5),
    "elemtype": Field(52, immediate=True),
    "global_stride": Field(56, u64, 4),
    "element_stride": Field(88, count=5),
    "interleave_layout": Field(108, immediate=True),
    "swizzle_mode": Field(112, immediate=True),
    "fill_mode": Field(116, immediate=True),
}
"""The fields by their names in ``tensormap.replace``."""

_ELEMENTS = (u8, u16, u32, s32, u64, s64, f16, f32, f32, f64, bf16, f32, f32)
"""``.elemtype`` by number; f32 with subnormal numbers flushed, and tf32, are moved as they are."""


def decoded(data: bytes) -> tuple[int, TensorMapSpec]:
    """The tensor's address and what the map says of it. Raises LayoutError for what describes no tensor."""

    def field(name: str) -> tuple[int, ...]:
        where = FIELDS[name]
        return struct.unpack_from(f"<{where.count}{'Q' if where.dtype is u64 else 'I'}", data, where.place)

    (address,), (rank,), (kind,), (swizzle,) = map(field, ("global_address", "rank", "elemtype", "swizzle_mode"))
    rank += 1
    if rank > 5 or kind >= len(_ELEMENTS) or swizzle > 3:
        raise LayoutError(f"a tensor map of {rank} dimensions, element type {kind} and swizzle mode {swizzle}")
    if any(n != 1 for n in field("element_stride")[:rank]):
        raise LayoutError("strides between the elements of a box are not supported")
    if not all(field("global_dim")[:rank]):
        raise LayoutError(f"a tensor map of a tensor without elements: {field('global_dim')[:rank]}")
    spec = TensorMapSpec(
        _ELEMENTS[kind],
        field("global_dim")[:rank],
        field("global_stride")[: rank - 1],
        field("box_dim")[:rank],
        (0, 32, 64, 128)[swizzle],
    )
    return address, spec


# One field of a tensor map in memory. Values are as PTX has them: ``rank`` is one less than the dimensions, strides are
# bytes.

_DEFAULTS = ("interleave_layout", "fill_mode")
"""Fields of which the first choice is supported alone."""


def _field(i: Instruction) -> dict[str, Any]:
    field, index = FIELDS[i.member], i.fields.get("index", 0)
    if not 0 <= index < field.count:
        raise VerifyError(f"a tensor map has no field {i.member}, number {index}")
    if i.member in _DEFAULTS and i.value:
        raise VerifyError(f"{i.member} other than 0 is not supported")
    return {"size": field.dtype.bytes, "place": field.place + index * field.dtype.bytes}


def _written(i: Instruction) -> Any:
    """The word that is written, shape (warps, lanes, words): of a register, or the immediate."""
    word = np.dtype(f"u{i.size}")
    return lambda *registers: as_words(registers or [np.full((1, 32), i.value, word)], word)


def _write(i: Instruction) -> tuple[Effect, ...]:
    """An access to the whole map that changes one field."""
    return (TensorMapWrite("shared" if "shared" in i.space else "global", 0, i.place, i.size),)


MAP = common(since="sm_90a", asm="volatile memory")
for bits, operands in dict.fromkeys(field.operands for field in FIELDS.values()):
    form(
        f"tensormap.replace.tile.{{member}}{{.space}}.b1024.{bits} [map], {operands}",
        MAP,
        member=" ".join(name for name, field in FIELDS.items() if field.operands == (bits, operands)),
        space="global shared::cta",
        let=_field,
        choose=_written,
        effects=_write,
    )
form(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{scope}.sync.aligned "
    "[to]:u64, [from]:u32, #size",
    MAP,
    scope="gpu sys",
    let=whole_map,
    effects=(WarpSync(aligned=True), TensorMapFence()),
)
