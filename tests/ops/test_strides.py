"""Strides that say nothing, and strides that no kernel counts in: dimensions of one element, 2^32 elements and more."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import warploom
from warploom.core.errors import ProblemError
from warploom.interop.arrays import as_if_compact, compact, describe
from warploom.ops.arrays import ROWS

TOO_FAR = 2**32
ODD = (-5, 0, 2**40 + 1)


def half(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)


def idle(x: Any, axis: int, stride: int) -> Any:
    """The array with another stride along a dimension of one element."""
    assert x.shape[axis] == 1
    strides = list(x.strides)
    strides[axis] = stride * x.itemsize
    return as_strided(x, x.shape, strides)


def far(x: Any, axis: int) -> Any:
    """A copy whose elements lie 2^32 apart along a dimension, in memory that is only there where it is touched."""
    if sys.platform != "linux":
        pytest.skip("memory that is not reserved")
    strides, packed = [0] * x.ndim, 1
    for i in reversed(range(x.ndim)):
        strides[i] = TOO_FAR if i == axis else packed
        packed *= 1 if i == axis else x.shape[i]
    span = x.itemsize * (1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)))
    not_reserved = 0x4000
    memory = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | not_reserved)
    found = np.ndarray(x.shape, x.dtype, buffer=memory, strides=[s * x.itemsize for s in strides])
    found[...] = x
    return found


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("stride", ODD)
def test_attention_neither_copies_nor_refuses_dimensions_of_one(layout: Any, stride: int) -> None:
    for axis in range(3):
        shape = [2, 8, 2, 16] if layout == "bshd" else [2, 2, 8, 16]
        shape[axis] = 1
        q, k, v = (half(*shape) + i for i in range(3))
        odd = [idle(x, axis, stride) for x in (q, k, v)]
        assert all(ROWS.take("x", describe(x), compact).pointer == describe(x).pointer for x in odd)
        found = warploom.attention(odd[0], odd[1], odd[2], layout=layout)
        np.testing.assert_array_equal(found, warploom.attention(q, k, v, layout=layout))


def test_results_of_torch_do_not_inherit_them() -> None:
    torch = pytest.importorskip("torch")

    def odd(x: Any) -> Any:
        return torch.as_strided(x, x.shape, (2 * TOO_FAR, *x.stride()[1:]))

    q, k, v, given = (torch.from_numpy(half(1, 8, 2, 16) + i) for i in range(4))
    out, lse = warploom.attention(q, k, v, return_lse=True)
    assert torch.equal(warploom.attention(odd(q), odd(k), odd(v)), out)
    gradients = warploom.attention_backward(*map(odd, (given, q, k, v, out, lse)))
    for found, right in zip(gradients, warploom.attention_backward(given, q, k, v, out, lse), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("stride", ODD)
def test_products_neither_copy_nor_refuse_dimensions_of_one(stride: int) -> None:
    a, b, x, w = half(1, 1, 32), half(1, 32, 1), half(1, 32), half(24, 32)
    expected = warploom.matmul(a, b)
    for axis in (0, 1):
        np.testing.assert_array_equal(warploom.matmul(idle(a, axis, stride), b), expected)
    for axis in (0, 2):
        np.testing.assert_array_equal(warploom.matmul(a, idle(b, axis, stride)), expected)
    for axis in range(3):
        out = idle(np.zeros((1, 1, 1), np.float16), axis, stride)
        np.testing.assert_array_equal(warploom.matmul(a, b, out=out), expected)
    words = np.array([7], np.int32)
    loss = warploom.linear_cross_entropy(x, w, words)
    np.testing.assert_array_equal(warploom.linear_cross_entropy(idle(x, 0, stride), w, idle(words, 0, stride)), loss)
    alone = warploom.linear_cross_entropy(x, w[:1], words * 0)
    np.testing.assert_array_equal(warploom.linear_cross_entropy(x, idle(w[:1], 0, stride), words * 0), alone)
    best = warploom.matmul_reduce(x, w.T)
    np.testing.assert_array_equal(warploom.matmul_reduce(idle(x, 0, stride), w.T), best)


def test_elements_too_far_apart_are_copied_first() -> None:
    q = half(2, 8, 2, 16)
    expected = warploom.attention(q, q, q)
    for axis in range(3):
        np.testing.assert_array_equal(warploom.attention(far(q, axis), q, far(q, axis)), expected)
    a, b, words = half(2, 8, 32), half(2, 32, 24), np.arange(8, dtype=np.int32)
    for axis in range(2):
        np.testing.assert_array_equal(warploom.matmul(far(a, axis), far(b, axis)), warploom.matmul(a, b))
    x, w = a[0], np.ascontiguousarray(b[0].T)
    loss = warploom.linear_cross_entropy(x, w, words)
    np.testing.assert_array_equal(warploom.linear_cross_entropy(far(x, 0), far(w, 0), far(words, 0)), loss)


def test_a_result_too_far_apart_is_refused() -> None:
    a, b, out = half(2, 8, 32), half(2, 32, 24), half(2, 8, 24)
    for axis in range(3):
        with pytest.raises(ProblemError, match="4294967296 elements or more are too far"):
            warploom.matmul(a, b, out=far(out, axis))


def test_one_sequence_may_be_longer_than_strides_reach() -> None:
    """There is no second one that its stride would lead to."""
    keys, row = 2**22, 8 * 128
    shown = as_strided(np.zeros(8, np.float16), (1, keys, 8, 128), (2 * keys * row, 2 * row, 256, 2))
    first, read = describe(shown).pointer, ROWS.take("x", describe(shown), as_if_compact).pointer
    assert first == read  # no memory is behind it: nothing but numbers may be shown
    q, lens = np.zeros((1, 1, 8, 128), np.float16), np.ones(1, np.int32)
    turned = shown.swapaxes(1, 2)[:, :1]  # of one head as well
    plans = [
        warploom.plan(q, shown, shown),
        warploom.plan(q[:, :, :1], turned, turned, layout="bhsd"),
        warploom.plan_attention_paged(q, shown, shown, lens),
    ]
    numbers = [number for plan in plans for call in plan.calls for number in call.scalars.values()]
    assert max(numbers) < 2**32
