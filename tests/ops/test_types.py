"""What a type checker sees of the public functions, and that it is what they return.

``assert_type`` and the comments are judged where this file is checked, with the rest of the tests.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import warploom

pytestmark = pytest.mark.usefixtures("emulated")
Halves = NDArray[np.float16]


def halves(*shape: int) -> Halves:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def test_numpy_in_numpy_out():
    x = halves(1, 8, 1, 16)
    out = assert_type(warploom.attention(x, x, x, causal=True), Halves)
    both = assert_type(warploom.attention(x, x, x, return_lse=True), tuple[Halves, NDArray[np.float32]])
    assert (out.dtype, both[0].dtype, both[1].dtype) == (np.float16, np.float16, np.float32)
    a, b = halves(8, 16), halves(16, 8)
    product = assert_type(warploom.matmul(a, b, out_dtype="f32"), NDArray[Any])
    assert product.dtype == np.float32
    room = product.astype(np.float32)
    assert assert_type(warploom.matmul(a, b, out_dtype="f32", out=room), NDArray[np.float32]) is room
    best = assert_type(warploom.matmul_reduce(a, b), NDArray[np.float32])
    found = assert_type(
        warploom.matmul_reduce(a, b, "max", return_index=True), tuple[NDArray[np.float32], NDArray[np.int32]]
    )
    loss = assert_type(warploom.linear_cross_entropy(a, b.T, found[1]), NDArray[np.float32])
    assert (best.dtype, found[1].dtype, loss.dtype) == (np.float32, np.int32, np.float32)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    from torch import Tensor

    x: Tensor = torch.ones(1, 8, 1, 16, dtype=torch.float16)
    out = assert_type(warploom.attention(x, x, x), Tensor)
    both = assert_type(warploom.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    rows: Tensor = torch.ones(8, 16, dtype=torch.float16)
    product = assert_type(warploom.matmul(rows, rows.T, bias=rows[:, 0]), Tensor)
    into = assert_type(warploom.matmul(rows, rows.T, out=torch.empty_like(product)), Tensor)
    found = assert_type(warploom.matmul_reduce(rows, rows.T, return_index=True), tuple[Tensor, Tensor])
    loss = assert_type(warploom.linear_cross_entropy(rows, rows, found[1]), Tensor)
    assert all(isinstance(y, Tensor) for y in (out, *both, product, into, *found, loss))


def test_plans_have_their_classes():
    x, a = halves(1, 8, 1, 16), halves(8, 16)
    assert_type(warploom.plan(x, x, x), warploom.AttentionPlan)
    assert_type(warploom.plan_matmul(a, a.T), warploom.MatmulPlan)
    assert_type(warploom.plan_matmul_reduce(a, a.T), warploom.ReducePlan)


def test_an_option_that_is_not_there_is_an_error():
    x = halves(1, 8, 1, 16)
    with pytest.raises(TypeError, match="causl"):
        warploom.attention(x, x, x, causl=True)  # pyright: ignore[reportCallIssue]
