"""What loads give and conversions make of it, names that a loop binds anew, and words that are called wrongly."""

# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.lang.support import run
from warploom.core.errors import TraceError
from warploom.lang import Global, Kernel, bf16, e4m3, e5m2, f16, f32, kernel, s8, s16, s32, u8, u32

RNG = np.random.default_rng(3)
VALUES = np.concatenate(
    [[-3e9, -300.0, -128.5, -2.5, -0.5, 0.5, 1.5, 2.5, 126.5, 127.5, 255.5, 3e9], RNG.uniform(-200, 200, 20)]
).astype(np.float32)


def traces(body):
    @kernel(threads=32)
    def traced(k: Kernel, x: Global[f32], h: Global[bf16]) -> None:
        body(k, x, h)

    return traced.trace()


# -- names that a loop binds anew
def summed(k, x, h):
    total = 0.0
    with k.loop(4) as i:
        total = total + x.load(i)
    x.store(total, 0)


def augmented(k, x, h):
    total = k.value(0.0, f32)
    with k.loop(4) as i:
        total += x.load(i)
        x.store(total, i)


def swapped(k, x, h):
    before = x.load(0)
    with k.loop(4) as i, k.when(k.lane == 0):
        now = x.load(i)
        x.store(now - before, i)
        before = now


def counted(k, x, h):
    total = 0.0
    with k.loop(4):
        total += 1.0
    x.store(x.load(0) * total, 0)


def set_in_a_branch(k, x, h):
    total = 1.0
    with k.when(k.lane < 4):
        total = 2.0
    x.store(x.load(0) * total, 0)


def not_set(k, x, h):
    total = k.register(f32, 0.0)
    with k.loop(4) as i:
        total = total + x.load(i)
    x.store(total, 0)


@pytest.mark.parametrize(
    ("body", "name"),
    [(summed, "total"), (augmented, "total"), (swapped, "before"), (counted, "total"), (set_in_a_branch, "total")],
)
def test_a_name_that_carries_nothing_is_refused_with_its_line(body, name):
    with pytest.raises(TraceError, match=rf"^test_loads\.py:\d+: '{name}' is bound anew.*{name} = k\.register\(f32"):
        traces(body)


def test_a_register_that_a_loop_binds_anew_is_to_be_set():
    with pytest.raises(TraceError, match=r"'total' is bound anew.*write total\.set"):
        traces(not_set)


def turns_of_python(k, x, h):
    side, i = 0, 5
    with k.when(k.lane == 0):
        for i in range(2):
            x.store(x.load(side), i)
            side ^= 1
    for i in range(2):
        x.store(1.0, side + i)


def fresh_each_time(k, x, h):
    value = x.load(0)
    x.store(value, 1)
    with k.loop(4) as i:
        value = x.load(i)
        for _ in range(3):
            value = value * 2.0
        x.store(value, i)


def in_a_register(k, x, h):
    total = k.register(f32, 0.0)
    with k.loop(4) as i:
        total += x.load(i)
    x.store(total, 0)


def listed(k, x, h):
    values = [x.load(0)]
    values += x.load(4, 4)
    for value in values:
        x.store(value, 0)


def under_a_condition(k, x, h):
    value = x.load(0)
    with k.when(k.lane == 3):
        value = value * 2.0
        x.store(value, 3)


@pytest.mark.parametrize("body", [fresh_each_time, turns_of_python, in_a_register, listed, under_a_condition])
def test_names_that_mean_what_they_say_are_left_alone(body):
    traces(body)


# -- loads
@kernel(threads=32)
def doubled(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
    tile = k.shared(f32, 32)
    tile.store(x.load(k.lane), 0, k.lane)
    k.syncwarp()
    y.store(tile.load(0, k.lane) + x.load(k.lane), k.lane)


def test_a_load_of_one_element_is_a_value():
    y = np.zeros(32, np.float32)
    run(doubled, VALUES, y)
    assert (y == 2 * VALUES).all()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda k, x, h: x.load(0, 4) + x.load(4, 4), "a load of 4 elements gives 4 values"),
        (lambda k, x, h: x.load(0, 4) * 2.0, "compute with each"),
        (lambda k, x, h: x.load(0)[0], "is one value, not a sequence"),
        (lambda k, x, h: list(x.load(0)), "is one value, not a sequence"),
        (lambda k, x, h: h.load(0) + h.load(1), r"the bits of one bf16 in u32.*k\.convert\(x, f32\)"),
        (lambda k, x, h: h.load(0) * 2.0, r"the bits of one bf16"),
        (lambda k, x, h: h.store(x.load(0), 0), r"stored as its bits.*store k\.convert\(x, bf16\)"),
        (lambda k, x, h: h.store(1.0, 0), r"store k\.convert\(x, bf16\)"),
        (lambda k, x, h: k.convert(x.load(0), "u32"), "takes a type of warploom.lang, not 'u32'"),
        (lambda k, x, h: k.convert(x.load(0), s32, rounding="even"), "rounding is zero, nearest, down, up, not 'even'"),
        (lambda k, x, h: k.convert(k.lane, f32, rounding="up"), "rounding is for floats that become integers"),
        (lambda k, x, h: k.pack_bytes([1, 2], s8), "four values of s8, u8, e4m3 or e5m2, not 2 of s8"),
        (lambda k, x, h: k.unpack_bytes(k.lane, f16), "takes s8, u8, e4m3 or e5m2, not f16"),
        (
            lambda k, x, h: k.shared(f32),
            r"test_loads\.py:\d+: shared missing.*'shape'; its parameters are \(dtype, shape",
        ),
        (
            lambda k, x, h: k.cp_async(x, x),
            r"test_loads\.py:\d+: cp_async (takes|does not take).*parameters are \(shared, source",
        ),
        (lambda k, x, h: k.register_(f32), r"test_loads\.py:\d+: Kernel has no 'register_'; near it: register"),
    ],
)
def test_what_goes_wrong_says_what_to_write(body, says):
    with pytest.raises(TraceError, match=says):
        traces(body)


def test_an_error_of_the_authors_own_code_stays_as_it_is():
    with pytest.raises(KeyError):
        traces(lambda k, x, h: {}["x"])


def test_a_kernel_typed_into_an_interpreter_has_lines_of_its_own():
    source = "@kernel(threads=32)\ndef typed(k: Kernel, x: Global[f32]) -> None:\n    x.load(0.5)\n"
    names = {"kernel": kernel, "Kernel": Kernel, "Global": Global, "f32": f32}
    exec(compile(source, "<python-input-0>", "exec"), names)
    with pytest.raises(TraceError, match=r"python-input-0>:3"):
        names["typed"].trace()


# -- conversions
@kernel(threads=32)
def rounded(k: Kernel, x: Global[f32], out: Global[s32]) -> None:
    ways = "zero", "nearest", "down", "up"
    out.store([k.convert(x.load(k.lane), s32, rounding=way) for way in ways], 4 * k.lane)


def test_floats_become_integers_by_each_rounding():
    out = np.zeros((32, 4), np.int32)
    run(rounded, VALUES, out)
    wanted = np.stack([f(VALUES.astype(np.float64)) for f in (np.trunc, np.rint, np.floor, np.ceil)], 1)
    assert (out == np.clip(wanted, -(2**31), 2**31 - 1)).all()


@kernel(threads=32)
def narrowed(k: Kernel, x: Global[f32], out: Global[u8], *, dtype, saturate: bool) -> None:
    (out + 0).store(k.convert(x.load(k.lane), dtype, rounding="nearest", saturate=saturate), k.lane)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize(("dtype", "kind"), [(s8, np.int8), (u8, np.uint8)])
def test_bytes_wrap_or_saturate(dtype, kind, saturate):
    out = np.zeros(32, kind)
    run(narrowed, VALUES, out.view(np.uint8), dtype=dtype, saturate=saturate)
    whole = np.clip(np.rint(VALUES.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int64)
    info = np.iinfo(kind)
    assert (out == (np.clip(whole, info.min, info.max) if saturate else whole).astype(kind)).all()


@kernel(threads=32)
def through_memory(k: Kernel, x: Global[f32], h: Global[bf16], s: Global[s16], y: Global[f32], *, other) -> None:
    h.store(k.convert(x.load(k.lane), bf16), k.lane)
    s.store(k.convert(x.load(k.lane), other, saturate=True), k.lane)
    y.store(k.convert(h.load(k.lane), f32) + k.convert(s.load(k.lane), f32), k.lane)


def test_elements_below_32_bits_convert_both_ways():
    h, s, y = np.zeros(32, ml_dtypes.bfloat16), np.zeros(32, np.int16), np.zeros(32, np.float32)
    run(through_memory, VALUES, h, s, y, other=s16)
    assert (h == VALUES.astype(ml_dtypes.bfloat16)).all()
    assert (s == np.clip(np.trunc(VALUES.astype(np.float64)), -(2**15), 2**15 - 1)).all()
    assert (y == h.astype(np.float32) + s.astype(np.float32)).all()


@kernel(threads=32)
def bytes_there_and_back(k: Kernel, x: Global[f32], out: Global[u32], back: Global[s32], *, dtype) -> None:
    v = x.load(k.lane)
    word = k.pack_bytes([v, v * 0.5, -v, k.convert(v, s32)], dtype)
    out.store(word, k.lane)
    back.store(k.unpack_bytes(word, dtype), 4 * k.lane)


@pytest.mark.parametrize(("dtype", "kind"), [(s8, np.int8), (u8, np.uint8)])
def test_four_values_pack_into_a_word(dtype, kind):
    out, back = np.zeros((32, 4), kind), np.zeros((32, 4), np.int32)
    run(bytes_there_and_back, VALUES, out.view(np.uint32).reshape(32), back, dtype=dtype)
    v, info = VALUES.astype(np.float64), np.iinfo(kind)
    wanted = np.stack([np.rint(v), np.rint(v * 0.5), np.rint(-v), np.trunc(v)], 1)
    assert (out == np.clip(wanted, info.min, info.max)).all()
    assert (back == out).all()


@kernel(threads=32, requires="sm_90")
def fp8_as_halves(k: Kernel, x: Global[u32], out: Global[u32]) -> None:
    for i in range(2):
        word = x.load(k.lane + 32 * i)
        out.store(list(k.unpack_fp8(word)), 2 * (k.lane + 32 * i))


def test_every_fp8_unpacks_exactly():
    x, out = np.arange(256, dtype=np.uint8), np.zeros(256, np.float16)
    run(fp8_as_halves, x.view(np.uint32), out.view(np.uint32))
    assert np.array_equal(out, x.view(ml_dtypes.float8_e4m3fn).astype(np.float16), equal_nan=True)


@kernel(threads=32, requires="sm_90")
def through_fp8(k: Kernel, x: Global[f32], h: Global[u8], out: Global[u32], back: Global[f32], *, dtype) -> None:
    v = x.load(k.lane)
    h.store(k.convert(v, dtype), k.lane, dtype=dtype)
    word = k.pack_bytes([v, v * 0.5, -v, k.convert(h.load(k.lane, dtype=dtype), f32)], dtype)
    out.store(word, k.lane)
    back.store(k.unpack_bytes(word, dtype), 4 * k.lane)


@pytest.mark.parametrize(("dtype", "kind"), [(e4m3, ml_dtypes.float8_e4m3fn), (e5m2, ml_dtypes.float8_e5m2)])
def test_fp8_rounds_to_nearest_and_keeps_to_its_largest(dtype, kind):
    h, out, back = np.zeros(32, np.uint8), np.zeros((32, 4), np.uint8), np.zeros((32, 4), np.float32)
    run(through_fp8, VALUES, h, out.view(np.uint32).reshape(32), back, dtype=dtype)
    most = float(ml_dtypes.finfo(kind).max)
    rounded = np.clip(VALUES, -most, most).astype(kind)
    assert (h == rounded.view(np.uint8)).all()
    wanted = np.stack([VALUES, VALUES * 0.5, -VALUES, rounded.astype(np.float32)], 1)
    assert (out == np.clip(wanted, -most, most).astype(kind).view(np.uint8)).all()
    assert (back == out.view(kind).astype(np.float32)).all()
