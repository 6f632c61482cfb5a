"""``matmul`` on NumPy arrays: any shapes, strides, layouts, types and epilogues, on the emulator with all checks."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warploom
from tests.properties import slow_property
from warploom.core.dtypes import bf16, dtype_of, f16, f32
from warploom.core.errors import ConfigError, EmulationWarning, ProblemError
from warploom.core.identity import function_key
from warploom.kernels.matmul.reference import gemm_error, gemm_reference
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.lang.functions import absolute, exp, fma, gelu, log, maximum, minimum, relu, select, silu, sqrt, tanh
from warploom_lab.kernels.matmul.ladder_config import RungGemm

SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=3)
SPLIT = replace(SMALL, split_k=3)
STREAM = replace(SMALL, stream_k=True)
KINDS = {"whole": SMALL, "split": SPLIT, "stream": STREAM}


def random(*shape: int, dtype: Any = np.float16, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def assert_right(c: Any, a: Any, b: Any, accumulate: str = "f32") -> None:
    error = gemm_error(c, gemm_reference(a, b), dtype_of(c.dtype), dtype_of(accumulate))
    assert error.ok, error


@st.composite
def matrices(draw: st.DrawFn, rows: int, cols: int, batch: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """A matrix row-major, column-major, padded, sliced, reversed or strided in both axes."""
    kind = draw(st.sampled_from(["rows", "columns", "padded", "sliced", "reversed", "strided"]))
    pad = draw(st.integers(0, 9))
    if kind == "columns":
        return random(*batch, cols, rows + pad, dtype=dtype, seed=seed)[..., :rows].swapaxes(-1, -2)
    whole = random(*batch, 2 * rows, 2 * cols + pad, dtype=dtype, seed=seed)
    if kind == "rows":
        return np.ascontiguousarray(whole[..., :rows, :cols])
    if kind == "padded":
        return whole[..., :rows, :cols]
    if kind == "sliced":
        return whole[..., ::2, :][..., :rows, pad // 2 : pad // 2 + cols]
    if kind == "reversed":
        return whole[..., :rows, :cols][..., ::-1, :]
    return whole[..., ::2, ::2][..., :rows, :cols]


@st.composite
def products(draw: st.DrawFn) -> tuple[Any, Any, dict[str, Any]]:
    m, n, k = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(st.integers(1, 140))
    dtype = draw(st.sampled_from([np.float16, ml_dtypes.bfloat16]))
    lead = draw(st.sampled_from([(), (), (2,), (2, 3)]))
    lead_b = draw(st.sampled_from([(), lead, lead[-1:], (1,) * len(lead)]))
    a = draw(matrices(m, k, lead, dtype, 1))
    b = draw(matrices(k, n, lead_b, dtype, 2))
    options: dict[str, Any] = {"out_dtype": draw(st.sampled_from([None, "f32", "f16", "bf16"]))}
    options["accumulate"] = draw(st.sampled_from(["f32", "f16"])) if dtype is np.float16 else "f32"
    options["config"] = draw(st.sampled_from([None, SMALL]))
    if options["config"] is not None:
        options["config"] = replace(SMALL, dtype=dtype_of(dtype), accumulate=dtype_of(options["accumulate"]))
    return a, b, options


@slow_property(40)
@given(products())
def test_any_product(case):
    a, b, options = case
    c = warploom.matmul(a, b, **options)
    assert c.shape == (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    assert c.dtype == (dtype_of(options["out_dtype"]).numpy if options["out_dtype"] else a.dtype)
    assert_right(c, a, b, options["accumulate"])


EPILOGUES: dict[str, tuple[Any, Any]] = {
    "relu": (relu, lambda x: np.maximum(x, 0)),
    "clip": (lambda x: minimum(maximum(x, -1), 2), lambda x: np.clip(x, -1, 2)),
    "gelu": (gelu, lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "silu": (silu, lambda x: x / (1 + np.exp(-x))),
    "leaky": (lambda x: select(x > 0, x, x * 0.1), lambda x: np.where(x > 0, x, 0.1 * x)),
    "log": (lambda x: log(fma(x, x, 1.0)), lambda x: np.log(x * x + 1)),
    "root": (lambda x: sqrt(absolute(x)), lambda x: np.sqrt(np.abs(x))),
    "exponential": (lambda x: exp(-absolute(x)), lambda x: np.exp(-np.abs(x))),
    "constant": (lambda x: 3, lambda x: np.full_like(x, 3)),
}


@pytest.mark.parametrize(("kind", "n"), [("whole", 64), *((kind, 33) for kind in KINDS)])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name, kind, n):
    """In the product's kernel, and in the one that adds the parts of a split K; pairs and single columns."""
    traced, exact = EPILOGUES[name]
    a, b, bias = random(35, 200), random(200, n), random(n)
    c = warploom.matmul(a, b, bias=bias, epilogue=traced, alpha=0.25, out_dtype="f32", config=KINDS[kind])
    expected = exact(0.25 * (a.astype(np.float64) @ b.astype(np.float64)) + bias.astype(np.float64))
    assert np.abs(c - expected).max() < 3e-5


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("out_dtype", ["f16", "f32"])
@pytest.mark.parametrize("n", [40, 37])
def test_extra_matrices(config, out_dtype, n):
    """SiLU of the product times a gate, plus a residual."""
    a, b, gate, rest = random(2, 20, 96), random(96, n), random(2, 20, n), random(2, 20, n, seed=9)
    c = warploom.matmul(
        a, b, epilogue=lambda x, g, r: silu(x) * g + r, extras=(gate, rest), out_dtype=out_dtype, config=config
    )
    x = a.astype(np.float64) @ b.astype(np.float64)
    expected = x / (1 + np.exp(-x)) * gate + rest
    assert np.abs(c - expected).max() < (0.05 if out_dtype == "f16" else 1e-4)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("shape", "n"), [((35, 96), 40), ((2, 20, 96), 37)], ids=["matrix", "folded"])
def test_extra_matrices_of_rows_and_columns(config, shape, n):
    """Each dequantised by a scale per row and one per column in f32, which 16 bits would round."""
    a, b = random(*shape), random(96, n)
    of_rows = random(*shape[:-1], 1).astype(np.float32) / 3
    of_cols = random(1, n, seed=9).astype(np.float32) / 3
    c = warploom.matmul(
        a, b, epilogue=lambda x, r, s: x * r * s, extras=(of_rows, of_cols), out_dtype="f32", config=config
    )
    expected = a.astype(np.float64) @ b.astype(np.float64) * of_rows * of_cols
    assert np.abs(c - expected).max() < 3e-5


@pytest.mark.parametrize("n", [40, 37])
def test_wide_extra_matrices_beside_narrow_rows(n):
    a, b, rest, of_rows = random(20, 96), random(96, n), random(20, n).astype(np.float32) / 3, random(20, 1)
    c = warploom.matmul(a, b, epilogue=lambda x, y, r: x * r + y, extras=(rest, of_rows), out_dtype="f32")
    expected = a.astype(np.float64) @ b.astype(np.float64) * of_rows + rest
    assert np.abs(c - expected).max() < 3e-5


def test_hyperbolic_tangent_is_approximate():
    a, b = random(16, 32), random(32, 16)
    c = warploom.matmul(a, b, epilogue=tanh, out_dtype="f32")
    assert np.abs(c - np.tanh(a.astype(np.float64) @ b.astype(np.float64))).max() < 2**-10


@pytest.mark.parametrize("shapes", [((16, 1000), (1000, 33)), ((3, 16, 768), (3, 768, 32)), ((16, 768), (2, 768, 8))])
@pytest.mark.parametrize("splits", [2, 5])
def test_split_k_is_right_and_repeatable(shapes, splits):
    a, b = random(*shapes[0]), random(*shapes[1])
    config = replace(SMALL, split_k=splits)
    first, second = (warploom.matmul(a, b, config=config, out_dtype="f32") for _ in range(2))
    assert_right(first, a, b)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("shapes", [((96, 160), (160, 31)), ((3, 30, 100), (3, 100, 32)), ((2, 3, 32, 64), (3, 64, 9))])
def test_shared_tiles_are_right_and_repeatable(shapes):
    """Odd counts of tiles for two CTAs, and batches whose counts start anew in each launch."""
    a, b = random(*shapes[0]), random(*shapes[1])
    plan = warploom.plan_matmul(a, b, config=STREAM)
    shares = STREAM.shares(plan.problem, plan.multiprocessors)
    assert plan.steps.workspace == {"parts": shares.ctas * 2 * 32 * 32, "arrived": shares.cut}
    assert shares.cut > 0
    first, second = (warploom.matmul(a, b, config=STREAM, out_dtype="f32") for _ in range(2))
    assert_right(first, a, b)
    assert np.array_equal(first, second)


def test_long_thin_products_are_split():
    plan = warploom.plan_matmul(random(16, 16384), random(16384, 32))
    assert plan.config.split_k > 1
    assert plan.steps.workspace == {"parts": plan.config.split_k * 16 * 32}
    assert len(plan.calls) == 2


@pytest.mark.parametrize("shapes", [((0, 4), (4, 5)), ((3, 4), (4, 0)), ((0, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 0))])
def test_empty_results(shapes):
    assert warploom.plan_matmul(random(*shapes[0]), random(*shapes[1])).problem.m >= 0
    c = warploom.matmul(random(*shapes[0]), random(*shapes[1]))
    assert c.size == 0
    assert c.shape[-2:] == (shapes[0][-2], shapes[1][-1])


def test_an_empty_sum_is_zero_and_still_gets_its_epilogue():
    a, b, bias = random(3, 0), random(0, 5), random(5)
    assert np.array_equal(warploom.matmul(a, b), np.zeros((3, 5)))
    c = warploom.matmul(a, b, bias=bias, epilogue=lambda x: x * 2.0, out_dtype="f32")
    assert np.array_equal(c, np.broadcast_to(2 * bias.astype(np.float32), (3, 5)))


def test_matrices_without_elements_lie_anyhow():
    rows = np.zeros((3, 20), np.float16)
    odd = np.zeros(61, np.uint8)[1:].view(np.float16).reshape(3, 10)
    for a, b in (
        (odd[:, :0], np.zeros((0, 5), np.float16)),
        (np.flip(rows[:, :0], 0), rows[:0, :5]),
        (rows[:, :0], np.flip(rows[:0, :5], 1)),
    ):
        assert np.array_equal(warploom.matmul(a, b), np.zeros((3, 5)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_out_receives_the_result_and_nothing_else(dtype):
    whole = np.full((40, 50), 7, dtype)
    out = whole[3:36, 5:45]
    a, b = random(33, 72), random(72, 40)
    assert warploom.matmul(a, b, out=out) is out
    assert_right(out, a, b)
    whole[3:36, 5:45] = 7
    assert (whole == 7).all()


def test_batches_that_share_b_become_rows():
    assert warploom.plan_matmul(random(4, 8, 32), random(32, 16)).problem.m == 32
    assert warploom.plan_matmul(random(4, 8, 32).swapaxes(0, 1), random(32, 16)).problem.m == 4
    assert warploom.plan_matmul(random(4, 1, 32), random(32, 16)).problem.m == 4


def test_transposed_operands_are_read_as_they_lie():
    x, w = random(64, 64), random(64, 64)
    plan = warploom.plan_matmul(x, w.T)
    assert plan.problem.a.k_contiguous
    assert plan.problem.b.k_contiguous
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" not in plan.cuda
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in warploom.plan_matmul(x.T, w).cuda


@pytest.mark.parametrize(("extent", "chunk"), [(64, 8), (68, 4), (66, 2), (65, 1)])
def test_alignment_decides_how_lines_are_copied(extent, chunk):
    plan = warploom.plan_matmul(random(64, extent), random(extent, 64))
    assert plan.problem.a.chunk == chunk
    assert (f"cp.async.c{'g' if chunk == 8 else 'a'}.shared.global" in plan.cuda) or chunk == 1


def test_nan_and_infinity_propagate():
    a, b = random(16, 32), random(32, 16)
    a[3, 4], a[5, 6] = np.nan, np.inf
    c = warploom.matmul(a, b)
    assert np.isnan(c[3]).all()
    assert np.isinf(c[5]).all()
    assert np.isfinite(np.delete(c, [3, 5], axis=0)).all()


def test_equal_lambdas_share_a_kernel():
    def scaled(factor: float) -> Any:
        return lambda x: x * factor

    assert function_key(scaled(2.0)) == function_key(scaled(2.0))
    assert function_key(scaled(2.0)) != function_key(scaled(3.0))
    assert function_key(scaled(2)) != function_key(scaled(2.0))
    unhashable = lambda x, table={1.0}: x * len(table)  # noqa: E731
    assert function_key(unhashable) == function_key(unhashable)
    a, b = random(16, 32), random(32, 16)
    twice, thrice = (warploom.matmul(a, b, epilogue=scaled(s), out_dtype="f32") for s in (2.0, 3.0))
    assert np.allclose(thrice, twice * 1.5, rtol=1e-6)


REFUSED: dict[str, tuple[Any, str]] = {
    "inner extents": (lambda: warploom.matmul(random(3, 4), random(5, 6)), "pass w.T"),
    "vector": (lambda: warploom.matmul(random(4), random(4, 2)), "add a dimension"),
    "mixed": (lambda: warploom.matmul(random(3, 4), random(4, 5, dtype=ml_dtypes.bfloat16)), "one type"),
    "batches": (lambda: warploom.matmul(random(2, 3, 4), random(3, 4, 5)), "do not broadcast"),
    "bias": (lambda: warploom.matmul(random(3, 4), random(4, 6), bias=random(3)), "n = 6, as b has"),
    "bias type": (lambda: warploom.matmul(random(3, 4), random(4, 3), bias=random(3, dtype=np.float32)), "one type"),
    "extras alone": (lambda: warploom.matmul(random(3, 4), random(4, 6), extras=(random(3, 6),)), "epilogue"),
    "extra rows of a batch": (
        lambda: warploom.matmul(
            random(2, 3, 8), random(2, 8, 16), epilogue=lambda x, y: x + y, extras=(random(2, 3, 1),)
        ),
        "a batch of products takes extra matrices",
    ),
    "extra shape": (
        lambda: warploom.matmul(random(3, 4), random(4, 6), epilogue=lambda x, y: x + y, extras=(random(6),)),
        "give it that shape",
    ),
    "no value": (lambda: warploom.matmul(random(3, 4), random(4, 6), epilogue=lambda x: None), "one traced value"),
    "accumulate": (
        lambda: warploom.matmul(*(random(4, 4, dtype=ml_dtypes.bfloat16),) * 2, accumulate="f16"),
        "float16 inputs",
    ),
    "out shape": (lambda: warploom.matmul(random(3, 4), random(4, 6), out=random(3, 5)), "out has shape"),
    "out strides": (lambda: warploom.matmul(random(3, 4), random(4, 6), out=random(6, 3).T), "row-major"),
    "alpha": (lambda: warploom.matmul(random(3, 4), random(4, 6), alpha=math.inf), "finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do(name):
    call, words = REFUSED[name]
    with pytest.raises(ProblemError) as refused:
        call()
    assert words in str(refused.value)


@pytest.mark.parametrize(("lead", "suggested"), [((), 3), ((2,), 1)], ids=["one b", "a batch of them"])
def test_shapes_that_a_refusal_suggests_for_an_extra_matrix_are_taken(lead, suggested):
    def planned(*shape: int) -> Any:
        a, b = random(2, 3, 16), random(*lead, 16, 8)
        return warploom.plan_matmul(a, b, epilogue=lambda x, y: x + y, extras=(random(*shape),))

    with pytest.raises(ProblemError) as refused:
        planned(5)
    _, *shapes = re.findall(r"\(([\d, ]+)\)", str(refused.value))
    assert len(shapes) == suggested
    for shape in shapes:
        planned(*map(int, shape.split(",")))


def test_configurations_that_do_not_fit_are_refused():
    a, b = random(32, 64), random(64, 32)
    for config, words in (
        (replace(SMALL, dtype=bf16), "the arrays are f16"),
        (replace(SMALL, accumulate=f16), "sums are wanted in f32"),
        (replace(SMALL, split_k=8), "fewer than 8 parts"),
        (replace(SMALL, tile_k=24), "tile_k"),
        (RungGemm(32, 32, 32, 16, 16, dtype=bf16), "the arrays are f16"),
    ):
        with pytest.raises(ConfigError) as refused:
            warploom.matmul(a, b, config=config)
        assert words in str(refused.value)


TILES = "BM=32, BN=32, BK=32, WM=16, WN=16, STAGES=2"


@pytest.mark.parametrize(("dtype", "accumulate"), [(bf16, "f32"), (f16, "f32"), (f16, "f16")])
def test_a_notation_leaves_types_to_the_call(dtype, accumulate):
    a, b = random(32, 48, dtype=dtype.numpy), random(48, 40, dtype=dtype.numpy)
    full = MatmulSm80(32, 32, 32, 16, 16, 2, dtype, dtype_of(accumulate))
    words, seeds = f"matmul_sm80({TILES})", TILES + ",ldmatrix,swizzle,pipelined"
    rung = RungGemm(32, 32, 32, 16, 16, dtype, full.accumulate, ldmatrix=True, swizzle=True, stages=2, pipelined=True)
    for text, config in ((words, full), (seeds, rung), (TILES, rung)):
        assert warploom.plan_matmul(a, b, accumulate=accumulate, config=text).config == config
    assert_right(warploom.matmul(a, b, accumulate=accumulate, config=words), a, b, accumulate)
    if accumulate == "f32":
        assert warploom.plan_matmul_reduce(a, b, config=words).config == full


def test_what_a_notation_says_holds():
    bf, half = (random(32, 32, dtype=dtype.numpy) for dtype in (bf16, f16))
    with pytest.raises(ConfigError, match="the arrays are bf16, the configuration f16"):
        warploom.matmul(bf, bf, config=TILES + ",dtype=f16")
    with pytest.raises(ConfigError, match="sums are wanted in f32, the configuration has f16"):
        warploom.matmul(half, half, config=f"matmul_sm80({TILES}, accumulate=f16)")
    assert warploom.plan_matmul(bf, bf, config="matmul_sm90()").config.dtype is bf16


def test_a_plan_says_what_would_run():
    plan = warploom.plan_matmul(random(32, 64), random(64, 32))
    assert plan.problem.out_dtype is f16
    assert plan.problem.accumulate is f32
    assert "cost model" in str(plan)
    assert "mma.sync" in plan.cuda
    assert plan.grid[0] >= 1


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_plans_copy_nothing_and_copies_that_do_not_fit_are_refused(kind):
    """32 TiB in name: neither rows nor columns are contiguous, so that a product would have to copy them."""
    one, b = np.ones((1, 1), np.float16), random(2**22, 8)
    a = np.broadcast_to(one, (2**22, 2**22))
    q = np.broadcast_to(np.ones(257, np.float16)[1:], (2**10, 2**22, 1, 256))  # rows at odd multiples of 2 bytes
    if kind == "torch":
        torch = pytest.importorskip("torch")
        a, b = torch.from_numpy(one).expand(a.shape), torch.from_numpy(b)
    assert warploom.plan_matmul(a, b).problem.a.chunk == 8
    assert warploom.plan_matmul_reduce(a, b).problem.product.m == 2**22
    assert warploom.plan(q, q[:, :1], q[:, :1]).calls[0].scalars["q_stride0"] == 2**30
    for call in (warploom.matmul, warploom.matmul_reduce):
        with pytest.raises(ProblemError, match=r"copy of 32768\.0 GiB does not fit in memory: pass one with"):
            call(a, b)


def test_what_a_plan_of_a_strided_array_says_is_what_a_call_runs():
    a, b = random(48, 80)[:, ::2], random(40, 24)
    planned, called = warploom.plan_matmul(a, b), warploom.plan_matmul(np.ascontiguousarray(a), b)
    assert planned == called
    assert (warploom.matmul(a, b) == warploom.matmul(np.ascontiguousarray(a), b)).all()


def test_the_emulators_time_counts_the_tiles(monkeypatch):
    """(1120000, 1) · (1, 1) takes a minute: hardly a sum, but thousands of tiles."""
    stopped = RuntimeError("would run now")

    def stop(*_: object) -> None:
        raise stopped

    monkeypatch.setattr("warploom.emulate.emulate", stop)
    seconds = []
    for rows in (112_000, 1_120_000):
        with pytest.warns(EmulationWarning) as caught, pytest.raises(RuntimeError, match="would run now"):
            warploom.matmul(np.ones((rows, 1), np.float16), np.ones((1, 1), np.float16))
        seconds.append(float(str(caught[0].message).split("about ")[1].split()[0]))
    assert seconds[1] > 20
    assert 5 < seconds[1] / seconds[0] < 15


def test_the_emulator_says_that_it_is_slow():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EmulationWarning, match="no GPU"):
            warploom.matmul(random(8, 8), random(8, 8))


def test_odd_addresses_and_factors_beyond_f32_are_refused():
    straight = np.ones((4, 4), np.float16)
    odd = np.frombuffer(b"\0" + straight.tobytes(), np.uint8)[1:].view(np.float16).reshape(4, 4)
    with pytest.raises(ProblemError, match="odd address"):
        warploom.matmul(odd, straight)
    with pytest.raises(ProblemError, match="finite float32"):
        warploom.matmul(straight, straight, alpha=1e60)
    with pytest.raises(ProblemError, match="finite float32"):
        warploom.matmul_reduce(straight, straight, "max", scale=1e60)


def test_batches_that_are_rows_are_one_launch_with_those_that_are_not():
    a, b = random(2, 3, 8, 16), random(2, 1, 16, 24, seed=1)
    extra = random(2, 3, 8, 24, seed=2).astype(np.float32)
    plan = warploom.plan_matmul(a, b, epilogue=lambda x, y: x + y, extras=(extra,))
    assert (plan.problem.m, plan.problem.batch, len(plan.steps.calls)) == (24, 2, 1)
    found = warploom.matmul(a, b, out_dtype="f32", epilogue=lambda x, y: x + y, extras=(extra,))
    assert np.allclose(found, a.astype(np.float32) @ b.astype(np.float32) + extra, atol=1e-5)
