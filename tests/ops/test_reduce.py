"""``matmul_reduce`` and ``linear_cross_entropy`` on the emulator, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ConfigError, ProblemError
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.ops.loss import linear_cross_entropy
from warploom.ops.reduce import matmul_reduce, plan_matmul_reduce
from warploom_lab.kernels.matmul.ladder_config import RungGemm

SMALL = {t: MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=t) for t in (bf16, f16)}


def inputs(m, n, k, dtype=bf16, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)).astype(dtype.numpy), rng.standard_normal((k, n)).astype(dtype.numpy)


def reference(a, b, op, scale=1.0, bias=None):
    product = scale * (a.astype(np.float64) @ b.astype(np.float64))
    if bias is not None:
        product = product + bias.astype(np.float64)
    if op == "max":
        return product.max(1)
    if op == "sum":
        return product.sum(1)
    top = product.max(1, keepdims=True)
    return (top + np.log(np.exp(product - top).sum(1, keepdims=True)))[:, 0]


def slack(a, b, op):
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    bound = a.shape[1] * 2.0**-22 * (size.sum(1) if op == "sum" else size.max(1))
    return bound + 1e-5


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(64, 96, 64, bf16), (33, 71, 40, f16), (5, 1, 8, bf16), (32, 300, 17, f16), (1, 33, 1, bf16)],
)
def test_every_size_is_right(op, m, n, k, dtype):
    a, b = inputs(m, n, k, dtype)
    found = matmul_reduce(a, b, op, config=SMALL[dtype])
    assert found.shape == (m,)
    assert found.dtype == np.float32
    assert (np.abs(found - reference(a, b, op)) <= slack(a, b, op)).all()


@pytest.mark.parametrize("op", ["max", "logsumexp"])
def test_the_configuration_chosen_without_asking(op):
    a, b = inputs(70, 200, 48)
    assert (np.abs(matmul_reduce(a, b, op) - reference(a, b, op)) <= slack(a, b, op)).all()


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
def test_scale_and_bias(op):
    a, b = inputs(40, 50, 32)
    bias = (np.random.default_rng(3).standard_normal(50) * 4).astype(bf16.numpy)
    for scale, given in ((0.125, None), (1.0, bias), (-0.5, bias)):
        found = matmul_reduce(a, b, op, scale=scale, bias=given, config=SMALL[bf16])
        assert (np.abs(found - reference(a, b, op, scale, given)) <= slack(a, b, op)).all()


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "strided"])
def test_operands_as_they_lie(layout):
    a, b = inputs(40, 72, 48)
    if layout == "nt":
        b = np.ascontiguousarray(b.T).T
    elif layout == "tn":
        a = np.ascontiguousarray(a.T).T
    elif layout == "strided":
        wide = np.zeros((40, 64), a.dtype)
        wide[:, :48] = a
        a = wide[:, :48]
    assert (np.abs(matmul_reduce(a, b, config=SMALL[bf16]) - reference(a, b, "max")) <= slack(a, b, "max")).all()


def test_the_index_is_the_first_of_equal_maxima():
    a, b = inputs(48, 130, 32)
    a, b = (np.sign(x.astype(np.float32)).astype(bf16.numpy) for x in (a, b))  # small integers: many ties
    values, index = matmul_reduce(a, b, return_index=True, config=SMALL[bf16])
    product = a.astype(np.float32) @ b.astype(np.float32)
    assert (values == product.max(1)).all()
    assert (index == product.argmax(1)).all()
    assert index.dtype == np.int32


def test_where_the_maximum_is_does_not_matter():
    a = np.zeros((32, 32), bf16.numpy)
    a[:, 0] = 1
    for col in (0, 15, 16, 31, 32, 65, 69):
        b = np.full((32, 70), -3, bf16.numpy)
        b[0, col] = 2
        values, index = matmul_reduce(a, b, return_index=True, config=SMALL[bf16])
        assert (values == 2).all()
        assert (index == col).all()


def test_large_scores_do_not_overflow_and_equal_calls_give_equal_bits():
    a, b = inputs(32, 100, 32)
    a, b = (x * np.asarray(30, x.dtype) for x in (a, b))
    first = matmul_reduce(a, b, "logsumexp", config=SMALL[bf16])
    assert np.isfinite(first).all()
    assert np.allclose(first, reference(a, b, "logsumexp"), rtol=1e-5)
    assert (first == matmul_reduce(a, b, "logsumexp", config=SMALL[bf16])).all()


def special_rows():
    """x, w: all logits of a row are of a size, +inf, -inf or NaN; of huge ones some overflow."""
    x = np.array([[1, -1, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e9, -1e12]]).T
    return x.astype(bf16.numpy), np.random.default_rng(5).uniform(0.5, 2, (71, 1)).astype(bf16.numpy)


@pytest.mark.parametrize("added", [(0, 0), (np.inf, np.inf), (-np.inf, -np.inf), (np.inf, -np.inf), (np.nan, 0)])
def test_infinities_and_nan(added):
    """A logit of +inf makes the log-sum-exp +inf, -inf alone make it -inf, NaN makes it NaN."""
    x, w = special_rows()
    bias = np.zeros(71, bf16.numpy)
    bias[[3, 50]] = added
    with np.errstate(all="ignore"):
        logits = (x.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32) + bias.astype(np.float32)
        expected = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    found = matmul_reduce(x, w.T, "logsumexp", bias=bias, config=SMALL[bf16])
    np.testing.assert_allclose(found, expected, rtol=1e-6, equal_nan=True)
    top = matmul_reduce(x, w.T, "max", bias=bias, config=SMALL[bf16])
    most, where = matmul_reduce(x, w.T, "max", bias=bias, return_index=True, config=SMALL[bf16])
    numbers = np.where(np.isnan(logits), -np.inf, logits)
    for values in (top, most):
        np.testing.assert_allclose(values, numbers.max(1), rtol=1e-6)
    assert (where == numbers.argmax(1)).all()


def test_the_loss_of_infinite_logits_is_the_difference():
    """+inf where some other logit is +inf or the target's is -inf, NaN where the target's is +inf or any is NaN."""
    x = np.array([[1, 0], [1, 0], [np.inf, 0], [-np.inf, 0], [np.nan, 0], [1, 0]], bf16.numpy)
    w = np.ones((50, 2), bf16.numpy)
    w[:, 1] = 0
    w[7, 0], w[8, 0] = np.inf, -np.inf
    target = np.array([7, 3, 3, 3, 3, 8], np.int64)
    with np.errstate(all="ignore"):
        logits = x.astype(np.float64) @ w.T.astype(np.float64)
        expected = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(6), target]
    found = linear_cross_entropy(x, w, target, config=SMALL[bf16])
    np.testing.assert_allclose(found, expected, rtol=1e-6, equal_nan=True)
    assert np.isposinf(found).tolist() == [False, True, False, True, False, True]


def test_a_least_element_is_a_largest_one_of_the_opposite_sign():
    a, b = inputs(33, 71, 40)
    bound = slack(a, b, "max")
    expected = (a.astype(np.float64) @ b.astype(np.float64)).min(1)
    assert (np.abs(-matmul_reduce(a, b, "max", scale=-1) - expected) <= bound).all()


def test_no_product_is_written():
    plan = plan_matmul_reduce(*inputs(256, 4096, 16), "logsumexp")
    assert str(plan.config) in str(plan)
    assert plan.program.name in plan.cuda
    assert plan.calls[1].source.name in plan.cuda
    assert plan.workspace_bytes <= 256 * 4096 * 4 // 16
    assert {p.name for p in plan.program.parameters} >= {"a", "b", "result_first", "result_second"}


def test_what_it_does_not_take():
    a, b = inputs(8, 8, 8)
    for call, text in (
        (lambda: matmul_reduce(a, b, "min"), "op is 'max'"),  # pyright: ignore[reportCallIssue, reportArgumentType]
        (lambda: matmul_reduce(a, b, "sum", return_index=True), "return_index goes with"),
        (lambda: matmul_reduce(a, b[:, :0]), "no columns"),
        (lambda: matmul_reduce(a[None], b), "a has shape"),
        (lambda: matmul_reduce(a, b, scale=float("inf")), "finite"),
        (lambda: linear_cross_entropy(a, b, np.zeros(8, np.float32)), "int32 or int64"),
        (lambda: linear_cross_entropy(a, b, np.zeros(7, np.int32)), "target has shape"),
    ):
        with pytest.raises(ProblemError, match=text):
            call()
    assert matmul_reduce(a[:0], b).shape == (0,)
    with pytest.raises(ConfigError, match="split_k"):
        matmul_reduce(*inputs(32, 32, 128), config=replace(SMALL[bf16], split_k=2))
    with pytest.raises(ConfigError, match="no kernel that reduces rows"):
        matmul_reduce(*inputs(32, 32, 128), config=RungGemm(32, 32, 32, 16, 16, dtype=bf16))
