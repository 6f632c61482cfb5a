"""Forms of instructions, each declared once, and the instructions that they make.

A line of a table declares a form by its pattern (:mod:`warploom.isa.pattern`) and what else is true of it; the PTX
text, its reader, operand and result types, refusals, effects, meaning, C++ text, poison rule, derivative and
architecture of every instruction come from that line. An instruction is a form, the word in each of its slots, its
immediates, and for forms that do not depend on the sign or the kind of bits the type of the registers (``home``). There
is one object for each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from typing import Any, Literal

from numpy.typing import NDArray

from warploom.core.dtypes import DType, f32, f64, pred, s16, s32, s64, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.effects import Effect
from warploom.isa.pattern import places_of, slots_of

REGISTER: dict[str, DType] = {
    "pred": pred,
    "b16": u16,
    "u16": u16,
    "s16": s16,
    "f16": u16,
    "bf16": u16,
    **dict.fromkeys(("b32", "u32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), u32),
    "s32": s32,
    "b64": u64,
    "u64": u64,
    "s64": s64,
    "f32": f32,
    "f64": f64,
    "f32x2": u64,
    **dict.fromkeys(("e4m3x2", "e5m2x2"), u16),
}
"""PTX's type → the type of the register that holds it."""
Array = NDArray[Any]
REGISTERS = (pred, u16, s16, u32, s32, u64, s64, f32, f64)
"""The types that a register of a thread can have."""
_SETS = {
    "rnd": "rn rz rm rp",
    "int": "u16 s16 u32 s32 u64 s64",
    "signed": "s16 s32 s64",
    "wide32": "u32 s32 u64 s64",
    "bits": "b16 b32 b64",
    "half": "f16 bf16",
    "pair": "f16x2 bf16x2",
    "any": "b16 b32 b64 u16 s16 u32 s32 u64 s64 f32 f64",
}
"""Words of slots that have the same in most forms."""


def takes(what: str, dtype: DType, allowed: Sequence[DType]) -> None:
    """Raises VerifyError unless ``dtype`` is among the types that an instruction takes."""
    if dtype not in allowed:
        raise VerifyError(f"{what} takes {', '.join(t.name for t in allowed)}, not {dtype}: convert the operand first")


def waits_for_groups(pending: int) -> None:
    """Raises VerifyError unless a wait may leave so many of the newest groups pending."""
    if isinstance(pending, bool) or pending < 0:
        raise VerifyError(f"a wait leaves 0 or more of the newest groups pending, not {pending}")


class RefusedError(VerifyError):
    """Words and operands that no form has."""


@dataclass(frozen=True, slots=True)
class Open:
    """Operands for which PTX or C++ leaves a result undefined.

    ``where`` tells it of two arrays: the first operand, and the one at position ``operand``; with ``alone`` the latter
    decides by itself. ``what`` says what happens, ``{}`` in it is the value, and ``cure`` what to do.
    """

    operand: int
    where: Callable[[Array, Array], Array]
    what: str
    cure: str = "guard the operation with k.when, or give those lanes another operand by k.select"
    alone: bool = True


Of = Callable[[Any], Any]
"""What is said of each instruction of a form by itself."""


class Form:
    """A declared form.

    ``meaning`` is a function of arrays, ``choose`` makes it of the instruction. ``registers`` "bits": PTX reads and
    writes unsigned registers, as the sign does not count; "home": those of the type at hand; "width": the same, and the
    word for the type says only how wide they are. ``name`` is what Programs
    call it instead of PTX's name, ``operands`` the order of theirs. ``operator`` is the language's operator.
    ``call`` gives the C++ expression, ``inline`` the inline PTX where it is not the line itself, ``statement`` the
    whole statement of the operands for which it gives one. ``let`` gives further attributes of an instruction (or
    refuses it), ``effects``, ``open``, ``shadow``, ``exact`` and ``gradient`` are those of
    :class:`~warploom.isa.instruction.Instruction`, ``default`` the words of slots that are left out. ``asm`` says how a
    compiler treats inline PTX of what is not lanewise: it stays where it stands ("volatile"), in order with accesses to
    memory ("memory"). Registers of the place ``tied`` that are those of the results are one read-write operand. What is
    not ``ptx`` is an operator of C++ alone.
    """

    def __init__(
        self,
        pattern: str,
        *,
        meaning: Callable[..., Any] | None = None,
        choose: Of | None = None,
        effects: tuple[Effect, ...] | Of = (),
        let: Of | None = None,
        registers: Literal["", "bits", "home", "width"] = "",
        name: str | Of = "",
        operands: str = "",
        operator: str | Of = "",
        call: Of | None = None,
        inline: Of | None = None,
        statement: Callable[..., str | None] | None = None,
        tied: str = "",
        open: tuple[Open, ...] | Of = (),  # noqa: A002 (as PTX's table has it)
        shadow: Callable[..., Any] | None = None,
        exact: Of | None = None,
        gradient: Of | None = None,
        exchange: Of | None = None,
        asm: Literal["", "plain", "volatile", "volatile memory"] = "",
        moves_bits: bool = False,
        since: str = "sm_80",
        ptx: bool = True,
        default: Mapping[str, Any] | None = None,
        **sets: str,
    ) -> None:
        head, _, tail = pattern.partition(" ")
        self.pattern, self.slots, self.places = pattern, slots_of(head, _SETS | sets), places_of(tail)
        self.meaning, self.choose, self.effects, self.let = meaning, choose, effects, let
        self.registers, self.name, self.operands, self.operator, self.call = (
            registers,
            name,
            operands.split(),
            operator,
            call,
        )
        self.open, self.shadow, self.exact, self.gradient = open, shadow, exact, gradient
        self.exchange, self.asm, self.moves_bits, self.since = exchange, asm, moves_bits, since
        self.ptx, self.default = ptx, default or {}
        self.inline, self.statement, self.tied = inline, statement, tied
        addresses = [p for p in self.places if p.kind == "address"]
        if self.operands:
            addresses.sort(key=lambda p: self.operands.index(p.name))
        self.offsets = tuple(p.offset for p in addresses)
        self.immediates = tuple(p.offset or p.name for p in self.places if p.kind in ("address", "number"))
        self.words = frozenset(word for slot in self.slots for word in slot.words)
        self.types = self.words & REGISTER.keys()
        fixed = [s.words[0] for s in self.slots if not s.name and s.words[0] in REGISTER]
        self.type = fixed[-1] if fixed else ""
        self.scalar = all(
            p.kind in ("result", "value") and not (p.written or p.count or p.paired or p.hidden or p.optional)
            for p in self.places
        )
        self.plain = all(
            p.is_register and not (p.paired or p.hidden or p.box or (p.optional and not p.given)) for p in self.places
        )

    def match(self, written: Sequence[str]) -> tuple[str, ...] | None:
        """The word in each slot ('' for none) of an opcode with its modifiers, or None.

        Modifiers may stand in any order, as ptxas takes them; equal words go to slots in the order of the text.
        """
        left, found = [*written], list[str]()
        for slot in self.slots:
            word = next((w for w in (left if found else left[:1]) if w in slot.words), "")
            if not word and not slot.optional:
                return None
            found.append(word)
            if word:
                left.remove(word)
        types = [w for w in found if w in REGISTER]
        return (
            tuple(found)
            if not left and types == [w for w in written if w in REGISTER] and self._agrees(found)
            else None
        )

    def _agrees(self, words: Sequence[str]) -> bool:
        """Whether slots of one name have the same word."""
        named = [(s.name, word) for s, word in zip(self.slots, words, strict=True) if s.name]
        return len(dict(named)) == len(set(named))

    def choices(self) -> Iterable[tuple[str, ...]]:
        """Every word in every slot, with and without what may be left out."""
        every = product(*((*s.words, "") if s.optional else s.words for s in self.slots))
        return filter(self._agrees, every)

    def __str__(self) -> str:
        return self.pattern


FORMS: dict[str, list[Form]] = {}
"""Opcode → the forms of PTX, in the order of their declaration."""
OPERATORS: dict[str, list[Form]] = {}


def form(pattern: str, **said: Any) -> Form:
    """Declare a form. Raises ValueError for one that is declared already."""
    made = Form(pattern, **said)
    table = FORMS if made.ptx else OPERATORS
    for opcode in made.slots[0].words:
        known = table.setdefault(opcode, [])
        if any(f.pattern == pattern and f.slots == made.slots for f in known):
            raise ValueError(f"{made} is declared twice")
        known.append(made)
    return made


_TABLES = ("lanewise", "conversion", "collective", "memory", "async_copy", "barriers", "matrix")


@cache
def load_tables() -> None:
    """Import the modules whose lines declare the package's forms, which themselves import this one."""
    for name in _TABLES:
        import_module(f"warploom.isa.{name}")


@cache
def is_for_warps(opcode: str) -> bool:
    """Whether the lanes of a warp execute an opcode together (``.sync``)."""
    load_tables()
    return any("sync" in form.words for form in FORMS.get(opcode, ()))


@lru_cache(maxsize=1 << 14)
def candidates(written: tuple[str, ...], ptx: bool = True) -> tuple[tuple[Form, tuple[str, ...]], ...]:
    """The forms that have these words (opcode, then modifiers), each with the word in every slot.

    Raises RefusedError.
    """
    load_tables()
    forms = (FORMS if ptx else OPERATORS).get(written[0], ())
    if not forms:
        raise RefusedError("this instruction is not supported")
    found = tuple((f, words) for f in forms for words in [f.match(written)] if words is not None)
    if not found:
        raise RefusedError(_why(written, forms))
    return found


_MOST_LISTED = 12
"""Words that a refusal names."""


def _why(written: tuple[str, ...], forms: Sequence[Form]) -> str:
    """Why no form has these words: the first one that none knows, the one that is missing, or their combination."""
    types = {w for w in written if w in REGISTER}
    near = [f for f in forms if types & f.types] or [f for f in forms if not types or not f.types]
    if not near:
        return f".{min(types)} is no type of it, it takes {_listed(sorted({w for f in forms for w in f.types}))}"
    known = {f: (len(types & f.types), sum(w in f.words for w in written)) for f in near}
    best = [f for f in near if known[f] == max(known.values())]
    shown = best[0].pattern.split()[0].replace("{op}", written[0], 1)
    for word in written[1:]:
        if all(word not in f.words for f in best):
            slots = [s for f in best for s in f.slots[1:] if s.name and not set(s.words) & set(written)]
            others = [*dict.fromkeys(w for s in slots for w in s.words if w not in REGISTER)]
            if len(others) > _MOST_LISTED:
                return f".{word} is not supported"
            return f".{word} is not supported, " + (f"{shown} takes {_listed(others)}" if others else f"it is {shown}")
    missing = [s for f in best for s in f.slots[1:] if not s.optional and not set(s.words) & set(written)]
    words = [*dict.fromkeys(w for s in missing for w in s.words)]
    if len(missing) >= len(best) and len(words) <= _MOST_LISTED:
        return f"it must name {_listed(words, 'or')}"
    return f"no form has all of these modifiers, {shown} has others"


def _listed(words: Sequence[str], last: str = "and") -> str:
    *others, end = (f".{w}" for w in words)
    return f"{', '.join(others)} {last} {end}" if others else end
