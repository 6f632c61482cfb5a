"""What is known of every instruction, and helpers of their text and their poison.

Arrays in ``meaning`` have the shape (warps, 32): one row per warp, one column per lane; lanewise instructions may also
get arrays that broadcast to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

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


def takes(what: str, dtype: DType, allowed: Sequence[DType]) -> None:
    """Raises VerifyError unless ``dtype`` is among the types that an instruction takes."""
    if dtype not in allowed:
        raise VerifyError(f"{what} takes {', '.join(t.name for t in allowed)}, not {dtype}: convert the operand first")


def waits_for_groups(pending: int) -> None:
    """Raises VerifyError unless a wait may leave so many of the newest groups pending."""
    if isinstance(pending, bool) or pending < 0:
        raise VerifyError(f"a wait leaves 0 or more of the newest groups pending, not {pending}")


class Instruction:
    """What the language, the emulator, the printer and verification know of an instruction.

    :mod:`warploom.isa.form` makes them, one object for each. Results and operands are registers, in order.
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
    # The shape and the operands of wgmma (warploom.isa.wgmma.WarpgroupProduct).
    warpgroup_product: Any = None
    # What an atomic leaves in memory, of the old value and its operands, elementwise; None for all else.
    combine: Callable[..., Array] | None = None
    # The operand that is the rank of a CTA in the cluster; None where none is.
    cta_rank: int | None = None

    @property
    def details(self) -> list[str]:
        """Displacements and counts that the mnemonic leaves out, as ``offset=16``."""
        raise NotImplementedError

    def effects(self) -> tuple[Effect, ...]:
        """What the instruction does beyond its registers."""
        raise NotImplementedError

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Results as a pure function of operands, where NumPy's warnings of overflows and the like are silenced.

        For a load, the operands are the words read, shape (warps, lanes, words); for a store, the result is the words
        to write in that shape.
        """
        raise NotImplementedError

    def expression(self, operands: Sequence[str]) -> str:
        """The CUDA C++ expression of an instruction of at most one result that needs no inline PTX."""
        raise NotImplementedError

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """The CUDA C++ statement; results are declared names, operands C++ expressions.

        Inline PTX has predicates as 0 or 1 in a 32-bit register.
        """
        raise NotImplementedError

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


def unsigned_bits(x: Array) -> Array:
    """The same bits as an unsigned integer; a predicate as it is."""
    return x if x.dtype == np.bool_ else np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def filled(where: Array, dtype: np.dtype[Any]) -> Array:
    """All ones where ``where`` holds, as the shadow of a register of ``dtype``."""
    if dtype == np.bool_:
        return np.asarray(where)
    zero: Any = np.dtype(f"u{dtype.itemsize}").type(0)
    return np.where(where, ~zero, zero)  # pyright: ignore[reportUnknownVariableType]


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
