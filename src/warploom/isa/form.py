"""Forms of instructions, each declared once, and the instructions that they make.

A line of a table declares a form by its pattern (:mod:`warploom.isa.pattern`) and what else is true of it; the PTX
text, its reader, operand and result types, refusals, effects, meaning, C++ text, poison rule, derivative and
architecture of every instruction come from that line. An instruction is a form, the word in each of its slots, its
immediates, and for forms that do not depend on the sign or the kind of bits the type of the registers (``home``). There
is one object for each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from typing import Any, Literal

import numpy as np
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
TYPE_BITS = (
    {name: t.bits for name, t in REGISTER.items()}
    | dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 8)
    | {"b128": 128}
)
"""The bits of PTX's types."""
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


def viewed(x: Array, dtype: Any) -> Array:
    """The bits of an array as another type."""
    return np.ascontiguousarray(x).view(dtype)


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
"""A function of an instruction, where its words or immediates decide."""


@dataclass(eq=False)
class Form:
    """A declared form: its pattern, the words of its slots, and what else a line of a table says of its instructions.

    What depends on the words is a function of the instruction.
    """

    pattern: str
    sets: Mapping[str, str]
    meaning: Callable[..., Any] | None = None
    """Results as a function of arrays."""
    choose: Of | None = None
    """Makes that function of the instruction."""
    effects: tuple[Effect, ...] | Of = ()
    let: Of | None = None
    """Gives further attributes of an instruction, or refuses it."""
    registers: Literal["", "bits", "home", "width"] = ""
    """PTX's registers where the form does not tell their type. "bits": unsigned ones, as the sign does not count;
    "home": of the type at hand; "width": the same, and the word for the type says only how wide they are."""
    name: str | Of = ""
    """What Programs call it instead of PTX's name."""
    operands: str = ""
    """The order of a Program's operands, where it is not that of the text."""
    operator: str | Of = ""
    """The operator of the language."""
    call: Of | None = None
    """The C++ expression (:class:`~warploom.isa.cpp.Expression`)."""
    inline: Of | None = None
    """The inline PTX where it is not the line itself."""
    statement: Callable[..., str | None] | None = None
    """The whole C++ statement, of the results and operands for which it gives one."""
    tied: str = ""
    """The place whose registers, where they are those of the results, are one read-write operand with them."""
    open: tuple[Open, ...] | Of = ()
    shadow: Callable[..., Any] | None = None
    """The poison rule (:mod:`warploom.isa.poison`)."""
    exact: Of | None = None
    gradient: Of | None = None
    exchange: Of | None = None
    asm: Literal["", "plain", "volatile", "volatile memory"] = ""
    """How a compiler treats inline PTX of what is not lanewise: it stays where it stands ("volatile"), in order with
    accesses to memory ("memory")."""
    moves_bits: bool = False
    since: str = "sm_80"
    """The first architecture that has it."""
    ptx: bool = True
    """Whether PTX has it; else it is an operator of C++ or a function of the system."""
    default: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Words and immediates that count where they are left out."""

    def __post_init__(self) -> None:
        head, _, tail = self.pattern.partition(" ")
        self.slots, self.places, self.order = (
            slots_of(head, _SETS | {**self.sets}),
            places_of(tail),
            self.operands.split(),
        )
        addresses = [p for p in self.places if p.kind == "address"]
        if self.order:
            addresses.sort(key=lambda p: self.order.index(p.name))
        self.offsets = tuple(p.offset for p in addresses)
        self.immediates = tuple(p.offset or p.name for p in self.places if p.kind in ("address", "number"))
        self.words = frozenset(word for slot in self.slots for word in slot.words)
        self.types = self.words & REGISTER.keys()
        fixed = [s.words[0] for s in self.slots if not s.name and s.words[0] in REGISTER]
        self.type = fixed[-1] if fixed else ""
        self.plain = all(
            p.is_register and not (p.paired or p.hidden or p.box or (p.optional and not p.given)) for p in self.places
        )
        self.scalar = self.plain and not any(
            p.kind == "address" or p.written or p.count or p.optional for p in self.places
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
        fits = not left and types == [w for w in written if w in REGISTER] and self._agrees(found)
        return tuple(found) if fits else None

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


def common(**said: Any) -> dict[str, Any]:
    """Collect what several lines of a table have in common."""
    return said


_SAID = {x.name for x in fields(Form)}


def form(pattern: str, *bases: Mapping[str, Any], **said: Any) -> Form:
    """Declare a form, with what lines of a table have in common. Raises ValueError for one that is declared already."""
    for base in reversed(bases):
        said = {**base, **said}
    sets = {name: said.pop(name) for name in [*said] if name not in _SAID}
    made = Form(pattern, sets, **said)
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


_NO_WORDS = frozenset[str]()
_LATER = {
    **{op: frozenset({op}) for op in ("tcgen05", "clusterlaunchcontrol")},
    "ld": frozenset({"v8"}),
    "st": frozenset({"v8", "bulk"}),
}
"""Opcodes, and words of theirs, that came with sm_100 and stand in no table."""


@lru_cache(maxsize=1 << 14)
def candidates(written: tuple[str, ...], ptx: bool = True) -> tuple[tuple[Form, tuple[str, ...]], ...]:
    """The forms that have these words (opcode, then modifiers), each with the word in every slot.

    Raises RefusedError.
    """
    load_tables()
    forms = (FORMS if ptx else OPERATORS).get(written[0], ())
    if ptx and not _LATER.get(written[0], _NO_WORDS).isdisjoint(written):
        raise RefusedError("GPUs before sm_100 do not have it, and here it does not run: compile for sm_90a or older")
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
