"""Forms that compilers write for eviction hints, int8 products, rounding modes and byte tables, against references."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ptx.text import check, kernel, lanewise
from warploom.core.dtypes import s8, s32, u8
from warploom.core.errors import PtxError
from warploom.cuda.printer import print_cuda
from warploom.isa.instruction import named

RNG = np.random.default_rng(33)
MOST = np.finfo(np.float32).max
MODES = ("rz", "rm", "rp")
FULL = np.full((1, 32), 0xFFFFFFFF, np.uint32)


def directed(mode: str, guess: np.float32, is_above: Callable[[Fraction], bool], negative: bool) -> np.float32:
    """The f32 that a direction takes: ``is_above`` says whether a rational number exceeds the exact one."""
    low = guess
    while is_above(Fraction(float(low))):
        low = np.nextafter(low, np.float32(-np.inf))
    while not is_above(Fraction(float(high := np.nextafter(low, np.float32(np.inf))))):
        low = high
    if mode == "rm" or (mode == "rz" and not negative):
        return low
    exact = not is_above(Fraction(float(low))) and is_above(Fraction(float(low)) + Fraction(1, 2**300))
    return low if exact else high


def singles(count: int = 32) -> np.ndarray[Any, Any]:
    """Numbers of all sizes, subnormal ones among them."""
    x = np.ldexp(RNG.uniform(1, 2, count), RNG.integers(-140, 60, count)) * RNG.choice([-1, 1], count)
    return x.astype(np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_quotients_and_roots_are_rounded_in_a_direction(mode: str) -> None:
    with np.errstate(all="ignore"):
        a, b = singles(200), singles(200)
        near = (b * np.float32(3)) / np.float32(7)  # quotients beside a number of f32
        for x, y in zip(np.r_[a, b, near], np.r_[b, b, b], strict=True):
            exact = Fraction(float(x)) / Fraction(float(y))
            if abs(exact) < 2**120:
                (got,) = named(f"div.{mode}.f32").meaning(x[None, None], y[None, None])
                assert got[0, 0] == directed(mode, np.float32(float(exact)), lambda q, e=exact: q > e, exact < 0), (
                    x,
                    y,
                )
            exact = 1 / Fraction(float(y))
            if abs(exact) < 2**120:
                (got,) = named(f"rcp.{mode}.f32").meaning(y[None, None])
                assert got[0, 0] == directed(mode, np.float32(float(exact)), lambda q, e=exact: q > e, exact < 0), y
            square = Fraction(float(abs(x)))
            (got,) = named(f"sqrt.{mode}.f32").meaning(np.abs(x)[None, None])
            assert got[0, 0] == directed(mode, np.sqrt(abs(x)), lambda q, e=square: q > 0 and q * q > e, False), x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "f64"])
def test_conversions_to_f32_are_rounded_in_a_direction(kind: str, mode: str) -> None:
    if kind == "f64":
        x = np.ldexp(RNG.uniform(-2, 2, 32), RNG.integers(-140, 100, 32))
    else:
        info = np.iinfo({"s": "i", "u": "u"}[kind[0]] + str(int(kind[1:]) // 8))
        edges = [info.min, info.max, 0, 1, 2**24 + 1, 2**31 - 1, 2**25 + 3, info.max - 1]
        x = np.array([*edges, *RNG.integers(info.min, info.max, 24, info.dtype)], info.dtype)
    got = lanewise(f"cvt.{mode}.f32.{kind} %out, %in0;", [x], np.float32)
    for value, found in zip(x.tolist(), got, strict=True):
        exact = Fraction(value)
        assert found == directed(mode, np.float32(value), lambda q, e=exact: q > e, value < 0), value


def test_directed_roundings_at_the_ends_of_f32() -> None:
    def divided(mode: str, a: float, b: float) -> np.float32:
        with np.errstate(all="ignore"):
            return named(f"div.{mode}.f32").meaning(*(np.array([[x]], np.float32) for x in (a, b)))[0][0, 0]

    assert [divided(mode, 3e38, 0.5) for mode in MODES] == [MOST, MOST, np.inf]
    assert [divided(mode, -3e38, 0.5) for mode in MODES] == [-MOST, -np.inf, -MOST]
    assert [divided(mode, 1, 0) for mode in MODES] == [np.inf] * 3
    assert all(np.isnan(divided(mode, 0, 0)) for mode in MODES)
    assert [str(divided(mode, -0.0, 3)) for mode in MODES] == ["-0.0"] * 3
    assert [float(divided(mode, 1e-45, 4e38 / 2)) for mode in MODES] == [0, 0, 2.0**-149]
    with np.errstate(all="ignore"):
        converted = [named(f"cvt.{mode}.f32.f64").meaning(np.array([[-0.0, 1e300]]))[0][0] for mode in MODES]
    assert [[str(y) for y in x] for x in converted] == [
        ["-0.0", str(MOST)],
        ["-0.0", str(MOST)],
        ["-0.0", "inf"],
    ]


def picked(mode: str, i: int, c: int) -> int:
    """Which of the eight bytes of b and a becomes byte i, by the table of the PTX ISA."""
    return {
        "f4e": i + c,
        "b4e": (c - i) % 8,
        "rc8": c,
        "ecl": max(i, c),
        "ecr": min(i, c),
        "rc16": 2 * (c & 1) + (i & 1),
    }[mode]


@pytest.mark.parametrize("mode", ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
def test_bytes_are_picked_by_a_mode(mode: str) -> None:
    a, b, c = (RNG.integers(0, 2**32, 64, np.uint32) for _ in range(3))
    got = lanewise(f"prmt.b32.{mode} %out, %in0, %in1, %in2;", [a, b, c], np.uint32)
    for x, y, by, found in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        both = (x | y << 32).to_bytes(8, "little")
        assert found.to_bytes(4, "little") == bytes(both[picked(mode, i, by & 3)] for i in range(4))


@pytest.mark.parametrize("inputs", [s8, u8])
def test_sums_of_bytes_may_saturate(inputs: Any) -> None:
    """Products without a sum do not overflow; with one beside an end of s32 some do."""
    made = named(f"mma.sync.aligned.m16n8k32.row.col.satfinite.s32.{inputs}.{inputs}.s32")
    wraps = named(f"mma.sync.aligned.m16n8k32.row.col.s32.{inputs}.{inputs}.s32")
    registers = [RNG.integers(0, 2**32, (1, 32), np.uint32) for _ in range(6)]
    ends = [np.full((1, 32), end, np.int32) for end in (2**31 - 5, -(2**31) + 5, 2**31 - 5, 7)]
    held, free = (np.stack(i.meaning(*registers, *ends)).astype(np.int64) for i in (made, wraps))
    zeros = [np.zeros((1, 32), s32.numpy)] * 4
    products = np.stack(wraps.meaning(*registers, *zeros)).astype(np.int64)
    exact = products + np.stack(ends)
    assert (np.abs(exact) >= 2**31).any()
    assert np.array_equal(held, np.clip(exact, -(2**31), 2**31 - 1))
    assert np.array_equal(free, (exact + 2**31) % 2**32 - 2**31)


@pytest.mark.parametrize("words", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_reductions_of_floats(op: str, words: str) -> None:
    made = named(f"redux.sync.{op}{words}.f32")
    values = RNG.standard_normal((1, 32)).astype(np.float32)
    values[0, 3], values[0, 20] = np.nan, np.inf
    masks = np.where(np.arange(32) < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)[None]
    (got,) = made.meaning(values, masks)
    for first in (0, 16):
        of = values[0, first : first + 16]
        of = np.abs(of) if "abs" in words else of
        wanted = np.nan if "NaN" in words and np.isnan(of).any() else {"min": np.nanmin, "max": np.nanmax}[op](of)
        assert np.array_equal(got[0, first : first + 16], np.full(16, wanted, np.float32), equal_nan=True)


def test_cache_policies_change_no_result() -> None:
    """What Triton writes for ``eviction_policy="evict_last"``."""
    body = """cvta.to.global.u64 %d1, %d0; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d1, %d2;
    createpolicy.fractional.L2::evict_last.b64 %d4, 1.0; mov.f32 %f1, 0f3F000000;
    createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d5, %f1;
    createpolicy.fractional.L2::evict_unchanged.b64 %d6;
    ld.global.L1::evict_last.L2::cache_hint.b32 %r1, [%d3], %d4; add.u32 %r1, %r1, 1;
    st.global.L1::evict_first.L2::cache_hint.b32 [%d3], %r1, %d5;"""
    out = np.arange(32, dtype=np.uint32)
    assert check(kernel(body), [out]).findings == ()
    assert out.tolist() == list(range(1, 33))


@pytest.mark.parametrize("space", ["global", "shared"])
def test_halves_are_compared_and_swapped(space: str) -> None:
    """Each lane replaces the number that equals its own; its neighbour in the same word stays."""
    place = "%d3" if space == "global" else "%r3"
    body = f"""cvta.to.global.u64 %d1, %d0; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 2; add.s64 %d3, %d1, %d2;
    mov.u32 %r2, words; mad.lo.u32 %r3, %r0, 2, %r2; ld.global.u16 %h0, [%d3]; st.shared.u16 [%r3], %h0;
    cvt.u16.u32 %h1, %r0; mov.u16 %h2, 999; atom.{space}.cas.b16 %h3, [{place}], %h1, %h2;
    {"" if space == "global" else "ld.shared.u16 %h4, [%r3]; st.global.u16 [%d3], %h4;"}
    cvta.to.global.u64 %d5, %d4; ld.param.u64 %d6, [p1]; add.s64 %d7, %d6, %d2; st.global.u16 [%d7], %h3;"""
    body = body.replace("cvta.to.global.u64 %d5, %d4; ", "")
    x = np.arange(32, dtype=np.uint16)
    x[::3] += 100
    before, old = x.copy(), np.zeros(32, np.uint16)
    text = kernel(body, ("u64", "u64"), before=".shared .align 4 .b8 words[64];")
    assert check(text, [x, old]).findings == ()
    assert old.tolist() == before.tolist()
    assert x.tolist() == np.where(before == np.arange(32), 999, before).tolist()


def test_the_number_of_the_elected_lane() -> None:
    """Every lane gets one number, and it is that of the lane whose predicate holds."""
    body = """cvta.to.global.u64 %d1, %d0; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d1, %d2;
    mov.u32 %r5, -1; elect.sync %r1|%p2, %r5; selp.u32 %r2, 100, 0, %p2; add.u32 %r2, %r2, %r1;
    st.global.u32 [%d3], %r2;"""
    out = np.zeros(32, np.uint32)
    found = check(kernel(body, target="sm_90"), [out])
    assert found.findings == ()
    (leader,) = np.flatnonzero(out >= 100)
    assert out.tolist() == [leader + 100 * (lane == leader) for lane in range(32)]
    assert "elect.sync d|p, 0xffffffff; mov.b32 %0, d; selp.u32 %1, 1, 0, p;" in print_cuda(found.program)


def test_a_breakpoint_ends_its_threads() -> None:
    body = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 3; @%p1 brkpt; cvta.to.global.u64 %d1, %d0;
    mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d1, %d2; st.global.u32 [%d3], 7;"""
    out = np.zeros(32, np.uint32)
    (found,) = check(kernel(body), [out]).findings
    assert (found.kind, found.count) == ("assert", 1)
    assert out.tolist() == [7 * (lane != 3) for lane in range(32)]


def test_the_number_of_the_sm() -> None:
    body = "cvta.to.global.u64 %d1, %d0; mov.u32 %r0, %smid; st.global.u32 [%d1], %r0;"
    out = np.full(1, 9, np.uint32)
    found = check(kernel(body), [out])
    assert out == 0
    assert "mov.u32 %0, %%smid;" in print_cuda(found.program)


@pytest.mark.parametrize("initial", ["{f, f}", "{0, f}", "generic(x)"])
def test_tables_of_functions_are_refused_by_name(initial: str) -> None:
    text = kernel("", before=f".func f {{ ret; }} .global .u64 x; .global .align 8 .u64 table[2] = {initial};")
    with pytest.raises(PtxError, match=r"(f|generic) as an initial value is not supported: a table of functions"):
        check(text, [np.zeros(1, np.uint32)])


def test_members_of_a_structure_may_have_8_bits() -> None:
    source = """struct P { signed char a; unsigned char b; bool c; float* y; char d; int n; };
    extern "C" __global__ void k(P p) {
        if (p.c) p.y[threadIdx.x] = p.a * 1000 + p.b * 3 + p.d + p.n * 100000.f;
    }"""
    for a, c, d in ((-5, True, -100), (7, False, 100), (127, True, 1)):
        y = np.zeros(32, np.float32)
        given = [np.int8(a), np.uint8(250), np.bool_(c), y, np.int8(d), 2]
        assert warploom.check_cuda(source, "k", 1, 32, [given]).findings == ()
        assert (y == c * (1000 * a + 750 + d + 200000)).all()


def directed_double(mode: str, op: str, *x: float) -> float:
    """One operation of f64 in a direction, by rational numbers alone: a search between neighbours of the quotient."""
    exact = {"add": sum, "mul": math.prod, "div": lambda v: v[0] / v[1], "rcp": lambda v: 1 / v[0]}[op](
        [Fraction(v) for v in x]
    )
    guess = float(exact)
    near = [guess, math.nextafter(guess, -math.inf), math.nextafter(guess, math.inf)]
    fits = {"rm": lambda v: v <= exact, "rp": lambda v: v >= exact, "rz": lambda v: abs(v) <= abs(exact)}[mode]
    return min((v for v in near if fits(Fraction(v))), key=lambda v: abs(Fraction(v) - exact))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["add", "mul", "div", "rcp"])
def test_doubles_are_rounded_in_a_direction(op: str, mode: str) -> None:
    a, b = (np.ldexp(RNG.uniform(-2, 2, (1, 64)), RNG.integers(-30, 30, (1, 64))) for _ in range(2))
    a[0, :8], b[0, :8] = [1, 3, 10, 0.1, 5e-324, -5e-324, 6, -1], [3, 3, -3, 0.2, 0.5, 0.5, -2, 1e-300]
    given = (b,) if op == "rcp" else (a, b)
    (got,) = named(f"{op}.{mode}.f64").meaning(*given)
    assert got[0].tolist() == [directed_double(mode, op, *x) for x in zip(*(v[0].tolist() for v in given), strict=True)]


@pytest.mark.parametrize(
    ("form", "x", "is_"),
    [
        ("add.rm.f64", (1.0, -1.0), -0.0),
        ("add.rz.f64", (1.0, -1.0), 0.0),
        ("sub.rm.f64", (0.0, 0.0), -0.0),
        ("add.rm.f64", (0.0, 0.0), 0.0),
        ("fma.rm.f64", (2.0, 3.0, -6.0), -0.0),
        ("mul.rz.f64", (1e300, 1e300), float(np.finfo(np.float64).max)),
        ("mul.rp.f64", (1e300, 1e300), math.inf),
        ("mul.rp.f64", (1e-300, 1e-300), 5e-324),
        ("div.rz.f64", (1.0, 0.0), math.inf),
        ("sqrt.rz.f64", (2.0,), math.sqrt(2.0) - 2.0**-52),
        ("sqrt.rp.f64", (4.0,), 2.0),
        ("fma.rp.f64", (1.0 + 2.0**-52, 1.0 + 2.0**-52, 0.0), 1.0 + 2.0**-51 + 2.0**-52),
    ],
)
def test_ends_of_doubles_rounded_in_a_direction(form: str, x: tuple[float, ...], is_: float) -> None:
    with np.errstate(all="ignore"):
        (got,) = named(form).meaning(*(np.full((1, 32), v) for v in x))
    assert got.tolist() == [[is_] * 32]
    assert (np.signbit(got) == np.signbit(is_)).all()


@pytest.mark.parametrize("form", ["add.u16x2", "add.s16x2", "min.u16x2", "max.s16x2", "min.relu.s16x2"])
def test_pairs_of_integers(form: str) -> None:
    op, *relu, kind = form.split(".")
    halves = RNG.integers(0, 1 << 16, (2, 32, 2)).astype(np.uint16)
    a, b = halves.view(np.int16 if kind == "s16x2" else np.uint16)
    found = {"add": np.add, "min": np.minimum, "max": np.maximum}[op](a, b)
    found = np.maximum(found, 0) if relu else found
    (got,) = named(form).meaning(*halves.view(np.uint32)[..., 0][:, None])
    assert np.array_equal(got[0], np.ascontiguousarray(found).view(np.uint32)[:, 0])
