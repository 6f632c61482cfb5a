"""The types of a function's PTX registers, which of them are values of one block, and which a ``wgmma`` still writes.

PTX registers have a width; what they hold, the table of instructions says. Here a register has one *home* type, that of
most of its uses, and is read as another one by a reinterpretation of its bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from warploom.core.dtypes import DType, f32, f64, pred, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.form import TYPE_BITS
from warploom.isa.instruction import Instruction
from warploom.isa.pattern import OperandPlace
from warploom.ptx.blocks import BasicBlock
from warploom.ptx.reading import key_of, placed
from warploom.ptx.syntax import (
    Both,
    Float,
    Function,
    Guard,
    Integer,
    Operand,
    PtxInstruction,
    PtxRegister,
    PtxVector,
    Symbol,
    leaves,
    parts,
)

_INTEGER = {1: pred, 8: u16, 16: u16, 32: u32, 64: u64}
_FLOAT = {"f32": f32, "f64": f64}
_IN_PLACE = 1 << 20
"""Uses that the result of an instruction on registers in place counts as."""


@dataclass(frozen=True, slots=True)
class OperandRoles:
    """Which registers of its operands an instruction reads and writes, by the parts of the operands (one or two each).

    The first ``results`` parts are written, and ``in_place`` they are read too (the accumulators of ``wgmma``).
    ``kinds`` are "f32", "f64", "bits", or "" where the table leaves it open; the parts ``alike`` are then of one type.
    """

    results: int
    in_place: bool
    kinds: tuple[str, ...]
    alike: tuple[int, ...]


_ROLES: dict[object, OperandRoles] = {}


def _roles(i: PtxInstruction) -> OperandRoles:
    """The roles of the operands. What no form has counts as writing its first operand until it is refused."""
    key = key_of(i)
    found = _ROLES.get(key)
    if found is None:
        try:
            made, places = placed(i)
        except VerifyError:
            first = next(iter(i.operands), None)
            return OperandRoles(2 if isinstance(first, Both) else 1, False, (), ())
        is_typed = any(m in TYPE_BITS and not m.startswith("b") for m in i.modifiers)
        any_type = made.form.registers in ("home", "width") and not is_typed
        found = _ROLES[key] = OperandRoles(
            sum(place.kind in ("result", "sink") for place in places),
            any(p.hidden and p.name == made.form.tied for p in made.present),
            tuple(_kind(made, p, any_type or (made.moves_bits and not is_typed)) for p in places),
            tuple(n for n, p in enumerate(places) if any_type and p.kind in ("result", "value") and not p.type),
        )
    return found


def _kind(made: Instruction, place: OperandPlace, is_open: bool) -> str:
    if place.kind not in ("result", "value"):
        return "bits"
    if is_open and (place.type in ("", "element") or place.type.startswith("b")):
        return ""
    name = made.type_of(place).name
    return name if name in _FLOAT else "bits"


def registers(operand: Operand) -> tuple[str, ...]:
    """The names of the registers in a part of an operand."""
    if type(operand) is PtxRegister:
        return (operand.name,) if operand.name else ()
    return tuple(x.name for x in leaves(operand) if isinstance(x, PtxRegister) and x.name)


class _Use:
    """The registers of an instruction, by the parts of its operands."""

    def __init__(self, i: PtxInstruction) -> None:
        self.instruction, self.roles = i, _roles(i)
        simple = all(type(x) is PtxRegister for x in i.operands)
        self.parts = [registers(x) for x in (i.operands if simple else chain.from_iterable(map(parts, i.operands)))]
        results = self.roles.results
        self.written = [*chain.from_iterable(self.parts[:results])]
        self.read = [*chain.from_iterable(self.parts[0 if self.roles.in_place else results :])]
        if i.guard is not None:
            self.read.append(i.guard.register.name)


@dataclass(frozen=True, slots=True)
class Usage:
    """``home``: register → its type here; ``local``: those with one definition, used in its block after it alone.

    ``constants`` are set once, to a constant or the address of a variable; ``read`` are read anywhere. ``variables``:
    those that hold addresses formed from one shared variable alone.
    """

    home: dict[str, DType]
    local: frozenset[str]
    constants: dict[str, Operand]
    read: frozenset[str]
    variables: dict[str, str]


def usage(function: Function, blocks: list[BasicBlock], shared: Collection[str] = ()) -> Usage:
    """The types and lifetimes of a function's registers, and from which of the ``shared`` variables each is formed."""
    uses = [list(map(_Use, block.body)) for block in blocks]
    every = [use for of in uses for use in of]
    read = {name for use in every for name in use.read} | {name for block in blocks for name in _decides(block)}
    constants, variables = _constants(function, every), _variables(every, shared) if len(shared) > 1 else {}
    return Usage(_homes(function, every), _local(function, blocks, uses), constants, frozenset(read), variables)


def _decides(block: BasicBlock) -> Iterator[str]:
    """The register that a block's branch depends on."""
    if block.guard is not None:
        yield block.guard.register.name
    if isinstance(block.index, PtxRegister):
        yield block.index.name


def _constants(function: Function, uses: list[_Use]) -> dict[str, Operand]:
    definitions = Counter(name for use in uses for name in use.written)
    moves = (use.instruction for use in uses if use.instruction.opcode == "mov" and use.instruction.guard is None)
    return {
        i.operands[0].name: i.operands[1]
        for i in moves
        if len(i.operands) == 2 and isinstance(i.operands[0], PtxRegister) and i.operands[0].name in function.registers
        if definitions[i.operands[0].name] == 1 and isinstance(i.operands[1], Integer | Float | Symbol)
    }


# An address is formed from a shared variable where numbers are added to the variable's. Of what is formed of two, or in
# another way, nothing is said.


_NUMBER, _UNKNOWN = "", "?"
_FORMS = {"mov": (0,), "cvta": (0,), "cvt": (0,), "add": (0, 1), "sub": (0,), "and": (0, 1), "or": (0, 1), "mad": (2,)}
"""The sources of an instruction of which one may be an address that the result is formed from, too."""
_READS_MEMORY = ("ld", "ldu", "atom", "ldmatrix")


def _variables(uses: list[_Use], shared: Collection[str]) -> dict[str, str]:
    """The shared variable of each register that holds addresses formed from one alone."""
    readers, writers, reached = defaultdict[str, list[_Use]](list), defaultdict[str, list[_Use]](list), dict[str, str]()
    for use in uses:
        for name in use.written:
            writers[name].append(use)
        if use.instruction.opcode not in _READS_MEMORY:
            for name in use.read:
                readers[name].append(use)
            if any(isinstance(x, Symbol) and x.name in shared for o in use.instruction.operands for x in leaves(o)):
                reached.update(dict.fromkeys(use.written, ""))
    waiting = list(reached)
    while waiting:
        more = {name for use in readers[waiting.pop()] for name in use.written if name not in reached}
        reached.update(dict.fromkeys(more, ""))
        waiting += more
    found: dict[str, str] = {}
    changed = True
    while changed:
        changed = False
        for name in reached:
            kinds = {x for use in writers[name] if (x := _formed_from(use, found, reached, shared)) is not None}
            kind = None if not kinds else kinds.pop() if len(kinds) == 1 else _UNKNOWN
            if kind is not None and kind != found.get(name):
                found[name], changed = kind, True
    return {name: kind for name, kind in found.items() if kind not in (_NUMBER, _UNKNOWN)}


def _formed_from(use: _Use, found: dict[str, str], reached: Collection[str], shared: Collection[str]) -> str | None:
    """Return the kind of value that an instruction's result is formed from; None where it is not known yet."""
    i = use.instruction
    if i.opcode in _READS_MEMORY:
        return _NUMBER
    kinds: list[str] = []
    for operand in i.operands[1:]:
        for x in leaves(operand):
            kind: str | None = x.name if isinstance(x, Symbol) and x.name in shared else _NUMBER
            if isinstance(x, PtxRegister) and x.name in reached:
                kind = found.get(x.name)
            if kind is None:
                return None
            kinds.append(kind)
    formed = [n for n, kind in enumerate(kinds) if kind != _NUMBER]
    if not formed:
        return _NUMBER
    return kinds[formed[0]] if len(formed) == 1 and formed[0] in _FORMS.get(i.opcode, ()) else _UNKNOWN


def _homes(function: Function, uses: list[_Use]) -> dict[str, DType]:
    votes = defaultdict[str, Counter[str]](Counter)
    copies: list[tuple[str, str]] = []
    for use in uses:
        roles = use.roles
        for n, (names, kind) in enumerate(zip(use.parts, roles.kinds, strict=False)):
            for name in names if kind else ():
                votes[name][kind] += _IN_PLACE if roles.in_place and n < roles.results else 1
        if roles.alike:
            alike = [name for n in roles.alike for name in use.parts[n]]
            copies += [(alike[0], other) for other in alike[1:]]
    for _ in range(4):  # a copy has the type of what it copies, or of what becomes of it
        for one, other in copies:
            for a, b in ((one, other), (other, one)):
                if not votes[a] and votes[b]:
                    votes[a][max(votes[b], key=lambda kind, b=b: votes[b][kind])] += 1
    return {name: _home(kind, votes[name]) for name, kind in function.registers.items()}


def _home(kind: str, votes: Counter[str]) -> DType:
    if kind in _FLOAT:
        return _FLOAT[kind]
    bits = TYPE_BITS[kind]
    name = f"f{bits}"
    if name in _FLOAT and votes[name] > votes["bits"]:
        return _FLOAT[name]
    return _INTEGER.get(bits, u64)


def _local(function: Function, blocks: list[BasicBlock], uses: list[list[_Use]]) -> frozenset[str]:
    defined: dict[str, int] = {}
    out: set[str] = set()
    for number, block in enumerate(blocks):
        for use in uses[number]:
            for name in use.read:
                if defined.get(name) != number:
                    out.add(name)
            for name in use.written:
                if name in defined or use.instruction.guard is not None or use.roles.in_place:
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
        changed = i.guard is not None and i.guard.register.name in _Use(i).written
    return groups


# Accumulators of ``wgmma``. PTX's ``wgmma.wait_group`` names no registers; a Program's does, so that no compiler moves
# their uses above it. They are followed along the control-flow graph: a group is a set of registers, and where ways
# meet, what is under way on any of them counts.


_MOST = 8  # groups that are told apart; older ones count as one
RegisterNames = frozenset[str]


@dataclass(frozen=True, slots=True)
class _ProductsUnderWay:
    """Registers of products that are not committed, and of groups, the newest first."""

    open: RegisterNames = frozenset()
    groups: tuple[RegisterNames, ...] = ()

    def joined(self, other: _ProductsUnderWay) -> _ProductsUnderWay:
        """The union of what is under way on two paths of the control flow."""
        count = max(len(self.groups), len(other.groups))
        mine, theirs = ((*g, *(frozenset[str](),) * (count - len(g))) for g in (self.groups, other.groups))
        return _ProductsUnderWay(self.open | other.open, tuple(a | b for a, b in zip(mine, theirs, strict=True)))

    @property
    def registers(self) -> RegisterNames:
        """All registers that products under way write."""
        return self.open.union(*self.groups)

    def after(self, i: PtxInstruction) -> _ProductsUnderWay:
        """Return the products that are under way after an instruction."""
        if i.opcode != "wgmma":
            return self
        if "mma_async" in i.modifiers and isinstance(i.operands[0], PtxVector):
            return _ProductsUnderWay(self.open | frozenset(registers(i.operands[0])), self.groups)
        if "commit_group" in i.modifiers:
            newest = (self.open, *self.groups)
            older = frozenset[str]().union(*newest[_MOST - 1 :])
            return _ProductsUnderWay(groups=(*newest[: _MOST - 1], older)[: len(newest)])
        if "wait_group" in i.modifiers:
            pending = i.operands[0].value if i.operands and isinstance(i.operands[0], Integer) else 0
            return _ProductsUnderWay(self.open, self.groups[:pending])
        return self


def completed_registers(blocks: list[BasicBlock]) -> dict[int, tuple[str, ...]]:
    """id of each ``wgmma.wait_group`` → the registers that are under way before it and not after it."""
    starts: dict[int, _ProductsUnderWay] = {0: _ProductsUnderWay()}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        state = reduce(_ProductsUnderWay.after, blocks[number].body, starts[number])
        for target in blocks[number].targets:
            joined = starts[target].joined(state) if target in starts else state
            if joined != starts.get(target):
                starts[target] = joined
                waiting.append(target)
    found: dict[int, tuple[str, ...]] = {}
    for number, block in enumerate(blocks):
        state = starts[number]
        for i in block.body:
            before, state = state, state.after(i)
            if i.opcode == "wgmma" and "wait_group" in i.modifiers:
                done = before.registers - state.registers
                found[id(i)] = tuple(sorted(done, key=lambda name: (len(name), name)))
    return found
