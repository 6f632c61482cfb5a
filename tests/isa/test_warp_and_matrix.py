"""Shuffles, votes, ldmatrix, stmatrix and mma.sync against transcriptions of the PTX ISA, lane by lane."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.core.dtypes import bf16, f16, f32, s32, tf32, u16, u32
from warploom.core.errors import VerifyError
from warploom.isa.collective import shuffle
from warploom.isa.instruction import named
from warploom.isa.matrix import matrix_access, mma
from warploom.isa.memory import atomic, load, store

CASES = settings(deadline=None, max_examples=40)
RNG = np.random.default_rng(11)
FULL = np.full((1, 32), 0xFFFFFFFF, np.uint32)


def source_lane(mode: str, lane: int, argument: int) -> int:
    """PTX ISA, ``shfl.sync`` with clamp 31 and no segments: the lane read, the own one when out of range."""
    wanted = {"xor": lane ^ argument, "idx": argument & 31, "up": lane - argument, "down": lane + argument}[mode]
    return wanted if 0 <= wanted <= 31 else lane


@pytest.mark.parametrize("mode", ["xor", "idx", "up", "down"])
@pytest.mark.parametrize("dtype", [u32, s32, f32], ids=repr)
@CASES
@given(arguments=st.lists(st.integers(0, 31), min_size=32, max_size=32))
def test_shuffles(mode, dtype, arguments):
    values = RNG.integers(0, 2**32, (2, 32), np.uint32).view(dtype.numpy)
    lanes = np.array([arguments, arguments[::-1]], np.uint32)
    (got,) = shuffle(mode, dtype).meaning(values, lanes, np.repeat(FULL, 2, 0))
    for warp in range(2):
        expected = [values[warp, source_lane(mode, lane, int(lanes[warp, lane]))] for lane in range(32)]
        assert got[warp].tobytes() == np.array(expected, dtype.numpy).tobytes()


@pytest.mark.parametrize(
    ("mode", "delta"), [("up", 1), ("up", 31), ("up", 32), ("down", 1), ("down", 31), ("down", 32)]
)
def test_shuffles_keep_the_own_value_at_the_warps_edge(mode, delta):
    values = np.arange(32, dtype=np.uint32)[None]
    (got,) = shuffle(mode, u32).meaning(values, np.full((1, 32), delta, np.uint32), FULL)
    expected = [source_lane(mode, lane, delta) for lane in range(32)]
    assert got[0].tolist() == expected
    assert got[0, 0 if mode == "up" else 31] == (0 if mode == "up" else 31)


@pytest.mark.parametrize("mode", ["up", "down", "xor", "idx"])
def test_shuffles_read_five_bits_of_the_distance(mode):
    values = np.arange(32, dtype=np.uint32)[None]
    near, far = (shuffle(mode, u32).meaning(values, np.full((1, 32), n, np.uint32), FULL)[0] for n in (1, 33))
    assert (near == far).all()


@CASES
@given(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1))
def test_votes_count_members_only(holds, mask):
    bits = np.array([[bool(holds >> lane & 1) for lane in range(32)]])
    masks = np.full((1, 32), mask, np.uint32)
    members = [lane for lane in range(32) if mask >> lane & 1]
    for vote, expected in (
        (named("vote.sync.any.pred"), any(holds >> m & 1 for m in members)),
        (named("vote.sync.all.pred"), all(holds >> m & 1 for m in members)),
        (named("vote.sync.ballot.b32"), holds & mask),
    ):
        (got,) = vote.meaning(bits, masks)
        assert all(got[0, m] == expected for m in members), vote


def test_each_half_of_a_warp_may_vote_apart():
    masks = np.where(np.arange(32) < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)[None]
    holds = (np.arange(32) < 4)[None]
    assert named("vote.sync.any.pred").meaning(holds, masks)[0][0].tolist() == [True] * 16 + [False] * 16
    assert set(named("vote.sync.ballot.b32").meaning(holds, masks)[0][0].tolist()) == {0xF, 0}


def test_one_lane_is_elected():
    assert named("elect.sync", numbers=(("mask", 0xFFFFFFFF),)).meaning()[0].sum() == 1


# -- ldmatrix and stmatrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_by_the_isas_figure(count, transposed):
    """Thread l gets elements 2(l%4), 2(l%4)+1 of row l/4; with .trans those of column l/4."""
    halves = RNG.integers(0, 65536, (3, count, 8, 8), np.uint16)
    rows = halves.view(np.uint32).reshape(3, 8 * count, 4)
    got = matrix_access("ldmatrix", count, transposed).meaning(rows)
    for warp in range(3):
        for matrix in range(count):
            for lane in range(32):
                a, b = 2 * (lane % 4), 2 * (lane % 4) + 1
                at = halves[warp, matrix]
                pair = (at[a, lane // 4], at[b, lane // 4]) if transposed else (at[lane // 4, a], at[lane // 4, b])
                assert int(got[matrix][warp, lane]) == int(pair[0]) | int(pair[1]) << 16


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse(count, transposed):
    rows = RNG.integers(0, 2**32, (2, 8 * count, 4), np.uint32)
    registers = matrix_access("ldmatrix", count, transposed).meaning(rows)
    (back,) = matrix_access("stmatrix", count, transposed).meaning(*registers)
    assert np.array_equal(back, rows)


@pytest.mark.parametrize("instruction", ["ldmatrix", "stmatrix"])
def test_matrices_come_in_ones_twos_and_fours(instruction):
    with pytest.raises(VerifyError, match="1, 2 or 4"):
        matrix_access(instruction, 3)


# -- loads, stores, atomics


@pytest.mark.parametrize("dtype", [f32, u32, s32])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_loads_and_stores_are_inverse(dtype, count):
    registers = tuple(RNG.integers(0, 2**32, (2, 32), np.uint32).view(dtype.numpy) for _ in range(count))
    (words,) = store("shared", dtype, count).meaning(*registers)
    assert words.shape == (2, 32, count)
    back = load("shared", dtype, count).meaning(words)
    assert [b.tobytes() for b in back] == [r.tobytes() for r in registers]
    assert all(b.dtype == dtype.numpy for b in back)


def test_narrow_loads_zero_extend_and_stores_truncate():
    (word,) = store("global", u16).meaning(np.array([[0xABCD1234]], np.uint32))
    assert (word.dtype, int(word[0, 0, 0])) == (np.uint16, 0x1234)
    (value,) = load("global", u16).meaning(np.array([[[0xFFFE]]], np.uint16))
    assert (value.dtype, int(value[0, 0])) == (np.uint32, 0xFFFE)


def updated(instruction, *operands):
    """What an atomic leaves in memory, of what was there and its operands."""
    assert instruction.combine is not None
    return instruction.combine(*operands)


@CASES
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_atomics(old, value, other):
    expected = {
        "add": (old + value) % 2**32,
        "min": min(old, value),
        "max": max(old, value),
        "and": old & value,
        "or": old | value,
        "xor": old ^ value,
        "exch": value,
    }
    before, operand = np.array([old], np.uint32), np.array([value], np.uint32)
    for op, result in expected.items():
        assert int(updated(atomic("global", op, u32), before, operand)[0]) == result, op
    compare = np.array([old if other % 2 else other], np.uint32)
    swapped = int(updated(atomic("global", "cas", u32), before, compare, operand)[0])
    assert swapped == (value if int(compare[0]) == old else old)


@pytest.mark.parametrize(("old", "compare", "swaps"), [(0.0, -0.0, False), (np.nan, np.nan, True), (1.0, 1.0, True)])
def test_cas_compares_bits(old, compare, swaps):
    before, expected, value = (np.array([x], np.float32) for x in (old, compare, 7.0))
    after = updated(atomic("global", "cas", f32), before, expected, value)
    assert (after[0] == 7.0) == swaps


def test_sums_in_global_memory_flush_subnormals():
    tiny = np.array([1e-40], np.float32)
    assert updated(atomic("global", "add", f32), tiny, tiny)[0] == 0
    assert updated(atomic("shared", "add", f32), tiny, tiny)[0] == tiny[0] + tiny[0]


# -- mma.sync: the owner formulas of the PTX ISA, with g = lane / 4 and t = lane % 4


def a_owner(shape: str, bits: int, lane: int, i: int) -> tuple[int, int]:
    """(row, col) of element ``i`` of A."""
    g, t = lane >> 2, lane & 3
    if bits == 32:  # .tf32 m16n8k8: a0 (g, t), a1 (g+8, t), a2 (g, t+4), a3 (g+8, t+4)
        return (g if i in (0, 2) else g + 8), (t if i < 2 else t + 4)
    if shape == "m16n8k8":
        return (g if i < 2 else g + 8), t * 2 + (i & 1)
    row = g if (0 <= i < 2) or (4 <= i < 6) else g + 8
    return row, t * 2 + (i & 1) + (0 if i < 4 else 8)


def b_owner(shape: str, bits: int, lane: int, i: int) -> tuple[int, int]:
    """(row, col) = (k, n) of element ``i`` of B."""
    g, t = lane >> 2, lane & 3
    if bits == 32:
        return (t if i == 0 else t + 4), g
    return t * 2 + (i & 1) + (0 if i < 2 else 8), g


def c_owner(lane: int, i: int) -> tuple[int, int]:
    """(row, col) of element ``i`` of C and D."""
    g, t = lane >> 2, lane & 3
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


KINDS = [
    ("m16n8k16", f16, f32),
    ("m16n8k16", f16, f16),
    ("m16n8k16", bf16, f32),
    ("m16n8k8", f16, f32),
    ("m16n8k8", f16, f16),
    ("m16n8k8", bf16, f32),
    ("m16n8k8", tf32, f32),
]
NUMPY = {f16: np.float16, bf16: ml_dtypes.bfloat16, tf32: np.float32, f32: np.float32}


def registers_of(matrix: np.ndarray, owner, count: int, dtype) -> tuple[np.ndarray, ...]:
    """Each lane's elements, gathered by the owner formula, packed into registers; matrix (rows, cols)."""
    per_lane = np.array([[matrix[owner(lane, i)] for i in range(count)] for lane in range(32)]).astype(NUMPY[dtype])
    words = np.ascontiguousarray(per_lane).view(np.float32 if dtype is f32 else np.uint32)
    return tuple(np.ascontiguousarray(words[:, i])[None] for i in range(words.shape[1]))


@pytest.mark.parametrize(("shape", "inputs", "accumulator"), KINDS)
def test_mma_is_a_matrix_product_in_the_isas_layout(shape, inputs, accumulator):
    k = int(shape.rsplit("k", 1)[1])
    small = RNG.integers(-4, 5, (16, k)), RNG.integers(-4, 5, (k, 8)), RNG.integers(-8, 9, (16, 8))
    a, b, c = (x.astype(np.float64) for x in small)  # exact in every type, and so is every partial sum
    operands = (
        *registers_of(a, lambda lane, i: a_owner(shape, inputs.bits, lane, i), 16 * k // 32, inputs),
        *registers_of(b, lambda lane, i: b_owner(shape, inputs.bits, lane, i), 8 * k // 32, inputs),
        *registers_of(c, c_owner, 4, accumulator),
    )
    instruction = mma(shape, inputs, accumulator)
    assert [o.dtype for o in operands] == [t.numpy for t in instruction.operand_types]
    got = instruction.meaning(*operands)
    expected = registers_of(a @ b + c, c_owner, 4, accumulator)
    assert [g.dtype for g in got] == [t.numpy for t in instruction.result_types]
    for have, want in zip(got, expected, strict=True):
        assert np.array_equal(have, want)


@pytest.mark.parametrize(("shape", "inputs", "accumulator"), KINDS)
def test_mma_on_random_values_and_several_warps(shape, inputs, accumulator):
    instruction = mma(shape, inputs, accumulator)
    k = int(shape.rsplit("k", 1)[1])
    matrices = [[RNG.standard_normal(s).astype(NUMPY[inputs]) for s in ((16, k), (k, 8))] for _ in range(3)]
    packed = [
        registers_of(a, lambda lane, i: a_owner(shape, inputs.bits, lane, i), 16 * k // 32, inputs)
        + registers_of(b, lambda lane, i: b_owner(shape, inputs.bits, lane, i), 8 * k // 32, inputs)
        + registers_of(np.zeros((16, 8)), c_owner, 4, accumulator)
        for a, b in matrices
    ]
    operands = [np.concatenate(parts) for parts in zip(*packed, strict=True)]
    got = instruction.meaning(*operands)
    for warp, (a, b) in enumerate(matrices):
        a64, b64 = (_as_operand(x, inputs) for x in (a, b))
        size = np.abs(a64) @ np.abs(b64)
        unit = 2.0**-11 if accumulator is f16 else 0.0
        tolerance = k * 2.0**-22 * size + unit * np.abs(a64 @ b64) + 2.0**-24 * (accumulator is f16)
        for lane in range(32):
            for i in range(4):
                row, col = c_owner(lane, i)
                have = (
                    got[i][warp, lane] if accumulator is f32 else got[i // 2].view(np.float16)[warp, 2 * lane + i % 2]
                )
                assert abs(float(have) - (a64 @ b64)[row, col]) <= tolerance[row, col]


def _as_operand(x: np.ndarray, inputs) -> np.ndarray:
    """float64 values as the tensor core sees them: tf32 drops 13 bits."""
    if inputs is tf32:
        return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def test_shapes_that_do_not_exist_are_refused():
    for arguments in (("m16n8k16", tf32), ("m8n8k4", f16), ("m16n8k16", f32)):
        with pytest.raises(VerifyError, match="m16n8k16 takes f16, bf16"):
            mma(*arguments)
    with pytest.raises(VerifyError, match=r"sums in f16: m16n8k16 takes f16[,;]"):
        mma("m16n8k16", bf16, f16)
