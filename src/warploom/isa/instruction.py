"""Instructions: a form, the word in each slot, immediates and, where the form leaves it open, the registers' type.

The language, the emulator, the printer and verification know of an instruction what its attributes say; all that a line
of a table does not say derives from its words here. There is one object for each instruction. Arrays in ``meaning``
have the shape (warps, 32): one row per warp, one column per lane; lanewise instructions may also get arrays that
broadcast to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from warploom.core.dtypes import DType, pred, s16, s32, s64, u16, u32, u64
from warploom.isa.cpp import ANY, PRIMARY, Expression, inline_ptx
from warploom.isa.effects import Effect
from warploom.isa.form import FORMS, OPERATORS, REGISTER, Array, Form, Open, RefusedError, candidates, load_tables
from warploom.isa.pattern import OperandPlace
from warploom.isa.poison import anywhere

_DETAILS = ("offset", "threads", "pending")
_UNSIGNED = {s16: u16, s32: u32, s64: u64}
_WIDE = {u16: u32, s16: s32, u32: u64, s32: s64}
_TYPED = ("type", "int", "signed", "wide32", "bits", "half", "pair", "any")
"""Slots that name the type of operands without one of their own, unless a word of the pattern does."""


class Instruction:
    """An instruction of a form, whose results and operands are registers, in order.

    The words in its slots and its immediates are attributes by their names, beside those that every instruction has.
    """

    # PTX's name with its qualifiers, or the language's of plain arithmetic.
    mnemonic: str
    operand_types: tuple[DType, ...]
    result_types: tuple[DType, ...]
    # The first architecture that has it.
    since: str
    # Operands for which its result is undefined.
    open: tuple[Open, ...]
    # Pure instructions may be shared, dropped when unused, and have no effects.
    pure: bool
    # Lanewise: every lane's results depend on that lane's operands alone.
    lanewise: bool
    # Moves bits without computing: the shadow of a result is the meaning applied to the operands' shadows.
    moves_bits: bool
    # The compiler keeps its inline PTX where it stands, and in order with accesses to memory.
    volatile_ptx: bool
    clobbers_memory: bool
    # The operator of the language that it is (add, shl, lt …); '' for what is none.
    operator: str
    # How tightly its C++ expression binds, and how tightly those of its operands must.
    binds: tuple[int, tuple[int, ...]]
    # Whether it has a C++ expression, and whether that has the type of its result, so that it may stand inside another.
    has_expression: bool
    nests: bool
    # Derivative: f(k, result, gradient of the result, *operands) → what is added to each operand's gradient.
    gradient: Callable[..., Sequence[Any]] | None
    # An integer result as f64, of operands as f64, as if integers had no end; None where it is no address arithmetic.
    exact: Callable[..., Array] | None
    # Of a shuffle's lane operand: the lane that each lane reads, and whether it is in its group; None for all else.
    exchange: Callable[[Array], tuple[Array, Array]] | None
    # Copies a register.
    copies: bool = False
    # What CUDA C++ needs declared before the kernel.
    declaration: str = ""
    # Positions of operands that may be left unread, as another operand says (wgmma without accumulation).
    optional_operands: range = range(0)
    # A, B and C of a matrix product of a warp as fragments (warploom.isa.matrix.FragmentSlot).
    slots: Any = None
    # Gives the layout of the fragment that a warp loads from or stores to memory; raises LayoutError for unknown ones.
    fragment: Callable[[], Any] | None = None
    # The shape and the operands of wgmma (warploom.isa.matrix.WarpgroupProduct).
    warpgroup_product: Any = None
    # What an atomic leaves in memory, of the old value and its operands, elementwise; None for all else.
    combine: Callable[..., Array] | None = None
    # The operand that is the rank of a CTA in the cluster; None where none is.
    cta_rank: int | None = None

    def __init__(
        self,
        form: Form,
        words: tuple[str, ...],
        numbers: tuple[tuple[str, Any], ...],
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
        self._order: list[int] = []
        self.operator, self.pure, self.lanewise = self._said(form.operator), not form.asm, not form.asm
        self.moves_bits, self.exchange = form.moves_bits, self._said(form.exchange)
        self.volatile_ptx, self.clobbers_memory = "volatile" in form.asm, "memory" in form.asm
        self.mnemonic = self._said(form.name) or self.ptx_name + self._immediates()
        self.result_types, self.operand_types = self._register_types()
        self.since = max([form.since, *(s.since.get(w, "") for s, w in slots)], key=_generation)
        self.open, self.exact, self.gradient = self._said(form.open), self._said(form.exact), self._said(form.gradient)
        self._run = self._said(form.choose) or form.meaning
        self._effects: tuple[Effect, ...] = self._said(form.effects)
        self._call: Expression | None = self._said(form.call)
        self.has_expression, self.nests = self._call is not None, self._call is not None and self._call.nests
        needed = (PRIMARY,) * len(self.operand_types)
        self.binds = (self._call.binds, self._call.needed) if self._call else (ANY, needed)
        self._others = dict[Any, Instruction]()

    def displaced(self, numbers: tuple[tuple[str, Any], ...]) -> Instruction:
        """The instruction with displacements of its addresses, on which its effects alone depend."""
        found = object.__new__(Instruction)
        found.__dict__.update(self.__dict__)
        found.numbers, found.fields, found._others = numbers, self.fields | dict(numbers), {}
        found._effects = found._said(self.form.effects)
        return found

    def _said(self, what: Any) -> Any:
        """A value of the form, made of the instruction where it is a function or a pattern of names."""
        return what(self) if callable(what) else what.format(**self.fields) if isinstance(what, str) else what

    def _immediates(self) -> str:
        return "".join(f".{self.fields[p.name]:#x}" for p in self.present if p.kind == "number")

    def _register_types(self) -> tuple[tuple[DType, ...], tuple[DType, ...]]:
        """The types of results and operands. Programs may have operands in another order than PTX."""
        types = [(p, t) for p, n in zip(self.present, self.counts, strict=True) for t in self._types_of(p, n)]
        results, read = [x for x in types if not x[0].is_read], [x for x in types if x[0].is_read]
        self._order = [*range(len(read))]
        if self.form.order:
            by_name = sorted(self._order, key=lambda k: self.form.order.index(read[k][0].name))
            for position, k in enumerate(by_name):
                self._order[k] = position
        self.addresses = {n: p.offset for n, (p, _) in zip(self._order, read, strict=True) if p.offset}
        operands = self.ordered(read)
        self.ptx_types = tuple(REGISTER.get(p.written, t) for p, t in (*results, *operands))
        return tuple(t for _, t in results), tuple(t for _, t in operands)

    def _count(self, place: OperandPlace) -> int:
        if not place.count or not place.is_register:
            return int(place.is_register)
        value = self.fields.get(place.count, place.count)
        if isinstance(value, tuple):  # the type of each
            return len(cast("tuple[DType, ...]", value))
        return value if isinstance(value, int) else int(value.strip("vxd") or 1)

    def _types_of(self, place: OperandPlace, count: int) -> Sequence[DType]:
        each = self.fields.get(place.type)
        return (
            cast("tuple[DType, ...]", each) if isinstance(each, tuple) else [self.type_of(place) for _ in range(count)]
        )

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
        if not self.form.order:
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

    @property
    def has_meaning(self) -> bool:
        """Whether the form says what the instruction computes; else it is printed and read alone."""
        return self._run is not None

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Results as a pure function of operands, where NumPy's warnings of overflows and the like are silenced.

        For a load, the operands are the words read, shape (warps, lanes, words); for a store, the result is the words
        to write in that shape.
        """
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
        """Accesses, synchronisation and all else that the instruction does beyond its registers."""
        return self._effects

    def shadow(self, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
        """Which bits of a lanewise instruction's results depend on poisoned bits of its operands.

        ``shadows`` have a 1 for each poisoned bit (predicates: True), zeros for clean operands.
        """
        rule = self.form.shadow
        found = rule(self, values, shadows, results) if rule is not None else None
        return found if found is not None else anywhere(self, values, shadows, results)

    def at(self, **immediates: int) -> Instruction:
        """The instruction with other immediates: displacements of its addresses and the like."""
        key = tuple(immediates.items())
        found = self._others.get(key)
        if found is None:
            numbers = tuple((dict(self.numbers) | immediates).items())
            found = self._others[key] = instruction(self.form, self.words, numbers, self.left, self.home)
        return found

    @property
    def details(self) -> list[str]:
        """Displacements and counts that the mnemonic leaves out and that are not 0, as ``offset=16``."""
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
        """The CUDA C++ statement; results are declared names, operands C++ expressions.

        Inline PTX has predicates as 0 or 1 in a 32-bit register.
        """
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

    def statement(
        self, template: str, results: Sequence[str], taken: Sequence[tuple[DType, str]], written: str = "="
    ) -> str:
        """The ``asm`` statement of inline PTX; predicates are 0 or 1 in 32 bits; ``written`` is = or +."""
        given = zip(self.result_types, results, strict=True)
        flags = [name for t, name in zip(self.result_types, results, strict=True) if t is pred]
        holds = dict(zip(flags, ("holds", *(f"holds{i}" for i in range(1, len(flags)))), strict=False))
        outs = [("=r", holds[name]) if t is pred else (f"{written}{t.constraint}", name) for t, name in given]
        ins = [("r", f"(unsigned)({text})") if t is pred else (t.constraint, text) for t, text in taken]
        text = inline_ptx(template, outs, ins, volatile=self.volatile_ptx, memory=self.clobbers_memory)
        if not flags:
            return text
        kept = " ".join(f"{name} = {of} != 0;" for name, of in holds.items())
        return f"{{ unsigned {', '.join(holds.values())}; {text} {kept} }}"

    def positions(self, name: str) -> list[int]:
        """The positions of a place's registers among the operands of Programs."""
        read = [p.name for p, n in zip(self.present, self.counts, strict=True) for _ in range(n) if p.is_read]
        return [self._order[k] for k, of in enumerate(read) if of == name]

    def position(self, name: str) -> int | None:
        """The position of the only register of a place; None where none stands there."""
        return next(iter(self.positions(name)), None)

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


_MADE: dict[Any, Instruction] = {}


def instruction(
    form: Form,
    words: tuple[str, ...],
    numbers: tuple[tuple[str, Any], ...] = (),
    left: frozenset[str] = frozenset(),
    home: DType | None = None,
) -> Instruction:
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
        made = (
            instruction(form, words, at_base, left, home).displaced(numbers)
            if at_base != numbers
            else Instruction(*key)
        )
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


def _unpickled(pattern: str, ptx: bool, words: tuple[str, ...], *rest: Any) -> Instruction:
    load_tables()  # a process that only reads a pickle has imported none of them
    forms = (FORMS if ptx else OPERATORS)[words[0]]
    known = (f for f in forms if f.pattern == pattern and f.words.issuperset(filter(None, words)))
    return instruction(next(known), words, *rest)


@lru_cache(maxsize=1 << 12)
def named(
    name: str,
    home: DType | None = None,
    *,
    numbers: tuple[tuple[str, Any], ...] = (),
    operands: int | None = None,
    ptx: bool = True,
) -> Instruction:
    """The instruction of PTX's name, ``"add.rn.f32"``, whose optional operands are left out.

    ``operands`` tells forms of one name apart by how many they read. Raises RefusedError.
    """
    for form, words in candidates(tuple(name.split(".")), ptx):
        left = frozenset(p.name for p in form.places if p.optional and not p.given) - {n for n, _ in numbers}
        made = instruction(form, words, numbers, left, home or home_of(form, words))
        if operands in (None, len(made.operand_types)):
            return made
    raise RefusedError(f"{name} has no form of {operands} operands")
