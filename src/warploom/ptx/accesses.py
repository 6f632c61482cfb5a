"""Loads, stores, atomics and ``cp.async``.

Source: PTX ISA, "Data Movement and Conversion Instructions", "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from warploom.core.dtypes import pred, s16, s32, u8, u16, u32
from warploom.ir.statements import Operand as Value
from warploom.isa import memory as isa
from warploom.isa.async_copy import cp_async
from warploom.isa.conversion import combine, half_of
from warploom.isa.effects import Space
from warploom.isa.form import REGISTER, TYPE_BITS
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import select
from warploom.isa.memory import CACHE_HINTS, register_type
from warploom.ptx.builder import FlowBuilder, lowered
from warploom.ptx.emitter import constant, unsigned
from warploom.ptx.syntax import Address, Integer, Not, Operand, PtxInstruction, PtxRegister, Symbol


def _reach(b: FlowBuilder, made: Instruction) -> tuple[str, bool]:
    """The space of an access, '' for a generic address, and whether shared memory may be another CTA's.

    Constant memory is global memory that nobody writes.
    """
    written = str(made.fields.get("space", ""))
    space = "global" if written == "const" else written.partition("::")[0]
    return space, written == "shared::cluster" or (not space and b.maps_generic)


def _ordered(b: FlowBuilder, made: Instruction, space: Space) -> dict[str, Any]:
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
def load(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``ld``: vectors of any elements as words of at least 32 bits, single bytes and halves extended."""
    if "param" in made.words:
        _parameter(b, made, targets, sources[0])
        return
    (space, remote), bits = _reach(b, made), TYPE_BITS[made.type]
    if bits >= 32:
        # of a register that is wider, the sign fills the rest
        word = made.element if made.element.is_float else b.home(targets[0], made.element)
        words = made.count
    else:
        word, words = {1: u8, 2: u16}.get(made.bytes, u32), max(1, made.bytes // 4)

    def make(where: Space, offset: int) -> tuple[Instruction, tuple[Value, ...]]:
        how = _ordered(b, made, where)
        return isa.load(where, word, words, remote=remote and where == "shared", **how).at(offset=offset), ()

    if bits >= 32 and (space or not b.windows):
        base, offset, within = b.address(sources[0], space or "global")
        b.set_all(targets, make(cast("Space", space or "global"), offset)[0], (base,), within)
        return
    loaded = b.access(sources[0], space, make, [register_type(word)] * words)
    for i, register in enumerate(targets):
        b.assign(register, loaded[i] if bits >= 32 else _element(b, loaded, i, made.type))


def _byte(b: FlowBuilder, x: Value, signed: bool) -> Value:
    """The low byte of a u32 as a number, u32 or s32."""
    if not signed:
        return b.binary("and", x, 255)
    high = b.cast(b.binary("shl", x, 24), s32)
    return b.binary("shr", high, 24)


def _element(b: FlowBuilder, words: Sequence[Value], index: int, kind: str) -> Value:
    """One byte or half of loaded words, extended by its type."""
    per_word = 32 // TYPE_BITS[kind]
    word, place = words[index // per_word], index % per_word
    if TYPE_BITS[kind] == 8:
        return _byte(b, b.binary("shr", word, 8 * place), kind[0] == "s")
    half = b.once(half_of(u32, place), word)
    return b.extend(b.cast(half, s16), s32) if kind[0] == "s" else half


def _parameter(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], address: Operand) -> None:
    """``ld.param``: an argument."""
    kind, bits = made.type, TYPE_BITS[made.type]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise b.refusal("addresses within parameters must be constants")
    members = b.parameters.get(address.base.name, {})
    for i, register in enumerate(targets):
        value = members.get(address.base.offset + address.offset + i * bits // 8)
        if value is None or (value.dtype.bits != bits and bits > 16):
            raise b.refusal("whole arguments, and whole members of structures, are supported")
        if bits == 8:
            b.assign(register, _byte(b, b.extend(value, u32), kind[0] == "s"))
        else:
            dtype = REGISTER[kind] if kind[0] == "s" else b.home(register, unsigned(REGISTER[kind]))
            b.assign(register, b.cast(value, dtype))


@lowered("st")
def store(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``st``: vectors of any elements as words of at least 32 bits."""
    if "async" in made.words:
        b.declared(made, targets, sources)
        return
    (space, remote), values = _reach(b, made), sources[1 : 1 + made.count]
    if TYPE_BITS[made.type] >= 32:
        dtype = made.element if made.element.is_float else b.home(values[0], unsigned(made.element))
        words = [b.read(x, dtype) for x in values]
    else:
        dtype, words = {1: u8, 2: u16}.get(made.bytes, u32), _words(b, values, made.type)

    def make(where: Space, offset: int) -> tuple[Instruction, list[Value]]:
        how = _ordered(b, made, where)
        return isa.store(where, dtype, len(words), remote=remote and where == "shared", **how).at(offset=offset), words

    b.access(sources[0], space, make, ())


def _words(b: FlowBuilder, values: Sequence[Operand], kind: str) -> list[Value]:
    """Bytes or halves joined to words."""
    halves = [b.read(x, u16) for x in values]
    if TYPE_BITS[kind] == 8:
        if len(halves) == 1:
            return [b.extend(halves[0], u32)]
        bytes_ = [b.binary("and", x, 255) for x in halves]
        halves = [b.binary("or", bytes_[i], b.binary("shl", bytes_[i + 1], 8)) for i in range(0, len(bytes_), 2)]
    if len(halves) == 1:
        return [b.extend(halves[0], u32)]
    return [b.op(combine(u32), *halves[i : i + 2]) for i in range(0, len(halves), 2)]


@lowered("atom", "red")
def atomic(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``atom`` and, without the old value, ``red``."""
    (space, remote), scope = _reach(b, made), b.scope(made)
    if made.count > 1 and not space and b.windows:
        raise b.refusal("vectors are for sums in global memory")
    kind = ".".join(filter(None, ("noftz" * ("noftz" in made.words), made.fields.get("vec"), made.type)))
    values = [b.read(x, made.element) for x in sources[1 : 1 + made.count * (2 if made.rmw == "cas" else 1)]]

    def make(where: Space, offset: int) -> tuple[Instruction, list[Value]]:
        reached, order = "global" if where == "local" else where, made.fields.get("order") or "relaxed"
        far = remote and where == "shared"
        return isa.atomic(reached, made.rmw, made.element, order, scope, kind, far).at(offset=offset), values

    for target, old in zip(targets, b.access(sources[0], space, make, [made.element] * made.count), strict=False):
        b.assign(target, old)


@lowered("cp")
def copy(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``cp.async`` and its groups, bulk copies of bytes and of tensors."""
    if "prefetch" in made.words:
        return
    if "wait_all" in made.words:
        b.emit(named("cp.async.commit_group"))
        b.emit(named("cp.async.wait_group", numbers=(("pending", 0),)))
    elif made.words[1:3] == ("async", "mbarrier"):
        # What the async proxy reads would need a fence that is not looked for here.
        if any(
            isinstance(i, PtxInstruction) and (i.opcode == "wgmma" or "bulk" in i.modifiers) for i in b.function.body
        ):
            raise b.refusal("beside wgmma and bulk copies it is not supported")
        b.declared(made, targets, sources)
    elif made.fields.get("cache"):
        _copy(b, made, sources)
    else:
        b.declared(made, targets, sources)


def _copy(b: FlowBuilder, made: Instruction, sources: Sequence[Operand]) -> None:
    """``cp.async``: a predicate in place of the count of bytes holds where the source is left out."""
    size, valid = made.bytes, sources[2] if len(sources) > 2 else None
    zero_fill = valid is not None and valid != Integer(size)
    copied = cp_async(size, made.cache, zero_fill, int(made.prefetch.strip("L2:B") or 0))
    base, offset, within = b.address(sources[0], "shared")
    origin, displaced, _ = b.address(sources[1], "global")
    words: tuple[Value, ...] = ()
    if valid is not None and zero_fill:
        words = (
            (b.read(valid, u32),)
            if not _is_predicate(b, valid)
            else (b.op(select(u32), b.read(valid, pred), constant(0, u32), constant(size, u32)),)
        )
    b.emit(copied.at(shared_offset=offset, global_offset=displaced), (base, origin, *words), within=within)


def _is_predicate(b: FlowBuilder, x: Operand) -> bool:
    return isinstance(x, Not) or (isinstance(x, PtxRegister) and b.usage.home.get(x.name) is pred)
