"""``cvt``, and addresses from one state space to another.

Source: PTX ISA, "Data Movement and Conversion Instructions" (``cvt``, ``cvta``).
"""

from __future__ import annotations

from typing import cast

from warploom.core.dtypes import bf16, f16, f32, f64, pred, s32, u32, u64
from warploom.ir.statements import Const
from warploom.ir.statements import Operand as Value
from warploom.isa.conversion import Convert, PackPair
from warploom.isa.form import named
from warploom.isa.narrow import FP8
from warploom.isa.operators import binary, select, unary
from warploom.isa.spaces import FromGeneric, IsSpace, ToGeneric, Window
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.syntax import TYPES, Operand
from warploom.ptx.types import TYPE

_ROUNDINGS = ("rni", "rzi", "rmi", "rpi", "rna", "rn", "rz", "rm", "rp")
_HALVES = {"f16": f16, "bf16": bf16}
_FLOATS = ("f16", "bf16", "f32", "f64")


@form("cvt")
def convert(b: Builder, f: Form) -> None:
    """``cvt.to.from``."""
    types, rounding = f.types(), f.one_of(*_ROUNDINGS)
    if len(types) != 2:
        raise f.refusal()
    to, source = types
    if f.flag("relu") or to in FP8 or source in FP8:
        _narrow(b, f, rounding, to, source)
        return
    if to in ("f16x2", "bf16x2"):
        target, high, low = f.operands(3)
        if rounding != "rn" or source != "f32":
            raise f.refusal()
        b.set(target, PackPair(_HALVES[to[:-2]]), b.read(low, f32), b.read(high, f32))
        return
    target, given = f.operands(2)
    if to == "tf32":
        if rounding != "rna" or source != "f32":
            raise f.refusal()
        b.set(target, unary("tf32", f32), b.read(given, f32))
    else:
        b.assign(target, _converted(b, f, given, source, to, rounding))


def _converted(b: Builder, f: Form, given: Operand, source: str, to: str, rounding: str) -> Value:
    """One number as another; ``.ftz`` flushes what is f32, and ``.sat`` holds an f32 within 0 and 1."""
    if source not in _FLOATS and to not in _FLOATS:
        return _integer(b, f, _widest(b, given, source), source, to)
    ftz = f.flag("ftz")
    if ftz and "f32" not in (source, to):
        raise f.refusal()
    if source in _FLOATS:
        x = b.read(given, TYPE[source])
        x = _from_float(b, f, _flushed(b, x) if ftz and source == "f32" else x, source, to, rounding)
    else:
        x = _to_float(b, f, given, source, to, rounding)
    x = _flushed(b, x) if ftz and to == "f32" else x
    return b.op(named("cvt.sat.f32.f32"), x) if to == "f32" and f.flag("sat") else x


def _narrow(b: Builder, f: Form, rounding: str, to: str, source: str) -> None:
    """Conversions to and from fp8, and those that leave out negative numbers."""
    relu = ".relu" if "relu" in f.instruction.modifiers else ""
    instruction = named(f"cvt.{rounding}{'.satfinite' if f.flag('satfinite') else ''}{relu}.{to}.{source}")
    b.apply(f.operands(1 + len(instruction.operand_types)), instruction)


def _flushed(b: Builder, x: Value) -> Value:
    return b.op(named("add.rn.ftz.f32"), x, Const(f32, -0.0))


def _from_float(b: Builder, f: Form, x: Value, source: str, to: str, rounding: str) -> Value:
    if source in _HALVES and to != source:
        x, source = b.op(named(f"cvt.f32.{source}"), x), "f32"
    if to in _FLOATS:
        return _float_to_float(b, f, x, source, to, rounding)
    if rounding not in ("rzi", "rni", "rmi", "rpi"):
        raise f.refusal()
    f.flag("sat")  # integers are clamped in any case
    if TYPES[to] >= 32:
        return b.op(Convert(x.dtype, TYPE[to], rounding), x)
    clamped = _clamped(b, b.op(Convert(x.dtype, s32, rounding), x), to)
    if source != "f64" or to[0] == "s":
        return clamped
    number = b.op(binary("eq", f64), x, x)  # of a NaN in f64 comes the highest bit
    return b.op(select(clamped.dtype), number, clamped, Const(clamped.dtype, 1 << TYPES[to] - 1))


def _float_to_float(b: Builder, f: Form, x: Value, source: str, to: str, rounding: str) -> Value:
    if source == to:
        for step in (rounding, f.one_of("sat")):
            x = b.op(named(f"cvt.{step}.{to}.{to}"), x) if step else x
        return x
    widens = TYPES[to] > TYPES[source]
    if rounding != ("" if widens else "rn"):
        raise f.refusal("only rounding to nearest is supported")
    if to in _HALVES:
        if source != "f32":
            raise f.refusal()
        return b.op(named(f"cvt.rn.{to}.f32"), x)
    return b.op(Convert(x.dtype, TYPE[to]), x)


def _to_float(b: Builder, f: Form, given: Operand, source: str, to: str, rounding: str) -> Value:
    if rounding != "rn":
        raise f.refusal("only rounding to nearest is supported")
    x = _widest(b, given, source)
    if to not in _HALVES:
        return b.op(Convert(x.dtype, TYPE[to]), x)
    # By way of f32: rounded twice, unless f32 holds it exactly, or (f16) what it does not hold is infinite.
    if TYPES[source] > (32 if to == "f16" else 16):
        raise f.refusal()
    return b.op(named(f"cvt.rn.{to}.f32"), b.op(Convert(x.dtype, f32), x))


def _widest(b: Builder, given: Operand, source: str) -> Value:
    """An integer operand by value, in 32 or 64 bits."""
    if TYPES[source] >= 32:
        return b.read(given, TYPE[source])
    signed = source[0] == "s"
    narrow = TYPE.get(source)
    if narrow is not None:
        return b.extend(b.read(given, narrow), s32 if signed else u32)
    return byte(b, b.extend(b.read(given, TYPE["u16"]), u32), signed)


def byte(b: Builder, x: Value, signed: bool) -> Value:
    """The low byte of a u32 as a number, u32 or s32."""
    if not signed:
        return b.binary("and", x, 255)
    high = b.cast(b.binary("shl", x, 24), s32)
    return b.binary("shr", high, 24)


def _integer(b: Builder, f: Form, x: Value, source: str, to: str) -> Value:
    if f.flag("sat"):
        return _clamped(b, x, to)
    if TYPES[to] == 8:
        return byte(b, b.extend(x, u32), to[0] == "s")
    return b.extend(x, TYPE[to])


def _clamped(b: Builder, x: Value, to: str) -> Value:
    """An integer within the range of a type, which must be within that of its own or unsigned."""
    signed, bits = to[0] == "s", TYPES[to]
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    own = x.dtype.bits - (x.dtype.kind == "signed")
    if x.dtype.kind == "signed" and least > -(1 << own):
        x = b.op(binary("max", x.dtype), x, Const(x.dtype, least))
    if most < (1 << own) - 1:
        x = b.op(binary("min", x.dtype), x, Const(x.dtype, most))
    return b.extend(x, TYPE.get(to, s32 if signed else u32))


@form("cvta")
def convert_address(b: Builder, f: Form) -> None:
    """``cvta[.to]``: a global address is its own generic one."""
    back = f.flag("to")
    space = f.one_of("global", "const", "param", "shared", "shared::cta", "shared::cluster", "local").split("::")[0]
    if not space or f.type() != "u64" or (back and space == "param"):
        raise f.refusal("generic addresses of this space are not supported")
    target, source = f.operands(2)
    if space in ("shared", "local"):
        window = cast("Window", space)
        generic = b.op(FromGeneric(window), b.read(source, u64)) if back else None
        b.assign(target, generic if generic is not None else b.op(ToGeneric(window), b.read(source, u32)))
        return
    address = b.read(source, u64)
    b.assign(target, b.generic(address) if space == "param" else address)


@form("isspacep")
def is_space(b: Builder, f: Form) -> None:
    """``isspacep``: what lies in no other space is global."""
    space = f.one_of("global", "shared", "shared::cta", "local").removesuffix("::cta")
    target, source = f.operands(2)
    address = b.read(source, u64)
    if space in ("shared", "local"):
        b.set(target, IsSpace(cast("Window", space)), address)
    elif space:
        inside = (b.op(IsSpace(window), address) for window in ("shared", "local"))
        b.set(target, unary("not", pred), b.op(binary("or", pred), *inside))
    else:
        raise f.refusal()
