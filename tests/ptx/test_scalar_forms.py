"""Lanewise forms against Python's integers and NumPy's floats, on edges and random operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.text import check, kernel, lanewise
from warploom.core.errors import PtxError

RNG = np.random.default_rng(7)
EDGES = (0, 1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256)


def integers(bits: int, signed: bool = False, count: int = 96) -> np.ndarray[Any, Any]:
    """Edges and random values of a width."""
    values = list(EDGES) + [(1 << bits) - 1 - e for e in EDGES] + [(1 << bits - 1) + d for d in (-1, 0, 1)]
    values += [int(x) for x in RNG.integers(0, 1 << 62, count)]
    kept = np.array([v % (1 << bits) for v in values[:count]], f"u{bits // 8}")
    return RNG.permutation(kept.view(f"i{bits // 8}") if signed else kept)


def shifts(count: int = 96) -> np.ndarray[Any, Any]:
    return RNG.choice(np.array([0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255], np.uint32), count)


def extract(value: int, position: int, length: int, bits: int) -> int:
    """The field of a value, whose sign continues beyond its top (PTX ISA, bfe)."""
    position, length = position & 255, length & 255
    unsigned = value % (1 << bits)
    field = 0
    top = min(position + length - 1, bits - 1)
    sign = unsigned >> top & 1 if value < 0 or bits == -1 else 0
    for i in range(bits):
        field |= (unsigned >> position + i & 1 if i < length and position + i < bits else sign) << i
    return field


def insert(field: int, into: int, position: int, length: int, bits: int) -> int:
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i < bits:
            into = into & ~(1 << position + i) | (field >> i & 1) << position + i
    return into


def permuted(a: int, b: int, selector: int) -> int:
    both, result = a | b << 32, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return result


U, S = ("u", False), ("s", True)
INTEGER_FORMS: list[tuple[str, tuple[Any, ...], int, Any]] = [
    *(
        (f"add.{k}{n} %out, %in0, %in1;", ((n, s), (n, s)), n, lambda a, b: a + b)
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    *((f"sub.{k}{n} %out, %in0, %in1;", ((n, s), (n, s)), n, lambda a, b: a - b) for k, s in (U, S) for n in (16, 64)),
    *(
        (f"mul.lo.{k}{n} %out, %in0, %in1;", ((n, s), (n, s)), n, lambda a, b: a * b)
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    *(
        (f"mul.hi.{k}{n} %out, %in0, %in1;", ((n, s), (n, s)), n, lambda a, b, n=n: a * b >> n)
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    *(
        (f"mul.wide.{k}{n} %out, %in0, %in1;", ((n, s), (n, s)), 2 * n, lambda a, b: a * b)
        for k, s in (U, S)
        for n in (16, 32)
    ),
    *(
        (f"mad.lo.{k}{n} %out, %in0, %in1, %in2;", ((n, s),) * 3, n, lambda a, b, c: a * b + c)
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    *(
        (f"mad.hi.{k}32 %out, %in0, %in1, %in2;", ((32, s),) * 3, 32, lambda a, b, c: (a * b >> 32) + c)
        for k, s in (U, S)
    ),
    *(
        (f"mad.wide.{k}32 %out, %in0, %in1, %in2;", ((32, s), (32, s), (64, s)), 64, lambda a, b, c: a * b + c)
        for k, s in (U, S)
    ),
    *(
        (f"{op}.{k}{n} %out, %in0, %in1;", ((n, s), (n, s)), n, {"min": min, "max": max}[op])
        for op in ("min", "max")
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    *(
        (
            f"{op}.b{n} %out, %in0, %in1;",
            ((n, False), (n, False)),
            n,
            {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[op],
        )
        for op in ("and", "or", "xor")
        for n in (16, 32, 64)
    ),
    *((f"not.b{n} %out, %in0;", ((n, False),), n, lambda a: ~a) for n in (16, 32, 64)),
    *((f"neg.s{n} %out, %in0;", ((n, True),), n, lambda a: -a) for n in (16, 32, 64)),
    *((f"abs.s{n} %out, %in0;", ((n, True),), n, abs) for n in (16, 32, 64)),
    *((f"shl.b{n} %out, %in0, %in1;", ((n, False), "shift"), n, lambda a, b: a << b) for n in (16, 32, 64)),
    *(
        (f"shr.{k}{n} %out, %in0, %in1;", ((n, s), "shift"), n, lambda a, b: a >> b)
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    *((f"popc.b{n} %out, %in0;", ((n, False),), 32, int.bit_count) for n in (32, 64)),
    *((f"clz.b{n} %out, %in0;", ((n, False),), 32, lambda a, n=n: n - a.bit_length()) for n in (32, 64)),
    *((f"brev.b{n} %out, %in0;", ((n, False),), n, lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2)) for n in (32, 64)),
    *(
        (f"bfind.{k}{n} %out, %in0;", ((n, s),), 32, lambda a: (~a if a < 0 else a).bit_length() - 1)
        for k, s in (U, S)
        for n in (32, 64)
    ),
    *(
        (
            f"bfind.shiftamt.{k}{n} %out, %in0;",
            ((n, s),),
            32,
            lambda a, n=n: n - (~a if a < 0 else a).bit_length() if a not in (0, -1) else -1,
        )
        for k, s in (U, S)
        for n in (32, 64)
    ),
    *(
        (
            f"bfe.{k}{n} %out, %in0, %in1, %in2;",
            ((n, s), "shift", "shift"),
            n,
            lambda a, p, c, n=n: extract(a, p, c, n) if c & 255 else 0,
        )
        for k, s in (U,)
        for n in (32, 64)
    ),
    *(
        (
            f"bfi.b{n} %out, %in0, %in1, %in2, %in3;",
            ((n, False), (n, False), "shift", "shift"),
            n,
            lambda a, b, p, c, n=n: insert(a, b, p, c, n),
        )
        for n in (32, 64)
    ),
    ("lop3.b32 %out, %in0, %in1, %in2, 0x96;", ((32, False),) * 3, 32, lambda a, b, c: a ^ b ^ c),
    ("lop3.b32 %out, %in0, %in1, %in2, 0xca;", ((32, False),) * 3, 32, lambda a, b, c: a & b | ~a & c),
    ("prmt.b32 %out, %in0, %in1, %in2;", ((32, False),) * 3, 32, permuted),
    ("prmt.b32 %out, %in0, %in1, 0x5410;", ((32, False),) * 2, 32, lambda a, b: a & 0xFFFF | b << 16),
    (
        "shf.l.wrap.b32 %out, %in0, %in1, %in2;",
        ((32, False), (32, False), "shift"),
        32,
        lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    ),
    (
        "shf.r.clamp.b32 %out, %in0, %in1, %in2;",
        ((32, False), (32, False), "shift"),
        32,
        lambda a, b, c: (b << 32 | a) >> min(c, 32),
    ),
    ("sad.s32 %out, %in0, %in1, %in2;", ((32, True),) * 3, 32, lambda a, b, c: abs(a - b) + c),
    (
        "mov.b64 {%r1, %r2}, %in0; mov.b64 %out, {%r2, %r1};",
        ((64, False),),
        64,
        lambda a: a >> 32 | (a & 0xFFFFFFFF) << 32,
    ),
    (
        "mov.b64 {%h1, %h2, %h3, %h4}, %in0; mov.b64 %out, {%h4, %h3, %h2, %h1};",
        ((64, False),),
        64,
        lambda a: sum((a >> 16 * i & 0xFFFF) << 48 - 16 * i for i in range(4)),
    ),
    ("mov.b32 {%h1, %h2}, %in0; mov.b32 %out, {%h2, %h1};", ((32, False),), 32, lambda a: a >> 16 | a << 16),
    *(
        (f"cvt.{to}.{of} %out, %in0;", ((int(of[1:]), of[0] == "s"),), int(to[1:]), lambda a: a)
        for to in ("u16", "s16", "u32", "s32", "u64", "s64")
        for of in ("u16", "s16", "u32", "s32", "u64", "s64")
    ),
    ("cvt.u32.u8 %out, %in0;", ((32, False),), 32, lambda a: a & 255),
    ("cvt.s32.s8 %out, %in0;", ((32, False),), 32, lambda a: (a & 255 ^ 128) - 128),
    ("cvt.s8.s32 %out, %in0;", ((32, True),), 32, lambda a: (a & 255 ^ 128) - 128),
    ("cvt.sat.u8.s32 %out, %in0;", ((32, True),), 32, lambda a: min(max(a, 0), 255)),
    ("cvt.sat.s8.s32 %out, %in0;", ((32, True),), 32, lambda a: min(max(a, -128), 127)),
    ("cvt.sat.s32.u32 %out, %in0;", ((32, False),), 32, lambda a: min(a, 0x7FFFFFFF)),
    ("cvt.sat.u32.s64 %out, %in0;", ((64, True),), 32, lambda a: min(max(a, 0), 0xFFFFFFFF)),
    *(
        (
            f"setp.{op}.{k}{n} %p1, %in0, %in1; selp.u32 %out, 1, 0, %p1;",
            ((n, s), (n, s)),
            32,
            lambda a, b, op=op: int(getattr(a, f"__{op}__")(b)),
        )
        for op in ("lt", "le", "gt", "ge", "eq", "ne")
        for k, s in (U, S)
        for n in (16, 32, 64)
    ),
    ("setp.hi.u32 %p1, %in0, %in1; selp.u32 %out, 1, 0, %p1;", ((32, False),) * 2, 32, lambda a, b: int(a > b)),
    (
        "setp.lt.s32 %p2, %in0, 0; setp.lt.and.s32 %p1|%p3, %in0, %in1, %p2; selp.u32 %r1, 1, 0, %p1;"
        "selp.u32 %r2, 2, 0, %p3; or.b32 %out, %r1, %r2;",
        ((32, True),) * 2,
        32,
        lambda a, b: (int(a < b) | 2 * int(a >= b)) * int(a < 0),
    ),
    ("set.lt.u32.s32 %out, %in0, %in1;", ((32, True),) * 2, 32, lambda a, b: -int(a < b)),
    (
        "slct.b32.s32 %out, %in0, %in1, %in2;",
        ((32, False), (32, False), (32, True)),
        32,
        lambda a, b, c: a if c >= 0 else b,
    ),
]


@pytest.mark.parametrize(("text", "given", "bits", "meaning"), INTEGER_FORMS, ids=[f[0] for f in INTEGER_FORMS])
def test_integer_forms(text: str, given: Any, bits: int, meaning: Callable[..., int]) -> None:
    operands = [shifts() if g == "shift" else integers(*g) for g in given]
    got = lanewise(text, operands, f"u{bits // 8}")
    wanted = [meaning(*map(int, row)) % (1 << bits) for row in zip(*operands, strict=True)]
    assert got.tolist() == wanted


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_low_bits_as_a_number(kind: str, mode: str) -> None:
    """``szext``, at every length and beyond all of them."""
    x, count = integers(32, kind == "s32"), np.resize(np.arange(48, dtype=np.uint32), 96)
    got = lanewise(f"szext.{mode}.{kind} %out, %in0, %in1;", [x, count], x.dtype)
    for value, n, result in zip(x.tolist(), count.tolist(), got.tolist(), strict=True):
        bits = min(n, 32) if mode == "clamp" else n % 32
        low = value % (1 << bits)
        sign = kind == "s32" and bits > 0 and low >> bits - 1
        assert result == low - (1 << bits if sign else 0), (value, n)


def test_constants_of_both_signs() -> None:
    x = np.array([2**30 - 1, 2**30, -(2**30), 1, -1, 0, 7, -7] * 4, np.int32)
    less = lanewise("setp.lt.s32 %p1, %in0, 1073741824; selp.u32 %out, 1, 0, %p1;", [x], np.uint32)
    assert np.array_equal(less, x < 2**30)
    y = x.astype(np.float32)
    assert np.array_equal(lanewise("add.f32 %out, %in0, -1.5;", [y], np.float32), y - np.float32(1.5))
    assert np.array_equal(lanewise("add.f64 %out, %in0, -0d3FF8000000000000;", [x.astype(float)], float), x - 1.5)


def test_signed_fields_extend_the_sign() -> None:
    """bfe.s32: the bit at the end of the field, or the top one where the field goes beyond."""
    values, places, counts = integers(32, True), shifts(), shifts()
    got = lanewise("bfe.s32 %out, %in0, %in1, %in2;", [values, places, counts], np.int32)
    for value, p, c, x in zip(*(v.tolist() for v in (values, places, counts, got)), strict=True):
        if c == 0:
            assert x == 0
            continue
        top = min(p + c - 1, 31)
        sign = value >> top & 1
        bits = [(value >> p + i & 1 if i < c and p + i < 32 else sign) for i in range(32)]
        assert x % (1 << 32) == sum(b << i for i, b in enumerate(bits))


SPECIAL = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, 2.5, 3.5, -2.5, 0.49999997]


def floats(dtype: Any = np.float32, count: int = 96) -> np.ndarray[Any, Any]:
    values = np.array(SPECIAL + list(RNG.standard_normal(count) * 10.0 ** RNG.integers(-6, 6, count)))[:count]
    return RNG.permutation(values.astype(dtype))


def flushed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fma_exactly(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    with np.errstate(over="ignore"):
        return float(np.float32(float(exact))) if exact else a * b + c


def same(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """Equal, signs of zeros too; NaN equals NaN."""
    assert np.array_equal(got, wanted, equal_nan=True)
    number = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got[number]), np.signbit(wanted[number]))


def maximum(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The larger number, NaN where one is; -0 is less than +0, of which NumPy takes either."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b))


FLOAT_FORMS: list[tuple[str, int, Any, Callable[..., Any]]] = [
    ("add.f32 %out, %in0, %in1;", 2, np.float32, np.add),
    ("sub.rn.f32 %out, %in0, %in1;", 2, np.float32, np.subtract),
    ("mul.ftz.f32 %out, %in0, %in1;", 2, np.float32, lambda a, b: flushed(flushed(a) * flushed(b))),
    ("div.rn.f32 %out, %in0, %in1;", 2, np.float32, np.divide),
    ("add.f64 %out, %in0, %in1;", 2, np.float64, np.add),
    ("div.rn.f64 %out, %in0, %in1;", 2, np.float64, np.divide),
    ("sqrt.rn.f32 %out, %in0;", 1, np.float32, np.sqrt),
    ("rcp.rn.f64 %out, %in0;", 1, np.float64, lambda a: 1 / a),
    ("neg.f32 %out, %in0;", 1, np.float32, np.negative),
    ("abs.ftz.f32 %out, %in0;", 1, np.float32, lambda a: np.abs(flushed(a))),
    ("copysign.f32 %out, %in0, %in1;", 2, np.float32, lambda s, v: np.copysign(v, s)),
    ("cvt.rmi.f32.f32 %out, %in0;", 1, np.float32, np.floor),
    ("cvt.rni.f32.f32 %out, %in0;", 1, np.float32, np.rint),
    ("cvt.f64.f32 %e1, %in0; cvt.rn.f32.f64 %out, %e1;", 1, np.float32, lambda a: a),
    ("max.NaN.f32 %out, %in0, %in1;", 2, np.float32, maximum),
    ("mov.f32 %f1, 0f3F800000; add.f32 %out, %in0, %f1;", 1, np.float32, lambda a: a + np.float32(1)),
    ("fma.rn.f64 %out, %in0, 0d4000000000000000, %in1;", 2, np.float64, lambda a, b: a * 2 + b),
]


@pytest.mark.parametrize(("text", "count", "dtype", "meaning"), FLOAT_FORMS, ids=[f[0] for f in FLOAT_FORMS])
def test_float_forms(text: str, count: int, dtype: Any, meaning: Callable[..., Any]) -> None:
    operands = [floats(dtype) for _ in range(count)]
    with np.errstate(all="ignore"):
        same(lanewise(text, operands, dtype), meaning(*operands).astype(dtype))


def test_fma_rounds_once() -> None:
    a, b, c = (floats() for _ in range(3))
    got = lanewise("fma.rn.f32 %out, %in0, %in1, %in2;", [a, b, c], np.float32)
    wanted = np.array([fma_exactly(*map(float, row)) for row in zip(a, b, c, strict=True)], np.float32)
    assert np.array_equal(got, wanted, equal_nan=True)


COMPARISONS = {
    "lt": lambda a, b: a < b,
    "ne": lambda a, b: a < b or a > b,
    "eq": lambda a, b: a == b,
    "ge": lambda a, b: a >= b,
    "ltu": lambda a, b: not a >= b,
    "neu": lambda a, b: a != b,
    "equ": lambda a, b: not (a < b or a > b),
    "gtu": lambda a, b: not a <= b,
    "leu": lambda a, b: not a > b,
    "geu": lambda a, b: not a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b,
}


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize("kind", ["f32", "f64", "f16"])
def test_comparisons_with_nan(op: str, kind: str) -> None:
    dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind]
    with np.errstate(over="ignore"):
        a, b = floats(dtype), floats(dtype)
    got = lanewise(f"setp.{op}.{kind} %p1, %in0, %in1; selp.u32 %out, 1, 0, %p1;", [a, b], np.uint32)
    assert got.tolist() == [int(COMPARISONS[op](float(x), float(y))) for x, y in zip(a, b, strict=True)]


INTEGER_COMPARISONS = {
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


UNSIGNED_ONLY = "lo", "ls", "hi", "hs"
"""Comparisons that ptxas refuses for signed types."""


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (op, kind)
        for op in INTEGER_COMPARISONS
        for kind in ("u16", "s16", "u32", "s32", "u64", "s64")
        if not (op in UNSIGNED_ONLY and kind[0] == "s")
    ],
)
def test_comparisons_of_integers(op: str, kind: str) -> None:
    """Every comparison is that of Python; a third of the pairs are equal."""
    a, b = (integers(int(kind[1:]), kind[0] == "s") for _ in range(2))
    b = np.where(np.arange(b.size) % 3 == 0, a, b)
    got = lanewise(f"setp.{op}.{kind} %p1, %in0, %in1; selp.u32 %out, 1, 0, %p1;", [a, b], np.uint32)
    assert got.tolist() == [int(INTEGER_COMPARISONS[op](x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("form", "dtype", "least", "most"),
    [
        ("cvt.rzi.s32.f32", np.int32, -(2**31), 2**31 - 1),
        ("cvt.rni.u32.f32", np.uint32, 0, 2**32 - 1),
        ("cvt.rpi.s64.f32", np.int64, None, None),
        ("cvt.rmi.s16.f32", np.int16, -(2**15), 2**15 - 1),
    ],
)
def test_floats_to_integers_clamp(form: str, dtype: Any, least: Any, most: Any) -> None:
    x = floats()
    x = x[np.isfinite(x) & (np.abs(x) < 1e18)] if least is None else x
    x = np.resize(x, 96)
    got = lanewise(f"{form} %out, %in0;", [x], dtype)
    whole = {"rzi": math.trunc, "rni": round, "rpi": math.ceil, "rmi": math.floor}[form[4:7]]
    for value, found in zip(x.tolist(), got.tolist(), strict=True):
        if math.isnan(value):
            assert found == 0
        elif math.isinf(value):
            assert found == (most if value > 0 else least)
        else:
            assert found == (whole(value) if least is None else min(max(whole(value), least), most))


HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("kind", HALVES)
def test_halves_convert_and_compute(kind: str) -> None:
    half = HALVES[kind]
    x, y = (RNG.standard_normal(96).astype(np.float32) for _ in range(2))
    bits = lanewise(f"cvt.rn.{kind}.f32 %out, %in0;", [x], np.uint16)
    assert np.array_equal(bits, x.astype(half).view(np.uint16))
    assert np.array_equal(
        lanewise(f"cvt.f32.{kind} %out, %in0;", [bits], np.float32), x.astype(half).astype(np.float32)
    )
    packed = lanewise(f"cvt.rn.{kind}x2.f32 %out, %in0, %in1;", [x, y], np.uint32)
    assert np.array_equal(packed & 0xFFFF, y.astype(half).view(np.uint16))
    assert np.array_equal(packed >> 16, x.astype(half).view(np.uint16))
    other = RNG.permutation(packed)
    a, b = (v.view(half).astype(np.float64) for v in (packed, other))
    for op, wanted in (("mul", a * b), ("max", np.maximum(a, b)), ("sub", a - b)):
        form = f"{op}.{kind}x2"
        got = lanewise(f"{form} %out, %in0, %in1;", [packed, other], np.uint32).view(half)
        assert np.array_equal(got, wanted.astype(np.float32).astype(half)), form
    got = lanewise(f"fma.rn.{kind} %out, %in0, %in0, %in1;", [bits, RNG.permutation(bits)], np.uint16)
    assert got.dtype == np.uint16


def test_approximations_are_within_their_bounds() -> None:
    x = np.abs(floats()) + np.float32(0.1)
    x = np.where(np.isfinite(x) & (x < 80), x, np.float32(3))
    for form, exact in (
        ("ex2.approx.f32", np.exp2),
        ("lg2.approx.ftz.f32", np.log2),
        ("sqrt.approx.f32", np.sqrt),
        ("rsqrt.approx.f32", lambda v: 1 / np.sqrt(v)),
        ("tanh.approx.f32", np.tanh),
        ("sin.approx.f32", np.sin),
    ):
        got = lanewise(f"{form} %out, %in0;", [x], np.float32)
        wanted = exact(x.astype(np.float64))
        assert np.all(np.abs(got - wanted) <= 2**-21 * np.maximum(np.abs(wanted), 1)), form


def test_a_vote_whether_all_agree() -> None:
    x = np.concatenate([np.zeros(32), np.arange(32), np.full(32, 9)]).astype(np.uint32)
    text = "{ .reg .pred q, r; setp.lt.u32 q, %in0, 5; vote.sync.uni.pred r, q, -1; selp.b32 %out, 1, 0, r; }"
    assert lanewise(text, [x], np.uint32).reshape(3, 32).tolist() == [[1] * 32, [0] * 32, [1] * 32]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("form", "kind", "x", "wanted"),
    [
        ("cvt.sat.f32.f32", "f32", [-0.0, NAN, 3, 0.25], [0x0, 0x0, 0x3F800000, 0x3E800000]),
        ("cvt.rzi.sat.f32.f32", "f32", [0.9, 1.5, -2, 7], [0x0, 0x3F800000, 0x0, 0x3F800000]),
        ("div.approx.f32 %out, %in0, 0f7F000001; //", "f32", [1, -1, 7, 5], [0x0, 0x80000000, 0x0, 0x0]),
        ("cvt.rn.satfinite.e5m2x2.f32 %out, %in0, %in0; //", "f32", [NAN, 1, -1, 0], [0x7F7F, 0x3C3C, 0xBCBC, 0x0]),
        (
            "cvt.rn.satfinite.relu.e4m3x2.f32 %out, %in0, %in0; //",
            "f32",
            [-0.0, -1, 1, NAN],
            [0x0, 0x0, 0x3838, 0x7F7F],
        ),
        ("cvt.rn.relu.f16x2.f32 %out, %in0, %in0; //", "f32", [-0.0, -1, 1, 0], [0x0, 0x0, 0x3C003C00, 0x0]),
        ("cvt.rzi.u8.f64", "f64", [NAN, INF, -INF, 3.9], [0x80, 0xFF, 0x0, 0x3]),
        ("cvt.rzi.u16.f64", "f64", [NAN, INF, -INF, 3.9], [0x8000, 0xFFFF, 0x0, 0x3]),
        ("cvt.rzi.u8.f32", "f32", [NAN, INF, -INF, 3.9], [0x0, 0xFF, 0x0, 0x3]),
    ],
)
def test_corners_are_those_of_an_h200(form: str, kind: str, x: list[float], wanted: list[int]) -> None:
    given = np.resize(np.array(x, {"f32": np.float32, "f64": np.float64}[kind]), 32)
    narrow = any(to in form for to in (".u8.", ".u16.", "e5m2x2", "e4m3x2"))
    got = lanewise(f"{form} %out, %in0;", [given], np.uint16 if narrow else np.uint32)
    assert got.tolist() == (wanted * 8)[:32]


@pytest.mark.parametrize(
    "form",
    [
        "cvt.sat.f16.f16 %h1, %h2;",
        "cvt.sat.f64.f64 %e1, %e2;",
        "mad.hi.b32 %r1, %r2, %r3, %r4;",
        "setp.lt.ftz.f64 %p1, %e1, %e2;",
        "mov; //",
        "setp.u32;",
        "bra;",
    ],
)
def test_what_no_form_is_refused(form: str) -> None:
    with pytest.raises(PtxError, match=r"kernel.ptx:\d+: "):
        check(kernel(form), [np.zeros(1)])
