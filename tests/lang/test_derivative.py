"""Derivatives of traced functions: each rule beside float64's differences, and what has none is named."""

# pyright: reportInvalidTypeForm=false
import numpy as np
import pytest

from warploom.core.errors import ProblemError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, f32, kernel, u32
from warploom.lang.functions import (
    absolute,
    as_f32,
    exp,
    fma,
    gelu,
    log,
    maximum,
    minimum,
    reciprocal,
    relu,
    select,
    sigmoid,
    silu,
    sqrt,
    tanh,
    vector_jacobian,
)


@kernel(threads=32)
def derivative(k: Kernel, x: Global[f32], y: Global[f32], dx: Global[f32], dy: Global[f32], *, function) -> None:
    values = x.load(k.thread), y.load(k.thread)
    found = vector_jacobian(as_f32(function(*values), values[0]), values, k.value(2.0, f32))
    dx.store(found[0], k.thread)
    dy.store(found[1], k.thread)


def of(function, x, y):
    """2 · the derivatives by x and y, of 32 numbers each."""
    results = [np.full(32, np.nan, np.float32) for _ in range(2)]
    done = emulate(derivative.trace(function=function), 1, [x, y, *results])
    assert done.findings == ()
    return results


NUMBERS = np.linspace(-3, 3, 32, dtype=np.float32), np.linspace(2.5, 0.3, 32, dtype=np.float32)
SMOOTH = {
    "sum": (lambda x, y: x + y * 3.0 - x, lambda x, y: y * 3),
    "product": (lambda x, y: -x * y * x, lambda x, y: -x * x * y),
    "quotient": (lambda x, y: x / y + 1.0 / y, lambda x, y: (x + 1) / y),
    "fma": (lambda x, y: fma(x, y, fma(x, x, y)), lambda x, y: x * y + x * x + y),
    "exponentials": (lambda x, y: exp(x) * log(y), lambda x, y: np.exp(x) * np.log(y)),
    "roots": (lambda x, y: sqrt(y) * reciprocal(y + 1.0) + x.builder.rsqrt(y), lambda x, y: y**0.5 / (y + 1) + y**-0.5),
    "tanh": (lambda x, y: tanh(x) * y, lambda x, y: np.tanh(x) * y),
    "silu": (lambda x, y: silu(x) * y, lambda x, y: x / (1 + np.exp(-x)) * y),
    "gelu": (lambda x, _: gelu(x), lambda x, _: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    "used twice": (lambda x, y: (x * y + 1.0) * (x * y + 1.0), lambda x, y: (x * y + 1) ** 2),
    "a number": (lambda *_: 3.0, lambda x, _: 0 * x),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_beside_differences(name):
    function, reference = SMOOTH[name]
    x, y = (v.astype(np.float64) for v in NUMBERS)
    step = 1e-5
    expected = (
        (reference(x + step, y) - reference(x - step, y)) / step,
        (reference(x, y + step) - reference(x, y - step)) / step,
    )
    for found, want in zip(of(function, *NUMBERS), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


X = np.array([-2, -0.0, 0.0, 0.5, 0.75, 1, 3, np.inf] * 4, np.float32)
KINKS = {
    "relu": (lambda x, _: relu(x), X > 0),
    "absolute": (lambda x, _: absolute(x), np.sign(X)),
    "clipped": (lambda x, _: minimum(maximum(x, -1.0), 1.0), (X > -1) & (X < 1)),
    "select": (lambda x, _: select(x > 0.5, x * 3.0, x), np.where(X > 0.5, 3, 1)),
}


@pytest.mark.parametrize("name", KINKS)
def test_kinks_take_one_side(name):
    function, expected = KINKS[name]
    found, nothing = of(function, X, X)
    np.testing.assert_array_equal(found, 2 * expected)
    assert (nothing == 0).all()


def test_saturated_functions_have_the_derivative_zero():
    far = np.array([-1e4, -200, 200, 1e4] * 8, np.float32)
    np.testing.assert_array_equal(of(lambda x, _: sigmoid(x), far, far)[0], 0)
    np.testing.assert_array_equal(of(lambda x, _: gelu(x), far, far)[0], np.where(far > 0, 2, 0))


def test_an_instruction_without_a_derivative_is_named():
    def bits(x, _):
        k = x.builder
        return k.bitcast(k.bitcast(x, u32) & 0x7FFFFFFF, f32)

    with pytest.raises(ProblemError, match=r"mov\.b32\S* .*has no derivative: call under torch\.no_grad"):
        of(bits, *NUMBERS)


def test_what_the_inputs_do_not_reach_needs_no_derivative():
    def scaled(x, _):
        k = x.builder
        return x * k.bitcast(k.bitcast(k.value(2.0, f32) + 0.0, u32) | 0, f32)

    np.testing.assert_allclose(of(scaled, *NUMBERS)[0], 4)
