"""Floating-point instructions: single rounding, NaN, flushing, packed pairs, tf32."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.isa.functions import function
from warploom.core.dtypes import bf16, f16, f32, f64
from warploom.isa.conversion import pack_pair, unpack_half
from warploom.isa.instruction import named
from warploom.isa.lanewise import binary, pair_arithmetic, unary
from warploom.isa.meanings import single_to_odd, sum_to_odd

CASES = settings(deadline=None, max_examples=150)
SINGLES = st.floats(width=32)
HALVES = {f16: np.float16, bf16: ml_dtypes.bfloat16}
TINY = np.float32(2.0**-126)


def f(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def bits(x) -> int:
    return int(np.float32(x).view(np.uint32))


def nearest_single(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact number, ties to even; by comparing neighbours, not by rounding twice."""
    guess = np.float32(float(exact)) if abs(exact) < Fraction(2) ** 1000 else np.float32(np.inf)
    if not np.isfinite(guess):
        limit = Fraction(2) ** 128 - Fraction(2) ** 103
        return np.float32(
            np.copysign(np.inf if abs(exact) >= limit else np.finfo(np.float32).max, float(exact > 0) - 0.5)
        )
    candidates = {float(guess), *(float(np.nextafter(guess, np.float32(d))) for d in (-np.inf, np.inf))}
    finite = [c for c in candidates if np.isfinite(c)]
    best = min(finite, key=lambda c: (abs(Fraction(c) - exact), bits(c) & 1))
    return np.float32(best)


@CASES
@given(SINGLES, SINGLES, SINGLES)
def test_fma_rounds_once(a, b, c):
    (got,) = named("fma.rn.f32").meaning(f(a), f(b), f(c))
    if not all(map(np.isfinite, (a, b, c))):
        return
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        assert got[0, 0] == 0
        return
    assert got[0, 0] == nearest_single(exact), (a, b, c)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (1 + 2**-12, 1 + 2**-12, -1.0),  # the product is not a float32
        (1 + 2**-23, 1 - 2**-23, -1.0),  # -2^-46 is lost by rounding the product first
        (2.0**-75, 2.0**-75, 1.0 + 2**-23),  # far below half an ulp
        (1 + 2**-12, 1 + 2**-12, 2.0**40),
        (1.0 + 2**-23, 1.0 + 2**-23, 2.0**24),  # exactly between, but for the last bit of the product
        (2.0**24 + 2, 2.0**-25, 1.0),  # a tie that a rounded sum would break the wrong way
        (1.0 + 2**-23, 2.0**-24, 1.0 + 2.0**-23),  # above a tie by 2^-47
        (-(1.0 + 2**-23), 2.0**-24, 1.0 + 2.0**-23),
        (2.0**-24 * (1 + 2**-23), 1 - 2**-23, 1 + 2**-23),  # below a tie by 2^-70: f64 sees the tie
        (-(2.0**-24) * (1 + 2**-23), 1 - 2**-23, 1 + 2**-22),
        (2.0**-75 * (1 + 2**-23), 2.0**-75 * (1 - 2**-23), 2.0**-149),  # just below half of the least subnormal
    ],
)
def test_fma_where_two_roundings_differ(a, b, c):
    (got,) = named("fma.rn.f32").meaning(f(a), f(b), f(c))
    assert got[0, 0] == nearest_single(Fraction(a) * Fraction(b) + Fraction(c))


def double_exactly(a: float, b: float, c: float) -> float:
    """a·b + c rounded once, with the sign of the exact sum."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        size = float(abs(exact))
    except OverflowError:
        size = np.inf
    return -size if exact < 0 else size


@pytest.mark.parametrize("product", [-1090, -1050, -1000, -955, 0, 1000, 1022])
def test_double_precision_fma_rounds_once_at_any_size(product):
    """Products of about 2**product, some with a subnormal factor, and third operands near and far; many ties."""
    rng = np.random.default_rng(product % 97)
    short, long = rng.integers(1, 16, (3, 400)).astype(np.float64), rng.uniform(1, 2, (3, 400))
    factor = rng.choice([-1, 1], (3, 400)) * np.where(rng.random((3, 400)) < 0.5, short, long)
    first = rng.integers(max(-1074, product - 900), min(900, product + 900), 400)
    a, b = np.ldexp(factor[0], first), np.ldexp(factor[1], product - first)
    c = np.ldexp(factor[2], np.minimum(product + rng.choice([-60, -3, -2, -1, 0, 1, 2, 3, 52, 53, 54], 400), 1019))
    with np.errstate(all="ignore"):
        (got,) = named("fma.rn.f64").meaning(a, b, c)
    assert got.tolist() == [double_exactly(*map(float, row)) for row in zip(a, b, c, strict=True)]


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (5e-324, 2.5, 5e-324),  # 3.5 of the least subnormal: a rounded product, of 2, would give 3
        (2.0**1000, 2.0**30, -(2.0**1023) * (2 - 2.0**-52)),  # the product alone overflows
        (2.0**485 * (1 - 2.0**-53), 2.0**485, (2 - 2.0**-52) * 2.0**1023),  # just not enough to overflow
        (-(2.0**-700), 2.0**-700, 0.0),  # vanishes, and keeps its sign
    ],
)
def test_double_precision_fma_at_the_ends_of_the_range(a, b, c):
    with np.errstate(all="ignore"):
        (got,) = named("fma.rn.f64").meaning(*(np.array([x]) for x in (a, b, c)))
    wanted = double_exactly(a, b, c)
    assert got[0] == wanted
    assert np.signbit(got[0]) == np.signbit(wanted)


def test_double_precision_fma_does_not_lose_the_product():
    (got,) = named("fma.rn.f64").meaning(np.array([[1 + 2.0**-30]]), np.array([[1 - 2.0**-30]]), np.array([[-1.0]]))
    assert got[0, 0] == -(2.0**-60)
    (got,) = named("fma.rn.f64").meaning(
        np.array([[2.0**1000 * (1 + 2.0**-30)]]), np.array([[2.0**-1000 * (1 - 2.0**-30)]]), np.array([[-1.0]])
    )
    assert got[0, 0] == -(2.0**-60)
    (got,) = named("fma.rn.f64").meaning(np.array([[-0.0, -0.0]]), np.array([[2.0, 2.0]]), np.array([[-0.0, 0.0]]))
    assert np.signbit(got)[0].tolist() == [True, False]


@CASES
@given(SINGLES, SINGLES)
def test_arithmetic_rounds_to_nearest(a, b):
    if not (np.isfinite(a) and np.isfinite(b)):
        return
    exact = {"add": Fraction(a) + Fraction(b), "sub": Fraction(a) - Fraction(b), "mul": Fraction(a) * Fraction(b)}
    if b != 0:
        exact["div"] = Fraction(a) / Fraction(b)
    for op, value in exact.items():
        if value != 0:
            assert binary(op, f32).meaning(f(a), f(b))[0][0, 0] == nearest_single(value), op


@pytest.mark.parametrize("dtype", [f32, f64], ids=repr)
def test_minimum_and_maximum_ignore_one_nan(dtype):
    a = np.array([[1.0, np.nan, np.nan, -np.inf]], dtype.numpy)
    b = np.array([[np.nan, 2.0, np.nan, np.nan]], dtype.numpy)
    for op in ("min", "max"):
        got = binary(op, dtype).meaning(a, b)[0][0]
        assert got[:2].tolist() == [1.0, 2.0]
        assert np.isnan(got[2])
        assert got[3] == -np.inf


@pytest.mark.parametrize("dtype", [f32, f64], ids=repr)
def test_minus_zero_is_less_than_zero(dtype):
    a, b = np.array([[-0.0, 0.0, -0.0, 0.0]], dtype.numpy), np.array([[0.0, -0.0, -0.0, 0.0]], dtype.numpy)
    assert np.signbit(binary("min", dtype).meaning(a, b)[0])[0].tolist() == [True, True, True, False]
    assert np.signbit(binary("max", dtype).meaning(a, b)[0])[0].tolist() == [False, False, True, False]


@CASES
@given(SINGLES, SINGLES)
def test_comparisons_with_nan_are_ordered(a, b):
    either = np.isnan(a) or np.isnan(b)
    for op, holds in (("lt", a < b), ("le", a <= b), ("gt", a > b), ("ge", a >= b), ("eq", a == b)):
        assert binary(op, f32).meaning(f(a), f(b))[0][0, 0] == (holds and not either)
    assert binary("ne", f32).meaning(f(a), f(b))[0][0, 0] == (either or a != b)


def test_signs():
    x = f(1.5, -0.0, np.inf, -np.nan)
    assert unary("neg", f32).meaning(x)[0].view(np.uint32).tolist() == (x.view(np.uint32) ^ 0x80000000).tolist()
    assert unary("abs", f32).meaning(x)[0].view(np.uint32).tolist() == (x.view(np.uint32) & 0x7FFFFFFF).tolist()


@CASES
@given(st.floats(-160, 160, width=32))
def test_exp2_flushes_subnormals_on_both_sides(x):
    got = named("ex2.approx.ftz.f32").meaning(f(x))[0][0, 0]
    exact = 2.0 ** float(np.float32(x))
    if exact < float(TINY):
        assert got == 0
    elif exact >= 2.0**128:
        assert got == np.inf
    else:
        assert abs(float(got) - exact) <= 2 * 2.0**-23 * exact


@pytest.mark.parametrize(
    ("op", "x", "expected"),
    [
        ("ex2", -np.inf, 0.0),
        ("ex2", np.inf, np.inf),
        ("ex2", 0.0, 1.0),
        ("ex2", -126.0, float(TINY)),
        ("ex2", -127.0, 0.0),
        ("ex2", 2.0**-140, 1.0),
        ("lg2", 0.0, -np.inf),
        ("lg2", 2.0**-140, -np.inf),
        ("lg2", 8.0, 3.0),
        ("lg2", np.inf, np.inf),
        ("rcp", 0.0, np.inf),
        ("rcp", -0.0, -np.inf),
        ("rcp", 2.0**-140, np.inf),
        ("rcp", np.inf, 0.0),
        ("rcp", 2.0**127, 0.0),
        ("rcp", 4.0, 0.25),
        ("rsqrt", 0.0, np.inf),
        ("rsqrt", 4.0, 0.5),
        ("rsqrt", np.inf, 0.0),
        ("rsqrt", 2.0**-140, np.inf),
        ("sqrt", 9.0, 3.0),
        ("sqrt", 2.0**-140, 2.0**-70),
        ("tanh", 0.0, 0.0),
        ("tanh", np.inf, 1.0),
    ],
)
def test_special_values_of_the_approximations(op, x, expected):
    got = function(op).meaning(f(x))[0][0, 0]
    assert bits(got) == bits(expected)


@pytest.mark.parametrize(
    ("op", "x"),
    [
        ("lg2", -1.0),
        ("rsqrt", -1.0),
        ("sqrt", -1.0),
        *((o, np.nan) for o in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh")),
    ],
)
def test_undefined_values_are_nan(op, x):
    assert np.isnan(function(op).meaning(f(x))[0][0, 0])


@CASES
@given(st.floats(width=32, allow_subnormal=False))
def test_tf32_rounds_ties_away(x):
    (word,) = named("cvt.rna.tf32.f32").meaning(f(x))
    assert word.dtype == np.uint32
    got = word.view(np.float32)[0, 0]
    if not np.isfinite(x):
        assert np.isnan(got) if np.isnan(x) else got == x
        return
    assert word[0, 0] & 0x1FFF == 0
    kept = bits(x) & 0xFFFFE000
    low, high = (np.uint32(kept + step).view(np.float32) for step in (0, 0x2000))
    if np.isfinite(high):
        below, above = abs(Fraction(x) - Fraction(float(low))), abs(Fraction(float(high)) - Fraction(x))
        assert got == (low if below < above else high)


def test_tf32_ties_and_overflow():
    tie = np.array([[0x3F801000, 0x3F803000, 0xBF801000, 0x7F7FF000]], np.uint32)
    (word,) = named("cvt.rna.tf32.f32").meaning(tie.view(np.float32))
    assert [hex(w) for w in word[0].tolist()] == ["0x3f802000", "0x3f804000", "0xbf802000", "0x7f800000"]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800FFF])
def test_tf32_of_nan_is_nan(bits):
    (word,) = named("cvt.rna.tf32.f32").meaning(np.array([[bits]], np.uint32).view(np.float32))
    assert np.isnan(word.view(np.float32)[0, 0])


@pytest.mark.parametrize("half", [f16, bf16], ids=repr)
@CASES
@given(low=SINGLES, high=SINGLES)
def test_pairs_round_to_nearest_even(half, low, high):
    (word,) = pack_pair(half).meaning(f(low), f(high))
    with np.errstate(all="ignore"):
        expected = [np.float32(x).astype(HALVES[half]) for x in (low, high)]
    got = word.view(np.uint16)[0]
    for have, want in zip(got.tolist(), expected, strict=True):
        if np.isnan(want):
            assert np.isnan(np.array(have, np.uint16).view(HALVES[half]))
        else:
            assert have == int(want.view(np.uint16))


def test_packing_at_the_edges():
    """Ties to even, overflow to infinity (f16 from 65520 on), subnormals, the sign of zero."""
    cases = [(65519.0, 0x7BFF), (65520.0, 0x7C00), (-1e6, 0xFC00), (2.0**-25, 0), (1.5 * 2.0**-25, 1), (-0.0, 0x8000)]
    cases += [(1 + 2.0**-11, 0x3C00), (1 + 3 * 2.0**-11, 0x3C02), (2.0**-24, 1), (np.inf, 0x7C00)]
    for value, expected in cases:
        (word,) = pack_pair(f16).meaning(f(value), f(0.0))
        assert int(word[0, 0]) == expected, value
    for value, expected in [(1 + 2.0**-8, 0x3F80), (1 + 3 * 2.0**-8, 0x3F82), (3.4e38, 0x7F80), (-0.0, 0x8000)]:
        (word,) = pack_pair(bf16).meaning(f(0.0), f(value))
        assert int(word[0, 0]) >> 16 == expected, value


@pytest.mark.parametrize("half", [f16, bf16], ids=repr)
def test_unpacking_is_exact_for_every_pattern(half):
    patterns = np.arange(65536, dtype=np.uint32)
    words = (patterns | (patterns[::-1] << np.uint32(16))).reshape(-1, 32)
    expected = patterns.astype(np.uint16).view(HALVES[half]).astype(np.float32)
    for which, values in ((0, expected), (1, expected[::-1])):
        (got,) = unpack_half(half, which).meaning(words)
        np.testing.assert_array_equal(got.reshape(-1), values)
    (again,) = pack_pair(half).meaning(*(unpack_half(half, i).meaning(words)[0] for i in (0, 1)))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal((again.reshape(-1) & 0xFFFF)[numbers], patterns[numbers])


@pytest.mark.parametrize("half", [f16, bf16], ids=repr)
@pytest.mark.parametrize("op", ["add", "mul", "min", "max", "fma"])
def test_pair_arithmetic_rounds_once(half, op):
    rng = np.random.default_rng(5)
    kind = HALVES[half]
    count = 3 if op == "fma" else 2
    raw = [rng.standard_normal((8, 64)).astype(np.float32).astype(kind) for _ in range(count)]
    (got,) = pair_arithmetic(op, half).meaning(*(np.ascontiguousarray(x).view(np.uint32) for x in raw))
    got = got.view(kind)
    numbers = [[Fraction(float(v)) for v in x.reshape(-1)] for x in raw]
    exact = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "min": min,
        "max": max,
        "fma": lambda a, b, c: a * b + c,
    }[op]
    for have, *operands in zip(got.reshape(-1), *numbers, strict=True):
        value = exact(*operands)
        pattern = int(np.array([have]).view(np.uint16)[0])
        for neighbour in np.array([max(pattern - 1, 0), pattern + 1], np.uint16).view(kind):
            if np.isfinite(neighbour):
                assert abs(Fraction(float(have)) - value) <= abs(Fraction(float(neighbour)) - value), operands


@pytest.mark.parametrize("half", [f16, bf16], ids=repr)
def test_products_that_vanish_are_zero(half):
    """The least subnormals squared: below everything, with the sign of the product."""
    least = np.array([[0x00018001]], np.uint32)  # low half negative, high half positive
    (got,) = pair_arithmetic("mul", half).meaning(np.array([[0x00010001]], np.uint32), least)
    assert int(got[0, 0]) == 0x00008000
    (fused,) = pair_arithmetic("fma", half).meaning(least, least, np.array([[0]], np.uint32))
    assert int(fused[0, 0]) == 0


def test_pair_minimum_ignores_nan():
    nan, one = 0x7E00, 0x3C00
    (got,) = pair_arithmetic("min", f16).meaning(
        np.array([[nan | one << 16]], np.uint32), np.array([[one | nan << 16]], np.uint32)
    )
    assert int(got[0, 0]) == one | one << 16


@pytest.mark.parametrize(("sign", "expected"), [(-1, 1 + 2**-7), (0, 1 + 2**-6), (1, 1 + 2**-6)])
def test_a_sum_next_to_a_tie_is_rounded_once(sign, expected):
    """1 + 2^-7 + 2^-8 is a tie of bf16; 2^-60 beside it decides, which neither f32 nor f64 can hold."""
    kind = ml_dtypes.bfloat16
    a, b = (np.array([[x, 0]], np.float32).astype(kind) for x in (1 + 2**-7, 1.0))
    c = np.array([[2.0**-8, 0]], np.float32).astype(kind)
    (tie,) = pair_arithmetic("fma", bf16).meaning(*(x.view(np.uint32) for x in (a, b, c)))
    assert float(tie.view(kind)[0, 0]) == 1 + 2**-6
    small = np.array([[1.0]]) * (2.0**-8), np.array([[sign * 2.0**-60]])
    total = sum_to_odd(np.array([[1 + 2.0**-7]]), sum_to_odd(*small))
    assert float(single_to_odd(total).astype(kind)[0, 0]) == expected
