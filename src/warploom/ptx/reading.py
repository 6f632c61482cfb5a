"""From the syntax of a PTX instruction to the declared instruction, what it writes and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from warploom.core.dtypes import DType
from warploom.isa.barriers import SYSTEM_CALLS
from warploom.isa.form import Form, RefusedError, candidates
from warploom.isa.instruction import Instruction, home_of, instruction
from warploom.isa.pattern import OperandPlace
from warploom.ptx.syntax import Address, Both, Integer, Operand, PtxInstruction, PtxRegister, PtxVector

CARRY = PtxRegister("%%carry")  # no name that PTX can have
"""Stands for the carry among what is written and read."""
_UNKNOWN = Integer(16)
"""Stands for a number that is not known yet: one that every instruction can have."""
Home = Callable[[Operand, DType], DType]
Known = Callable[[Operand], Operand]
Found = tuple[Instruction, Sequence[Operand], Sequence[Operand]]
_PLAIN: dict[Any, Instruction] = {}
_SCALAR: dict[tuple[str, tuple[str, ...], int], Instruction] = {}


def _flat(operands: Sequence[Operand]) -> Sequence[Operand]:
    if PtxVector not in map(type, operands):
        return operands
    return [r for x in operands for r in (x.items if isinstance(x, PtxVector) else (x,))]


def _shape(x: Operand) -> Any:
    """The class of an operand, or the number of its registers."""
    if isinstance(x, PtxVector):
        return len(x.items)
    return None if isinstance(x, Address) and x.coordinates is not None else type(x)


def key_of(i: PtxInstruction) -> Any:
    """The words of an instruction and the shapes of its operands, which decide where in a form each operand stands."""
    return i.opcode, i.modifiers, tuple(map(_shape, i.operands))


def placed(i: PtxInstruction) -> tuple[Instruction, list[OperandPlace]]:
    """The instruction, and the places of all that its operands name. Numbers in registers are not known yet.

    Raises VerifyError.
    """
    every = frozenset(x.name for both in i.operands if isinstance(both, Both) for x in (both.first, both.second))
    made, *_ = find(i, lambda _, dtype: dtype, lambda x: x if isinstance(x, Integer) else _UNKNOWN, every)
    return made, [place for place, _ in _grouped(made.form, made.words, i.operands, every)[0]]


def find(i: PtxInstruction, home: Home, known: Known, read: Container[str]) -> Found:
    """The instruction, the operands that it writes and those that it reads, in the order of Programs.

    ``home`` is the type in which a register of a width is at home, ``known`` gives the number that a register stands
    for, ``read`` are those that are read anywhere: of two results one that is not is left out where the form allows
    that. Raises RefusedError with the reason.
    """
    short = (i.opcode, i.modifiers, len(i.operands))
    scalar = _SCALAR.get(short)
    if scalar is not None and type(i.operands[0]) is not Both:
        count = len(scalar.result_types)
        return scalar, i.operands[:count], i.operands[count:]
    key = key_of(i)
    plain = _PLAIN.get(key)
    if plain is not None:
        count, operands = len(plain.result_types), _flat(i.operands)
        return plain, operands[:count], plain.ordered(operands[count:])
    why: RefusedError | None = None
    choices = candidates((i.opcode, *i.modifiers), i.opcode not in SYSTEM_CALLS)
    for form, words in choices:
        try:
            found = _placed(form, words, i.operands, home, known, read)
        except RefusedError as refused:
            why = why or refused
            continue
        whole = len(found[1]) + len(found[2]) == len(_flat(i.operands))
        if form.plain and form.registers != "home" and whole:  # registers alone need no second look
            _PLAIN[key] = found[0]
            if i.operands and form.scalar and not form.order and not any(p.count for f, _ in choices for p in f.places):
                _SCALAR[short] = found[0]
        return found
    assert why is not None
    raise why


def _placed(
    form: Form,
    words: tuple[str, ...],
    given: Sequence[Operand],
    home: Home,
    known: Known,
    read: Container[str],
) -> Found:
    """The instruction of a form, where the operands are as many and of the kinds that it has."""
    groups, left = _grouped(form, words, given, read)
    targets, sources, numbers = list[Operand](), list[Operand](), list[tuple[str, int]]()
    for place, operand in groups:
        if isinstance(operand, Both):
            raise RefusedError(f"it gives one register as {form}")
        if place.kind == "number":
            number = known(operand)
            if not isinstance(number, Integer):  # compilers put constants into registers first
                raise RefusedError(f"{place.name} must be a number in {form}")
            numbers.append((place.name, number.value))
        elif place.kind == "address":
            if not isinstance(operand, Address) or operand.coordinates is not None:
                raise RefusedError(f"{operand} is no address in {form}")
            sources.append(operand)
        elif place.kind == "sink":
            if not isinstance(operand, PtxRegister):
                raise RefusedError(f"{place.name} is one register in {form}")
        else:
            if isinstance(operand, Address) and place.box != "map" and form.ptx:
                raise RefusedError(f"{operand} is an address, {place.name} is none in {form}")
            vector = isinstance(operand, PtxVector)
            if vector and not place.count:
                raise RefusedError(f"{place.name} is one register in {form}")
            items = operand.items if vector else (operand,)
            (targets if place.kind == "result" else sources).extend(items)
    where = home_of(form, words)
    if form.registers == "home" and where is not None:
        where = home((targets or sources)[0], where)
    found = instruction(form, words, tuple(numbers), left, where)
    hidden = {p.name for p in found.present if p.hidden}
    targets += [CARRY] * ("out" in hidden)
    sources += [CARRY] * ("in" in hidden) + [Integer(1)] * ("guard" in hidden) + targets * (form.tied in hidden)
    counts = dict(zip(found.present, found.counts, strict=True))
    fits = all(len(x.items) == counts[p] for p, x in groups if isinstance(x, PtxVector) and p.is_register)
    if not fits or len(targets) != len(found.result_types) or len(sources) != len(found.operand_types):
        raise RefusedError(f"as many registers as elements are needed in {form}")
    return found, targets, found.ordered(sources)


def _grouped(
    form: Form, words: tuple[str, ...], given: Sequence[Operand], read: Container[str]
) -> tuple[list[tuple[OperandPlace, Operand]], frozenset[str]]:
    """Each place of a form with the operand that stands there, and the names of the places that are left out."""
    present = {s.name for s, w in zip(form.slots, words, strict=True) if w}
    places = [p for p in form.places if (not p.given or p.given in present) and not p.hidden]
    single = [p for p in places if not p.paired and p.box != "coordinates"]
    spare = len(given) - sum(not p.optional or bool(p.given) for p in single)
    if not 0 <= spare <= sum(p.optional and not p.given for p in single):
        raise RefusedError(f"it has {len(given)} operands, not those of {form}")
    operands, groups, left = iter(given), list[tuple[OperandPlace, Operand]](), set[str]()
    for place in places:
        if place.box == "coordinates":
            box = groups[-1][1]
            if not isinstance(box, Address) or box.coordinates is None:
                raise RefusedError(f"{box} is no box of a tensor map in {form}")
            groups.append((place, box.coordinates))
        elif place.paired:
            if not groups:
                raise RefusedError(f"it gives two registers, as {form}")
            first, both = groups[-1]
            if isinstance(both, Both):
                parts = (first, both.first), (place, both.second)
                unread = [p.name for p, register in parts if p.optional and register.name not in read]
                groups[-1:] = [(p, register) for p, register in parts if p.name not in unread]
                left.update(unread)
            elif place.optional:
                left.add(place.name)
            else:
                raise RefusedError(f"it gives two registers, as {form}")
        elif place.optional and not place.given and spare == 0:
            left.add(place.name)
        else:
            spare -= place.optional and not place.given
            groups.append((place, next(operands)))
    return groups, frozenset(left)
