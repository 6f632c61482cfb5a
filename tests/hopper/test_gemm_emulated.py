"""Matrix products fed by the TMA: right and clean in every layout, size, type and order of events."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom
from tests.hopper.gemm_cases import (
    ALONE,
    PAIRS,
    TOGETHER,
    TURNS,
    WARPS,
    WARPS_ALONE,
    WARPS_IN_PAIRS,
    WARPS_IN_TURNS,
    check,
    matrix,
    run,
)
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.reference import gemm_error, gemm_reference
from warploom.ops.matmul import plan_matmul

KINDS = {
    "together": TOGETHER, "turns": TURNS, "alone": ALONE, "pairs": PAIRS, "warps": WARPS,
    "warps in turns": WARPS_IN_TURNS, "warps alone": WARPS_ALONE, "warps in pairs": WARPS_IN_PAIRS,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_rings_that_wrap_twice_over_several_tiles(kind: str, seed: int | None) -> None:
    config = KINDS[kind]
    rng = np.random.default_rng(3)
    m, n, k = 5 * config.tile_m - 40, 128, 5 * config.tile_k
    check(config, matrix(rng, m, k, f16), matrix(rng, k, n, f16, row_major=False), seed=seed)


@settings(max_examples=32, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.tuples(st.integers(1, 200), st.integers(1, 200), st.integers(2, 200)),
    row_major=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([f16, bf16]),
    out=st.sampled_from([None, f32]),
    seed=st.sampled_from([None, 0, 1, 2]),
)
def test_any_size_layout_and_type(kind, size, row_major, dtype, out, seed) -> None:
    m, n, k = size
    rng = np.random.default_rng(m + 256 * n + 65536 * k)
    a = matrix(rng, m, k, dtype, row_major=row_major[0])
    b = matrix(rng, k, n, dtype, row_major=row_major[1])
    check(replace(KINDS[kind], dtype=dtype), a, b, seed=seed, out_dtype=out)


@pytest.mark.parametrize(
    "config",
    [
        HopperGemmConfig(),
        HopperGemmConfig(256, 192, 3, in_flight=True, persistent=True),
        HopperGemmConfig(192, 192, 4, 3, in_flight=True, persistent=True, block_stride=8),
        HopperGemmConfig(128, 128, 6, persistent=True, in_flight=True, pingpong=True),
        HopperGemmConfig(128, 160, 5, persistent=True, in_flight=True),
        HopperGemmConfig(mma_sync=True, persistent=True),
        HopperGemmConfig(256, 128, 3, mma_sync=True, persistent=True),
        HopperGemmConfig(128, 128, 3, mma_sync=True, persistent=True, pingpong=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [True, False])
def test_large_tiles(config: HopperGemmConfig, rows: bool) -> None:
    rng = np.random.default_rng(5)
    check(config, matrix(rng, 264, 136, f16, row_major=rows), matrix(rng, 136, 264, f16, row_major=not rows))


@pytest.mark.parametrize(
    ("kind", "splits", "n"),
    [
        *itertools.product(("together", "turns", "alone", "pairs"), (1, 2), (96, 30)),
        ("warps", 2, 96),
        ("warps in turns", 1, 30),
        ("warps alone", 1, 96),
    ],
)
def test_everything_that_matmul_combines(kind: str, splits: int, n: int) -> None:
    """Batches that broadcast, scale, bias, an extra matrix, a function; of 30 columns the lines are not aligned."""
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((3, 70, 200), (3, n, 200)))
    bias, gate = (rng.standard_normal(shape).astype(np.float16) for shape in ((n,), (3, 70, n)))
    for right in (b, b[:1]):
        got = warploom.matmul(
            a, right.transpose(0, 2, 1), config=replace(KINDS[kind], split_k=splits), bias=bias, alpha=0.5,
            epilogue=lambda x, y: x * y, extras=(gate,), out_dtype="f32",
        )  # fmt: skip
        exact = (x.astype(np.float64) for x in (a, right.transpose(0, 2, 1), bias, gate))
        a64, b64, bias64, gate64 = exact
        np.testing.assert_allclose(got, (0.5 * a64 @ b64 + bias64) * gate64, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["turns", "warps alone"])
@pytest.mark.parametrize("n", [13, 30, 36])
def test_results_whose_lines_the_tma_does_not_reach(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    check(KINDS[kind], matrix(rng, 100, 72, f16), matrix(rng, 72, n, f16, row_major=False))


def test_rows_of_c_within_a_larger_array_are_all_that_is_written() -> None:
    rng = np.random.default_rng(1)
    a, b = matrix(rng, 100, 72, bf16), matrix(rng, 72, 40, bf16)
    whole = np.full((110, 64), 7, bf16.numpy)
    warploom.matmul(a, b, out=whole[:100, :40], config=replace(TOGETHER, dtype=bf16))
    assert gemm_error(whole[:100, :40], gemm_reference(a, b), bf16).ok
    assert (whole[100:].astype(np.float32) == 7).all()
    assert (whole[:, 40:].astype(np.float32) == 7).all()


def test_batches_that_lie_between_the_rows() -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal((70, 3, 72)).astype(np.float16).transpose(1, 0, 2) for _ in range(2))
    whole = np.full((70, 3, 80), 7, np.float16)
    out = whole.transpose(1, 0, 2)[:, :, :70]
    warploom.matmul(a, b.transpose(0, 2, 1), out=out, config=TOGETHER)
    exact = a.astype(np.float64) @ b.astype(np.float64).transpose(0, 2, 1)
    np.testing.assert_allclose(out, exact, rtol=1e-3, atol=1e-2)
    assert (whole[:, :, 70:] == 7).all()


def test_equal_calls_give_equal_bits_whatever_the_schedule() -> None:
    rng = np.random.default_rng(2)
    a, b = matrix(rng, 200, 200, f16), matrix(rng, 200, 72, f16)
    made = plan_matmul(a, b, config=TURNS)
    results = [run(made, a, b, seed=seed, ctas=ctas)[1] for seed, ctas in ((None, 1), (1, 2), (2, 3))]
    assert all((x == results[0]).all() for x in results)


@pytest.mark.parametrize("kind", KINDS)
def test_no_shared_access_conflicts(kind: str) -> None:
    rng = np.random.default_rng(4)
    a, b = matrix(rng, 128, 128, f16), matrix(rng, 128, 128, f16)
    emulation, _ = run(plan_matmul(a, b, config=KINDS[kind]), a, b)
    assert emulation.traffic.shared["stmatrix"].accesses > 0
    assert all(w.conflicts == 0 for w in emulation.traffic.shared.values())


def test_what_the_tma_does_not_take_is_refused_with_the_reason() -> None:
    rng = np.random.default_rng(4)
    with pytest.raises(ConfigError, match="B's lines do not start at multiples of 16 bytes"):
        plan_matmul(matrix(rng, 64, 64, f16), np.ones((64, 9), np.float16), config=TURNS)
    with pytest.raises(ConfigError, match="A's lines overlap"):
        plan_matmul(np.broadcast_to(np.ones(64, np.float16), (64, 64)), np.ones((64, 64), np.float16), config=TURNS)
    with pytest.raises(ConfigError, match="K = 0"):
        plan_matmul(np.ones((8, 0), np.float16), np.ones((0, 8), np.float16), config=TURNS)
    with pytest.raises(ConfigError, match="sums are wanted in f16"):
        plan_matmul(*(np.ones((64, 64), np.float16),) * 2, accumulate="f16", config=TURNS)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(TOGETHER, tile_n=80), "tile_n 80"),
        (replace(TOGETHER, tile_m=64), "tile_m 64"),
        (replace(TOGETHER, tile_m=256, tile_n=256), "256 accumulators"),
        (replace(TURNS, persistent=False), "pingpong"),
        (replace(TOGETHER, stages=1), "at least 2 stages"),
        (replace(TOGETHER, cluster=2), "a cluster is 1 CTA"),
        (replace(WARPS, tile_m=192, tile_n=128, consumers=3), "at most 2 consumers"),
        (replace(WARPS, in_flight=True), "in_flight is wgmma's"),
        (replace(WARPS, tile_n=96), "part of 32×48 does not divide"),
        (replace(WARPS, tile_m=256, tile_n=256), "256 accumulators"),
    ],
)
def test_what_is_no_kernel_says_why(config: HopperGemmConfig, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config.require()


@pytest.mark.parametrize("config", [*KINDS.values(), HopperGemmConfig(dtype=bf16, split_k=4)], ids=str)
def test_notation_and_back(config: HopperGemmConfig) -> None:
    assert HopperGemmConfig.parse(str(config)) == config
    assert plan_matmul(
        *(np.ones((512, 512), config.dtype.numpy),) * 2, config=config).config == config  # fmt: skip


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="no flag"):
        HopperGemmConfig.parse("wgmma,BM=128,WM=64")
    with pytest.raises(ConfigError, match="no wgmma or mma\\+tma GEMM"):
        HopperGemmConfig.parse("BM=128")
