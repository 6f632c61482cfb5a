"""``linear_cross_entropy`` and its gradients on the emulator, against float64."""

from typing import Any

import numpy as np
import pytest

from warploom import linear_cross_entropy
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ProblemError
from warploom.core.targets import target as architecture
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul_reduce.loss import Loss, total_call
from warploom.ops.backends import emulated
from warploom.ops.loss import (
    GradientPlan,
    gradients_are_formed,
    loss_with_gradients,
    loss_with_gradients_call,
    scale_gradients,
)
from warploom.ops.loss import row_gradients as gradients

SMALL = {t: MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=t) for t in (bf16, f16)}
BULK = MatmulSm90(tile_m=64, tile_n=64, consumers=1, stages=2, dtype=bf16)
IN_TURN = MatmulSm90(tile_m=64, tile_n=64, consumers=2, stages=2, dtype=bf16, pingpong=True)
IGNORED = -100
UNIT = {bf16: 2.0**-8, f16: 2.0**-11}
EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}


def inputs(m, n, k, dtype=bf16, seed=0):
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(shape).astype(dtype.numpy) for shape in ((m, k), (n, k)))
    target = rng.integers(0, n, m)
    target[m // 2] = IGNORED
    return x, w, target


class Reference:
    """A loss in float64: of the rows, and the derivatives by the logits before the soft cap."""

    def __init__(self, x, w, target, label_smoothing=0.0, z_loss=0.0, softcap=None, bias=None):
        self.x, self.w = x.astype(np.float64), w.astype(np.float64)
        plain = self.x @ self.w.T + (0 if bias is None else bias.astype(np.float64))
        logits = plain if softcap is None else softcap * np.tanh(plain / softcap)
        self.slope = 1.0 if softcap is None else 1.0 - (logits / softcap) ** 2
        self.lse = np.logaddexp.reduce(logits, 1)
        self.kept = target != IGNORED
        hot = np.zeros_like(logits)
        hot[np.flatnonzero(self.kept), target[self.kept]] = 1.0
        self.hot = (1 - label_smoothing) * hot + label_smoothing / logits.shape[1]
        self.softmax = np.exp(logits - self.lse[:, None])
        self.z_loss = z_loss
        self.rows = (self.lse - (self.hot * logits).sum(1) + z_loss * self.lse**2) * self.kept

    def gradients(self, by_loss, by_lse=None):
        """((gradient, magnitude of its sum) by x, by w), those by the bias in ``by_bias``."""
        own = by_loss * self.kept
        factor = own * (1 + 2 * self.z_loss * self.lse) + (0 if by_lse is None else by_lse)
        d = (factor[:, None] * self.softmax - own[:, None] * self.hot) * self.slope
        self.by_bias = d.sum(0), abs(d).sum(0)
        return (d @ self.w, abs(d) @ abs(self.w)), (d.T @ self.x, abs(d).T @ abs(self.x))


def assert_gradients(found, reference, dtype, roundings=1):
    """Each element within what the rounded derivatives, sums in f32, and roundings of the result allow."""
    for result, (expected, magnitude) in zip(found, reference, strict=True):
        bound = UNIT[dtype] * (magnitude + roundings * magnitude) + 1e-5 * magnitude + 1e-7
        error = np.abs(result.astype(np.float64) - expected)
        assert (error <= bound).all(), (error / bound).max()
        assert np.abs(expected).max() > 4 * bound.max()  # the bound says something


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"softcap": 2.0}, EVERYTHING])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_losses_and_log_sum_exps(kind, options):
    x, w, target = inputs(37, 90, 40)
    reference = Reference(x, w, target, **options)
    found, lse = linear_cross_entropy(x, w, target.astype(kind), return_lse=True, config=SMALL[bf16], **options)
    np.testing.assert_allclose(found, reference.rows, atol=1e-4)
    np.testing.assert_allclose(lse, reference.lse, atol=1e-4)


def test_every_reduction_is_float32():
    x, w, target = np.ones((3, 8), np.float16), np.ones((5, 8), np.float16), np.zeros(3, np.int64)
    assert {linear_cross_entropy(x, w, target, reduction=r).dtype for r in ("none", "sum", "mean")} == {np.dtype("f4")}


def test_reductions_count_the_rows_that_are_not_ignored():
    x, w, target = inputs(19, 40, 32)
    rows = linear_cross_entropy(x, w, target, config=SMALL[bf16])
    assert rows[target == IGNORED] == 0
    total = linear_cross_entropy(x, w, target, reduction="sum", config=SMALL[bf16])
    mean = linear_cross_entropy(x, w, target, reduction="mean", config=SMALL[bf16])
    np.testing.assert_allclose([total, mean], [rows.sum(), rows.sum() / 18], rtol=1e-6)
    padded = np.where(target == IGNORED, 7, target)
    np.testing.assert_array_equal(
        linear_cross_entropy(x, w, padded, ignore_index=7, config=SMALL[bf16])[target == 7], 0
    )


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("m", [1, 511, 2 * 4096 + 700])
def test_the_losses_of_many_rows_are_added_by_one_cta(m, words):
    rng = np.random.default_rng(m)
    losses, target = (
        rng.uniform(1, 2, m).astype(np.float32),
        rng.integers(-1, 2, m, np.int64 if words == 2 else np.int32),
    )
    for mean in (False, True):
        call, total, count = total_call(m, words, -1, mean=mean), np.zeros((), np.float32), np.zeros((), np.float32)
        given = [losses, target.view(np.uint32), total, count] if mean else [losses, total]
        emulated(call.source.program, call.grid, [*given, m])
        kept = np.count_nonzero(target != -1)
        np.testing.assert_allclose(total, losses.sum(dtype=np.float64) / (kept if mean else 1), rtol=1e-6)
        assert count == (kept if mean else 0)


def test_reductions_of_no_row():
    x, w, target = inputs(1, 40, 32)
    found = {r: linear_cross_entropy(x[:0], w, target[:0], reduction=r) for r in ("none", "sum", "mean")}
    assert found["none"].shape == (0,)
    assert found["sum"] == 0
    assert np.isnan(found["mean"])
    assert np.isnan(linear_cross_entropy(x, w, np.full(1, IGNORED), reduction="mean", config=SMALL[bf16]))


@pytest.mark.parametrize("wrong", [40, -1, 2**40])
def test_a_target_outside_the_vocabulary_is_named(wrong):
    x, w, target = inputs(8, 40, 32)
    target[5] = wrong
    with pytest.raises(ProblemError, match=rf"target\[5\] is {wrong}, and w has 40 rows"):
        linear_cross_entropy(x, w, target)


def test_a_target_that_cannot_be_looked_at_is_nan(gpu, monkeypatch):
    gpu.hold(monkeypatch)
    x, w, target = inputs(8, 40, 32)
    target[5], target[6], target[7] = 40, -1, 2**32 + 3
    assert np.isnan(linear_cross_entropy(x, w, target)).tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing is between 0 and 1"),
        ({"z_loss": -1.0}, "z_loss is a finite number from 0 on"),
        ({"softcap": 0.0}, "softcap is a positive finite number"),
        ({"reduction": "average"}, "reduction is 'none', 'mean' or 'sum'"),
        ({"ignore_index": 0.5}, "ignore_index is an integer"),
        ({"workspace_mib": 0}, "workspace_mib is a positive number of MiB"),
    ],
)
def test_options_that_make_no_sense(options, match):
    with pytest.raises(ProblemError, match=match):
        linear_cross_entropy(*inputs(8, 40, 32), **options)


CASES = {
    "plain": ((40, 72, 48), None, {}),
    "blocks": ((40, 72, 48), (16, 24), {}),
    "everything": ((40, 72, 48), (16, 24), EVERYTHING),
    "ragged": ((33, 71, 41), (16, 24), {"label_smoothing": 0.2}),
    "one row": ((1, 30, 24), None, {}),
    "one word": ((24, 1, 24), None, {"z_loss": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    (m, n, k), blocks, options = CASES[name]
    x, w, target = inputs(m, n, k)
    if m == 1:
        target[:] = 3
    reference, rng = Reference(x, w, target, **options), np.random.default_rng(1)
    by_loss, by_lse = (rng.uniform(0.5, 1.5, m).astype(np.float32) for _ in range(2))
    lse = linear_cross_entropy(x, w, target, return_lse=True, config=SMALL[bf16], **options)[1]
    for other in (None, by_lse):
        found = gradients(x, w, lse, target, by_loss, other, config=SMALL[bf16], blocks=blocks, **options)
        expected = reference.gradients(by_loss, other)
        assert_gradients(found, expected, bf16, 1 if blocks is None else -(-m // blocks[0]))
        if other is None:
            assert (found[0][~reference.kept] == 0).all()


FORMED: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "plain": ((37, 90, 40), SMALL[bf16], None, {}),
    "sum": ((40, 72, 48), SMALL[bf16], None, {"reduction": "sum"}),
    "blocks": ((40, 72, 48), SMALL[bf16], (16, 72), {"label_smoothing": 0.1, "z_loss": 0.01}),
    "ragged, bias": ((33, 71, 41), SMALL[bf16], (16, 71), {"label_smoothing": 0.2, "bias": True}),
    "one row": ((1, 30, 24), SMALL[bf16], None, {}),
    "one word": ((24, 1, 24), SMALL[bf16], None, {"z_loss": 0.5}),
    "wgmma": ((80, 136, 64), BULK, (64, 136), {"reduction": "sum"}),
    "wgmma, ragged, bias": ((80, 137, 64), BULK, None, {"bias": True}),
    "wgmma in turns": ((150, 300, 136), IN_TURN, None, {"z_loss": 0.1}),
}


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_gradients_formed_in_the_forward_pass(name, kind):
    (m, n, k), config, blocks, options = FORMED[name]
    x, w, target = inputs(m, n, k)
    if m == 1:
        target[:] = 3
    options = {"reduction": "mean", **options}
    biased, reduction = options.pop("bias", False), options["reduction"]
    bias = np.random.default_rng(5).standard_normal(n).astype(bf16.numpy) if biased else None
    reference = Reference(x, w, target, **{k: v for k, v in options.items() if k != "reduction"}, bias=bias)
    kept = np.count_nonzero(reference.kept)
    given = {"bias": bias, "wants_bias": biased, "config": config, "blocks": blocks, **options}
    total, lse, *found = loss_with_gradients(x, w, target.astype(kind), **given)
    if reduction == "mean":
        assert found.pop(0) == kept
    np.testing.assert_allclose(lse, reference.lse, atol=1e-4)
    weight = 1 / kept if reduction == "mean" else 1.0
    np.testing.assert_allclose(total, reference.rows.sum() * weight, rtol=1e-5)
    expected = [*reference.gradients(np.full(m, weight)), *([reference.by_bias] if biased else [])]
    assert_gradients(found, expected, bf16, 2 if blocks is None else 1 - (-m // blocks[0]))
    assert (found[0][~reference.kept] == 0).all()


def test_formed_gradients_of_large_logits_and_of_rows_that_count_for_nothing():
    """One factor for all parts of a row would overflow: its logits are apart by more than float32's exponents."""
    x, w, target = inputs(24, 96, 32)
    w[::2] *= 100
    reference = Reference(x, w, target)
    assert np.ptp(x.astype(np.float64) @ w.astype(np.float64).T, axis=1).min() > 200
    found = loss_with_gradients(x, w, target, reduction="sum", config=SMALL[bf16])
    np.testing.assert_allclose(found[0], reference.rows.sum(), rtol=1e-5)
    assert_gradients(found[2:], reference.gradients(np.ones(24)), bf16, 2)
    ignored = loss_with_gradients(x, w, np.full(24, IGNORED), reduction="sum", config=SMALL[bf16])
    assert ignored[0] == 0
    assert all((x == 0).all() for x in ignored[2:])


def test_a_target_that_cannot_be_looked_at_makes_formed_gradients_nan(gpu, monkeypatch):
    gpu.hold(monkeypatch)
    x, w, target = inputs(8, 40, 32)
    target[5], target[6] = 40, 2**32 + 3
    _, _, dx, _ = loss_with_gradients(x, w, target, reduction="sum")
    assert np.isnan(dx.astype(np.float32)).all(1).tolist() == [False] * 5 + [True] * 2 + [False]


@pytest.mark.parametrize("size", [(13, 7), (5, 8), (40, 72)])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0])
def test_gradients_are_scaled_in_place(size, factor):
    rng = np.random.default_rng(0)
    dx, dbias = (rng.standard_normal(shape).astype(bf16.numpy) for shape in (size, size[:1]))
    expected = [(x.astype(np.float32) * np.float32(factor)).astype(bf16.numpy) for x in (dx, dbias)]
    scale_gradients(np.array(factor, np.float32), None, dx, dbias)
    for found, wanted in zip((dx, dbias), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_which_gradients_are_formed():
    usual: dict[str, Any] = {"reduction": "mean", "softcap": None, "return_lse": False, "workspace_mib": 512}
    assert gradients_are_formed(8192, 128256, 4096, **usual)
    assert gradients_are_formed(1, 1, 1, **usual)
    for other in ({"reduction": "none"}, {"softcap": 30.0}, {"return_lse": True}, {"workspace_mib": 64}):
        assert not gradients_are_formed(8192, 128256, 4096, **usual | other)
    for size in ((0, 8, 8), (8, 8, 0), (8192, 1 << 20, 64)):
        assert not gradients_are_formed(*size, **usual)


@pytest.mark.parametrize(
    ("size", "mib"),
    [
        ((8192, 128256, 4096), 512),
        ((16384, 151936, 2048), 512),
        ((65536, 50304, 768), 128),
        ((8192, 262144, 2048), 512),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_workspace_of_formed_gradients_is_bounded(size, mib, smoothing, gpu):
    m, n, k = size
    usual: dict[str, Any] = {"reduction": "mean", "softcap": None, "return_lse": False, "workspace_mib": mib}
    assert gradients_are_formed(*size, **usual)
    x, w = (np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), (rows, k), (2 * k, 2)) for rows in (m, n))
    given = {"x": x, "w": w, "target": np.zeros(m, np.int64), "workspace_mib": mib, "label_smoothing": smoothing}
    plan = loss_with_gradients_call.computation(given).planned()
    assert plan.taken[1] == n
    assert plan.taken[0] >= 768
    assert plan.workspace_bytes <= mib << 20


@pytest.mark.parametrize(("blocks", "options"), [(None, {}), ((16, 24), EVERYTHING), ((40, 24), {})])
def test_a_bias(blocks, options):
    x, w, target = inputs(40, 71, 48)
    bias = np.random.default_rng(5).standard_normal(71).astype(bf16.numpy)
    reference, by_loss = Reference(x, w, target, **options, bias=bias), np.linspace(0.5, 1.5, 40).astype(np.float32)
    found, lse = linear_cross_entropy(x, w, target, bias=bias, return_lse=True, config=SMALL[bf16], **options)
    np.testing.assert_allclose(found, reference.rows, atol=1e-4)
    np.testing.assert_allclose(lse, reference.lse, atol=1e-4)
    given = {"bias": bias, "config": SMALL[bf16], "blocks": blocks, "wants_bias": True, **options}
    *products, by_bias = gradients(x, w, lse, target, by_loss, **given)
    expected = reference.gradients(by_loss)
    assert_gradients(products, expected, bf16, 3)
    assert_gradients([by_bias], [reference.by_bias], bf16)
    alone = gradients(x, w, lse, target, by_loss, wants_x=False, wants_w=False, **given)
    np.testing.assert_array_equal(alone, by_bias)


@pytest.mark.parametrize("name", ["lse", "by_loss", "by_lse"])
def test_numbers_of_rows_are_float32(name):
    x, w, target = inputs(8, 40, 32)
    rows = {**dict.fromkeys(("lse", "by_loss", "by_lse"), np.ones(8, np.float32)), name: np.ones(8, bf16.numpy)}
    with pytest.raises(ProblemError, match=f"^{name} is bf16, .*convert it to f32"):
        gradients(x, w, target=target, wants_bias=True, **rows)


@pytest.mark.parametrize("name", ["x", "w", "target"])
def test_arrays_of_another_number_of_dimensions_are_named(name):
    given: Any = dict(zip(("x", "w", "target"), inputs(8, 40, 32), strict=True))
    for changed in (given[name][None], given[name][..., None], given[name][0]):
        with pytest.raises(ProblemError, match=f"^{name} has shape"):
            linear_cross_entropy(**given | {name: np.asarray(changed)})


def test_a_bias_of_another_size_is_named():
    x, w, target = inputs(8, 40, 32)
    with pytest.raises(ProblemError, match=r"bias has shape \(8,\); it must be \(n,\) with n = 40, as w has"):
        linear_cross_entropy(x, w, target, bias=x[:, 0])


def test_gradients_by_wgmma_and_of_columns_that_lie_apart():
    x, w, target = inputs(80, 136, 64)
    reference, by_loss = Reference(x, w, target, **EVERYTHING), np.ones(80, np.float32)
    lse = reference.lse.astype(np.float32)
    found = gradients(x, w, lse, target, by_loss, config=BULK, blocks=(64, 64), **EVERYTHING)
    assert_gradients(found, reference.gradients(by_loss), bf16, 2)
    turned = np.asfortranarray(x), np.asfortranarray(w)
    again = gradients(*turned, lse, target, by_loss, config=SMALL[bf16], blocks=(32, 64), **EVERYTHING)
    assert_gradients(again, reference.gradients(by_loss), bf16, 3)


def test_only_what_is_wanted_is_computed():
    x, w, target = inputs(24, 40, 32, f16)
    reference, by_loss = Reference(x, w, target), np.ones(24, np.float32)
    given = x, w, reference.lse.astype(np.float32), target, by_loss
    dx = gradients(*given, wants_w=False, config=SMALL[f16])
    dw = gradients(*given, wants_x=False, config=SMALL[f16])
    assert_gradients((dx, dw), reference.gradients(by_loss), f16)


def test_repeated_calls_on_a_gpu_read_their_own_arrays(gpu, monkeypatch):
    gpu.hold(monkeypatch)
    kernels = 0
    for seed in range(2):
        x, w, target = inputs(24, 40, 32, seed=seed)
        reference, by_loss = Reference(x, w, target), np.ones(24, np.float32)
        lse = linear_cross_entropy(x, w, target, return_lse=True)[1]
        found = gradients(x, w, lse, target, by_loss, blocks=(16, 24))
        assert_gradients(found, reference.gradients(by_loss), bf16, 2)
        if seed == 0:
            kernels = len(gpu.prepared)
    assert len(gpu.prepared) == kernels


@pytest.mark.parametrize("size", [(8192, 128256, 4096), (16384, 151936, 2048), (300, 5003, 256), (65536, 50304, 768)])
def test_the_workspace_is_bounded(size):
    m, n, k = size
    product = contiguous_problem(m, n, k, bf16, b_rows=False)
    goal = architecture("sm_90a")
    plan = GradientPlan(product, Loss(IGNORED), 2, (True, False), (True, True, True), goal, 132)
    steps = plan.steps
    assert 4 * steps.words <= 64 << 20
    assert plan.bytes_of(*plan.taken) <= plan.workspace_bytes <= plan.bytes_of(*plan.taken) + 4096
