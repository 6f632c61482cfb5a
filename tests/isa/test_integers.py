"""Integer, bit and predicate instructions against Python's integers; ptx/test_scalar_forms.py has plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.core.dtypes import DType, bf16, f16, f32, f64, pred, s32, s64, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.async_copy import cp_async
from warploom.isa.barriers import set_max_registers
from warploom.isa.collective import shuffle
from warploom.isa.conversion import bitcast, convert, move
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, multiply_wide, select, unary
from warploom.isa.matrix import wgmma_wait
from warploom.isa.memory import atomic, load, store

INTEGERS = [u32, s32, u64, s64]
CASES = settings(deadline=None, max_examples=60)


def permute(selector: int) -> Instruction:
    return named("prmt.b32", numbers=(("selector", selector),), ptx=False)


def bounds(dtype: DType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def edges(dtype: DType) -> st.SearchStrategy[int]:
    """Any value, the ends and the neighbourhood of zero more often."""
    low, high = bounds(dtype)
    near = [x for x in (low, low + 1, -2, -1, 0, 1, 2, 31, 32, 33, 63, 64, high - 1, high) if low <= x <= high]
    return st.one_of(st.sampled_from(near), st.integers(low, high))


def wrapped(dtype: DType, value: int) -> int:
    """``value`` modulo the type."""
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind == "signed" and value >> (dtype.bits - 1) else value


def array(dtype: DType, *values: int | float | bool) -> np.ndarray:
    return np.array([values], dtype.numpy)


def run(instruction, *operands: np.ndarray):
    (result,) = instruction.meaning(*operands)
    assert result.dtype == instruction.result_types[0].numpy, (instruction, result.dtype)
    return result[0, 0].item()


def truncated(a: int, b: int) -> int:
    """Division toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("dtype", INTEGERS, ids=repr)
@CASES
@given(data=st.data())
def test_division_truncates(dtype, data):
    a, b = data.draw(edges(dtype)), data.draw(edges(dtype))
    quotient = run(binary("div", dtype), array(dtype, a), array(dtype, b))
    remainder = run(binary("rem", dtype), array(dtype, a), array(dtype, b))
    if b == 0:
        assert quotient == wrapped(dtype, -1)
        assert remainder == a
    else:
        assert quotient == wrapped(dtype, truncated(a, b))
        assert remainder == wrapped(dtype, a - truncated(a, b) * b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: binary("add", pred),
        lambda: binary("rem", f32),
        lambda: binary("shl", f64),
        lambda: binary("lt", pred),
        lambda: binary("and", f32),
        lambda: named("ex2.approx.ftz.u32"),
        lambda: named("sqrt.approx.f64"),
        lambda: unary("popc", f32),
        lambda: unary("not", f32),
        lambda: unary("abs", u32),
        lambda: named("fma.rn.u32"),
        lambda: multiply_wide(u64),
        lambda: convert(f32, bf16),
        lambda: bitcast(f16, u16),
        lambda: atomic("shared", "and", f32),
        lambda: atomic("global", "min", f32),
        lambda: atomic("global", "add", u16),
        lambda: shuffle("xor", u16),
        lambda: atomic("global", "nand", u32),
        lambda: atomic("global", "add", u32, order="weak"),
        lambda: permute(0x8000),
        lambda: cp_async(8, "cg"),
        lambda: cp_async(2, "ca"),  # pyright: ignore[reportArgumentType]
        lambda: named("cp.async.wait_group", numbers=(("pending", -1),)),
        lambda: named("cp.async.bulk.wait_group", numbers=(("pending", -1),)),  # pyright: ignore[reportArgumentType]
        lambda: wgmma_wait(-1, 0),
        lambda: set_max_registers(30, "inc"),
        lambda: load("global", u32, cache="wb"),
        lambda: store("global", u32, cache="nc"),
        lambda: load("shared", u32, cache="ca"),
        lambda: load("global", u32, order="release"),
        lambda: store("global", u32, order="acquire"),
    ],
)
def test_operands_that_an_instruction_does_not_take_are_refused(make):
    with pytest.raises(VerifyError):
        make()


def test_leading_zeros_around_every_power_of_two():
    values = sorted({max(0, min(2**32 - 1, 2**i + d)) for i in range(33) for d in (-1, 0, 1)})
    counts = unary("clz", u32).meaning(np.array([values], np.uint32))[0]
    assert counts[0].tolist() == [32 - v.bit_length() for v in values]


@CASES
@given(edges(u32), edges(u32), st.integers(0, 0xFFFF).map(lambda s: s & 0x7777))
def test_prmt_picks_bytes(a, b, selector):
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    expected = bytes(pool[(selector >> (4 * i)) & 7] for i in range(4))
    assert run(permute(selector), array(u32, a), array(u32, b)) == int.from_bytes(expected, "little")


@pytest.mark.parametrize("source", INTEGERS, ids=repr)
@CASES
@given(data=st.data())
def test_integers_become_the_nearest_float(source, data):
    a = data.draw(edges(source))
    assert run(convert(source, f64), array(source, a)) == float(a)  # Python rounds to nearest even as well
    single = np.float32(run(convert(source, f32), array(source, a)))
    neighbours = [np.nextafter(single, np.float32(d)) for d in (-np.inf, np.inf)]
    assert all(abs(int(single) - a) <= abs(int(n) - a) for n in neighbours)


@pytest.mark.parametrize("dtype", INTEGERS, ids=repr)
@pytest.mark.parametrize("source", [f32, f64], ids=repr)
@CASES
@given(data=st.data())
def test_floats_truncate_and_saturate(dtype, source, data):
    low, high = bounds(dtype)
    x = data.draw(
        st.one_of(
            st.floats(width=32), st.integers(low, high).map(float), st.sampled_from([low - 1.0, high + 1.0, -0.9, 0.9])
        )
    )
    value = source.numpy.type(x)
    with np.errstate(all="ignore"):
        got = run(convert(source, dtype), np.array([[value]]))
    if np.isnan(value):
        top_bit = wrapped(dtype, 1 << (dtype.bits - 1))
        assert got == (0 if source is f32 and dtype.bits == 32 else top_bit)
    elif np.isinf(value):
        assert got == (high if value > 0 else low)
    else:
        assert got == max(low, min(high, int(value)))


def test_predicates():
    bits = array(pred, False, True, False, True), array(pred, False, False, True, True)
    for op, expected in (("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0]), ("eq", [1, 0, 0, 1])):
        assert binary(op, pred).meaning(*bits)[0][0].tolist() == [bool(x) for x in expected], op
    assert unary("not", pred).meaning(bits[0])[0][0].tolist() == [True, False, True, False]
    assert convert(u32, pred).meaning(array(u32, 0, 1, 2))[0][0].tolist() == [False, True, True]
    assert convert(pred, u32).meaning(bits[0])[0][0].tolist() == [0, 1, 0, 1]


def test_select_and_move_keep_type_and_bits():
    condition = array(pred, True, False)
    for dtype in (*INTEGERS, f32, f64):
        a, b = array(dtype, 1, 2), array(dtype, 3, 4)
        (chosen,) = select(dtype).meaning(condition, a, b)
        assert chosen.dtype == dtype.numpy
        assert chosen[0].tolist() == [1, 4]
        assert move(dtype).meaning(a)[0] is a


@pytest.mark.parametrize(("a", "b"), [(u32, f32), (f32, s32), (s32, u32), (f64, s64), (u64, f64), (s64, u64)], ids=repr)
def test_bitcasts_keep_the_bits(a, b):
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (3, 32 * a.bytes), np.uint8).view(a.numpy)
    (there,) = bitcast(a, b).meaning(raw)
    (back,) = bitcast(b, a).meaning(there)
    assert there.dtype == b.numpy
    assert back.tobytes() == raw.tobytes()


def test_operands_may_broadcast():
    lane, warp = np.arange(32, dtype=np.uint32)[None, :], np.arange(4, dtype=np.uint32)[:, None]
    for instruction in (
        binary("add", u32),
        binary("shl", u32),
        binary("div", u32),
        permute(0x5410),
    ):
        (result,) = instruction.meaning(lane, warp)
        full = np.broadcast_to(lane, (4, 32)).copy(), np.broadcast_to(warp, (4, 32)).copy()
        assert np.array_equal(np.broadcast_to(result, (4, 32)), instruction.meaning(*full)[0]), instruction
