"""C++ expressions of lanewise forms: what a compiler sees through, where inline PTX would stand in its way.

Each function gives the expression of an instruction, or None where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.core.dtypes import DType, f32, f64, pred, s32, s64, u16, u32, u64

# How tightly an expression binds, as in C++'s operator table; higher binds tighter.
ANY, TERNARY, OR, XOR, AND, EQUALITY, RELATION, SHIFT, SUM, PRODUCT, PREFIX, PRIMARY = range(12)


@dataclass(frozen=True, slots=True)
class Expression:
    """The C++ expression of an instruction: how tightly it binds, and how tightly its operands must.

    ``text`` has ``{0}`` … for operands, or makes it of them. ``nests``: it may stand inside another expression.
    """

    text: str | Callable[[Sequence[str]], str]
    binds: int
    needed: tuple[int, ...]
    nests: bool = True


_INFIX = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "rem": ("%", PRODUCT),
    "shl": ("<<", SHIFT),
    "shr": (">>", SHIFT),
    "and": ("&", AND),
    "xor": ("^", XOR),
    "or": ("|", OR),
    "eq": ("==", EQUALITY),
    "ne": ("!=", EQUALITY),
    "lt": ("<", RELATION),
    "le": ("<=", RELATION),
    "gt": (">", RELATION),
    "ge": (">=", RELATION),
}
SAME = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
"""PTX's comparisons of unsigned integers that are called otherwise than those of other types."""
OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
"""Comparisons that are true where one operand is a NaN → the ordered ones that they are the opposite of."""
_UNSIGNED = {s32: u32, s64: u64}


def called(text: str, count: int, nests: bool = True) -> Expression:
    """A call of a function, by its name or with its operands ``{0}`` …."""
    places = ", ".join(f"{{{i}}}" for i in range(count))
    return Expression(text if "(" in text else f"{text}({places})", PRIMARY, (ANY,) * count, nests)


def infix(i: Any) -> Expression | None:
    """``a + b``. Sums and products of signed integers wrap: C++, which leaves that open, gets them as unsigned."""
    dtype, op = i.operand_types[0], i.operator
    if not op or len(i.result_types) > 1:
        return None
    sign, own = _INFIX[op]
    if dtype in _UNSIGNED and op in ("add", "sub", "mul", "shl"):
        return Expression(_wrapping(dtype, sign), PREFIX, (PREFIX, PRODUCT if own == SUM else PREFIX))
    if dtype is u16 and op == "mul":  # as int it could overflow
        return Expression("(unsigned){0} * {1}", own, (own, own + 1))
    if own >= SUM:
        needed = own, own + 1
    elif own in (EQUALITY, RELATION):
        needed = SUM, SUM
    else:
        needed = PREFIX, PREFIX  # bits and shifts: nobody knows their precedence, so always parentheses
    return Expression(f"{{0}} {sign} {{1}}", own, needed)


def _wrapping(dtype: DType, sign: str) -> Callable[[Sequence[str]], str]:
    cast, unsigned = f"({dtype.cuda})", _UNSIGNED[dtype].cuda

    def text(operands: Sequence[str]) -> str:
        a, b = operands
        inner = a.removeprefix(cast) if a.startswith(f"{cast}(") else a  # of a sum of sums only the outer cast
        return f"{cast}(({unsigned}){inner} {sign} {b})"

    return text


def compared(i: Any) -> Expression | None:
    """``setp`` of one predicate: ``a < b``, its opposite where a NaN counts, combined with another predicate."""
    if len(i.result_types) > 1 or i.fields.get("ftz") or (i.operand_types[0] is u16 and "f16" in i.type):
        return None
    cmp = "ne" if i.cmp == "neu" else str(SAME.get(i.cmp, i.cmp))
    is_float = i.operand_types[0].is_float
    if i.cmp in ("num", "nan"):
        text = "({0} == {0} && {1} == {1})" if i.cmp == "num" else "({0} != {0} || {1} != {1})"
        own, needed = PRIMARY, (SUM, SUM)
    elif i.cmp == "equ":
        text, own, needed = "!({0} < {1} || {0} > {1})", PREFIX, (SUM, SUM)
    elif cmp in OPPOSITE:
        text, own, needed = f"!({{0}} {_INFIX[OPPOSITE[cmp]][0]} {{1}})", PREFIX, (SUM, SUM)
    elif is_float and i.cmp == "ne":
        text, own, needed = "({0} < {1} || {0} > {1})", PRIMARY, (SUM, SUM)
    else:
        sign, own = _INFIX[cmp]
        text, needed = f"{{0}} {sign} {{1}}", (SUM, SUM)
    if not i.fields.get("bool"):
        return Expression(text, own, needed)
    sign, own = _INFIX[i.bool]
    return Expression(f"({text}) {sign} {{2}}", own, (*needed, PREFIX))


def extreme(i: Any) -> Expression | None:
    """``fminf``, ``fmin``, ``min`` and their like."""
    dtype = i.result_types[0]
    if i.fields.get("ftz") or i.fields.get("NaN"):
        return None
    names = {f32: f"f{i.op}f", f64: f"f{i.op}"}
    return called(str(names.get(dtype, i.op)), 2)


def rounded(i: Any) -> Expression | None:
    """Sums, products and ``fma`` of floats: operators, and with ``.rn`` CUDA's functions."""
    if i.operator:
        return infix(i)
    if i.fields.get("ftz") or i.fields.get("sat") or i.rnd != "rn":
        return None
    letter = "f" if i.result_types[0] is f32 else "d"
    if i.op in ("fma", "mad"):
        return called("__fmaf_rn" if letter == "f" else "__fma_rn", 3)
    return called(f"__{letter}{i.op}_rn", 2)


def prefix(i: Any) -> Expression | None:
    """``-x`` (of the unsigned type), ``~x``, ``!x`` of a predicate."""
    dtype = i.operand_types[0]
    if i.fields.get("ftz"):
        return None
    if i.op == "not":
        return Expression("!{0}" if dtype is pred else "~{0}", PREFIX, (PREFIX,))
    unsigned = _UNSIGNED.get(dtype)
    return Expression("-{0}" if unsigned is None else f"({dtype.cuda})-({unsigned.cuda}){{0}}", PREFIX, (PREFIX,))


def magnitude(i: Any) -> Expression | None:
    """``fabsf(x)``, ``fabs(x)``; C++ leaves that of the least integer open."""
    return None if i.fields.get("ftz") else called("fabsf" if i.result_types[0] is f32 else "fabs", 1)


def counted(i: Any) -> Expression:
    """``__popc(x)``, ``__clzll(x)``, ``__brev(x)``, of which the first two give an int."""
    return called(f"__{i.op}{'ll' if i.operand_types[0].bits == 64 else ''}", 1, i.op == "brev")


def product(i: Any) -> Expression | None:
    """A product in the type of twice the width, which ptxas makes one wide multiplication."""
    wide = i.result_types[0]
    return Expression(f"({wide.cuda}){{0}} * {{1}}", PRODUCT, (PREFIX, PREFIX)) if wide.bits == 64 else None


def product_sum(i: Any) -> Expression | None:
    """``a * b + c`` of unsigned registers; the sum of a wide product in the type of twice the width."""
    dtype = i.result_types[0]
    if i.how == "lo" and dtype in (u32, u64):
        return Expression("{0} * {1} + {2}", SUM, (PRODUCT, PREFIX, PRODUCT))
    if i.how != "wide" or dtype.bits != 64:
        return None
    if dtype is u64:
        return Expression("(unsigned long long){0} * {1} + {2}", SUM, (PREFIX, PREFIX, PRODUCT))
    text = "(long long)((unsigned long long)((long long){0} * {1}) + {2})"
    return Expression(text, PREFIX, (PREFIX, PREFIX, PRODUCT))


def selected(_: Any) -> Expression:
    """``c ? a : b``, whose values are computed already, so that nothing branches."""
    return Expression("{0} ? {1} : {2}", TERNARY, (OR, OR, OR))


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
