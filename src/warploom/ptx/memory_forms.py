"""Loads, stores, atomics and ``cp.async``.

Source: PTX ISA, "Data Movement and Conversion Instructions", "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

from warploom.core.dtypes import pred, s16, s32, u8, u16, u32, u64
from warploom.ir.statements import Operand as Value
from warploom.isa.async_copy import CommitCopies, CopiesArrive, CpAsync, WaitCopies
from warploom.isa.atomic import Atomic
from warploom.isa.conversion import Combine, Half
from warploom.isa.effects import MemoryOrder, Scope, Space
from warploom.isa.memory import Load, Store, register_type
from warploom.isa.operators import select
from warploom.ptx.builder import Builder, form
from warploom.ptx.conversion_forms import byte
from warploom.ptx.forms import Form
from warploom.ptx.hopper_forms import bulk_copy, bulk_group, store_async, tensor_copy
from warploom.ptx.syntax import TYPES, Address, Instruction, Integer, Not, Operand, Register, Symbol, Vector
from warploom.ptx.types import TYPE, constant, unsigned

_CACHE = ("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt")
_EVICTION = ("no_allocate", "evict_first", "evict_last")


def _space(f: Form) -> str:
    """The space of an access, '' for a generic address. Constant memory is global memory that nobody writes."""
    found = f.one_of("shared", "shared::cta", "global", "const", "local")
    return {"const": "global", "shared::cta": "shared"}.get(found, found)


def _reach(b: Builder, f: Form) -> tuple[str, bool]:
    """The space of an access, and whether shared memory may be another CTA's."""
    if f.flag("shared::cluster"):
        return "shared", True
    space = _space(f)
    return space, not space and b.maps_generic


def _cache(f: Form) -> str:
    """The cache hint that Programs know; others are left out, as they change speed alone."""
    hint = f.one_of(*_CACHE)
    eviction = f.one_of(*(f"L1::{name}" for name in _EVICTION)).removeprefix("L1::")
    f.drop("L1::", "L2::")
    return f"{hint}.{eviction}" if hint == "nc" and eviction == "no_allocate" else hint or eviction


def _order(b: Builder, f: Form) -> tuple[MemoryOrder | Literal["volatile"], Scope]:
    order = f.one_of("weak", "volatile", "relaxed", "acquire", "release", default="weak")
    return cast("MemoryOrder", order), "sys" if order == "volatile" else _scope(b, f)


def _ordered(
    space: Space, order: MemoryOrder | Literal["volatile"], scope: Scope, cache: str
) -> tuple[str, MemoryOrder, Scope, bool]:
    """Cache hint, order, scope and ``volatile`` as they count in a space: caches are global memory's alone.

    ``volatile`` is a relaxed access of the system's scope. In shared memory it counts as an ordinary one, since what it
    reads is what another thread wrote before only by luck: a barrier must say so.
    """
    if space == "local":
        return "", "weak", "gpu", False
    if order == "volatile":
        return ("", "weak", "gpu", True) if space == "shared" else ("", "relaxed", "sys", False)
    return cache if space == "global" and order == "weak" else "", order, scope, False


def _scope(b: Builder, f: Form, default: str = "gpu") -> Scope:
    scope = f.one_of("cta", "gpu", "sys", "cluster", default=default) or f.which("cta")
    if scope == "cluster":
        if b.specials.cluster != (1, 1, 1):
            raise f.refusal("in a cluster of several CTAs the scope .cluster is not supported: .gpu holds it")
        scope = "cta"
    return cast("Scope", scope)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@form("ld", "ldu")
def load(b: Builder, f: Form) -> None:
    """``ld``: vectors of any elements as words of at least 32 bits, single bytes and halves extended."""
    if f.flag("param"):
        _parameter(b, f)
        return
    (space, remote), (order, scope) = _reach(b, f), _order(b, f)
    hinted = any(m == "L2::cache_hint" for m in f.instruction.modifiers)
    cache, kind, count = _cache(f), f.type(), _count(f)
    target, address = f.operands(3 if hinted else 2)[:2]
    targets = _items(target)
    if len(targets) != count:
        raise f.refusal("as many registers as elements are needed")
    if TYPES[kind] >= 32:
        # of a register that is wider, the sign fills the rest
        word = TYPE[kind] if kind in ("f32", "f64") else b.home(targets[0], TYPE[kind])
        words = count
    else:
        size = TYPES[kind] // 8 * count
        word, words = (u8 if size == 1 else u16 if size == 2 else u32), max(1, size // 4)

    def make(where: Space, offset: int) -> tuple[Load, tuple[Value, ...]]:
        ordered = _ordered(where, order, scope, cache)
        return Load(where, word, words, offset, *ordered, remote and where == "shared"), ()

    if TYPES[kind] >= 32 and (space or not b.windows):
        base, offset, within = b.address(address, space or "global")
        b.set_all(targets, make(cast("Space", space or "global"), offset)[0], (base,), within)
        return
    loaded = b.access(address, space, make, [register_type(word)] * words)
    if TYPES[kind] >= 32:
        for register, value in zip(targets, loaded, strict=True):
            b.assign(register, value)
        return
    for i, register in enumerate(targets):
        b.assign(register, _element(b, loaded, i, kind))


def _count(f: Form) -> int:
    return int(f.one_of("v2", "v4", "v8", default="v1")[1:])


def _element(b: Builder, words: Sequence[Value], index: int, kind: str) -> Value:
    """One byte or half of loaded words, extended by its type."""
    per_word = 32 // TYPES[kind]
    word, place = words[index // per_word], index % per_word
    if TYPES[kind] == 8:
        return byte(b, b.binary("shr", word, 8 * place) if place else word, kind[0] == "s")
    half = b.once(Half(u32, place), word)
    return b.extend(b.cast(half, s16), s32) if kind[0] == "s" else half


def _parameter(b: Builder, f: Form) -> None:
    """``ld.param``: an argument."""
    kind, count = f.type(), _count(f)
    target, address = f.operands(2)
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise f.refusal("addresses within parameters must be constants")
    members = b.parameters.get(address.base.name, {})
    size = max(1, TYPES[kind] // 8)
    for i, register in enumerate(_items(target)):
        value = members.get(address.base.offset + address.offset + i * size)
        if value is None or len(_items(target)) != count or (value.dtype.bits != TYPES[kind] and TYPES[kind] > 16):
            raise f.refusal("whole arguments, and whole members of structures, are supported")
        if TYPES[kind] == 8:
            b.assign(register, byte(b, b.cast(value, u32), kind[0] == "s"))
        else:
            dtype = TYPE[kind] if kind[0] == "s" else b.home(register, unsigned(TYPE[kind]))
            b.assign(register, b.cast(value, dtype))


@form("st")
def store(b: Builder, f: Form) -> None:
    """``st``."""
    if f.flag("async"):
        store_async(b, f)
        return
    (space, remote), (order, scope) = _reach(b, f), _order(b, f)
    hinted = any(m == "L2::cache_hint" for m in f.instruction.modifiers)
    cache, kind, count = _cache(f), f.type(), _count(f)
    address, source = f.operands(3 if hinted else 2)[:2]
    values = _items(source)
    if len(values) != count:
        raise f.refusal("as many registers as elements are needed")
    if TYPES[kind] >= 32:
        dtype = TYPE[kind] if kind in ("f32", "f64") else b.home(values[0], unsigned(TYPE[kind]))
        words = [b.read(x, dtype) for x in values]
    else:
        size = TYPES[kind] // 8 * count
        dtype = u8 if size == 1 else u16 if size == 2 else u32
        words = _words(b, values, kind)

    def make(where: Space, offset: int) -> tuple[Store, list[Value]]:
        ordered = _ordered(where, order, scope, cache)
        return Store(where, dtype, len(words), offset, *ordered, remote and where == "shared"), words

    b.access(address, space, make, ())


def _words(b: Builder, values: tuple[Operand, ...], kind: str) -> list[Value]:
    """Bytes or halves joined to words."""
    halves = [b.read(x, u16) for x in values]
    if TYPES[kind] == 8:
        if len(halves) == 1:
            return [b.extend(halves[0], u32)]
        bytes_ = [b.binary("and", x, 255) for x in halves]
        halves = [b.binary("or", bytes_[i], b.binary("shl", bytes_[i + 1], 8)) for i in range(0, len(bytes_), 2)]
    if len(halves) == 1:
        return [b.extend(halves[0], u32)]
    return [b.op(Combine(u32), *halves[i : i + 2]) for i in range(0, len(halves), 2)]


Halves = Literal["", "f16", "bf16", "f16x2", "bf16x2"]
_HALVES = get_args(Halves)
_ATOMIC_OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_ATOMIC_TYPES = {
    "b32": u32,
    "u32": u32,
    "s32": s32,
    "b64": u64,
    "u64": u64,
    "s64": TYPE["s64"],
    "f32": TYPE["f32"],
    "f64": TYPE["f64"],
}


@form("atom", "red")
def atomic(b: Builder, f: Form) -> None:
    """``atom`` and, without the old value, ``red``."""
    space, remote = _reach(b, f)
    if space == "local":
        raise f.refusal("local memory has no atomics")
    order = f.one_of("relaxed", "acquire", "release", "acq_rel", default="relaxed")
    scope = _scope(b, f)
    f.drop("L2::", "L1::")
    op, kind, count = f.one_of(*_ATOMIC_OPS), f.type(), _count(f)
    halves = kind if kind in _HALVES and op == "add" and f.flag("noftz") else ""
    if not op or (kind not in _ATOMIC_TYPES and not halves):
        raise f.refusal()
    if count > 1 and (op != "add" or not (halves or kind == "f32") or space == "shared" or (not space and b.windows)):
        raise f.refusal("vectors are for sums of f32 and halves in global memory")
    operands = f.operands(*((4,) if op == "cas" else (3,)) if f.opcode == "atom" else (2,))
    targets = _items(operands[0]) if f.opcode == "atom" else (Register(""),) * count
    address, *values = operands[1:] if f.opcode == "atom" else operands
    if any(len(items) != count for items in (targets, *map(_items, values))):
        raise f.refusal("as many registers as elements are needed")
    dtype = TYPE[kind] if halves else _ATOMIC_TYPES[kind]
    for i, target in enumerate(targets):  # the elements of a vector are one atomic operation each
        read = [b.read(_items(x)[i], dtype) for x in values]

        def make(where: Space, offset: int, i: int = i, read: list[Value] = read) -> tuple[Atomic, list[Value]]:
            reached = "global" if where == "local" else where
            far, how, at = remote and where == "shared", cast("MemoryOrder", order), offset + i * dtype.bytes
            return Atomic(reached, op, dtype, at, how, scope, cast("Halves", halves), far, count if i == 0 else 1), read

        (old,) = b.access(address, space, make, [dtype])
        b.assign(target, old)


@form("prefetch", "prefetchu", "applypriority")
def no_operation(b: Builder, f: Form) -> None:
    """Hints to caches."""
    f.drop("")


@form("cp")
def copy(b: Builder, f: Form) -> None:
    """``cp.async`` and its groups; bulk copies of tensors."""
    f.need("async")
    if f.flag("bulk"):
        groups = {"commit_group", "wait_group"} & set(f.instruction.modifiers)
        (tensor_copy if f.flag("tensor") else bulk_group if groups else bulk_copy)(b, f)
    elif f.flag("commit_group"):
        b.emit(CommitCopies())
    elif f.flag("wait_group"):
        pending = f.immediate()
        b.emit(WaitCopies(pending))
    elif f.flag("mbarrier"):
        _copies_arrive(b, f)
    elif f.flag("wait_all"):
        b.emit(CommitCopies())
        b.emit(WaitCopies(0))
    else:
        _copy(b, f)


def _copies_arrive(b: Builder, f: Form) -> None:
    """``cp.async.mbarrier.arrive``. What the async proxy reads would need a fence that is not looked for here."""
    counted = f.flag("noinc")
    f.need("arrive")
    f.type("b64")
    f.which("shared", "shared::cta")
    if any(isinstance(i, Instruction) and (i.opcode == "wgmma" or "bulk" in i.modifiers) for i in b.function.body):
        raise f.refusal("beside wgmma and bulk copies it is not supported")
    (address,) = f.operands(1)
    base, offset, within = b.address(address, "shared")
    b.emit(CopiesArrive(counted, offset), (base,), within=within)


def _is_predicate(b: Builder, x: Operand) -> bool:
    return isinstance(x, Not) or (isinstance(x, Register) and b.usage.home.get(x.name) is pred)


def _copy(b: Builder, f: Form) -> None:
    cache = f.which("ca", "cg")
    f.which("shared", "shared::cta")
    f.need("global")
    prefetch = f.one_of("L2::64B", "L2::128B", "L2::256B").removeprefix("L2::").removesuffix("B")
    hinted = f.flag("L2::cache_hint")
    operands = f.operands(3 + hinted, 4 + hinted)
    shared, source, size, *more = operands[: len(operands) - hinted]
    if not isinstance(size, Integer):
        raise f.refusal()
    valid = more[0] if more and more[0] != size else None
    (to, to_offset, within), (source_base, from_offset, _) = b.address(shared, "shared"), b.address(source, "global")
    if valid is not None and _is_predicate(b, valid):  # it holds where the source is left out
        words = (b.op(select(u32), b.read(valid, pred), constant(0, u32), constant(size.value, u32)),)
    else:
        words = () if valid is None else (b.read(valid, u32),)
    instruction = CpAsync(
        cast("Literal[4, 8, 16]", size.value),
        cast("Literal['ca', 'cg']", cache),
        valid is not None,
        int(prefetch or 0),
        to_offset,
        from_offset,
    )
    b.emit(instruction, (to, source_base, *words), within=within)
