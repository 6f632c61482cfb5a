"""Arithmetic, comparisons, moves and bits: what every thread does for itself.

Source: PTX ISA, "Integer Arithmetic", "Floating-Point", "Comparison and Selection", "Logic and Shift" and "Data
Movement and Conversion" instructions.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.core.dtypes import DType, f32, pred, u16, u32, u64
from warploom.ir.statements import Const
from warploom.ir.statements import Operand as Value
from warploom.isa.alu import Binary, Fma, MultiplyWide, Select, Unary
from warploom.isa.conversion import Combine, Half
from warploom.isa.scalar import SCALARS, Scalar
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.integer_forms import extended
from warploom.ptx.syntax import TYPES, Both, Integer, Operand, Vector
from warploom.ptx.types import TYPE, unsigned


def _bits(kind: str) -> DType:
    """The unsigned type for what does not depend on the sign."""
    return unsigned(TYPE[kind]) if TYPE[kind].is_integer else TYPE[kind]


@form("add", "sub", "mul", "div", "rem", "min", "max")
def arithmetic(b: Builder, f: Form) -> None:
    """Two operands of one type."""
    if f.flag("cc"):
        extended(b, f, takes=False, leaves=True)
        return
    if f.flag("sat"):
        _saturated(b, f, arithmetic)
        return
    kind, op = f.type(), f.opcode
    if op == "mul" and kind[0] in "us" and not kind.endswith("x2"):
        _multiply(b, f, kind)
        return
    operands = f.operands(3)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        rounding = f.one_of("rn")
        name = f"{op}{'.NaN' if f.flag('NaN') else ''}"
        if op in ("add", "sub", "mul") and (rounding or kind.startswith("f16")):
            name = f"{op}{'.rn' if kind.startswith('f16') else ''}"
        b.apply(operands, Scalar(f"{name}.{kind}"))
        return
    if kind in ("f32", "f64"):
        ftz, how = f.flag("ftz"), f.one_of("rn", "rz", "rm", "rp", "full", "approx", "NaN")
        name = ".".join(
            x for x in (op, how if how != "NaN" else "", "ftz" if ftz else "", how if how == "NaN" else "", kind) if x
        )
        if op in ("add", "sub", "mul") and not how:
            name = name.replace(op, f"{op}.rn", 1)
        if name in SCALARS:
            b.apply(operands, Scalar(name))
            return
        if ftz or how not in ("", "rn"):
            raise f.refusal()
    _not_packed(f, kind)
    dtype = TYPE[kind] if op not in ("add", "sub") else _bits(kind)
    b.apply(operands, Binary(op, dtype))


def _not_packed(f: Form, kind: str) -> None:
    """Refuse pairs in one register where they would be taken for one number."""
    if kind.endswith("x2"):
        raise f.refusal(f"pairs of type .{kind} are not supported here")


def _saturated(b: Builder, f: Form, plain: Callable[[Builder, Form], None]) -> None:
    """A form of f32 with ``.sat``, as ``plain`` has it without, held within 0 and 1; sums of s32 within its range."""
    if "s32" in f.instruction.modifiers:
        b.apply(f.operands(3), Scalar(f"{f.opcode}.sat.{f.type()}"))
        return
    if "f32" not in f.instruction.modifiers:
        raise f.refusal(".sat is supported for f32, and for sums of s32")
    plain(b, f)
    target = f.instruction.operands[0]
    b.assign(target, b.op(Scalar("cvt.sat.f32.f32"), b.read(target, f32)))


def _multiply(b: Builder, f: Form, kind: str) -> None:
    how, operands = f.which("lo", "hi", "wide"), f.operands(3)
    if how == "lo":
        b.apply(operands, Binary("mul", _bits(kind)))
    elif how == "hi":
        b.apply(operands, Scalar(f"mul.hi.{kind}"))
    else:
        b.assign(operands[0], _wide(b, f, kind, operands[1], operands[2]))


def _wide(b: Builder, f: Form, kind: str, x: Operand, y: Operand) -> Value:
    """The product of twice the width."""
    if kind in ("u32", "s32"):
        instruction = MultiplyWide(TYPE[kind])
        return b.op(instruction, b.read(x, TYPE[kind]), b.read(y, TYPE[kind]))
    if kind in ("u16", "s16"):
        wide = TYPE[f"{kind[0]}32"]
        return b.binary("mul", *(b.extend(b.read(v, TYPE[kind]), wide) for v in (x, y)))
    raise f.refusal()


@form("mad")
def multiply_add(b: Builder, f: Form) -> None:
    """``mad.{lo,hi,wide}``: a product and a sum; of floats, an ``fma``."""
    if {"f32", "f64"} & set(f.instruction.modifiers):
        fused_multiply_add(b, f)
        return
    if f.flag("cc"):
        extended(b, f, takes=False, leaves=True)
        return
    kind, how = f.type(), f.which("lo", "hi", "wide")
    target, x, y, z = f.operands(4)
    if how == "wide":
        product = _wide(b, f, kind, x, y)
    elif how == "lo":
        product = b.op(Binary("mul", _bits(kind)), b.read(x, _bits(kind)), b.read(y, _bits(kind)))
    else:
        product = b.op(Scalar(f"mul.hi.{kind}"), b.read(x, TYPE[kind]), b.read(y, TYPE[kind]))
    dtype = unsigned(product.dtype)
    b.set(target, Binary("add", dtype), b.cast(product, dtype), b.read(z, dtype))


@form("fma")
def fused_multiply_add(b: Builder, f: Form) -> None:
    """``fma``, and ``mad`` of floats."""
    if f.flag("sat"):
        _saturated(b, f, fused_multiply_add)
        return
    kind, how, ftz = f.type(), f.one_of("rn", "rz", "rm", "rp"), f.flag("ftz")
    operands = f.operands(4)
    if kind in ("f32", "f64") and how == "rn" and not ftz:
        b.apply(operands, Fma(TYPE[kind]))
    else:
        b.apply(operands, Scalar(f"fma.{how}{'.ftz' if ftz else ''}.{kind}"))


@form("neg", "abs", "not", "popc", "clz", "brev")
def unary(b: Builder, f: Form) -> None:
    """One operand."""
    kind, op, ftz = f.type(), f.opcode, f.flag("ftz")
    operands = f.operands(2)
    name = f"{op}{'.ftz' if ftz else ''}.{kind}"
    if name in SCALARS:
        b.apply(operands, Scalar(name))
    elif ftz or (op in ("popc", "clz", "brev") and kind != "b32"):
        raise f.refusal()
    else:
        _not_packed(f, kind)
        dtype = _bits(kind) if op != "abs" else TYPE[kind]
        b.apply(operands, Unary(op, dtype))


@form("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
def transcendental(b: Builder, f: Form) -> None:
    """Approximations, and exact roots and reciprocals."""
    kind, ftz, how = f.type(), f.flag("ftz"), f.one_of("approx", "rn")
    name = f"{f.opcode}.{how}{'.ftz' if ftz else ''}.{kind}"
    if name == "tanh.approx.f32":
        b.apply(f.operands(2), Unary("tanh", f32))
    else:
        b.apply(f.operands(2), Scalar(name))


@form("and", "or", "xor")
def logic(b: Builder, f: Form) -> None:
    """Bitwise logic of bits or predicates."""
    b.apply(f.operands(3), Binary(f.opcode, _bits(f.type())))


@form("lop3")
def logic3(b: Builder, f: Form) -> None:
    """``lop3.b32`` with its table."""
    *operands, table = f.operands(5)
    f.type("b32")
    if not isinstance(table, Integer):
        raise f.refusal()
    b.apply(operands, Scalar("lop3.b32", table.value))


@form("shl", "shr")
def shift(b: Builder, f: Form) -> None:
    """Shifts; a count beyond the width gives 0, or the sign."""
    kind = f.type()
    target, value, by = f.operands(3)
    bits = TYPES[kind]
    if isinstance(by, Integer) and 0 <= by.value < bits:
        dtype = TYPE[kind] if f.opcode == "shr" else _bits(kind)
        b.set(target, Binary(f.opcode, dtype), b.read(value, dtype), Const(u32, by.value))
        return
    name = f"shl.b{bits}" if f.opcode == "shl" else f"shr.{kind.replace('b', 'u')}"
    b.apply((target, value, by), Scalar(name))


@form("shf", "bfe", "bfi", "bfind", "bmsk", "szext", "prmt", "sad", "copysign")
def bits(b: Builder, f: Form) -> None:
    """Fields of bits, funnel shifts, permutations of bytes."""
    how = [x for x in (f.one_of("l", "r"), f.one_of("wrap", "clamp", "shiftamt")) if x]
    kind = f.type()
    b.apply(f.operands(*range(2, 6)), Scalar(".".join((f.opcode, *how, kind))))


@form("setp")
def compare(b: Builder, f: Form) -> None:
    """``setp``: ordered and unordered comparisons, combined with a predicate if there is one; of pairs, both."""
    kind, ftz = f.type(), f.flag("ftz")
    op = f.one_of(*_UNSIGNED, *_ORDERED, *_UNORDERED, "num", "nan")
    combine = f.one_of("and", "or", "xor")
    target, x, y, *more = f.operands(*((4,) if combine else (3,)))
    holds = compared(b, f, op, kind, ftz, x, y)
    if not isinstance(target, Both):
        if len(holds) > 1:
            raise f.refusal("a comparison of pairs gives two predicates")
        b.assign(target, _combined(b, combine, holds[0], more))
        return
    second = holds[1] if len(holds) > 1 else b.op(Unary("not", pred), holds[0])
    both = [_combined(b, combine, x, more) for x in (holds[0], second)]  # before either target changes
    b.assign(target.first, both[0])
    b.assign(target.second, both[1])


_ORDERED = ("lt", "le", "gt", "ge", "eq", "ne")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def _combined(b: Builder, combine: str, holds: Value, more: list[Operand]) -> Value:
    return b.op(Binary(combine, pred), holds, b.read(more[0], pred)) if combine else holds


def compared(b: Builder, f: Form, op: str, kind: str, ftz: bool, x: Operand, y: Operand) -> list[Value]:
    """The predicate of a comparison, of pairs two. Of floats, ``neu`` and its like are true where one is a NaN."""
    if kind in ("f16x2", "bf16x2"):
        pairs = [[b.op(Half(u32, i), b.read(v, u32)) for v in (x, y)] for i in (0, 1)]
        return [_compared_halves(b, f, op, kind[:-2], ftz, *pair) for pair in pairs]
    if kind in ("f16", "bf16"):
        return [_compared_halves(b, f, op, kind, ftz, *(b.read(v, TYPE[kind]) for v in (x, y)))]
    if kind in ("f32", "f64"):
        a, c = (b.read(v, TYPE[kind]) for v in (x, y))
        if ftz:
            if kind != "f32":
                raise f.refusal()
            a, c = (b.op(Scalar("add.rn.ftz.f32"), v, Const(f32, -0.0)) for v in (a, c))
        return [_compared_floats(b, f, op, a, c)]
    _not_packed(f, kind)
    dtype = TYPE[kind] if op not in ("eq", "ne") else _bits(kind)
    if op in _UNSIGNED:
        dtype = _bits(kind)
    if ftz or (op not in _ORDERED and op not in _UNSIGNED):
        raise f.refusal()
    return [b.op(Binary(_UNSIGNED.get(op, op), dtype), b.read(x, dtype), b.read(y, dtype))]


def _compared_halves(b: Builder, f: Form, op: str, kind: str, ftz: bool, *halves: Value) -> Value:
    numbers = [b.op(Scalar(f"cvt.f32.{kind}"), x) for x in halves]
    if ftz:
        if kind != "f16":
            raise f.refusal()
        tiny = [b.op(Binary("lt", f32), b.op(Unary("abs", f32), x), Const(f32, 2.0**-14)) for x in numbers]
        numbers = [b.op(Select(f32), small, Const(f32, 0.0), x) for small, x in zip(tiny, numbers, strict=True)]
    return _compared_floats(b, f, op, *numbers)


def _compared_floats(b: Builder, f: Form, op: str, a: Value, c: Value) -> Value:
    dtype = a.dtype

    def ordered(which: str) -> Value:
        if which == "ne":
            return b.op(Binary("or", pred), ordered("lt"), ordered("gt"))
        return b.op(Binary(which, dtype), a, c)

    if op in _ORDERED:
        return ordered(op)
    if op == "neu":
        return b.op(Binary("ne", dtype), a, c)
    if op in _UNORDERED:
        return b.op(Unary("not", pred), ordered(_UNORDERED[op]))
    if op not in ("num", "nan"):
        raise f.refusal()
    number = b.op(Binary("and", pred), b.op(Binary("eq", dtype), a, a), b.op(Binary("eq", dtype), c, c))
    return number if op == "num" else b.op(Unary("not", pred), number)


_YES = {"u16": 0xFFFF, "s16": 0xFFFF, "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f16": 0x3C00, "bf16": 0x3F80}
"""What ``set`` gives where a comparison holds: all ones, or the bits of 1."""


@form("set")
def set_flag(b: Builder, f: Form) -> None:
    """``set``: a comparison as all ones or as 1.0; of pairs, a pair of halves."""
    ftz, op = f.flag("ftz"), f.one_of(*_UNSIGNED, *_ORDERED, *_UNORDERED, "num", "nan")
    types = f.types()
    target, x, y = f.operands(3)
    if len(types) != 2:
        raise f.refusal()
    to, kind = types
    holds = compared(b, f, op, kind, ftz, x, y)
    if len(holds) == 2 and to in ("u32", "s32", kind):
        yes = Const(u16, _YES[to[:-2] if to == kind else "u16"])
        halves = [b.op(Select(u16), h, yes, Const(u16, 0)) for h in holds]
        b.assign(target, b.op(Combine(u32), *halves))
    elif len(holds) == 1 and to == "f32":
        b.set(target, Select(f32), holds[0], Const(f32, 1.0), Const(f32, 0.0))
    elif len(holds) == 1 and to in _YES:
        dtype = _bits(to)
        b.set(target, Select(dtype), holds[0], Const(dtype, _YES[to]), Const(dtype, 0))
    else:
        raise f.refusal()


@form("selp")
def select(b: Builder, f: Form) -> None:
    """``selp``, in whichever type its result is at home."""
    target, x, y, holds = f.operands(4)
    dtype = b.home(target, _bits(f.type()))
    b.set(target, Select(dtype), b.read(holds, pred), b.read(x, dtype), b.read(y, dtype))


@form("slct")
def select_by_sign(b: Builder, f: Form) -> None:
    """``slct``: the first where the last is at least 0."""
    types = f.types()
    if f.flag("ftz") or len(types) != 2 or types[1] not in ("s32", "f32"):
        raise f.refusal()
    target, x, y, sign = f.operands(4)
    dtype, by = b.home(target, _bits(types[0])), TYPE[types[1]]
    holds = b.op(Binary("ge", by), b.read(sign, by), Const(by, 0.0 if by is f32 else 0))
    b.set(target, Select(dtype), holds, b.read(x, dtype), b.read(y, dtype))


@form("mov")
def move(b: Builder, f: Form) -> None:
    """``mov``: registers, constants, addresses, special registers; vectors pack and unpack."""
    kind = f.type()
    target, source = f.operands(2)
    if isinstance(source, Vector):
        b.assign(target, _packed(b, f, kind, source))
    elif isinstance(target, Vector):
        _unpack(b, f, kind, target, source)
    elif kind == "pred":
        b.assign(target, b.read(source, pred))
    else:
        b.assign(target, b.read(source, b.home(target, _bits(kind))))


def _packed(b: Builder, f: Form, kind: str, source: Vector) -> Value:
    bits, count = TYPES[kind], len(source.items)
    if bits == 64 and count == 4:  # two halves of two quarters
        halves = [_packed(b, f, "b32", Vector(source.items[i : i + 2])) for i in (0, 2)]
        return b.op(Combine(u64), *halves)
    if count != 2 or bits not in (32, 64):
        raise f.refusal()
    instruction = Combine(u32 if bits == 32 else u64)
    return b.op(instruction, *(b.read(x, t) for x, t in zip(source.items, instruction.operand_types, strict=True)))


def _unpack(b: Builder, f: Form, kind: str, target: Vector, source: Operand) -> None:
    bits, count = TYPES[kind], len(target.items)
    whole = b.read(source, TYPE[f"b{bits}"])
    if bits == 64 and count == 4:
        parts = [b.op(Half(u32, q), b.op(Half(u64, h), whole)) for h in (0, 1) for q in (0, 1)]
    elif count == 2 and bits in (32, 64):
        parts = [b.op(Half(u32 if bits == 32 else u64, which), whole) for which in (0, 1)]
    else:
        raise f.refusal()
    for register, part in zip(target.items, parts, strict=True):
        b.assign(register, part)
