"""The table of lanewise forms: arithmetic, comparison, selection and bits, one line a form.

16-bit floats are patterns in u16 registers, pairs of them in u32. Division by zero is unspecified in PTX; here it gives
all ones, as 32-bit divisions do on the hardware.

Sources: PTX ISA, "Integer Arithmetic", "Extended-Precision Integer Arithmetic", "Floating-Point", "Half Precision
Floating-Point", "Comparison and Selection", "Logic and Shift" and "Data Movement and Conversion" instructions.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, pred, u32
from warploom.core.errors import VerifyError
from warploom.isa import cpp, poison
from warploom.isa import meanings as m
from warploom.isa.form import REGISTERS, Open, RefusedError, common, form
from warploom.isa.instruction import Instruction, named
from warploom.isa.meanings import (
    BINARY_MEANINGS,
    bit_mask,
    distance_and_sum,
    dot,
    extended,
    extract,
    funnel_shift,
    highest,
    insert,
    left_of_highest,
    logic3,
    product24,
)

# Derivatives: (k, result, its gradient, operands) → what is added to the gradient of each operand. At a tie, maximum
# and minimum pass the gradient to their second operand; where no gradient comes, ex2 passes none on, though infinite.

LN_2 = float(np.log(2.0))
_GRADIENTS: dict[str, Any] = {
    "neg": lambda k, y, g, x: (-g,),
    "abs": lambda k, y, g, x: (k.select(x > 0.0, g, k.select(x < 0.0, -g, 0.0)),),
    "ex2": lambda k, y, g, x: (k.select(g == 0.0, 0.0, g * y * LN_2),),
    "lg2": lambda k, y, g, x: (g * k.reciprocal(x) * (1.0 / LN_2),),
    "rcp": lambda k, y, g, x: (-g * y * y,),
    "rsqrt": lambda k, y, g, x: (g * -0.5 * y * y * y,),
    "sqrt": lambda k, y, g, x: (g * 0.5 / y,),
    "tanh": lambda k, y, g, x: (g * (1.0 - y * y),),
    "add": lambda k, y, g, a, b: (g, g),
    "sub": lambda k, y, g, a, b: (g, -g),
    "mul": lambda k, y, g, a, b: (g * b, g * a),
    "div": lambda k, y, g, a, b: (g / b, -g * y / b),
    "max": lambda k, y, g, a, b: (k.select(a > b, g, 0.0), k.select(a > b, 0.0, g)),
    "min": lambda k, y, g, a, b: (k.select(a < b, g, 0.0), k.select(a < b, 0.0, g)),
    "fma": lambda k, y, g, a, b, c: (g * b, g * a, g),
}


def gradient(i: Instruction) -> Any:
    """The derivative of an f32 operation that neither saturates nor combines signs."""
    return None if i.fields.get("sat") else _GRADIENTS.get(i.op)


# Operators of C++


def contracted(i: Instruction) -> str:
    """A sum or product of floats is C++'s operator, which may be contracted, where it says nothing of its rounding."""
    return i.op if len(i.ptx_name.split(".")) == 2 else ""


def exact_quotient(i: Instruction) -> str:
    """C++ divides floats as ``div.rn`` does."""
    return "div" if i.how == "rn" and not i.fields.get("ftz") else ""


def quotient(i: Instruction) -> str:
    """Programs call the exact quotient ``div.f32``, as the language does."""
    return f"div.{i.words[-1]}" if i.operator else ""


# Address arithmetic without an end of the integers, in f64

_EXACT: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a * 2.0 ** np.minimum(b, 64),
}


def exact(i: Instruction) -> Any:
    """Sums, products and shifts of integers; not the upper half of a product."""
    return None if i.fields.get("how") == "hi" else _EXACT.get(i.op)


# Undefined operands


def divides(i: Instruction) -> tuple[Open, ...]:
    """``div`` and ``rem``: by zero, and the least integer by -1."""
    zero = Open(1, lambda _, by: by == 0, "divides by {}")
    if i.operand_types[0].kind != "signed":
        return (zero,)
    least = np.iinfo(i.operand_types[0].numpy).min
    overflow = "divides the least integer by {}, which overflows"
    return zero, Open(1, lambda x, by: (by == -1) & (x == least), overflow, alone=False)


def shifts(i: Instruction) -> tuple[Open, ...]:
    """The shifts of C++ are by less than the width."""
    bits = i.operand_types[0].bits
    return (Open(1, lambda _, by: by >= bits, f"shifts by {{}} of its {bits} bits"),)


EQUAL, ORDER = "eq ne", "lt le gt ge"
FLOAT = "equ neu ltu leu gtu geu num nan"
BOOL = "and or xor"
BITS = {"operator": "{op}", "call": cpp.infix, "shadow": poison.bitwise}
HOME_INT = {"name": "{op}.{home}", "registers": "bits"}

# Floats
SUM = common(op="add sub mul", choose=m.two, operator=contracted, call=cpp.rounded)
form("{op}{.rnd}{.ftz}{.sat}.f32 d, a, b", SUM, gradient=gradient)
form("{op}{.rnd}.f64 d, a, b", SUM)
QUOTIENT = common(choose=m.divided, name=quotient, operator=exact_quotient, call=cpp.infix)
form("div.{how}{.ftz}.f32 d, a, b", QUOTIENT, how="approx full rn rz rm rp", gradient=gradient)
form("div.{how}.f64 d, a, b", QUOTIENT, how="rn rz rm rp")
form("{op}.{rnd}{.ftz}{.sat}.f32 d, a, b, c", op="fma mad", choose=m.fused, call=cpp.rounded, gradient=gradient)
form("{op}.{rnd}.f64 d, a, b, c", op="fma mad", choose=m.fused, call=cpp.rounded)
form("{op}{.ftz}{.NaN}.f32 d, a, b", op="min max", choose=m.two, call=cpp.extreme, gradient=gradient)
form("{op}{.ftz}{.NaN}.f32 d, a, b, c", op="min max", choose=m.three, since="sm_100")
form("{op}.f64 d, a, b", op="min max", choose=m.two, call=cpp.extreme)
form("neg{.ftz}.f32 d, a", choose=m.one, call=cpp.prefix, gradient=gradient)
form("neg.f64 d, a", choose=m.one, call=cpp.prefix)
form("abs{.ftz}.f32 d, a", choose=m.one, call=cpp.magnitude, gradient=gradient)
form("abs.f64 d, a", choose=m.one, call=cpp.magnitude)
form("{op}.approx{.ftz}.f32 d, a", op="ex2 lg2 rcp rsqrt sqrt sin cos", choose=m.one, gradient=gradient)
form("{op}.{rnd}{.ftz}.f32 d, a", op="rcp sqrt", choose=m.one, gradient=gradient)
form("{op}.{rnd}.f64 d, a", op="rcp sqrt", choose=m.one)
form("rcp.approx.ftz.f64 d, a", choose=m.one)
form("rsqrt.approx.f64 d, a", choose=m.one)
form("tanh.approx.f32 d, a", choose=m.one, gradient=gradient)
form("copysign.{type} d, a, b", type="f32 f64", meaning=lambda a, b: np.copysign(b, a))

# 16-bit floats, alone and in pairs
for kind, types in (("half", "f16 bf16"), ("pair", "f16x2 bf16x2")):
    late = {kind: f"{types}@sm_90"}
    tracked: Any = {"choose": m.halves, "shadow": poison.by_halves if kind == "pair" else None}
    form(f"{{op}}{{.rnd}}.{{{kind}}} d, a, b", tracked, late, op="add sub mul", rnd="rn")
    form(f"{{op}}{{.NaN}}.{{{kind}}} d, a, b", tracked, op="min max")
    form(f"fma.rn{{.relu}}.{{{kind}}} d, a, b, c", tracked)
    form(f"{{op}}.{{{kind}}} d, a", tracked, op="neg abs")
    form(f"tanh.approx.{{{kind}}} d, a", tracked, late)
    of_f16, of_bf16 = ({kind: x} for x in types.split())
    form(f"ex2.approx.{{{kind}}} d, a", tracked, of_f16)
    form(f"ex2.approx.ftz.{{{kind}}} d, a", tracked, of_bf16, default={"ftz": "ftz"}, since="sm_90")

# Pairs of 16-bit integers
PAIRS = common(choose=m.integer_pairs, shadow=poison.by_halves, since="sm_90")
form("{op}.u16x2 d, a, b", PAIRS, op="add min max")
form("add.s16x2 d, a, b", PAIRS)
form("{op}{.relu}.s16x2 d, a, b", PAIRS, op="min max")

# Pairs of f32
form("{op}{.rnd}{.ftz}.f32x2 d, a, b", op="add sub mul", choose=m.single_pairs, since="sm_100")
form("fma.{rnd}{.ftz}.f32x2 d, a, b, c", choose=m.single_pairs, since="sm_100")

# Integers
form("{op}.{int} d, a, b", HOME_INT, op="add sub", operator="{op}", choose=m.two, call=cpp.infix, exact=exact)
form("{op}.sat.s32 d, a, b", op="add sub", choose=m.held_sum)
form("mul.lo.{int} d, a, b", HOME_INT, operator="mul", meaning=np.multiply, call=cpp.infix, exact=exact)
form("mul.hi.{int} d, a, b", meaning=m.product("hi"))
form("mul.wide.{int} d:wide, a, b", int="u16 s16 u32 s32", meaning=m.product("wide"), call=cpp.product, exact=exact)
form(
    "mad.lo.{int} d, a, b, c",
    HOME_INT,
    meaning=m.product_sum("lo"),
    default={"how": "lo"},
    call=cpp.product_sum,
    exact=exact,
)
form("mad.hi.{int} d, a, b, c", meaning=m.product_sum("hi"), default={"how": "hi"})
form(
    "mad.wide.{int} d:wide, a, b, c:wide",
    int="u16 s16 u32 s32",
    meaning=m.product_sum("wide"),
    default={"how": "wide"},
    call=cpp.product_sum,
    exact=exact,
)
form("{op}.{int} d, a, b", op="div rem", operator="{op}", choose=m.two, call=cpp.infix, open=divides)
form("{op}.{int} d, a, b", op="min max", choose=m.two, call=cpp.extreme)
form("neg.{signed} d, a", HOME_INT, choose=m.one, call=cpp.prefix)
form("abs.{signed} d, a", choose=m.one)
form("sad.{int} d, a, b, c", int="u32 s32", meaning=distance_and_sum)
form("mul24.{how}.{int} d, a, b", how="lo hi", int="u32 s32", choose=lambda i: product24(i.how == "hi"))
form(
    "mad24.{how}.{int} d, a, b, c",
    how="lo hi",
    int="u32 s32",
    choose=lambda i: lambda a, b, c: product24(i.how == "hi")(a, b) + c,
)


def summed(i: Instruction) -> dict[str, str]:
    """Sums of products of which one factor has a sign are signed."""
    return {"sum": "u32" if i.x == i.y == "u32" else "s32"}


form(
    "dp4a.{x}.{y} d:sum, a:x, b:y, c:sum",
    x="u32 s32",
    y="u32 s32",
    let=summed,
    choose=lambda i: dot(0, i.x == "s32", i.y == "s32"),
)
form(
    "dp2a.{how}.{x}.{y} d:sum, a:x, b:y, c:sum",
    how="lo hi",
    x="u32 s32",
    y="u32 s32",
    let=summed,
    choose=lambda i: dot(2 * (i.how == "hi"), i.x == "s32", i.y == "s32", 16),
)

# Carries: a register of their own, which the reader of PTX puts in and out
form("{op}.cc.{wide32} d, ^out:u32, a, b", op="add sub", choose=m.carried)
form("{op}.{wide32} d, a, b, ^in:u32", op="addc subc", choose=m.carried)
form("{op}.cc.{wide32} d, ^out:u32, a, b, ^in:u32", op="addc subc", choose=m.carried)
form("mad.{how}.cc.{wide32} d, ^out:u32, a, b, c", how="lo hi", choose=m.carried)
form("madc.{how}.{wide32} d, a, b, c, ^in:u32", how="lo hi", choose=m.carried)
form("madc.{how}.cc.{wide32} d, ^out:u32, a, b, c, ^in:u32", how="lo hi", choose=m.carried)

# Bits
form("{op}.{bits} d, a, b", BITS, HOME_INT, op=BOOL, choose=m.two)
form("{op}.pred d, a, b", BITS, op=BOOL, choose=m.two)
form("not.{bits} d, a", HOME_INT, choose=m.one, call=cpp.prefix, shadow=poison.bitwise)
form("not.pred d, a", choose=m.one, call=cpp.prefix, shadow=poison.bitwise)
form("cnot.{bits} d, a", meaning=lambda a: a == 0)
form("shl.{bits} d, a, b:u32", choose=m.two, shadow=poison.moved(1), exact=exact)
form("shr.{type} d, a, b:u32", type="b16 b32 b64 u16 u32 u64 s16 s32 s64", choose=m.two, shadow=poison.moved(1))
form("{op}.{bits} d:u32, a", HOME_INT, op="popc clz", bits="b32 b64", choose=m.one, call=cpp.counted)
form("brev.{bits} d:unsigned, a", HOME_INT, bits="b32 b64", choose=m.one, call=cpp.counted, shadow=poison.moved(1))
form("bfe.{wide32} d, a, b:u32, c:u32", meaning=extract, shadow=poison.moved(1))
form("bfi.{bits} d, a, b, c:u32, e:u32", bits="b32 b64", meaning=insert, shadow=poison.moved(2))
form("bfind{.shiftamt}.{wide32} d:u32, a", choose=lambda i: left_of_highest if i.shiftamt else highest)
form(
    "shf.{way}.{mode}.b32 d, a, b, c",
    way="l r",
    mode="wrap clamp",
    choose=lambda i: funnel_shift(i.way == "l", i.mode == "wrap"),
    shadow=poison.moved(2),
)
form("bmsk.{mode}.b32 d, a, b", mode="wrap clamp", choose=lambda i: bit_mask(i.mode == "clamp"))
form(
    "szext.{mode}.{int} d, a, b:u32",
    mode="wrap clamp",
    int="u32 s32",
    choose=lambda i: extended(i.mode == "clamp"),
    shadow=poison.moved(1),
)
form("lop3.b32 d, a, b, c, #table", choose=lambda i: lambda a, b, c: logic3(a, b, c, i.table), shadow=poison.bitwise)
form("prmt.b32{.mode} d, a, b, c", mode=" ".join(m.PERMUTATIONS), choose=m.permuted, shadow=poison.moved(2))

# Comparison and selection
SETP, SECOND = "setp.{cmp}{.bool}", "a, b, c:pred?bool"
for cmp, types, more in (
    (EQUAL, "b16 b32 b64 s16 s32 s64 u16 u32 u64", {"registers": "bits", "operator": "{cmp}", "name": "{cmp}.{home}"}),
    (ORDER, "s16 s32 s64 u16 u32 u64", {"operator": "{cmp}", "name": "{cmp}.{type}"}),
    ("lo ls hi hs", "u16 u32 u64", {}),
):
    said = common(cmp=cmp, type=types, choose=m.compared, call=cpp.compared)
    form("setp.{cmp}.{type} d:pred, a, b", said, more)
    form("setp.{cmp}.{type} d:pred|q:pred, a, b", said)
    form(f"setp.{{cmp}}.{{bool}}.{{type}} d:pred|q:pred?, {SECOND}", said, bool=BOOL)
    form("set.{cmp}.{to}.{type} d:to, a, b", cmp=cmp, to="u32 s32 f32", type=types, choose=m.flag_set)
for op, to in (("eq", "eq"), ("neu", "ne"), *((x, x) for x in ORDER.split())):
    said = common(cmp=op, type="f32 f64", operator=to, name=f"{to}.{{type}}", call=cpp.compared)
    form("setp.{cmp}.{type} d:pred, a, b", said, choose=m.compared)
for ftz, number, half, pair in (("{.ftz}", "f32", "f16", "f16x2"), ("", "f64", "bf16@sm_90", "bf16x2@sm_90")):
    said = common(cmp=f"{EQUAL} {ORDER} {FLOAT}", bool=BOOL, choose=m.compared, call=cpp.compared)
    form(f"{SETP}{ftz}.{{type}} d:pred|q:pred?, {SECOND}", said, type=number)
    form(f"{SETP}{ftz}.{{type}} d:pred, {SECOND}", said, type=half)
    form(f"{SETP}{ftz}.{{type}} d:pred|q:pred, {SECOND}", said, type=pair)
    for kind, to in (
        (number, "u32 s32 f32"),
        (half, f"u16 s16 u32 s32 {half.partition('@')[0]}"),
        (pair, f"u32 s32 {pair.partition('@')[0]}"),
    ):
        form(f"set.{{cmp}}{ftz}.{{to}}.{{type}} d:to, a, b", cmp=said["cmp"], to=to, type=kind, choose=m.flag_set)
form(
    "selp.{any} d, a, b, c:pred",
    registers="home",
    name="selp.{home}",
    operands="c a b",
    meaning=np.where,
    call=cpp.selected,
    shadow=poison.selected,
    exact=lambda _: np.where,
    gradient=lambda _: lambda k, y, g, c, a, b: (0.0, k.select(c, g, 0.0), k.select(c, 0.0, g)),
)
form("slct.{any}.{sign} d, a, b, c:sign", sign="s32 f32", meaning=lambda a, b, c: np.where(c >= 0, a, b))

# Operators of C++ that PTX has otherwise: shifts that are undefined beyond the width, comparisons of predicates
SHIFT = common(
    operator="{op}",
    choose=m.two,
    call=cpp.infix,
    shadow=poison.moved(1),
    ptx=False,
)
form("{op}.{int} d, a, b:u32", SHIFT, op="shl shr", open=shifts, exact=exact)
form("{op}.pred d, a, b", op=EQUAL, operator="{op}", choose=lambda i: BINARY_MEANINGS[i.op], call=cpp.infix, ptx=False)


# The language's arithmetic by its own names: ``binary("lt", u32)`` is ``setp.lt.u32``, ``a / b`` of floats ``div.rn``,
# ``!=`` of floats ``neu``.


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_BINARY = {
    **{op: (f"{op}.{{t}}", f"{op}.{{t}}") for op in ("add", "sub", "min", "max")},
    **{op: (f"{op}.b{{n}}", "") for op in ("and", "or", "xor")},
    **{op: (f"setp.{op}.{{t}}", f"setp.{op}.{{t}}") for op in COMPARISONS},
    **{op: (f"{op}.{{t}}", "") for op in ("rem", "shl", "shr")},
    "mul": ("mul.lo.{t}", "mul.{t}"),
    "div": ("div.{t}", "div.rn.{t}"),
    "ne": ("setp.ne.{t}", "setp.neu.{t}"),
}
"""Operator → PTX's name of it for integers of a type ``{t}`` of ``{n}`` bits, and for floats; '' for none."""
_UNARY = {
    "neg": ("neg.s{n}", "neg.{t}"),
    "not": ("not.b{n}", ""),
    "abs": ("abs.{t}", "abs.{t}"),
    **{op: (f"{op}.b{{n}}", "") for op in ("popc", "clz", "brev")},
}
_NOT_PTX = ("shl", "shr")


@lru_cache(maxsize=1 << 10)
def _found(op: str, names: tuple[str, str], dtype: DType) -> Instruction | None:
    """The instruction of an operator for a type, None where there is none."""
    if dtype is pred:
        name, ptx = f"{op}.pred", op not in ("eq", "ne")
    else:
        name, ptx = names[dtype.is_float].format(t=dtype.name, n=dtype.bits), op not in _NOT_PTX
    try:
        return named(name, dtype if dtype.is_integer else None, ptx=ptx) if name else None
    except RefusedError:
        return None


def _made(op: str, names: tuple[str, str], dtype: DType) -> Instruction:
    found = _found(op, names, dtype)
    if found is None:
        allowed = ", ".join(t.name for t in REGISTERS if _found(op, names, t) is not None)
        raise VerifyError(f"{op} takes {allowed}, not {dtype}: convert the operand first")
    return found


def binary(op: str, dtype: DType) -> Instruction:
    """``add sub mul div rem and or xor min max shl shr`` and the comparisons ``lt le gt ge eq ne`` of one type.

    The count of a shift is u32. Raises VerifyError for a type that the operator does not take.
    """
    return _made(op, _BINARY[op], dtype)


def unary(op: str, dtype: DType) -> Instruction:
    """``neg not abs popc clz brev`` of one type; ``popc`` and ``clz`` give a u32, ``brev`` an unsigned integer.

    Raises VerifyError for a type that the operator does not take.
    """
    return _made(op, _UNARY[op], dtype)


def multiply_wide(dtype: DType = u32) -> Instruction:
    """The product of two integers, in twice their width."""
    return _made("mul.wide", ("mul.wide.{t}", ""), dtype)


def select(dtype: DType) -> Instruction:
    """The second operand where the predicate, the first one, holds, else the third."""
    if dtype is pred:
        raise VerifyError("selp takes integers and floats, not pred")
    return named(f"selp.b{dtype.bits}", dtype)


def pair_arithmetic(op: str, half: DType) -> Instruction:
    """Packed 16-bit arithmetic, ``fma add mul min max`` on f16x2 or bf16x2 (bf16 has add and mul from sm_90 on)."""
    return named(f"{op}{'' if op in ('min', 'max') else '.rn'}.{half}x2")
