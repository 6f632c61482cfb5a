"""Loads, stores, atomics and ``cp.async``.

Source: PTX ISA, "Data Movement and Conversion Instructions", "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from warploom.core.dtypes import DType, pred, u16, u32
from warploom.ir.statements import Operand as Value
from warploom.isa.async_copy import cp_async
from warploom.isa.effects import Space
from warploom.isa.form import REGISTER, TYPE_BITS
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import select
from warploom.isa.memory import CACHE_HINTS
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


def _qualified(made: Instruction, where: Space) -> tuple[str, str]:
    """Order and scope, and the cache hint, as they count in a space: caches are global memory's alone.

    ``volatile`` is a relaxed access of the system's scope. In shared memory it counts as an ordinary one, since what it
    reads is what another thread wrote before only by luck: a barrier must say so. Hints that Programs do not know are
    left out, as they change speed alone.
    """
    if where == "local":
        return "", ""
    if "volatile" in made.words:
        return ("volatile" if where == "shared" else "relaxed.sys"), ""
    order = made.fields.get("order") or ("relaxed" if made.combine else "")
    if order:
        return f"{order}.{made.fields.get('scope') or 'gpu'}", ""
    hint, eviction = made.fields.get("cache", ""), made.fields.get("evict", "").removeprefix("L1::")
    if "nc" in made.words:
        hint = "nc.no_allocate" if eviction == "no_allocate" else "nc"
    return "", CACHE_HINTS.get(hint or eviction, "") if where == "global" else ""


def _in_space(made: Instruction, where: Space, far: bool, home: DType) -> Instruction:
    """The access to a space; ``far``: of shared memory, to that of any CTA of the cluster."""
    if made.combine and where == "local":  # which has no atomics: no array lies there
        where = "global"
    how, hint = _qualified(made, where)
    kind, bits = made.type, TYPE_BITS[made.type]
    if not made.combine:
        kind = f"{'b' if home.bits == bits else 's' if kind[0] == 's' else 'u'}{bits}"
    place = f"{'shared::cluster' if far and where == 'shared' else where}{hint}"
    rounds = "noftz" * ("noftz" in made.words)
    words = (made.op.removesuffix("u"), how, place, made.fields.get("rmw"), rounds, made.fields.get("vec"), kind)
    return named(".".join(filter(None, words)), home)


@lowered("ld", "ldu", "st", "atom", "red")
def access(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """Loads, stores and atomics, in the space in which a generic address lies, on registers as they are at home."""
    if "param" in made.words:
        _parameter(b, made, targets, sources[0])
        return
    if "async" in made.words:
        b.declared(made, targets, sources)
        return
    (space, remote), (address, *values) = _reach(b, made), sources
    home = made.element if made.combine or made.element.is_float else _home(b, made, (targets or values)[0])
    given = [b.read(x, home) for x in values]

    make = partial(_in_space, made, far=remote, home=home)
    if space or not b.windows:
        base, offset, within = b.address(address, space or "global")
        b.set_all(targets, make(cast("Space", space or "global")).at(offset=offset), (base, *given), within)
        return
    if made.combine and made.count > 1:
        raise b.refusal("vectors are for sums in global memory")
    for target, value in zip(targets, b.access(address, make, given, [home] * len(targets)), strict=True):
        b.assign(target, value)


def _home(b: FlowBuilder, made: Instruction, x: Operand) -> DType:
    """The type of a register of an access, which may be wider than what is moved."""
    home = b.usage.home.get(x.name) if isinstance(x, PtxRegister) else None
    return made.element if home is None or home.bits < TYPE_BITS[made.type] else home


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
            sign = "s" if kind == "s8" else "u"
            b.assign(register, b.op(named(f"cvt.{sign}32.{sign}8"), b.cast(value, u16)))
        else:
            dtype = REGISTER[kind] if kind[0] == "s" else b.home(register, unsigned(REGISTER[kind]))
            b.assign(register, b.cast(value, dtype))


@lowered("cp")
def copy(b: FlowBuilder, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``cp.async`` and its groups, bulk copies of bytes and of tensors."""
    # What the async proxy reads would need a fence that is not looked for here.
    if made.words[1:3] == ("async", "mbarrier") and any(
        isinstance(i, PtxInstruction) and (i.opcode == "wgmma" or "bulk" in i.modifiers) for i in b.function.body
    ):
        raise b.refusal("beside wgmma and bulk copies it is not supported")
    if not made.fields.get("cache"):
        b.declared(made, targets, sources)
        return
    to, of, *valid = sources
    (base, offset, within), (origin, displaced, _) = b.address(to, "shared"), b.address(of, "global")
    words = [_valid_bytes(b, x, made.bytes) for x in valid if x != Integer(made.bytes)]
    copied = cp_async(made.bytes, made.cache, bool(words), int(made.prefetch.strip("L2:B") or 0))
    b.emit(copied.at(shared_offset=offset, global_offset=displaced), (base, origin, *words), within=within)


def _valid_bytes(b: FlowBuilder, x: Operand, size: int) -> Value:
    """How many bytes a copy reads; a predicate in their place holds where the source is left out."""
    if isinstance(x, Not) or (isinstance(x, PtxRegister) and b.usage.home.get(x.name) is pred):
        return b.op(select(u32), b.read(x, pred), constant(0, u32), constant(size, u32))
    return b.read(x, u32)
