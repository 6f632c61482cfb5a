"""Loads, stores, atomics and ``cp.async``.

Source: PTX ISA, "Data Movement and Conversion Instructions", "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from warploom.core.dtypes import pred, s16, s32, u8, u16, u32
from warploom.ir.statements import Operand as Value
from warploom.isa import memory as isa
from warploom.isa.async_copy import CommitCopies, CopiesArrive, CpAsync, WaitCopies
from warploom.isa.conversion import combine, half_of
from warploom.isa.effects import Space
from warploom.isa.form import Formed
from warploom.isa.memory import CACHE_HINTS, register_type, width
from warploom.isa.operators import select
from warploom.ptx.builder import Builder, form, lowered
from warploom.ptx.conversion_forms import byte
from warploom.ptx.forms import Form
from warploom.ptx.hopper_forms import bulk_copy, bulk_group, tensor_copy
from warploom.ptx.syntax import Address, Instruction, Integer, Not, Operand, Register, Symbol
from warploom.ptx.types import TYPE, constant, unsigned


def _reach(b: Builder, made: Formed) -> tuple[str, bool]:
    """The space of an access, '' for a generic address, and whether shared memory may be another CTA's.

    Constant memory is global memory that nobody writes.
    """
    written = str(made.fields.get("space", ""))
    space = "global" if written == "const" else written.partition("::")[0]
    return space, written == "shared::cluster" or (not space and b.maps_generic)


def _ordered(b: Builder, made: Formed, space: Space) -> dict[str, Any]:
    """Cache hint, order and scope as they count in a space: caches are global memory's alone.

    ``volatile`` is a relaxed access of the system's scope. In shared memory it counts as an ordinary one, since what it
    reads is what another thread wrote before only by luck: a barrier must say so. Hints that Programs do not know are
    left out, as they change speed alone.
    """
    if space == "local":
        return {}
    if "volatile" in made.words:
        return {"volatile": True} if space == "shared" else {"order": "relaxed", "scope": "sys"}
    if made.fields.get("order"):
        return {"order": made.order, "scope": b.scope(made)}
    hint, eviction = made.fields.get("cache", ""), made.fields.get("evict", "").removeprefix("L1::")
    if "nc" in made.words:
        hint = "nc.no_allocate" if eviction == "no_allocate" else "nc"
    cache = hint or eviction
    return {"cache": cache} if space == "global" and cache in CACHE_HINTS else {}


@lowered("ld", "ldu")
def load(b: Builder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``ld``: vectors of any elements as words of at least 32 bits, single bytes and halves extended."""
    if "param" in made.words:
        _parameter(b, made, targets, sources[0])
        return
    (space, remote), bits = _reach(b, made), width(made.type)
    if bits >= 32:
        # of a register that is wider, the sign fills the rest
        word = made.element if made.element.is_float else b.home(targets[0], made.element)
        words = made.count
    else:
        word, words = {1: u8, 2: u16}.get(made.bytes, u32), max(1, made.bytes // 4)

    def make(where: Space, offset: int) -> tuple[Formed, tuple[Value, ...]]:
        how = _ordered(b, made, where)
        return isa.load(where, word, words, remote=remote and where == "shared", **how).at(offset=offset), ()

    if bits >= 32 and (space or not b.windows):
        base, offset, within = b.address(sources[0], space or "global")
        b.set_all(targets, make(cast("Space", space or "global"), offset)[0], (base,), within)
        return
    loaded = b.access(sources[0], space, make, [register_type(word)] * words)
    for i, register in enumerate(targets):
        b.assign(register, loaded[i] if bits >= 32 else _element(b, loaded, i, made.type))


def _element(b: Builder, words: Sequence[Value], index: int, kind: str) -> Value:
    """One byte or half of loaded words, extended by its type."""
    per_word = 32 // width(kind)
    word, place = words[index // per_word], index % per_word
    if width(kind) == 8:
        return byte(b, b.binary("shr", word, 8 * place) if place else word, kind[0] == "s")
    half = b.once(half_of(u32, place), word)
    return b.extend(b.cast(half, s16), s32) if kind[0] == "s" else half


def _parameter(b: Builder, made: Formed, targets: Sequence[Operand], address: Operand) -> None:
    """``ld.param``: an argument."""
    kind, bits = made.type, width(made.type)
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise b.refusal("addresses within parameters must be constants")
    members = b.parameters.get(address.base.name, {})
    for i, register in enumerate(targets):
        value = members.get(address.base.offset + address.offset + i * bits // 8)
        if value is None or (value.dtype.bits != bits and bits > 16):
            raise b.refusal("whole arguments, and whole members of structures, are supported")
        if bits == 8:
            b.assign(register, byte(b, b.cast(value, u32), kind[0] == "s"))
        else:
            dtype = TYPE[kind] if kind[0] == "s" else b.home(register, unsigned(TYPE[kind]))
            b.assign(register, b.cast(value, dtype))


@lowered("st")
def store(b: Builder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``st``: vectors of any elements as words of at least 32 bits."""
    if "async" in made.words:
        b.declared(made, targets, sources)
        return
    (space, remote), values = _reach(b, made), sources[1 : 1 + made.count]
    if width(made.type) >= 32:
        dtype = made.element if made.element.is_float else b.home(values[0], unsigned(made.element))
        words = [b.read(x, dtype) for x in values]
    else:
        dtype, words = {1: u8, 2: u16}.get(made.bytes, u32), _words(b, values, made.type)

    def make(where: Space, offset: int) -> tuple[Formed, list[Value]]:
        how = _ordered(b, made, where)
        return isa.store(where, dtype, len(words), remote=remote and where == "shared", **how).at(offset=offset), words

    b.access(sources[0], space, make, ())


def _words(b: Builder, values: Sequence[Operand], kind: str) -> list[Value]:
    """Bytes or halves joined to words."""
    halves = [b.read(x, u16) for x in values]
    if width(kind) == 8:
        if len(halves) == 1:
            return [b.extend(halves[0], u32)]
        bytes_ = [b.binary("and", x, 255) for x in halves]
        halves = [b.binary("or", bytes_[i], b.binary("shl", bytes_[i + 1], 8)) for i in range(0, len(bytes_), 2)]
    if len(halves) == 1:
        return [b.extend(halves[0], u32)]
    return [b.op(combine(u32), *halves[i : i + 2]) for i in range(0, len(halves), 2)]


@lowered("atom", "red")
def atomic(b: Builder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``atom`` and, without the old value, ``red``."""
    (space, remote), scope = _reach(b, made), b.scope(made)
    if made.count > 1 and not space and b.windows:
        raise b.refusal("vectors are for sums in global memory")
    kind = ".".join(filter(None, ("noftz" * ("noftz" in made.words), made.fields.get("vec"), made.type)))
    values = [b.read(x, made.element) for x in sources[1 : 1 + made.count * (2 if made.rmw == "cas" else 1)]]

    def make(where: Space, offset: int) -> tuple[Formed, list[Value]]:
        reached, order = "global" if where == "local" else where, made.fields.get("order") or "relaxed"
        far = remote and where == "shared"
        return isa.atomic(reached, made.rmw, made.element, order, scope, kind, far).at(offset=offset), values

    for target, old in zip(targets, b.access(sources[0], space, make, [made.element] * made.count), strict=False):
        b.assign(target, old)


@lowered("prefetch", "prefetchu", "applypriority")
def no_operation(b: Builder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """Hints to caches change speed alone."""


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
