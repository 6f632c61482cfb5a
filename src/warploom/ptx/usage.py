"""The types of a function's PTX registers, and which of them are values of one block.

PTX registers have a width; what they hold, their instructions say. Here a register has one *home* type, that of most of
its uses, and is read as another one by a reinterpretation of its bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from warploom.core.dtypes import DType, f32, f64, pred, u16, u32, u64
from warploom.isa.form import RefusedError, candidates
from warploom.ptx.blocks import BasicBlock
from warploom.ptx.syntax import (
    TYPES,
    Address,
    Both,
    Float,
    Function,
    Guard,
    Integer,
    Not,
    Operand,
    PtxInstruction,
    PtxRegister,
    PtxVector,
    Symbol,
)

_INTEGER = {1: pred, 8: u16, 16: u16, 32: u32, 64: u64}
_FLOAT = {"f32": f32, "f64": f64}
_COPIES = ("mov", "selp", "shfl")
_BITS_ALONE = ("ld", "st", "atom", "ldmatrix", *_COPIES)


def destinations(i: PtxInstruction) -> tuple[Operand, ...]:
    """The operands that an instruction writes."""
    return i.operands[:1] if i.operands and _writes(i.opcode, i.modifiers) else ()


@lru_cache(1 << 12)
def _writes(opcode: str, modifiers: tuple[str, ...]) -> bool:
    """Whether an instruction writes its first operand; one that no form has is refused when it is read."""
    try:
        form, _ = candidates((opcode, *modifiers))[0]
    except RefusedError:
        return True
    return any(p.kind in ("result", "sink") and not p.hidden for p in form.places)


def sources(i: PtxInstruction) -> tuple[Operand, ...]:
    """The operands that it reads; the accumulators of ``wgmma`` are both."""
    first = 0 if i.opcode == "wgmma" else len(destinations(i))
    return i.operands[first:]


def registers(operand: Operand) -> Iterator[str]:
    """The names of the virtual registers in an operand."""
    if isinstance(operand, PtxRegister):
        if operand.name:
            yield operand.name
    elif isinstance(operand, PtxVector):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Both):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Not):
        yield from registers(operand.register)
    elif isinstance(operand, Address):
        yield from registers(operand.base) if isinstance(operand.base, PtxRegister) else ()
        yield from registers(operand.coordinates) if operand.coordinates is not None else ()


def written(i: PtxInstruction) -> Iterator[str]:
    """The names of the registers that an instruction writes."""
    return (name for x in destinations(i) for name in registers(x))


@dataclass(frozen=True, slots=True)
class Usage:
    """``home``: register → its type here; ``local``: those with one definition, used in its block after it alone.

    ``constants`` are set once, to a constant or the address of a variable; ``read`` are read anywhere.
    """

    home: dict[str, DType]
    local: frozenset[str]
    constants: dict[str, Operand]
    read: frozenset[str]


def usage(function: Function, blocks: list[BasicBlock]) -> Usage:
    """The types and lifetimes of a function's registers."""
    instructions = [i for block in blocks for i in block.body]
    read = {n for i in instructions for x in sources(i) for n in registers(x)}
    read |= {i.guard.register.name for i in instructions if i.guard is not None}
    read |= {n for block in blocks for n in _decides(block)}
    return Usage(_homes(function, blocks), _local(function, blocks), _constants(instructions), frozenset(read))


def _decides(block: BasicBlock) -> Iterator[str]:
    """The register that a block's branch depends on."""
    if block.guard is not None:
        yield block.guard.register.name
    if isinstance(block.index, PtxRegister):
        yield block.index.name


def _constants(instructions: list[PtxInstruction]) -> dict[str, Operand]:
    definitions = Counter(n for i in instructions for n in written(i))
    return {
        i.operands[0].name: i.operands[1]
        for i in instructions
        if i.opcode == "mov" and i.guard is None and len(i.operands) == 2 and isinstance(i.operands[0], PtxRegister)
        if definitions[i.operands[0].name] == 1 and isinstance(i.operands[1], Integer | Float | Symbol)
    }


def _homes(function: Function, blocks: list[BasicBlock]) -> dict[str, DType]:
    votes = defaultdict[str, Counter[str]](Counter)
    copies: list[tuple[str, str]] = []
    for i in (i for block in blocks for i in block.body):
        _vote(i, votes)
        if i.opcode in _COPIES and "f32" not in i.modifiers and "f64" not in i.modifiers:
            names = [n for x in i.operands[: 3 if i.opcode == "selp" else 2] for n in registers(x)]
            copies += [(names[0], other) for other in names[1:]] if names else []
    for i in (i for block in blocks for i in block.body):  # the accumulators of wgmma stay where they are
        for name in (n for x in i.operands[:1] for n in registers(x)) if i.opcode == "wgmma" else ():
            votes[name]["f32"] += 1 << 20
    for _ in range(4):  # a copy has the type of what it copies, or of what becomes of it
        for one, other in copies:
            for a, b in ((one, other), (other, one)):
                if not votes[a] and votes[b]:
                    votes[a][max(votes[b], key=lambda kind, b=b: votes[b][kind])] += 1
    return {name: _home(kind, votes[name]) for name, kind in function.registers.items()}


def _home(kind: str, votes: Counter[str]) -> DType:
    if kind in _FLOAT:
        return _FLOAT[kind]
    bits = TYPES[kind]
    name = f"f{bits}"
    if name in _FLOAT and votes[name] > votes["bits"]:
        return _FLOAT[name]
    return _INTEGER.get(bits, u64)


def _vote(i: PtxInstruction, votes: dict[str, Counter[str]]) -> None:
    types = [m for m in i.modifiers if m in TYPES]
    if not types:
        return
    if i.opcode in _BITS_ALONE and types[-1].startswith("b"):
        for address in (x for x in i.operands if isinstance(x, Address)):
            for name in registers(address):
                votes[name]["bits"] += 1
        return
    targets = len(destinations(i))
    kinds = [types[0]] * targets + [types[-1]] * (len(i.operands) - targets)
    if len(types) == 4 and len(i.operands) >= 4:  # mma: D, A, B, C
        kinds[:4] = types
    elif len(types) == 3 and i.opcode == "wgmma":
        kinds[1:] = ["b64"] * (len(kinds) - 1)
    elif i.opcode == "setp" and kinds:
        kinds[0] = "pred"
    for operand, kind in zip(i.operands, kinds, strict=False):
        for name in registers(operand):
            is_address = isinstance(operand, Address)
            votes[name][kind if kind in _FLOAT and not is_address else "bits"] += 1


def _local(function: Function, blocks: list[BasicBlock]) -> frozenset[str]:
    defined: dict[str, int] = {}
    out: set[str] = set()
    for number, block in enumerate(blocks):
        for i in block.body:
            for name in (n for x in sources(i) for n in registers(x)):
                if defined.get(name) != number:
                    out.add(name)
            guard = i.guard
            if guard is not None and defined.get(guard.register.name) != number:
                out.add(guard.register.name)
            for name in written(i):
                if name in defined or guard is not None or i.opcode == "wgmma":
                    out.add(name)
                defined[name] = number
        out.update(name for name in _decides(block) if defined.get(name) != number)
    return frozenset(function.registers) - out


def by_guard(body: list[PtxInstruction]) -> list[tuple[Guard | None, list[PtxInstruction]]]:
    """Neighbours under one guard together, unless one of them changes its predicate."""
    groups: list[tuple[Guard | None, list[PtxInstruction]]] = []
    changed = True
    for i in body:
        if changed or not groups or groups[-1][0] != i.guard:
            groups.append((i.guard, []))
        groups[-1][1].append(i)
        changed = i.guard is not None and i.guard.register.name in written(i)
    return groups
