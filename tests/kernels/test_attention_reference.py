"""The error bound of attention: blind to nothing, deaf to averages."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.gradient_reference import gradient_reference
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.attention.scores import seen_of

HALVES = [bf16, f16]
RNG = np.random.default_rng(3)


def _case(dtype, heads=2, length=96, head_dim=64, scale=1.0):
    q, k, v = ((scale * RNG.standard_normal((heads, length, head_dim))).astype(dtype.numpy) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("dtype", HALVES)
def test_the_reference_is_attention(dtype):
    """Against a softmax written out row by row."""
    q, k, v = _case(dtype, heads=1, length=8)
    reference = attention_reference(q, k, v, dtype)
    for row in range(8):
        scores = [sum(float(a) * float(b) for a, b in zip(q[0, row], key, strict=True)) / 8.0 for key in k[0]]
        weights = [np.exp(s) for s in scores]
        expected = sum(w * x.astype(np.float64) for w, x in zip(weights, v[0], strict=True)) / sum(weights)
        np.testing.assert_allclose(reference.output[0, row], expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_rounded_exact_result_is_well_within(dtype):
    reference = attention_reference(*_case(dtype), dtype)
    report = attention_error(reference.output.astype(dtype.numpy), reference, dtype)
    assert report.ok
    assert report.value <= 0.5 + 1e-6


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ulps", [2, -2])
def test_two_units_in_the_last_place_of_one_element_are_seen(dtype, ulps):
    """Where one key dominates, |o| = Σp|v|, and the bound is two half-units: 2 ulp are outside."""
    q, k, v = _case(dtype, heads=1, length=16)
    q[:], k[:] = 0, 0
    q[0, :, 0], k[0, 5, 0] = 16, 16  # row 5 of V is all that counts
    v[0, 5] = np.linspace(1.0, 1.2, 64).astype(dtype.numpy)  # just above a power of two: an ulp is largest there
    reference = attention_reference(q, k, v, dtype)
    out = reference.output.astype(dtype.numpy)
    assert attention_error(out, reference, dtype).ok
    bits = out.view(np.int16)
    bits[0, 7, 40] += np.int16(ulps)
    report = attention_error(out, reference, dtype)
    assert report.value > report.bound
    assert not report.ok


@pytest.mark.parametrize("dtype", HALVES)
def test_one_wrong_element_among_many_is_not_averaged_away(dtype):
    reference = attention_reference(*_case(dtype, heads=4, length=256), dtype)
    out = reference.output.astype(dtype.numpy)
    out[3, 200, 63] = out[3, 200, 63] + np.float32(0.25)
    assert not attention_error(out, reference, dtype).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_infinitely_far(bad):
    reference = attention_reference(*_case(f16), f16)
    out = reference.output.astype(np.float16)
    out[0, 0, 0] = bad
    report = attention_error(out, reference, f16)
    assert report.value == np.inf
    assert not report.ok


def test_a_result_that_is_off_everywhere_within_the_bound_is_told_by_the_rounded_reference():
    """Small everywhere against Σp|v| but far beyond what rounding P costs: the second criterion."""
    q, k, v = _case(bf16, heads=1, length=512, scale=0.05)
    reference = attention_reference(q, k, v, bf16)
    biased = reference.output + 0.9 * 2.0**-8 * reference.magnitude
    report = attention_error(biased.astype(ml_dtypes.bfloat16), reference, bf16)
    assert report.against_rounded > 2.0
    assert not report.ok


def test_large_scores_do_not_overflow_the_reference():
    q, k, v = _case(f16, heads=1, length=32, scale=100.0)
    reference = attention_reference(q, k, v, f16)
    assert np.isfinite(reference.output).all()


def test_tensors_of_pytorch_have_the_same_reference():
    """With shared heads, a soft cap, sinks, and rows that see no key."""
    torch = pytest.importorskip("torch")
    q, k, v = _case(bf16, heads=4, length=24)
    q, k, v, sinks = q, k[:2, :20], v[:2, :20, :16], RNG.standard_normal(4)
    how = {"scale": 0.3, "softcap": 2.0, "seen": seen_of(24, 20, (9, 0))}
    ours = attention_reference(q, k, v, bf16, sinks=sinks, **how)
    tensors = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in (q, k, v))
    seen = seen_of(24, 20, (9, 0), device="cpu")
    theirs = attention_reference(*tensors, dtype=bf16, sinks=torch.from_numpy(sinks), **{**how, "seen": seen})
    for name in ("output", "magnitude", "rounded_p", "lse"):
        np.testing.assert_allclose(getattr(theirs, name).numpy(), getattr(ours, name), rtol=1e-9)
    assert (ours.output[:, :4] == 0).all()
    out = ours.output.astype(bf16.numpy)
    reports = attention_error(out, ours, bf16), attention_error(torch.from_numpy(out.astype(float)), theirs, bf16)
    assert reports[0].ok
    assert reports[0].value == pytest.approx(reports[1].value)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_gradients_of_some_queries_at_a_time_are_those_of_all(framework):
    numbers = np.random.default_rng(0)
    x: dict[str, Any] = {
        n: numbers.standard_normal((1 if n in "kv" else 2, 20, 8)) for n in ("dout", "q", "k", "v", "out")
    }
    seen, dlse = np.tri(20, dtype=bool), numbers.standard_normal((2, 20))
    if framework == "torch":
        torch = pytest.importorskip("torch")
        x, seen, dlse = {n: torch.from_numpy(a) for n, a in x.items()}, torch.from_numpy(seen), torch.from_numpy(dlse)
    found = [gradient_reference(**x, dtype=bf16, seen=seen, dlse=dlse, rows=rows) for rows in (None, 7)]
    for name in ("dq", "dk", "dv"):
        whole, parts = (getattr(one, name) for one in found)
        np.testing.assert_allclose(parts.value, whole.value, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(parts.allowed, whole.allowed, rtol=1e-9)
