"""sm_90: mbarriers, the TMA, addresses and stores in a cluster.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier", "Asynchronous copy".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from warploom.core.dtypes import pred, s32, u32, u64
from warploom.ir.statements import Const
from warploom.ir.statements import Operand as Value
from warploom.isa.async_copy import (
    POLICIES,
    BulkLoadBytes,
    BulkStoreBytes,
    CommitCopies,
    Eviction,
    TensorCopy,
    WaitCopies,
)
from warploom.isa.cluster import map_shared as isa_map_shared
from warploom.isa.form import Formed
from warploom.isa.operators import select
from warploom.isa.spaces import FromGeneric, ToGeneric
from warploom.isa.sync import (
    MbarrierArrival,
    MbarrierArrivalAmidst,
    MbarrierInitialise,
    MbarrierInvalidate,
    MbarrierTestWait,
    MbarrierTryWait,
)
from warploom.ptx.builder import Builder, form, lowered
from warploom.ptx.forms import Form
from warploom.ptx.syntax import Address, Operand
from warploom.ptx.syntax import Register as PtxRegister
from warploom.ptx.types import constant

_YES = Const(pred, True)


def _count(b: Builder, f: Form, operand: Operand, what: str) -> int:
    value = b.read(operand, u32)
    if not isinstance(value, Const):
        raise f.refusal(f"{what} must be a constant")
    return int(value.value)


# mbarriers


@form("mbarrier")
def mbarrier(b: Builder, f: Form) -> None:
    """``mbarrier.{init, inval, arrive[.expect_tx], arrive_drop, expect_tx, complete_tx, try_wait, test_wait}``."""
    for name, handler in _MBARRIERS.items():
        if f.flag(name):
            f.type("b64")
            handler(b, f)
            return
    if f.flag("pending_count"):
        raise f.refusal("the state of an mbarrier stands for its phase alone here")
    raise f.refusal()


def _own(f: Form) -> None:
    if not (f.flag("shared::cta") or f.flag("shared")):
        raise f.refusal("an mbarrier must be addressed in shared memory")


def _init(b: Builder, f: Form) -> None:
    _own(f)
    address, count = f.operands(2)
    base, offset, within = b.address(address, "shared")
    b.emit(MbarrierInitialise(_count(b, f, count, "the count of arrivals"), offset), (base,), within=within)


def _invalidate(b: Builder, f: Form) -> None:
    _own(f)
    (address,) = f.operands(1)
    base, offset, within = b.address(address, "shared")
    b.emit(MbarrierInvalidate(offset), (base,), within=within)


def _scope(f: Form, order: str) -> Literal["cta", "cluster"]:
    f.flag(order)
    return cast("Literal['cta', 'cluster']", f.one_of("cta", "cluster", default="cta"))


def _arrive(b: Builder, f: Form) -> None:
    expects, scope = f.flag("expect_tx"), _scope(f, "release")
    remote = f.flag("shared::cluster")
    if not remote:
        _own(f)
    given = f.operands(1, 2, 3)
    state = None if isinstance(given[0], Address) else given[0]
    address, *more = given if state is None else given[1:] or given
    if expects and not more:
        raise f.refusal()
    size = _count(b, f, more[0], "the count of bytes") if expects else None
    count = _count(b, f, more[0], "the count of arrivals") if more and not expects else 1
    base, offset, within = b.address(address, "shared")
    if isinstance(state, PtxRegister) and state.name in b.usage.read:
        # The state that an arrival returns stands for the phase: here, its parity. It cannot end before this arrival.
        odd = b.fresh(pred)
        b.emit(MbarrierTestWait(offset, relaxed=True), (base, constant(0, u32)), (odd,), within)
        b.assign(state, b.op(select(u64), odd, constant(1, u64), constant(0, u64)))
    if f.flag("noComplete"):
        b.emit(MbarrierArrivalAmidst(count, offset), (base,), within=within)
        return
    drops = "arrive_drop" in f.instruction.modifiers
    b.emit(MbarrierArrival(size, offset, remote, scope, count, drops), (base, _YES), within=within)


def _expect(b: Builder, f: Form) -> None:
    """``mbarrier.{expect_tx, complete_tx}``: bytes to expect, or those that have come, and no arrival."""
    f.flag("relaxed")
    f.one_of("cta", "cluster")
    remote = f.flag("shared::cluster")
    if not remote:
        _own(f)
    address, size = f.operands(2)
    base, offset, within = b.address(address, "shared")
    sign = -1 if "complete_tx" in f.instruction.modifiers else 1
    expected = MbarrierArrival(sign * _count(b, f, size, "the count of bytes"), offset, remote, count=0)
    b.emit(expected, (base, _YES), within=within)


def _wait(b: Builder, f: Form) -> None:
    f.flag("parity")  # a state is one too, see above
    scope = _scope(f, "acquire")
    _own(f)
    target, address, parity = f.operands(3, 4)[:3]
    base, offset, within = b.address(address, "shared")
    operands = (base, b.read(parity, u32))
    if b.loops_until(target):
        b.emit(MbarrierTryWait(offset, scope), operands, within=within)
        b.assign(target, _YES)
    else:
        unread = isinstance(target, PtxRegister) and target.name not in b.usage.read  # what follows runs in any case
        b.set_all((target,), MbarrierTestWait(offset, scope, relaxed=unread), operands, within)


_MBARRIERS = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _expect,
    "complete_tx": _expect,
    "try_wait": _wait,
    "test_wait": _wait,
}


# The TMA


def tensor_copy(b: Builder, f: Form) -> None:
    """``cp.async.bulk.tensor`` between shared and global memory."""
    rank = f.one_of("1d", "2d", "3d", "4d", "5d")
    if any(m.startswith(("im2col", "tile::")) for m in f.instruction.modifiers):
        raise f.refusal("of boxes, those of tiled tensor maps are supported")
    f.flag("tile")
    if f.flag("prefetch"):
        f.drop("")
        return
    shared, written = f.one_of("shared::cluster", "shared::cta"), f.instruction.modifiers
    if not rank or not shared or not f.flag("global"):
        raise f.refusal()
    (_load if written.index(shared) < written.index("global") else _store)(b, f, int(rank[0]))


def _place(b: Builder, f: Form, operand: Operand, rank: int) -> tuple[Value, tuple[Value, ...]]:
    """The tensor map and the coordinates of a box."""
    at = operand.coordinates if isinstance(operand, Address) else None
    if at is None or not isinstance(operand, Address) or len(at.items) != rank:
        raise f.refusal()
    tensor_map = b.read(operand.base, u64)
    if operand.offset:
        tensor_map = b.binary("add", tensor_map, operand.offset)
    return tensor_map, tuple(b.read(x, s32) for x in at.items)


def _load(b: Builder, f: Form, rank: int) -> None:
    f.need("mbarrier::complete_tx::bytes")
    multicast, hinted = f.flag("multicast::cluster"), f.flag("L2::cache_hint")
    shared, source, barrier, *more = f.operands(3 + multicast + hinted)
    (base, offset, _), (bar, bar_offset, _) = b.address(shared, "shared"), b.address(barrier, "shared")
    tensor_map, at = _place(b, f, source, rank)
    policy = b.read(more[-1], u64) if hinted else None
    named: dict[int, Eviction] = {value: name for name, value in POLICIES.items()}
    eviction = named.get(int(policy.value), "") if isinstance(policy, Const) else ""
    copy = TensorCopy("load", rank, offset, bar_offset, eviction, multicast)
    masks = (b.read(more[0], u32),) if multicast else ()
    b.emit(copy, (base, tensor_map, bar, _YES, *at, *masks))


def _store(b: Builder, f: Form, rank: int) -> None:
    f.need("bulk_group")
    reduction = f.one_of("add", "min", "max") if f.flag("reduce") else ""
    hinted = f.flag("L2::cache_hint")
    target, shared = f.operands(2 + hinted)[:2]
    base, offset, _ = b.address(shared, "shared")
    tensor_map, at = _place(b, f, target, rank)
    copy = TensorCopy("store", rank, offset, reduction=cast("Literal['', 'add', 'min', 'max']", reduction))
    b.emit(copy, (base, tensor_map, _YES, *at))


def bulk_copy(b: Builder, f: Form) -> None:
    """``cp[.reduce].async.bulk`` of consecutive bytes: from shared to global memory and back."""
    if f.flag("prefetch"):
        f.drop("")
        return
    adds = f.flag("reduce")
    written = f.instruction.modifiers
    if "mbarrier::complete_tx::bytes" in written and not adds:
        _load_bytes(b, f)
        return
    f.need("global", "shared::cta", "bulk_group")
    if adds and not (f.flag("add") and f.type() == "f32"):
        raise f.refusal("of reductions, sums of f32 are supported")
    if written.index("global") > written.index("shared::cta"):
        raise f.refusal()
    target, source, size = f.operands(3)
    (to, to_offset, _), (base, offset, _) = b.address(target, "global"), b.address(source, "shared")
    copy = BulkStoreBytes(_count(b, f, size, "the count of bytes"), adds, offset, to_offset)
    b.emit(copy, (base, to, _YES))


def _load_bytes(b: Builder, f: Form) -> None:
    """From global memory to this CTA's shared memory."""
    shared = f.which("shared::cluster", "shared::cta")
    f.need("global", "mbarrier::complete_tx::bytes")
    if (written := f.instruction.modifiers).index(shared) > written.index("global"):
        raise f.refusal()
    hinted = f.flag("L2::cache_hint")
    target, source, size, barrier = f.operands(4 + hinted)[:4]
    (to, to_offset, _), (base, offset, _) = b.address(target, "shared"), b.address(source, "global")
    bar, bar_offset, _ = b.address(barrier, "shared")
    b.emit(BulkLoadBytes(to_offset, offset, bar_offset), (to, base, b.read(size, u32), bar, _YES))


def bulk_group(b: Builder, f: Form) -> None:
    """``cp.async.bulk.{commit_group, wait_group[.read]}``."""
    if f.which("commit_group", "wait_group") == "commit_group":
        b.emit(CommitCopies("bulk"))
    else:
        pending = f.immediate()
        b.emit(WaitCopies(pending, "bulk", f.flag("read")))


# Clusters


@lowered("mapa")
def map_shared(b: Builder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``mapa``: of an address in shared memory, or of a generic one."""
    generic = made.operand_types[0] is u64
    address = b.read(sources[0], made.operand_types[0])
    own = b.op(FromGeneric("shared"), address) if generic else address
    place = b.op(isa_map_shared(), own, b.read(sources[1], u32))
    b.assign(targets[0], b.op(ToGeneric("shared"), place) if generic else place)
