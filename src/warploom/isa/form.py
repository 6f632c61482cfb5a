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
from typing import Any, Literal, cast

from warploom.core.dtypes import DType, f32, f64, pred, s16, s32, s64, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.base import ANY, PRIMARY, Array, Instruction, Open
from warploom.isa.effects import Effect
from warploom.isa.pattern import OperandPlace, places_of, slots_of

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
_DETAILS = ("offset", "threads", "pending")
_READ = ("value", "address")
_UNSIGNED = {s16: u16, s32: u32, s64: u64}
_WIDE = {u16: u32, s16: s32, u32: u64, s32: s64}
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
_TYPED = ("type", "int", "signed", "wide32", "bits", "half", "pair", "any")
"""Slots that name the type of operands without one of their own, unless a word of the pattern does."""


class RefusedError(VerifyError):
    """Words and operands that no form has."""


@dataclass(frozen=True, slots=True)
class Expression:
    """The C++ expression of an instruction: how tightly it binds, and how tightly its operands must.

    ``text`` has ``{0}`` … for operands, or makes it of them. ``nests``: it may stand inside another expression.
    """

    text: str | Callable[[Sequence[str]], str]
    binds: int
    needed: tuple[int, ...]
    nests: bool = True


Of = Callable[["Formed"], Any]
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
    :class:`~warploom.isa.base.Instruction`, ``default`` the words of slots that are left out. ``asm`` says how a
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
            p.kind in ("result", *_READ) and not (p.paired or p.hidden or p.box or (p.optional and not p.given))
            for p in self.places
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


class Formed(Instruction):
    """An instruction of a form. The words in its slots and its immediates are attributes by their names."""

    def __init__(
        self,
        form: Form,
        words: tuple[str, ...],
        numbers: tuple[tuple[str, int], ...],
        left: frozenset[str],
        home: DType | None,
    ) -> None:
        self.form, self.words, self.numbers, self.left, self.home = form, words, numbers, left, home
        slots = [*zip(form.slots, words, strict=True)]
        self.fields: dict[str, Any] = {s.name: w or form.default.get(s.name, "") for s, w in slots if s.name}
        first: dict[str, Any] = {"op": words[0], "home": home, **dict.fromkeys(form.offsets, 0)}
        self.fields = {**first, **form.default, **self.fields, **dict(numbers)}
        if form.let is not None:
            more = form.let(self)
            self.fields |= more
            self.__dict__.update({n: x for n, x in more.items() if hasattr(Instruction, n)})
        self.present = tuple(p for p in form.places if (self.fields[p.given] if p.given else p.name not in left))
        self.counts = tuple(map(self._count, self.present))
        self.ptx_name = ".".join(filter(None, words))
        immediates = "".join(f".{self.fields[p.name]:#x}" for p in self.present if p.kind == "number")
        self._order: list[int] = []
        self.operator, self.pure, self.lanewise = self._named(form.operator), not form.asm, not form.asm
        self.moves_bits, self.exchange = form.moves_bits, form.exchange and form.exchange(self)
        self.volatile_ptx, self.clobbers_memory = "volatile" in form.asm, "memory" in form.asm
        self.mnemonic = self._named(form.name) or self.ptx_name + immediates
        self.result_types, self.operand_types = self._register_types()
        self.since = max([form.since, *(s.since.get(w, "") for s, w in slots)], key=_generation)
        self.open = form.open(self) if callable(form.open) else form.open
        self.exact, self.gradient = form.exact and form.exact(self), form.gradient and form.gradient(self)
        self._run = form.choose(self) if form.choose is not None else form.meaning
        self._effects: tuple[Effect, ...] = form.effects(self) if callable(form.effects) else form.effects
        self._call: Expression | None = form.call and form.call(self)
        self.has_expression, self.nests = self._call is not None, self._call is not None and self._call.nests
        needed = (PRIMARY,) * len(self.operand_types)
        self.binds = (self._call.binds, self._call.needed) if self._call else (ANY, needed)
        self._others = dict[Any, Formed]()

    def displaced(self, numbers: tuple[tuple[str, int], ...]) -> Formed:
        """The same instruction with displacements of its addresses, on which its effects alone depend."""
        found = object.__new__(Formed)
        found.__dict__.update(self.__dict__)
        found.numbers, found.fields, found._others = numbers, self.fields | dict(numbers), {}
        effects = self.form.effects
        found._effects = effects(found) if callable(effects) else effects
        return found

    def _named(self, how: str | Of) -> str:
        return how(self) if callable(how) else how.format(**self.fields)

    def _register_types(self) -> tuple[tuple[DType, ...], tuple[DType, ...]]:
        """The types of results and operands. Programs may have operands in another order than PTX."""
        types = [(p, self.type_of(p)) for p, n in zip(self.present, self.counts, strict=True) for _ in range(n)]
        results, read = ([x for x in types if x[0].kind in kinds] for kinds in (("result",), _READ))
        self._order = [*range(len(read))]
        if self.form.operands:
            by_name = sorted(self._order, key=lambda k: self.form.operands.index(read[k][0].name))
            for position, k in enumerate(by_name):
                self._order[k] = position
        self.addresses = {n: p.offset for n, (p, _) in zip(self._order, read, strict=True) if p.offset}
        operands = self.ordered(read)
        self.ptx_types = tuple(REGISTER.get(p.written, t) for p, t in (*results, *operands))
        return tuple(t for _, t in results), tuple(t for _, t in operands)

    def _count(self, place: OperandPlace) -> int:
        if not place.count or place.kind not in ("result", *_READ):
            return int(place.kind in ("result", *_READ))
        value = self.fields.get(place.count, place.count)
        return value if isinstance(value, int) else int(value.strip("vxd") or 1)

    def type_of(self, place: OperandPlace) -> DType:
        """The type of a place's registers in Programs."""
        name = place.type
        own = next((self.fields[slot] for slot in _TYPED if slot in self.fields), self.form.type)
        if isinstance(self.fields.get(name), DType):
            return self.fields[name]
        if place.kind == "address" and not name:
            return u64 if self.fields.get("space", "global") in ("global", "const", "") else u32
        if name in ("", "unsigned") and self.home is not None:
            return self.home if not name else _UNSIGNED.get(self.home, self.home)
        if name == "wide":
            return _WIDE[REGISTER[own]]
        return REGISTER[self.fields.get(name, name or own)]

    def ordered(self, read: Sequence[Any]) -> Sequence[Any]:
        """Operands of PTX's text in the order that Programs have."""
        if not self.form.operands:
            return read
        return [x for _, x in sorted(zip(self._order, read, strict=True), key=lambda x: x[0])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "fields":
            raise AttributeError(name)
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"{self.form} has no {name}") from None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self.mnemonic}>"

    def __reduce__(self) -> Any:
        return _unpickled, (self.form.pattern, self.form.ptx, self.words, self.numbers, self.left, self.home)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The results by the form's function, in the types of the registers."""
        if self._run is None:
            raise TypeError(f"{self.mnemonic} has no register meaning")
        found: Any = self._run(*operands)
        types = self.result_types
        if not types:  # words that are stored
            return cast("tuple[Array, ...]", found) if isinstance(found, tuple) else (found,)
        if len(types) == 1 and not isinstance(found, tuple):
            wanted = types[0].numpy
            return (found if found.dtype == wanted else found.astype(wanted),)
        both: Iterable[tuple[Array, DType]] = zip(cast("tuple[Array, ...]", found), types, strict=False)
        return tuple([x.astype(t.numpy, copy=False) for x, t in both])

    def effects(self) -> tuple[Effect, ...]:
        """What the instruction does beyond its registers: the form's effects."""
        return self._effects

    def shadow(self, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
        """Poisoned bits of the results: the form's rule, or the general one where it has none."""
        rule = self.form.shadow
        found = rule(self, values, shadows, results) if rule is not None else None
        return found if found is not None else Instruction.shadow(self, values, shadows, results)

    def at(self, **immediates: int) -> Formed:
        """The same instruction with other immediates: displacements of its addresses and the like."""
        key = tuple(immediates.items())
        found = self._others.get(key)
        if found is None:
            numbers = tuple((dict(self.numbers) | immediates).items())
            found = self._others[key] = instruction(self.form, self.words, numbers, self.left, self.home)
        return found

    @property
    def details(self) -> list[str]:
        """Displacements and counts that the mnemonic leaves out and that are not 0."""
        offsets = [name for _, name in sorted(self.addresses.items())]  # in the order of Programs
        names = dict.fromkeys((*offsets, *self.fields))
        return [f"{n}={x}" for n in names if n.endswith(_DETAILS) and (x := self.fields[n]) not in (0, None)]

    # -- text

    def text(self, names: Sequence[str]) -> str:
        """The line of PTX; ``names`` are those of the results, then of the operands as Programs have them."""
        results, operands = names[: len(self.result_types)], names[len(self.result_types) :]
        given, read, parts = iter(results), iter([operands[n] for n in self._order]), list[str]()
        for place, count in zip(self.present, self.counts, strict=True):
            if place.kind == "number":
                if place.hidden:
                    continue
                number = self.fields[place.name]
                parts.append(f"{number:#x}" if place.type == "hex" else str(number))
                continue
            if place.kind == "sink":
                parts.append("_")
                continue
            items = [next(given if place.kind == "result" else read) for _ in range(count)]
            if place.hidden:
                continue
            shown = f"{{{', '.join(items)}}}" if place.count and self.fields.get(place.count, "v") else items[0]
            if place.kind == "address":
                offset = self.fields[place.offset]
                shown = f"[{shown}{f'+{offset}' if offset else ''}]"
            if place.box:
                shown = f"[{shown}" if place.box == "map" else f"{parts.pop()}, {shown}]"
            first = parts.pop() if place.paired and parts else "_"
            parts.append(f"{first}|{shown}" if place.paired else shown)
        return f"{self.ptx_name} {', '.join(parts)};" if parts else f"{self.ptx_name};"

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """The CUDA C++ statement."""
        own = self.form.statement(self, results, operands) if self.form.statement is not None else None
        if own is not None or self._call is not None:
            return own or f"{f'{results[0]} = ' if results else ''}{self.expression(operands)};"
        tied = self.positions(self.form.tied)
        in_place = bool(tied) and [operands[n] for n in tied] == [*results]
        guard = self.positions("guard")
        listed = [n for n in range(len(operands)) if n not in guard and not (in_place and n in tied)]
        names = [f"%{n}" for n in range(len(results))] + [""] * len(operands)
        for place, n in enumerate((*tied, *listed) if in_place else listed):
            names[len(results) + n] = f"%{place}" if in_place else f"%{len(results) + place}"
        taken = [self._in_ptx(len(results) + n, operands[n]) for n in listed]
        template = self._template(names)
        for n in guard:
            if operands[n] != "true":
                number = len(results) + len(taken)
                template = f"{{ .reg .pred guard; setp.ne.u32 guard, %{number}, 0; @guard {template} }}"
                taken.append((pred, operands[n]))
        return self.statement(template, results, taken, "+" if in_place else "=")

    def _in_ptx(self, position: int, operand: str) -> tuple[DType, str]:
        """The type of PTX's register for an operand, and the C++ expression of that type."""
        own, dtype = (*self.result_types, *self.operand_types)[position], self.ptx_types[position]
        return dtype, operand if dtype is own else f"({dtype.cuda})({operand})"

    def positions(self, name: str) -> list[int]:
        """The positions of a place's registers among the operands of Programs."""
        read = [p.name for p, n in zip(self.present, self.counts, strict=True) for _ in range(n) if p.kind in _READ]
        return [self._order[k] for k, of in enumerate(read) if of == name]

    def _template(self, names: list[str]) -> str:
        """Inline PTX. Predicates are 0 or 1 in 32 bits, and so are carries."""
        if self.form.inline is not None:
            return self.form.inline(self)
        count = len(self.result_types)
        before, after, declared = list[str](), list[str](), list[str]()
        for n, dtype in enumerate((*self.result_types, *self.operand_types)):
            if dtype is pred and names[n]:
                number, names[n] = names[n], f"p{names[n][1:]}"
                declared.append(names[n])
                if n < count:
                    after.append(f"selp.u32 {number}, 1, 0, {names[n]};")
                else:
                    before.append(f"setp.ne.u32 {names[n]}, {number}, 0;")
        if declared:
            before.insert(0, f".reg .pred {', '.join(declared)};")
        hidden = {p.name for p in self.present if p.hidden}
        borrows = self.words[0].startswith("sub")
        if "in" in hidden:
            carried = f"%{len(names) - 1}"
            leaves = f"sub.cc.u32 c, 0, {carried};" if borrows else f"add.cc.u32 c, {carried}, 0xffffffff;"
            before.append(f".reg .u32 c; {leaves}")
        if "out" in hidden:
            after.append(f"{'subc' if borrows else 'addc'}.u32 %1, 0, 0;{' neg.s32 %1, %1;' if borrows else ''}")
        text = self.text(names)
        return f"{{ {' '.join((*before, text, *after))} }}" if before or after else text

    def expression(self, operands: Sequence[str]) -> str:
        """The C++ expression of the operands. Raises TypeError for an instruction that has none."""
        if self._call is None:
            raise TypeError(f"{self.mnemonic} has no expression form")
        text = self._call.text
        return text.format(*operands) if isinstance(text, str) else text(operands)


def _generation(architecture: str) -> tuple[int, str]:
    return int(architecture[3:].rstrip("a") or 0), architecture


FORMS: dict[str, list[Form]] = {}
"""Opcode → the forms of PTX, in the order of their declaration."""
_OPERATORS: dict[str, list[Form]] = {}
_MADE: dict[Any, Formed] = {}


def form(pattern: str, **said: Any) -> Form:
    """Declare a form. Raises ValueError for one that is declared already."""
    made = Form(pattern, **said)
    table = FORMS if made.ptx else _OPERATORS
    for opcode in made.slots[0].words:
        known = table.setdefault(opcode, [])
        if any(f.pattern == pattern and f.slots == made.slots for f in known):
            raise ValueError(f"{made} is declared twice")
        known.append(made)
    return made


def instruction(
    form: Form,
    words: tuple[str, ...],
    numbers: tuple[tuple[str, int], ...] = (),
    left: frozenset[str] = frozenset(),
    home: DType | None = None,
) -> Formed:
    """The instruction of a form with these words; ``left`` names the operands that are left out."""
    home = home if form.registers else None
    if home is not None and form.registers != "width":
        words = _at_home(form, words, home)
    if numbers:
        given = dict(numbers)
        used = [n for n in form.immediates if n in given]
        numbers = tuple([(n, given[n]) for n in used if given[n] or n not in form.offsets])
    key = (form, words, numbers, left, home)
    found = _MADE.get(key)
    if found is None:
        at_base = tuple([x for x in numbers if x[0] not in form.offsets])
        made = instruction(form, words, at_base, left, home).displaced(numbers) if at_base != numbers else Formed(*key)
        found = _MADE.setdefault(key, made)
    return found


def _at_home(form: Form, words: tuple[str, ...], home: DType) -> tuple[str, ...]:
    """The words with the type of the registers: one instruction has one name where the sign does not count."""
    slots = zip(form.slots, words, strict=True)
    return tuple(home.name if s.name in _TYPED and home.name in s.words else w for s, w in slots)


def home_of(form: Form, words: tuple[str, ...]) -> DType | None:
    """The type of PTX's registers in a form that depends on their bits alone: the unsigned one, or the form's own."""
    if not form.registers:
        return None
    own = REGISTER.get(next((w for s, w in zip(form.slots, words, strict=True) if s.name in _TYPED), form.type), u32)
    return _UNSIGNED.get(own, own) if form.registers == "bits" else own


def _unpickled(pattern: str, ptx: bool, words: tuple[str, ...], *rest: Any) -> Formed:
    load_tables()  # a process that only reads a pickle has imported none of them
    forms = (FORMS if ptx else _OPERATORS)[words[0]]
    known = (f for f in forms if f.pattern == pattern and f.words.issuperset(filter(None, words)))
    return instruction(next(known), words, *rest)


@lru_cache(maxsize=1 << 12)
def named(
    name: str,
    home: DType | None = None,
    *,
    numbers: tuple[tuple[str, int], ...] = (),
    operands: int | None = None,
    ptx: bool = True,
) -> Formed:
    """The instruction of PTX's name, ``"add.rn.f32"``, whose optional operands are left out.

    ``operands`` tells forms of one name apart by how many they read. Raises RefusedError.
    """
    for form, words in candidates(tuple(name.split(".")), ptx):
        left = frozenset(p.name for p in form.places if p.optional and not p.given) - {n for n, _ in numbers}
        made = instruction(form, words, numbers, left, home or home_of(form, words))
        if operands in (None, len(made.operand_types)):
            return made
    raise RefusedError(f"{name} has no form of {operands} operands")


_TABLES = ("lanewise", "conversion", "special", "spaces", "collective", "barriers")
_MEMORY_TABLES = ("memory", "cluster", "async_copy", "mbarrier", "tensor_map")
_MATRIX_TABLES = ("matrix", "wmma", "wgmma")


@cache
def load_tables() -> None:
    """Import the modules whose lines declare the package's forms, which themselves import this one."""
    for name in (*_TABLES, *_MEMORY_TABLES, *_MATRIX_TABLES):
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
    forms = (FORMS if ptx else _OPERATORS).get(written[0], ())
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
