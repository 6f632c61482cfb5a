"""Words of ``k`` that no kernel of the package needs: what they compute, against NumPy; and that every word is run."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import re

import numpy as np
import pytest

from tests.lang.support import lanes, run
from tests.project import ROOT
from warploom.core.errors import TraceError
from warploom.lang import Global, Kernel, bf16, f16, f32, f64, kernel, s8, s32, u8, u32
from warploom.lang.builder import Builder
from warploom.layout.catalogue import mma_fragment

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("word", sorted({n for n in dir(Kernel) if not n.startswith("_")} - set(dir(Builder))))
def test_every_word_is_run_by_a_test(word: str) -> None:
    """Directly, or by a kernel of the package or an example: those are run by the tests."""
    for folder in ("tests", "examples", "src/warploom/kernels", "src/warploom_lab", "src/warploom/tile"):
        if any(re.search(rf"\.{word}\b", f.read_text(encoding="utf-8")) for f in (ROOT / folder).rglob("*.py")):
            return
    pytest.fail(f"no test runs k.{word}")


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

    with pytest.raises(TraceError, match="takes 4 registers, got 3"):
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
