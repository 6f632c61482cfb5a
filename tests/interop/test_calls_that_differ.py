"""Repeated calls that differ from the first in what is easily forgotten: each is right, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.errors import ProblemError

torch = pytest.importorskip("torch")


attention: Any = warploom.attention  # with options that a type checker refuses


def half(*shape: int, history: bool = False) -> Any:
    return torch.randn(*shape).half().requires_grad_(history)


def test_a_nested_tensor_after_an_ordinary_one_is_refused() -> None:
    a, b = half(16, 16, history=True), half(16, 16)
    warploom.matmul(a, b)
    with pytest.raises(ProblemError, match="nested"):
        warploom.matmul(a, torch.nested.nested_tensor([b, b]))


def test_another_number_of_extras_is_another_call() -> None:
    a, b = half(16, 16, history=True), half(16, 16)
    warploom.matmul(a, b)
    with pytest.raises(ProblemError, match="extras"):
        warploom.matmul(a, b, extras=(b,))


def test_a_tensor_on_the_meta_device_is_refused_by_name() -> None:
    a = half(16, 16)
    with pytest.raises(ProblemError, match="meta"):
        warploom.matmul(a.to("meta"), a)


def test_options_that_change_after_the_forward_pass_do_not_change_its_gradient() -> None:
    a, b, alpha = half(16, 16, history=True), half(16, 16), torch.tensor(2.0)
    product = warploom.matmul(a, b, alpha=alpha)
    alpha.fill_(5.0)
    (found,) = torch.autograd.grad(product.sum(), a)
    expected = 2.0 * b.double().sum(1).expand(16, 16)
    assert torch.allclose(found.double(), expected, rtol=2**-9, atol=2**-6)


def test_a_window_that_changes_after_the_forward_pass_does_not_change_its_gradient() -> None:
    q, k, v = (half(1, 16, 1, 16, history=True) for _ in range(3))
    window = [0, 0]
    out = attention(q, k, v, window=window, causal=True)
    window[0] = 8
    dq, dv = torch.autograd.grad(out, (q, v), torch.ones_like(out))
    assert dq.abs().max() < 1e-4  # each query sees one key, whose weight is 1 whatever the query
    assert torch.equal(dv, torch.ones_like(dv))


def test_an_option_of_the_wrong_type_is_refused_with_a_history_too() -> None:
    q, k = half(1, 16, 1, 16, history=True), half(1, 16, 1, 16)
    with pytest.raises(ProblemError, match="return_lse"):
        attention(q, k, k, return_lse="yes")


def test_arrays_of_two_dimensions_are_refused_in_the_other_layout_too() -> None:
    q, k = half(16, 16, history=True), half(16, 16)
    with pytest.raises(ProblemError, match="q"):
        attention(q, k, k, layout="bhsd")


def test_what_is_written_to_is_seen_by_a_backward_pass_that_needs_what_was_there() -> None:
    x, y, a = torch.ones(16, 16).half().requires_grad_(), torch.ones(16, 16).half(), half(16, 16)
    total = (x * y).sum()
    warploom.matmul(a, a, out=y)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


def test_a_negative_zero_is_a_zero() -> None:
    a = np.ones((16, 16), np.float16)
    assert not np.signbit(warploom.matmul(a, a, alpha=-0.0)).any()


def test_true_is_no_number_after_an_equal_one() -> None:
    q, k, v = (half(1, 16, 1, 16, history=True) for _ in range(3))
    for scale in (1, 1.0):
        for _ in range(2):
            attention(q, k, v, scale=scale)
    with pytest.raises(ProblemError, match="scale is a number, not True"):
        attention(q, k, v, scale=True)
    a, matmul = half(16, 16, history=True), warploom.matmul
    for _ in range(2):
        matmul(a, a, alpha=1)
    with pytest.raises(ProblemError, match="alpha is a number, not True"):
        matmul(a, a, alpha=True)
