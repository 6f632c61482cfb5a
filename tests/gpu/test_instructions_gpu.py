"""What the emulator computes is what the GPU computes: every instruction on random and on special operands."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from tests.gpu.harness import launch, on_gpu, random_operand  # noqa: E402 (after the skip)
from tests.isa.functions import function  # noqa: E402
from warploom.core.dtypes import bf16, f16, f32, f64, pred, s8, s32, s64, tf32, u8, u32, u64  # noqa: E402
from warploom.isa.collective import shuffle  # noqa: E402
from warploom.isa.conversion import bitcast, convert, pack_bytes, pack_pair, unpack_half  # noqa: E402
from warploom.isa.instruction import Instruction, named  # noqa: E402
from warploom.isa.lanewise import binary, multiply_wide, pair_arithmetic, select, unary  # noqa: E402
from warploom.isa.matrix import matrix_access, mma  # noqa: E402
from warploom.lang import Global, Kernel, kernel  # noqa: E402

INTEGERS = (u32, s32, u64, s64)
FLOATS = (f32, f64)
LANES = 32 * 128

EXACT: list[Instruction] = [
    *(binary(op, t) for op in ("add", "sub", "mul", "and", "or", "xor", "min", "max", "shl", "shr") for t in INTEGERS),
    *(binary(op, t) for op in ("div", "rem") for t in INTEGERS),
    *(binary(op, t) for op in ("lt", "le", "gt", "ge", "eq", "ne") for t in (*INTEGERS, *FLOATS)),
    *(binary(op, t) for op in ("add", "sub", "mul", "div", "min", "max") for t in FLOATS),
    *(binary(op, pred) for op in ("and", "or", "xor")),
    *(unary(op, u32) for op in ("not", "popc", "clz", "brev")),
    *(unary(op, t) for op in ("neg", "abs", "not") for t in (s32, s64)),
    *(unary(op, t) for op in ("neg", "abs") for t in FLOATS),
    *(function(op) for op in ("sqrt", "tf32")),
    *(named(f"fma.rn.{t}") for t in FLOATS),
    *(multiply_wide(t) for t in (u32, s32)),
    *(select(t) for t in (*INTEGERS, *FLOATS)),
    *(bitcast(a, b) for a, b in itertools.permutations((u32, s32, f32), 2)),
    *(bitcast(a, b) for a, b in itertools.permutations((u64, s64, f64), 2)),
    *(convert(a, b) for a, b in itertools.permutations((*INTEGERS, *FLOATS), 2)),
    *(convert(t, pred) for t in INTEGERS),
    *(convert(pred, t) for t in INTEGERS),
    *(convert(a, b, r) for a in (f32, f64) for b in (s32, u32, s64, u64) for r in ("rni", "rmi", "rpi")),
    *(pack_bytes(t) for t in (s8, u8)),
    *(pack_pair(t) for t in (f16, bf16)),
    *(unpack_half(t, i) for t in (f16, bf16) for i in (0, 1)),
    *(pair_arithmetic(op, t) for t in (f16, bf16) for op in ("fma", "add", "mul", "min", "max")),
    *(named("prmt.b32", numbers=(("selector", s),), ptx=False) for s in (0x5410, 0x7632, 0x0123, 0x3210)),
    *(shuffle("xor", t) for t in (u32, f32)),
]

APPROXIMATE = {"ex2": 2, "lg2": 4, "rcp": 1, "rsqrt": 2}
"""Largest distance in units of the last place of the exact result. PTX ISA: ex2 2 ulp, rcp 1 ulp, rsqrt 2^-22.9
relative; lg2 is bounded absolutely (2^-22) near 1."""

TANH_RELATIVE = 2.0**-10.5
"""Its bound in the PTX ISA is 2^-11 relative; half an ulp of the emulator's own rounding on top."""


def groups(instructions: list[Instruction]) -> dict[str, list[Instruction]]:
    """Instructions by operand types, so that one kernel runs many."""
    found: defaultdict[str, list[Instruction]] = defaultdict(list)
    for instruction in instructions:
        if instruction.exchange is None:
            found[",".join(t.name for t in instruction.operand_types)].append(instruction)
    return dict(found)


GROUPS = groups(EXACT)


def meaning(instruction: Instruction, operands: list[np.ndarray]) -> list[np.ndarray]:
    """The NumPy meaning on flat arrays."""
    return [r.reshape(-1) for r in instruction.meaning(*(x.reshape(-1, 32) for x in operands))]


def operands_for(instruction: Instruction, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [random_operand(rng, t, LANES) for t in instruction.operand_types]


def specified(instruction: Instruction, operands: list[np.ndarray]) -> np.ndarray:
    """The lanes whose result PTX specifies: all but 64-bit divisions by zero, which vary with the dividend."""
    if instruction.operator in ("div", "rem") and instruction.operand_types[0] in (u64, s64):
        return operands[1] != 0
    return np.ones(LANES, bool)


def differing(have: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two results differ in bits; a NaN equals every NaN."""
    if have.dtype.kind == "f":
        same = (have == want) & (np.signbit(have) == np.signbit(want)) | (np.isnan(have) & np.isnan(want))
        return np.flatnonzero(~same)
    return np.flatnonzero(have != want)


def nan_agnostic(instruction: Instruction, have: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """tf32 values as floats, and packed halves with every NaN made the same: payloads are not specified."""
    if instruction.mnemonic == "cvt.rna.tf32.f32":
        return have.view(np.float32), want.view(np.float32)
    pair = {"f16x2", "bf16x2"} & set(instruction.mnemonic.split("."))
    if not pair or have.dtype != np.uint32:
        return have, want
    limit = 0x7C00 if pair == {"f16x2"} else 0x7F80
    both: list[np.ndarray] = []
    for words in (have, want):
        halves = np.ascontiguousarray(words).view(np.uint16).copy()
        halves[(halves & 0x7FFF) > limit] = 0x7FFF
        both.append(halves)
    return both[0], both[1]


@pytest.mark.parametrize("kinds", GROUPS)
def test_exact_instructions_agree_bit_by_bit(kinds):
    instructions = GROUPS[kinds]
    wrong: list[str] = []
    for seed in (1, 2):
        operands = operands_for(instructions[0], seed)
        for instruction, results in zip(instructions, on_gpu(instructions, operands), strict=True):
            for have, want in zip(results, meaning(instruction, operands), strict=True):
                have, want = nan_agnostic(instruction, have, np.asarray(want))
                bad = differing(have, want)
                bad = bad[specified(instruction, operands)[bad * LANES // have.size]]
                if bad.size:
                    i = int(bad[0])
                    lane = i if have.size == LANES else i // 2
                    inputs = [x[lane] for x in operands]
                    wrong.append(
                        f"{instruction.mnemonic}{tuple(inputs)}: GPU {have[i]!r}, emulator {want[i]!r} "
                        f"({bad.size} lanes)"
                    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximations_are_as_close_as_documented(op):
    instruction = function(op)
    (x,) = operands_for(instruction, 3)
    ((have,),) = on_gpu([instruction], [x])
    (want,) = meaning(instruction, [x])
    special = ~np.isfinite(want) | (want == 0)
    assert differing(have[special], want[special]).size == 0, list(
        zip(x[special], have[special], want[special], strict=True)
    )[:5]
    have, want = have[~special].astype(np.float64), want[~special]
    ulp = np.spacing(np.abs(want)).astype(np.float64)
    allowed = APPROXIMATE[op] * ulp + (2.0**-22 if op == "lg2" else 0.0)
    worst = float((np.abs(have - want) / allowed).max())
    assert worst <= 1.0, worst


def test_tanh_is_as_close_as_documented():
    (x,) = operands_for(named("tanh.approx.f32"), 4)
    x = x[np.isfinite(x)][:2048]
    ((have,),) = on_gpu([named("tanh.approx.f32")], [x])
    want = np.tanh(x.astype(np.float64))
    error = np.abs(have - want) / np.maximum(np.abs(want), 2.0**-126)
    assert float(error.max()) <= TANH_RELATIVE


@pytest.mark.parametrize("mode", ["xor", "idx", "up", "down"])
@pytest.mark.parametrize("dtype", [u32, f32], ids=repr)
def test_shuffles(mode, dtype):
    instruction = shuffle(mode, dtype)
    rng = np.random.default_rng(6)
    values = random_operand(rng, dtype, LANES)
    lanes = rng.integers(0, 32, LANES).astype(np.uint32)
    operands = [values, lanes, np.full(LANES, 0xFFFFFFFF, np.uint32)]
    ((have,),) = on_gpu([instruction], operands)
    (want,) = meaning(instruction, operands)
    assert differing(have, want).size == 0


@pytest.mark.parametrize("mode", ["any", "all", "ballot"])
@pytest.mark.parametrize("split", [False, True])
def test_votes(mode, split):
    rng = np.random.default_rng(7)
    density = rng.choice([0, 1, 16, 31, 32], LANES // 32).repeat(32)
    holds = rng.integers(0, 32, LANES) < density
    lane = np.arange(LANES) % 32
    mask = np.where(lane < 12, 0xFFF, 0xFFFFF000) if split else np.full(LANES, 0xFFFFFFFF)
    operands = [holds, mask.astype(np.uint32)]
    vote = named(f"vote.sync.{mode}.{'b32' if mode == 'ballot' else 'pred'}")
    ((have,),) = on_gpu([vote], operands)
    (want,) = meaning(vote, operands)
    assert np.array_equal(have, want)


@kernel(threads=32)
def load_matrices(k: Kernel, source: Global[u32], out: Global[u32], *, count: int, transposed: bool) -> None:
    """32 rows of 16 bytes through shared memory and ``ldmatrix``; one warp per CTA."""
    tile = k.shared(u32, 128, name="tile")
    lane, first = k.lane, k.cta_x * 128
    tile.store(source.load(first + lane * 4, 4), 0, lane * 4)
    k.syncwarp()
    registers = k.ldmatrix(tile.address(0, lane * 4), count, transposed=transposed)
    out.store([*registers, *[0] * (4 - count)], first + lane * 4)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count, transposed):
    warps = 8
    rows = np.random.default_rng(8).integers(0, 2**32, (warps, 32, 4), np.uint32)
    source = torch.from_numpy(rows.view(np.int32)).cuda()
    out = torch.zeros_like(source)
    launch(load_matrices.trace(count=count, transposed=transposed), warps, [source, out])
    have = out.cpu().numpy().view(np.uint32)
    want = matrix_access("ldmatrix", count, transposed).meaning(rows[:, : 8 * count])
    for i in range(count):
        assert np.array_equal(have[:, :, i], want[i])
    assert not have[:, :, count:].any()


MMA = [
    mma("m16n8k16", f16, f32),
    mma("m16n8k16", f16, f16),
    mma("m16n8k16", bf16, f32),
    mma("m16n8k8", f16, f32),
    mma("m16n8k8", f16, f16),
    mma("m16n8k8", bf16, f32),
    mma("m16n8k8", tf32, f32),
]


def mma_operands(instruction: Instruction, exact: bool) -> list[np.ndarray]:
    """Random registers: small integers, for which every order of summation gives the same, or normal numbers."""
    rng = np.random.default_rng(9)
    kinds = [slot.dtype for slot in instruction.slots for _ in range(slot.count)]
    operands: list[np.ndarray] = []
    for dtype in kinds:
        count = LANES * (2 if dtype.bits == 16 else 1)
        values = rng.integers(-8, 9, count) if exact else rng.standard_normal(count)
        raw = values.astype(np.float32).astype(dtype.numpy)
        operands.append(raw if dtype is f32 else np.ascontiguousarray(raw).view(np.uint32))
    return operands


@pytest.mark.parametrize("instruction", MMA, ids=lambda i: i.mnemonic)
def test_mma_of_integers_is_exact(instruction):
    operands = mma_operands(instruction, exact=True)
    (have,) = on_gpu([instruction], operands)
    for got, want in zip(have, meaning(instruction, operands), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("instruction", MMA, ids=lambda i: i.mnemonic)
def test_mma_is_within_its_documented_tolerance(instruction):
    operands = mma_operands(instruction, exact=False)
    (have,) = on_gpu([instruction], operands)
    want = meaning(instruction, operands)
    a, b, c = (
        np.abs(slot.matrix([x.reshape(-1, 32) for x in operands[slot.first : slot.first + slot.count]]))
        for slot in instruction.slots
    )
    depth = a.shape[2]
    scale = [s.reshape(-1) for s in instruction.slots[2].registers(np.matmul(a, b) + c)]
    for got, expected, size in zip(have, want, scale, strict=True):
        if instruction.accumulator is f16:
            got, expected, size = (x.view(np.float16).astype(np.float64) for x in (got, expected, size))
            allowed = depth * 2.0**-22 * size + np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64)
        else:
            allowed = depth * 2.0**-22 * size.astype(np.float64)
        assert float((np.abs(got.astype(np.float64) - expected) / allowed).max()) <= 1.0
