"""Barriers, shuffles, votes, and the matrix products of a warp.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions", "Warp Level Matrix Instructions".
"""

from __future__ import annotations

from typing import Literal, cast

from warploom.core.dtypes import DTYPES, pred, s32, u32, u64
from warploom.ir.statements import Const
from warploom.ir.statements import Operand as Value
from warploom.isa.matrix import MmaSync
from warploom.isa.matrix_exact import MmaDouble, MmaInteger, MoveMatrix
from warploom.isa.members import ActiveMask, Match, Redux
from warploom.isa.operators import binary, unary
from warploom.isa.sync import BarArrive, BarReduce, BarSync
from warploom.isa.warp import Shuffle, Special, SyncWarp, Vote
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.hopper_forms import cluster_barrier
from warploom.ptx.syntax import Both, Operand, Register, Vector


def _threads(b: Builder, f: Form, count: tuple[Operand, ...]) -> int | None:
    if not count:
        return None
    threads = b.read(count[0], u32)
    if not isinstance(threads, Const):
        raise f.refusal("the count of a barrier's threads must be a constant")
    return int(threads.value)


@form("bar", "barrier")
def barrier(b: Builder, f: Form) -> None:
    """``bar.{sync, arrive, red, warp.sync}``; ``barrier`` by the same names."""
    if f.flag("warp"):
        (mask,) = f.operands(1)
        f.need("sync")
        b.emit(SyncWarp(), (b.read(mask, u32),))
        return
    if f.flag("cluster"):
        cluster_barrier(b, f)
        return
    f.flag("cta")
    how, aligned = f.which("sync", "arrive", "red"), f.flag("aligned") or f.opcode == "bar"
    if how == "red":
        _barrier_reduction(b, f, aligned)
        return
    number, *count = f.operands(1, 2)
    threads = _threads(b, f, tuple(count))
    if how == "sync":
        b.emit(BarSync(threads, aligned), (b.read(number, u32),))
    elif threads is None:
        raise f.refusal()
    else:
        b.emit(BarArrive(threads, aligned), (b.read(number, u32),))


def _barrier_reduction(b: Builder, f: Form, aligned: bool) -> None:
    op = f.which("popc", "and", "or")
    f.type("u32" if op == "popc" else "pred")
    target, number, *count, holds = f.operands(3, 4)
    instruction = BarReduce(cast("Literal['popc', 'and', 'or']", op), _threads(b, f, tuple(count)), aligned)
    b.set(target, instruction, b.read(number, u32), b.read(holds, pred))


@form("shfl")
def shuffle(b: Builder, f: Form) -> None:
    """``shfl.sync``."""
    mode = f.which("bfly", "idx", "up", "down")
    f.need("sync")
    f.type("b32")
    target, value, lane, limit, mask = f.operands(5)
    clamp = b.read(limit, u32)
    if not isinstance(clamp, Const):
        raise f.refusal("the clamp of a shuffle must be a constant")
    if isinstance(target, Both):
        if target.second.name in b.usage.read:
            b.assign(target.second, _in_range(b, mode, int(clamp.value), b.read(lane, u32)))
        target = target.first
    dtype = b.home(target, u32)
    name = cast("Literal['xor', 'idx', 'up', 'down']", "xor" if mode == "bfly" else mode)
    b.set(target, Shuffle(name, dtype, int(clamp.value)), b.read(value, dtype), b.read(lane, u32), b.read(mask, u32))


def _in_range(b: Builder, mode: str, clamp: int, lane: Value) -> Value:
    """Whether the source lane of a shuffle lies within its group, as :meth:`Shuffle.source_lanes` has it."""
    segment = clamp >> 8 & 31
    own, n = b.binary("and", b.once(Special("tid.x")), 31), b.binary("and", lane, 31)
    first = b.binary("and", own, segment)
    last = b.binary("or", first, clamp & 31 & ~segment)
    if mode == "up":
        return b.op(binary("ge", s32), b.cast(b.binary("sub", own, n), s32), b.cast(last, s32))
    source = {"bfly": ("xor", own, n), "down": ("add", own, n)}.get(mode)
    if source is None:
        source = ("or", first, b.binary("and", n, 31 & ~segment))
    return b.op(binary("le", u32), b.binary(*source), last)


@form("redux")
def reduce(b: Builder, f: Form) -> None:
    """``redux.sync`` of integers."""
    op, kind = f.which("add", "min", "max", "and", "or", "xor"), f.type("u32", "s32", "b32")
    f.need("sync")
    target, value, mask = f.operands(3)
    dtype = s32 if kind == "s32" else u32
    instruction = Redux(cast("Literal['add', 'min', 'max', 'and', 'or', 'xor']", op), dtype)
    b.set(target, instruction, b.read(value, dtype), b.read(mask, u32))


@form("match")
def match(b: Builder, f: Form) -> None:
    """``match.{any, all}.sync``."""
    mode, kind = f.which("any", "all"), f.type("b32", "b64")
    f.need("sync")
    target, value, mask = f.operands(3)
    dtype = u32 if kind == "b32" else u64
    both = (
        target
        if isinstance(target, Both)
        else Both(target if isinstance(target, Register) else Register(""), Register(""))
    )
    targets = (both.first,) if mode == "any" else (both.first, both.second)
    instruction = Match(cast("Literal['any', 'all']", mode), dtype)
    b.set_all(targets, instruction, (b.read(value, dtype), b.read(mask, u32)))


@form("activemask")
def active_mask(b: Builder, f: Form) -> None:
    """``activemask``."""
    (target,) = f.operands(1)
    f.type("b32")
    b.set(target, ActiveMask())


@form("vote")
def vote(b: Builder, f: Form) -> None:
    """``vote.sync``."""
    mode = f.which("any", "all", "ballot", "uni")
    f.need("sync")
    f.type("b32" if mode == "ballot" else "pred")
    target, *given = f.operands(3)
    holds, mask = b.read(given[0], pred), b.read(given[1], u32)
    if mode == "uni":
        none = b.op(unary("not", pred), b.op(Vote("any"), holds, mask))
        b.assign(target, b.op(binary("or", pred), b.op(Vote("all"), holds, mask), none))
        return
    b.set(target, Vote(cast("Literal['any', 'all', 'ballot']", mode)), holds, mask)


@form("mma")
def matrix_product(b: Builder, f: Form) -> None:
    """``mma.sync``."""
    f.need("sync", "aligned", "row", "col")
    shape, types = f.which(*_SHAPES), f.types()
    if len(types) != 4 or types[0] != types[3]:
        raise f.refusal()
    d, a, c = (DTYPES.get(types[i]) for i in (0, 1, 2))
    operands = f.operands(4)
    if d is None or a is None or c is None or not all(isinstance(x, Vector) for x in operands):
        raise f.refusal()
    instruction = (
        MmaDouble(shape) if a.name == "f64" else (MmaInteger(shape, a, c) if a.is_integer else MmaSync(shape, a, d))
    )
    if types != [x.name for x in (*(slot.dtype for slot in (instruction.slots[2], *instruction.slots)),)]:
        raise f.refusal()
    target, *sources = (x.items for x in operands if isinstance(x, Vector))
    given = [x for items in sources for x in items]
    if len(given) != len(instruction.operand_types):
        raise f.refusal("its registers are not as many as its shape has")
    values = [b.read(x, t) for x, t in zip(given, instruction.operand_types, strict=True)]
    b.set_all(target, instruction, values)


_SHAPES = ("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m8n8k4", "m8n8k16")


@form("movmatrix")
def transpose(b: Builder, f: Form) -> None:
    """``movmatrix``."""
    f.need("sync", "aligned", "m8n8", "trans")
    f.type("b16")
    target, source = f.operands(2)
    b.set(target, MoveMatrix(), b.read(source, u32))
