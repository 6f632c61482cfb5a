"""The form every instruction has: types, CUDA text, NumPy meaning and effects, side by side.

An instruction is a frozen dataclass; its fields are what the encoding fixes (shape, width, cache hint, immediate
offset), its operands what a thread holds in registers. Arrays in ``meaning`` have the shape (warps, 32): one row per
warp, one column per lane; lanewise instructions may also get arrays that broadcast to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DType, f32, f64, pred, s16, s32, s64, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.effects import Effect

Array = NDArray[Any]

INTEGERS = (u16, s16, u32, s32, u64, s64)
FLOATS = (f32, f64)
REGISTERS = (pred, *INTEGERS, *FLOATS)
"""The types that a register of a thread can have."""


# How tightly an expression binds, as in C++'s operator table; higher binds tighter.
ANY, TERNARY, OR, XOR, AND, EQUALITY, RELATION, SHIFT, SUM, PRODUCT, PREFIX, PRIMARY = range(12)


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


_DETAILS = ("offset", "threads", "pending")


def shown_details(fields: Mapping[str, Any]) -> list[str]:
    """Displacements and counts of an instruction as the text of Programs shows them, ``offset=16``; none that is 0."""
    return [f"{name}={x}" for name, x in fields.items() if name.endswith(_DETAILS) and x not in (0, None)]


def takes(what: str, dtype: DType, allowed: Sequence[DType]) -> None:
    """Raises VerifyError unless ``dtype`` is among the types that an instruction takes."""
    if dtype not in allowed:
        raise VerifyError(f"{what} takes {', '.join(t.name for t in allowed)}, not {dtype}: convert the operand first")


def waits_for_groups(pending: int) -> None:
    """Raises VerifyError unless a wait may leave so many of the newest groups pending."""
    if isinstance(pending, bool) or pending < 0:
        raise VerifyError(f"a wait leaves 0 or more of the newest groups pending, not {pending}")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Base class. Subclasses give types, text, meaning and effects; see the module's docstring.

    What an instruction is stands in ``ptx`` (``{self.…}`` is a field), ``takes``, ``gives`` (a type, or the name of the
    field that holds it) and ``does``; what needs more words is said by :attr:`mnemonic`, :attr:`operand_types`,
    :attr:`result_types` and :meth:`effects`. Its text, where it is not inline PTX of its name, results and operands,
    stands in ``call`` (C++, with operands ``{0}`` …) or ``inline`` (PTX, with ``%0`` … for results, then operands, and
    ``{address}`` for the first operand with the field ``offset``), or is said by :meth:`expression`, :attr:`template`
    or :meth:`cuda`.
    """

    ptx: ClassVar[str] = ""
    call: ClassVar[str] = ""
    inline: ClassVar[str] = ""
    takes: ClassVar[tuple[DType | str, ...]] = ()
    gives: ClassVar[tuple[DType | str, ...]] = ()
    does: ClassVar[tuple[Effect, ...]] = ()
    # Pure instructions may be shared, dropped when unused, and have no effects.
    pure: ClassVar[bool] = False
    # Lanewise: every lane's results depend on that lane's operands alone.
    lanewise: ClassVar[bool] = False
    # Moves bits without computing: the shadow of a result is the meaning applied to the operands' shadows.
    moves_bits: ClassVar[bool] = False
    # The compiler keeps its inline PTX where it stands, and in order with accesses to memory.
    volatile_ptx: ClassVar[bool] = True
    clobbers_memory: ClassVar[bool] = True
    # Copies a register.
    copies: ClassVar[bool] = False
    # The operator of the language that it is (add, shl, lt …); '' for what is none.
    operator: ClassVar[str] = ""
    # Whether its C++ expression has the type of its result, so that it may stand inside another one.
    nests: ClassVar[bool] = True
    # What CUDA C++ needs declared before the kernel.
    declaration: ClassVar[str] = ""
    # Positions of operands that may be left unread, as another operand says (wgmma without accumulation).
    optional_operands: ClassVar[range] = range(0)
    # A, B and C of a matrix product of a warp as fragments (warploom.isa.matrix.FragmentSlot).
    slots: ClassVar[Any] = None
    # Gives the layout of the fragment that a warp loads from or stores to memory; raises LayoutError for unknown ones.
    fragment: ClassVar[Callable[[], Any] | None] = None
    # The shape and the operands of wgmma (warploom.isa.wgmma.WarpgroupProduct).
    warpgroup_product: ClassVar[Any] = None
    # Derivative: f(k, result, gradient of the result, *operands) → what is added to each operand's gradient.
    gradient: ClassVar[Callable[..., Sequence[Any]] | None] = None
    # An integer result as f64, of operands as f64, as if integers had no end; None where it is no address arithmetic.
    exact: ClassVar[Callable[..., Array] | None] = None

    # What an atomic leaves in memory, of the old value and its operands, elementwise; None for all else.
    combine: ClassVar[Callable[..., Array] | None] = None
    # The operand that is the rank of a CTA in the cluster; None where none is.
    cta_rank: ClassVar[int | None] = None

    # Of a shuffle's lane operand: the lane that each lane reads, and whether it is in its group; None for all else.
    exchange: ClassVar[Callable[[Array], tuple[Array, Array]] | None] = None

    @property
    def since(self) -> str:
        """The first architecture that has it, as far as its effects do not say so."""
        return "sm_80"

    @property
    def open(self) -> tuple[Open, ...]:
        """Operands for which its result is undefined."""
        return ()

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """How tightly its C++ expression binds, and how tightly those of its operands must."""
        return ANY, (PRIMARY,) * len(self.operand_types)

    def shadow(self, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
        """Which bits of a lanewise instruction's results depend on poisoned bits of its operands.

        ``shadows`` have a 1 for each poisoned bit (predicates: True), zeros for clean operands. By default what only
        moves bits moves their shadows; in all else one poisoned bit poisons the results.
        """
        if self.moves_bits:
            typed = [s if s.dtype == np.bool_ else s.view(v.dtype) for s, v in zip(shadows, values, strict=True)]
            return tuple(unsigned_bits(x) for x in self.meaning(*typed))
        poisoned = reduce(np.logical_or, [s != 0 for s in shadows])
        return tuple(filled(poisoned, r.dtype) for r in results)

    @property
    def mnemonic(self) -> str:
        """PTX's (or, for plain arithmetic, the language's) name of the instruction, with its qualifiers."""
        if not self.ptx:
            raise TypeError(f"{type(self).__name__} has no mnemonic: say it in ptx")
        return self.ptx.format(self=self)

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """Register types of the operands, in order."""
        return self._types(self.takes)

    @property
    def result_types(self) -> tuple[DType, ...]:
        """Register types of the results, in order."""
        return self._types(self.gives)

    def _types(self, named: tuple[DType | str, ...]) -> tuple[DType, ...]:
        return tuple([getattr(self, t) if isinstance(t, str) else t for t in named])

    @property
    def details(self) -> list[str]:
        """Fields that the mnemonic leaves out, as ``offset=16``."""
        named = (name for name in self.__dataclass_fields__ if name.endswith(_DETAILS))
        return shown_details({name: getattr(self, name) for name in named})

    def effects(self) -> tuple[Effect, ...]:
        """What the instruction does beyond its registers."""
        return self.does

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """The CUDA C++ statement; results are declared names, operands C++ expressions.

        Inline PTX has predicates as 0 or 1 in a 32-bit register.
        """
        if self.has_expression:
            return f"{f'{results[0]} = ' if results else ''}{self.expression(operands)};"
        return self.statement(self.template, results, [*zip(self.operand_types, operands, strict=True)])

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

    @property
    def template(self) -> str:
        """The inline PTX of what has no expression: results are ``%0`` and so on, operands follow."""
        if self.inline:
            return self.inline.format(self=self, address=address(len(self.result_types), getattr(self, "offset", 0)))
        places = ", ".join(f"%{i}" for i in range(len(self.result_types) + len(self.operand_types)))
        return f"{self.mnemonic} {places};" if places else f"{self.mnemonic};"

    def expression(self, operands: Sequence[str]) -> str:
        """The CUDA C++ expression of an instruction of at most one result that needs no inline PTX."""
        if not self.call:
            raise TypeError(f"{self.mnemonic} has no expression form")
        return self.call.format(*operands, self=self)

    @property
    def has_expression(self) -> bool:
        """Whether :meth:`expression` gives its text (else :attr:`template` is inline PTX)."""
        return bool(self.call) or type(self).expression is not Instruction.expression

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Results as a pure function of operands, where NumPy's warnings of overflows and the like are silenced.

        For a load, the operands are the words read, shape (warps, lanes, words); for a store, the result is the words
        to write in that shape.
        """
        raise TypeError(f"{self.mnemonic} has no register meaning")


def unsigned_bits(x: Array) -> Array:
    """The same bits as an unsigned integer; a predicate as it is."""
    return x if x.dtype == np.bool_ else np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def filled(where: Array, dtype: np.dtype[Any]) -> Array:
    """All ones where ``where`` holds, as the shadow of a register of ``dtype``."""
    if dtype == np.bool_:
        return np.asarray(where)
    zero: Any = np.dtype(f"u{dtype.itemsize}").type(0)
    return np.where(where, ~zero, zero)  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True, slots=True)
class Lanewise(Instruction):
    """Base class of plain arithmetic: every lane for itself, and nothing but its results."""

    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True
    volatile_ptx: ClassVar[bool] = False
    clobbers_memory: ClassVar[bool] = False


def inline_ptx(
    template: str,
    outputs: Sequence[tuple[str, str]] = (),
    inputs: Sequence[tuple[str, str]] = (),
    *,
    volatile: bool = True,
    memory: bool = False,
) -> str:
    """An ``asm`` statement. Outputs and inputs are (constraint, C++ expression); ``%0`` … number them in that order."""

    def operands(pairs: Sequence[tuple[str, str]]) -> str:
        return ", ".join(f'"{constraint}"({text})' for constraint, text in pairs)

    parts = [f'"{template}"']
    if outputs or inputs or memory:
        parts.append(operands(outputs))
    if inputs or memory:
        parts.append(operands(inputs))
    if memory:
        parts.append('"memory"')
    listed = " : ".join(parts).replace(" :  :  : ", " ::: ").replace(" :  : ", " :: ")
    return f"asm{' volatile' if volatile else ''}({listed});"


def address(position: int, offset: int) -> str:
    """``[%position+offset]``: an address operand with an immediate (PTX has no ``-``: a negative one is ``+-4``)."""
    return f"[%{position}+{offset}]" if offset else f"[%{position}]"


def braces(first: int, count: int) -> str:
    """``{%first, …}``: a vector of asm operands."""
    return "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"


def as_words(values: Sequence[Array], word: np.dtype[Any]) -> Array:
    """Stack registers of shape (warps, 32) into memory words of shape (warps, 32, len(values))."""
    return np.stack([np.ascontiguousarray(v).view(word) for v in values], axis=-1)
