"""Carries, dot products of bytes, 24-bit products and fp8, against Python's integers and NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.text import lanewise

RNG = np.random.default_rng(11)
FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


def words(count: int = 96, dtype: Any = np.uint64) -> np.ndarray[Any, Any]:
    """Random words, and such as carry through."""
    edges = [0, 1, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x80000000, 0xFFFFFF, 0x800000]
    values = edges + [int(x) for x in RNG.integers(0, 1 << 63, count)]
    return RNG.permutation(np.array(values[:count], np.uint64)).astype(dtype)


HALVES = "mov.b64 {%r1, %r2}, %in0; mov.b64 {%r3, %r4}, %in1;"


@pytest.mark.parametrize("op", ["add", "sub"])
def test_carries(op: str) -> None:
    x, y = words(), words()
    body = f"{HALVES} {op}.cc.u32 %r5, %r1, %r3; {op}c.u32 %r6, %r2, %r4; mov.b64 %out, {{%r5, %r6}};"
    assert np.array_equal(lanewise(body, [x, y], np.uint64), x + y if op == "add" else x - y)
    again = f"{HALVES} {op}.cc.u32 %r5, %r1, %r3; {op}c.cc.s32 %r6, %r2, %r4; {op}c.u32 %out, 0, 0;"
    exact = [int(a) + int(b) if op == "add" else int(a) - int(b) for a, b in zip(x, y, strict=True)]
    assert lanewise(again, [x, y], np.uint32).tolist() == [(v >> 64) % (1 << 32) for v in exact]


def test_products_with_carries() -> None:
    x, y = words(), words()
    body = f"""{HALVES} mul.lo.u32 %r5, %r1, %r3; mul.hi.u32 %r6, %r1, %r3; mad.lo.cc.u32 %r6, %r1, %r4, %r6;
        madc.hi.u32 %r7, %r1, %r4, 0; mad.lo.cc.u32 %r6, %r2, %r3, %r6; madc.hi.cc.u32 %r7, %r2, %r3, %r7;
        addc.u32 %r8, 0, 0; mad.lo.cc.u32 %r7, %r2, %r4, %r7; madc.hi.u32 %r8, %r2, %r4, %r8;
        mov.b64 %out, {{%r7, %r8}};"""
    wanted = [int(a) * int(b) >> 64 for a, b in zip(x, y, strict=True)]
    assert lanewise(body, [x, y], np.uint64).tolist() == wanted


def test_a_carry_lives_across_branches() -> None:
    x, y = words(), words()
    body = f"""{HALVES} add.cc.u32 %r5, %r1, %r3; setp.gt.u32 %p1, %r1, 77; @%p1 bra there; mov.u32 %r9, 1; there:
        addc.u32 %r6, %r2, %r4; mov.b64 %out, {{%r5, %r6}};"""
    assert np.array_equal(lanewise(body, [x, y], np.uint64), x + y)


@pytest.mark.parametrize("kinds", ["u32.u32", "s32.u32", "u32.s32", "s32.s32"])
def test_dot_products(kinds: str) -> None:
    x, y, z = (words(dtype=np.uint32) for _ in range(3))
    a, b = (
        v.view("i1" if kind[0] == "s" else "u1").reshape(-1, 4).astype(np.int64)
        for v, kind in zip((x, y), kinds.split("."), strict=True)
    )
    wide = x.view("i2" if kinds[0] == "s" else "u2").reshape(-1, 2).astype(np.int64)
    for form, total in (
        (f"dp4a.{kinds}", a * b),
        (f"dp2a.lo.{kinds}", wide * b[:, :2]),
        (f"dp2a.hi.{kinds}", wide * b[:, 2:]),
    ):
        wanted = (z.astype(np.int64) + total.sum(1)) % (1 << 32)
        assert np.array_equal(lanewise(f"{form} %out, %in0, %in1, %in2;", [x, y, z], np.uint32), wanted), form


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_products_of_24_bits(kind: str) -> None:
    x, y = words(dtype=np.uint32), words(dtype=np.uint32)

    def low(v: int) -> int:
        v %= 1 << 24
        return v - (1 << 24) if kind == "s32" and v >> 23 else v

    exact = [low(int(a)) * low(int(b)) for a, b in zip(x, y, strict=True)]
    for form, shift in (("lo", 0), ("hi", 16)):
        got = lanewise(f"mad24.{form}.{kind} %out, %in0, %in1, 5;", [x, y], np.uint32)
        assert got.tolist() == [((v >> shift) + 5) % (1 << 32) for v in exact]


def test_sums_that_are_held_and_zeros() -> None:
    x, y = words(dtype=np.uint32).view(np.int32), words(dtype=np.uint32).view(np.int32)
    for op, exact in (("add", x.astype(np.int64) + y), ("sub", x.astype(np.int64) - y)):
        got = lanewise(f"{op}.sat.s32 %out, %in0, %in1;", [x, y], np.int32)
        assert np.array_equal(got, np.clip(exact, -(2**31), 2**31 - 1))
    assert np.array_equal(lanewise("cnot.b32 %out, %in0;", [x], np.uint32), x == 0)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", FP8)
def test_fp8(kind: str, relu: str) -> None:
    dtype = FP8[kind]
    most = float(ml_dtypes.finfo(dtype).max)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, most, -most * 2, 1e-9, 2.0**-9, 17.5], np.float32)
    x, y = (np.resize(np.r_[special, RNG.standard_normal(60) * 30], 96).astype(np.float32) for _ in range(2))
    y = RNG.permutation(y)

    def rounded(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        held = np.where(np.isnan(v), v, np.clip(v, -most, most))
        return np.where(relu != "" and held < 0, np.float32(0), held).astype(dtype)

    got = lanewise(f"cvt.rn.satfinite{relu}.{kind}.f32 %out, %in0, %in1;", [x, y], np.uint16)
    pairs = got.view(dtype).reshape(-1, 2).astype(np.float32)
    assert np.array_equal(pairs[:, 1], rounded(x).astype(np.float32), equal_nan=True)
    assert np.array_equal(pairs[:, 0], rounded(y).astype(np.float32), equal_nan=True)
    assert relu == "" or not (np.signbit(pairs) & ~np.isnan(pairs)).any()  # -0 becomes 0 too
    back = lanewise(f"cvt.rn{relu}.f16x2.{kind} %out, %in0;", [got], np.uint32).view(np.float16).reshape(-1, 2)
    assert np.array_equal(back.astype(np.float32), pairs, equal_nan=True)
    again = lanewise(f"cvt.rn.satfinite{relu}.{kind}.f16x2 %out, %in0;", [back.reshape(-1).view(np.uint32)], np.uint16)
    assert np.array_equal(again.view(dtype).astype(np.float32), pairs.reshape(-1), equal_nan=True)
    halves = lanewise("cvt.rn.relu.bf16x2.f32 %out, %in0, %in1;", [x, y], np.uint32)
    wanted = np.where(x < 0, np.float32(0), x).astype(ml_dtypes.bfloat16)
    assert np.array_equal(
        (halves >> 16).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32),
        wanted.astype(np.float32),
        equal_nan=True,
    )


def test_the_constant_that_ptx_defines() -> None:
    x = words(dtype=np.uint32)
    assert np.array_equal(lanewise("mov.u32 %r1, WARP_SZ; add.u32 %out, %in0, %r1;", [x], np.uint32), x + np.uint32(32))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_comparisons_of_pairs(kind: str) -> None:
    half = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    values = np.array([0, -0.0, 1, -1, np.nan, np.inf, 2.5, 1], np.float32).astype(half)
    a, b = (RNG.choice(values, 192).astype(half) for _ in range(2))
    x, y, (p, q) = a.view(np.uint32), b.view(np.uint32), (a < b).reshape(-1, 2).T
    masks = lanewise(f"set.lt.u32.{kind}x2 %out, %in0, %in1;", [x, y], np.uint32)
    assert np.array_equal(masks, p * 0xFFFF + q * 0xFFFF0000)
    ones = lanewise(f"set.lt.{kind}x2.{kind}x2 %out, %in0, %in1;", [x, y], np.uint32)
    assert np.array_equal(ones.view(half).astype(np.float32), (a < b).astype(np.float32))
    text = f"setp.geu.{kind}x2 %p1|%p2, %in0, %in1; selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2;"
    assert np.array_equal(lanewise(f"{text} add.u32 %out, %r1, %r2;", [x, y], np.uint32), ~p * 1 + ~q * 2)


def test_subnormals_are_flushed_before_halves_compare_and_after_f64_narrows() -> None:
    tiny = np.full(32, 1, np.uint16)
    text = "setp.gt{}.f16 %p1, %in0, 0; selp.u32 %out, 1, 0, %p1;"
    assert [lanewise(text.format(ftz), [tiny], np.uint32)[0] for ftz in ("", ".ftz")] == [1, 0]
    x = np.resize([1e-40, 1.5], 32)
    assert np.array_equal(lanewise("cvt.rn.ftz.f32.f64 %out, %in0;", [x], np.float32), np.resize([0, 1.5], 32))
    assert np.array_equal(lanewise("cvt.rn.sat.f32.f64 %out, %in0;", [x], np.float32)[1::2], np.ones(16))


@pytest.mark.parametrize("form", ["ex2.approx.f16x2", "ex2.approx.ftz.bf16x2"])
def test_powers_of_pairs(form: str) -> None:
    dtype = np.dtype(np.float16 if "bf16" not in form else ml_dtypes.bfloat16)
    x = RNG.uniform(-8, 8, (64, 2)).astype(dtype)
    found = lanewise(f"{form} %out, %in0;", [x.view(np.uint32).reshape(-1)], np.uint32).view(dtype)
    exact = np.exp2(x.astype(np.float64)).reshape(-1)
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2.0 ** (-8 if "bf16" in form else -10))


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("form", ["add.rn", "sub", "mul.rz", "fma.rn", "fma.rp"])
def test_pairs_of_f32_are_two_of_them(form: str, ftz: str) -> None:
    count = 3 if "fma" in form else 2
    pairs = [RNG.uniform(-4, 4, (64, 2)).astype(np.float32) for _ in range(count)]
    pairs[0][:8] *= np.float32(2.0**-149)
    form, places = form + ftz, ", ".join(f"%in{n}" for n in range(count))
    found = lanewise(f"{form}.f32x2 %out, {places};", [x.view(np.uint64).reshape(-1) for x in pairs], np.uint64)
    single = lanewise(f"{form}.f32 %out, {places};", [x.reshape(-1) for x in pairs], np.float32)
    assert np.array_equal(found.view(np.uint32), single.view(np.uint32))
