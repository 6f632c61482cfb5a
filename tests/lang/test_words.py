"""Words of ``k`` that no kernel of the package needs: what they compute, against NumPy; and that every word is run."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.lang.support import lanes, run
from tests.lang.test_printing import test_what_was_never_written_is_a_finding as printed_words
from tests.lang.test_wmma_words import test_sums_in_place_from_a_place_within_a_padded_tile as wmma_sums
from warploom import attention
from warploom.core.errors import TraceError, VerifyError
from warploom.ir.statements import Const, Op
from warploom.ir.verify import verify
from warploom.kernels.source import traced
from warploom.lang import Global, Kernel, bf16, f16, f32, f64, kernel, s8, s32, u8, u32
from warploom.lang.builder import Builder
from warploom.layout.catalogue import mma_fragment
from warploom.layout.wgmma import MatrixDescriptor
from warploom_lab.kernels.attention.ladder import FULL_LADDER

RNG = np.random.default_rng(11)


@kernel(threads=32)
def bits(k: Kernel, x: Global[u32], out: Global[u32]) -> None:
    value = x.load(k.lane)
    out.store([k.popc(value), k.clz(value), k.brev(value)][:2], 4 * k.lane)
    out.store(k.brev(value), 4 * k.lane + 2)


def test_counts_and_reversals_of_bits() -> None:
    x = RNG.integers(0, 2**32, 32, dtype=np.uint32) >> np.arange(32, dtype=np.uint32)
    x[5] = 0
    out = np.zeros((32, 4), np.uint32)
    run(bits, x, out)
    texts = [f"{v:032b}" for v in x.tolist()]
    expected = [[t.count("1"), 32 - len(t.lstrip("0")), int(t[::-1], 2)] for t in texts]
    assert (out[:, :3] == expected).all()


@kernel(threads=32)
def neighbours(k: Kernel, out: Global[u32]) -> None:
    out.store([k.shfl_up(k.lane, 3), k.shfl_down(k.lane, 5)], 2 * k.lane)


def test_shuffles_up_and_down_keep_what_has_no_neighbour() -> None:
    out = np.zeros((32, 2), np.uint32)
    run(neighbours, out)
    lane = np.arange(32)
    assert (out[:, 0] == np.where(lane < 3, lane, lane - 3)).all()
    assert (out[:, 1] == np.where(lane + 5 > 31, lane, lane + 5)).all()


@kernel(threads=32)
def numbers(k: Kernel, out: Global[f32]) -> None:
    out.store([k.convert(k.uniform(5), f32), k.shfl_xor(0.5, 1)], 2 * k.lane)


def test_of_a_number_every_lane_has_the_same() -> None:
    out = np.zeros((32, 2), np.float32)
    run(numbers, out)
    assert (out == (5.0, 0.5)).all()


@kernel(threads=32)
def all_below(k: Kernel, out: Global[u32], *, bound: int) -> None:
    out.store(k.select(k.vote_all(k.lane < bound), k.value(1, u32), k.value(0, u32)), k.lane)


@pytest.mark.parametrize("bound", [31, 32])
def test_a_vote_of_all(bound: int) -> None:
    out = lanes()
    run(all_below, out, bound=bound)
    assert (out == (bound == 32)).all()


@kernel(threads=64)
def locked(k: Kernel, flags: Global[u32], seen: Global[u32]) -> None:
    """Both warps try to set the flag of their lane from 7 to their number + 1; one of them finds the 7."""
    seen.store(k.atomic_cas(flags, 7, k.warp + 1, index=k.lane), k.thread)


def test_of_two_that_compare_and_swap_one_wins() -> None:
    flags, seen = np.full(32, 7, np.uint32), np.zeros((2, 32), np.uint32)
    flags[4] = 9  # equals neither: stays
    run(locked, flags, seen)
    winner = (seen == 7).argmax(0)
    others = np.arange(32) != 4
    assert ((seen == 7).sum(0) == others).all()
    assert (flags == np.where(others, winner + 1, 9)).all()


@kernel(threads=32)
def integers(k: Kernel, a: Global[u32], b: Global[u32], out: Global[s32], *, types) -> None:
    of_a, of_b = (
        [x.load(k.lane * count + i) for i in range(count)]
        for x, count in zip((a, b), (mma_fragment("m16n8k32", which, 8).registers for which in "AB"), strict=True)
    )
    found = k.mma_integer(of_a, of_b, [k.value(i, s32) for i in range(4)], "m16n8k32", types)
    out.store(list(found), 4 * k.lane)


@pytest.mark.parametrize("types", [(s8, s8), (u8, s8), (s8, u8)])
def test_products_of_integers(types) -> None:
    a_map, b_map, c_map = (mma_fragment("m16n8k32", which, bits) for which, bits in (("A", 8), ("B", 8), ("C", 32)))
    a, b = (
        RNG.integers(np.iinfo(t.numpy).min, np.iinfo(t.numpy).max + 1, m.shape).astype(t.numpy)
        for t, m in zip(types, (a_map, b_map), strict=True)
    )
    packed = [x.reshape(-1)[m.gather_index()].copy().view(np.uint32) for x, m in ((a, a_map), (b, b_map))]
    out = np.zeros((32, 4), np.int32)
    run(integers, *packed, out, types=types)
    product = a.astype(np.int64) @ b.astype(np.int64)
    assert (out == product.reshape(-1)[c_map.gather_index()] + np.arange(4)).all()


@kernel(threads=32)
def doubles(k: Kernel, a: Global[f64], b: Global[f64], out: Global[f64]) -> None:
    found = k.mma_double(a.load(k.lane, 1), b.load(k.lane, 1), [k.value(0.5, f64), k.value(-1.0, f64)])
    for i, x in enumerate(found):
        out.store(x, 2 * k.lane + i)


def test_products_of_doubles() -> None:
    a_map, b_map, c_map = (mma_fragment("m8n8k4", which, 64) for which in "ABC")
    a, b = RNG.standard_normal(a_map.shape), RNG.standard_normal(b_map.shape)
    out = np.zeros((32, 2))
    run(doubles, a.reshape(-1)[a_map.gather_index()].copy(), b.reshape(-1)[b_map.gather_index()].copy(), out)
    expected = (a @ b).reshape(-1)[c_map.gather_index()] + [0.5, -1.0]
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)


def test_a_product_takes_whole_fragments() -> None:
    @kernel(threads=32)
    def short(k: Kernel, out: Global[f64]) -> None:
        k.mma_double([k.value(1.0, f64)], [], [k.value(0.0, f64)] * 2)

    with pytest.raises(TraceError, match="takes 1 registers for B, got 0"):
        short.trace()


@kernel(threads=32)
def roundings(k: Kernel, x: Global[f32], tf32: Global[u32], pairs: Global[u32], *, half) -> None:
    low, high = x.load(2 * k.lane, 2)
    tf32.store([k.to_tf32(low), k.to_tf32(high)], 2 * k.lane)
    (pair,) = k.pack_all([low, high], half)
    assert k.pack_all([low, high], f32) == [low, high]
    pairs.store(k.pair("fma", half, pair, pair, pair), k.lane)


@pytest.mark.parametrize("half", [f16, bf16])
def test_rounding_to_tf32_and_packed_arithmetic(half) -> None:
    x = RNG.standard_normal(64).astype(np.float32)
    tf32, pairs = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    run(roundings, x, tf32, pairs, half=half)
    found = tf32.view(np.float32)
    assert not (tf32 & 0x1FFF).any()  # 10 bits of mantissa
    assert (np.abs(found - x) <= 2.0**-11 * np.abs(x)).all()
    rounded = x.astype(half.numpy).astype(np.float64)
    exact = rounded * rounded + rounded
    assert (pairs.view(half.numpy) == exact.astype(half.numpy)).all()


@kernel(threads=32, cluster=2, requires="sm_90")
def at_the_other(k: Kernel, out: Global[u32]) -> None:
    """Where this CTA's shared memory lies in each CTA of the cluster."""
    here = k.shared(u32, 32).base
    own, other = k.map_shared(here, k.cluster_rank), k.map_shared(here, (k.cluster_rank + 1) % k.cluster_ctas)
    with k.when(k.lane == 0):
        out.store([own - here, other - own], 2 * k.cluster_rank)


def test_shared_memory_of_another_cta_is_elsewhere() -> None:
    out = np.zeros((2, 2), np.int32)
    run(at_the_other, out.view(np.uint32), grid=2)
    assert out[0, 1] == -out[1, 1] != 0


@kernel(threads=32, cluster=2, requires="sm_90")
def of_rank(k: Kernel, out: Global[u32]) -> None:
    out.store(k.map_shared(k.shared(u32, 32).base, 1), k.lane)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_cluster_ends_at_its_last_cta(rank: int) -> None:
    """The language refuses such a rank; so does verification, of Programs that others make."""
    program = of_rank.trace()
    changed = [
        replace(s, operands=(s.operands[0], Const(u32, rank)))
        if isinstance(s, Op) and s.instruction.cta_rank is not None
        else s
        for s in program.body
    ]
    with nullcontext() if rank < 2 else pytest.raises(VerifyError, match="the cluster has 2 CTAs"):
        verify(replace(program, body=tuple(changed)))


@pytest.mark.parametrize("cluster", [(2, 1, 1), (1, 1, 1, 1), (0,), ()])
def test_a_cluster_has_up_to_three_dimensions(cluster: tuple[int, ...]) -> None:
    @kernel(threads=32, cluster=cluster, requires="sm_90")
    def nothing(k: Kernel, out: Global[u32]) -> None:
        out.store(k.lane, k.lane)

    with nullcontext() if cluster == (2, 1, 1) else pytest.raises(TraceError, match="one to three positive counts"):
        nothing.trace()


@kernel(threads=32, requires="sm_90a")
def of_floats(k: Kernel, x: Global[f32], out: Global[f32], bytes_out: Global[u32]) -> None:
    value = x.load(k.lane)
    size = k.absolute(value)
    of_one = [size, k.log2(size), k.minimum(value, 1.5), k.rsqrt(size), k.sqrt(size), k.tanh(value)]
    pair = k.pair("add", f16, k.pack(value, size, f16), k.pack(1.0, 2.0, f16))
    of_one += [k.bitcast(k.to_tf32(value), f32), *k.unpack(pair, f16)]
    for i, result in enumerate(of_one):
        out.store(result, 9 * k.lane + i)
    word = k.pack_bytes([value, size, k.convert(k.lane * 9, f32), -3.0], s8)
    four = k.unpack_bytes(word, s8)
    low, _ = k.unpack_fp8(k.value(0x38B8C0, u32))
    found = [k.prmt(word, low, 0x5410), word, k.bitcast(four[0] + four[2], u32), low]
    bytes_out.store(found, 4 * k.lane)


def test_words_of_floats_and_bytes() -> None:
    x = RNG.uniform(-4, 4, 32).astype(np.float32)
    out, words = np.zeros((32, 9), np.float32), np.zeros((32, 4), np.uint32)
    run(of_floats, x, out, words)
    size = np.abs(x)
    exact = [size, np.log2(size), np.minimum(x, 1.5), 1 / np.sqrt(size), np.sqrt(size), np.tanh(x)]
    np.testing.assert_allclose(out[:, :6], np.stack(exact, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[:, 6], x, rtol=2.0**-11)
    halves = np.stack([x, size], 1).astype(np.float16) + np.array([1, 2], np.float16)
    np.testing.assert_array_equal(out[:, 7:], halves.astype(np.float32))
    packed = np.stack([np.rint(x), np.rint(size), np.minimum(9 * np.arange(32), 127), np.full(32, -3)], 1).astype(
        np.int8
    )
    np.testing.assert_array_equal(words[:, 1], packed.view(np.uint32)[:, 0])
    np.testing.assert_array_equal(words[:, 2].view(np.int32), packed[:, 0].astype(int) + packed[:, 2])
    two = np.array([0xC0, 0xB8], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32)
    np.testing.assert_array_equal(words[:, 3], two[0])
    np.testing.assert_array_equal(words[:, 0], words[:, 1] & 0xFFFF | words[:, 3] << 16)


@kernel(threads=32, requires="sm_90a", cluster=2)
def in_order(k: Kernel, turn: Global[u32], total: Global[f32], rows: Global[u32]) -> None:
    """CTAs add to one sum, each after the one before it, and copy a row of their own in bulk."""
    k.await_launch_before()
    k.allow_next_launch()
    began, tile = k.clock(), k.shared(u32, 32)
    tile.store(k.ballot(k.lane >= k.cta_x), 0, k.lane)
    k.fence_async()
    k.syncwarp()
    one = k.elect()
    k.bulk_store(rows + 32 * k.cta_x, tile, when=one)
    k.commit_bulk()
    k.wait_bulk(0)
    k.cluster_arrive()
    k.cluster_wait()
    k.prefetch(total)
    with k.when(k.lane == 0):
        k.wait_at_least(turn, k.cta_x)
        k.reduce_add(total, k.select(k.clock() >= began, k.value(1.5, f32), 0.0))
        k.fence()
        k.atomic("add", turn, 1, order="release")
    k.cluster_sync()


def test_words_between_ctas_and_launches() -> None:
    turn, total, rows = np.zeros(1, np.uint32), np.zeros(1, np.float32), np.zeros((4, 32), np.uint32)
    run(in_order, turn, total, rows, grid=4)
    assert (turn[0], total[0]) == (4, 6.0)
    assert (rows == (0xFFFFFFFF << np.arange(4)[:, None]) % 2**32).all()


@kernel(threads=128, requires="sm_90a")
def of_matrices(k: Kernel, a: Global[u32], transposed: Global[u32], out: Global[f32]) -> None:
    """A·Aᵀ of 64×64 once by each way to name an operand, and A's corners 8×8 transposed."""
    tile = k.shared(bf16, (64, 64), swizzle="auto")
    for i in range(16):
        at = i * 128 + k.thread
        tile.store(a.load(at), at >> 5, (at & 31) * 2, dtype=u32)
    k.fence_async()
    k.syncthreads()
    corner = k.load_fragment(tile, mma_fragment("m16n8k16", "A"), 0, 0)
    with k.when(k.warp == 0, uniform=True):
        again = k.fragment(corner.layout, bf16, [k.movmatrix(x) for x in corner.registers])
        transposed.store(list(again.registers), 4 * k.lane)
    result = k.warpgroup_accumulator(64)
    k.wgmma_fence()
    for depth in range(0, 64, 16):
        shape = MatrixDescriptor(128, stride=1024)
        k.wgmma(result, k.wgmma_operand(tile, col=depth), k.descriptor(tile.at(2 * depth), shape), accumulate=depth > 0)
    k.wgmma_commit()
    k.wgmma_wait(0, result)
    result.store_global(out, 64)


def test_words_of_matrices() -> None:
    a = RNG.integers(-4, 5, (64, 64)).astype(ml_dtypes.bfloat16)
    out, corners = np.zeros((64, 64), np.float32), np.zeros((32, 4), np.uint32)
    run(of_matrices, a.view(np.uint32), corners, out)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ a.astype(np.float32).T)
    for i, corner in enumerate((a[:8, :8], a[8:16, :8], a[:8, 8:16], a[8:16, 8:16])):
        found = np.ascontiguousarray(corners[:, i]).view(ml_dtypes.bfloat16).reshape(8, 8)
        np.testing.assert_array_equal(found, corner.T)


WORDS = sorted(
    n
    for n, v in inspect.getmembers_static(Kernel)
    if n[0] != "_" and n not in dir(Builder) and not isinstance(v, tuple)
)


def test_every_word_is_run_by_a_test() -> None:
    """Kernels are traced, run, and have their results compared; meanwhile each word notes that it was called."""
    called: set[str] = set()

    def noted(word: str, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            called.add(word)
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for word in WORDS:
            own = inspect.getattr_static(Kernel, word)
            patch.setattr(
                Kernel, word, property(noted(word, own.fget)) if isinstance(own, property) else noted(word, own)
            )
        traced.cache_clear()  # kernels that another test has traced call no words
        for test in (
            test_counts_and_reversals_of_bits,
            test_shuffles_up_and_down_keep_what_has_no_neighbour,
            test_of_two_that_compare_and_swap_one_wins,
            test_products_of_doubles,
            test_shared_memory_of_another_cta_is_elsewhere,
            wmma_sums,
            printed_words,
            test_words_of_floats_and_bytes,
            test_words_between_ctas_and_launches,
            test_words_of_matrices,
        ):
            test()
        test_products_of_integers((s8, s8))
        attention_of("h9", 256)
        attention_of("best", 64)
    traced.cache_clear()  # what was traced here has this test's functions among its calls
    assert set(WORDS) - called == set()


def attention_of(rung: str, tokens: int) -> None:
    """A rung of the attention ladder on the emulator, against float64."""
    config = next(r.config for r in FULL_LADDER.rungs if r.key == rung)
    q, key, v = (RNG.standard_normal((1, tokens, 1, 128)).astype(ml_dtypes.bfloat16) for _ in range(3))
    found = attention(q, key, v, config=config)[0, :, 0].astype(np.float64)
    x, y, z = (part[0, :, 0].astype(np.float64) for part in (q, key, v))
    weights = np.exp(x @ y.T / np.sqrt(128.0))
    np.testing.assert_allclose(found, weights @ z / weights.sum(1, keepdims=True), rtol=2e-2, atol=1e-2)
