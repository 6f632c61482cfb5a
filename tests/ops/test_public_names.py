"""The public functions as Python objects: signatures, pickling, and where their warnings point."""

import inspect
import pickle
import warnings
from typing import Unpack, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import warploom
from warploom.core.errors import EmulationWarning
from warploom.ops import attention, attention_varlen, loss, matmul, reduce

EAGER = {
    "attention": attention.attention,
    "attention_varlen": attention_varlen.attention_varlen,
    "matmul": matmul.matmul,
    "matmul_reduce": reduce.matmul_reduce,
    "linear_cross_entropy": loss.linear_cross_entropy,
}


def half(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("name", [*EAGER, "launch", "plan_matmul"])
def test_public_functions_survive_pickling(name):
    function = getattr(warploom, name)
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("name", EAGER)
def test_an_operator_takes_what_its_function_takes(name):
    """By its own parameters and options, or by its schema's, where a window is two numbers."""
    torch = pytest.importorskip("torch")
    from warploom.operators.names import operator_of

    operator, schema = operator_of(name), getattr(torch.ops.warploom, name).default._schema
    options = [
        get_args(hint)[0].__annotations__ for hint in get_type_hints(operator).values() if get_origin(hint) is Unpack
    ]
    taken = {*inspect.signature(operator).parameters, *(argument.name for argument in schema.arguments), "window"}
    taken = taken.union(*options)
    assert set(inspect.signature(EAGER[name]).parameters) <= taken


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "call",
    [
        lambda: warploom.attention(half(1, 8, 1, 16), half(1, 8, 1, 16), half(1, 8, 1, 16)),
        lambda: warploom.matmul(half(8, 8), half(8, 8)),
        lambda: warploom.matmul_reduce(half(8, 8), half(8, 8)),
        lambda: warploom.linear_cross_entropy(half(8, 8), half(8, 8), np.zeros(8, np.int32)),
        lambda: attention.attention(half(1, 8, 1, 16), half(1, 8, 1, 16), half(1, 8, 1, 16)),
    ],
)
def test_warnings_name_the_callers_line(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [w.filename for w in caught if w.category is EmulationWarning] == [__file__]  # of several kernels one
