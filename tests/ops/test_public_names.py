"""The public functions as Python objects: signatures, pickling, and where their warnings point."""

import inspect
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ops.conftest import CALLS
from warploom.core.errors import EmulationWarning
from warploom.ops import attention, attention_varlen, loss, matmul, reduce
from warploom.ops.calls import Caller

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


class SeenError(Exception):
    """Ends a call where its arguments have arrived."""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_every_argument_reaches_its_place(call, monkeypatch):
    """A function's signature declares it, and its body says the same names again."""
    seen = list[tuple[Any, ...]]()

    def end(_: Any, *given: Any) -> None:
        seen.append(given)
        raise SeenError

    for name in ("__call__", "computed"):
        monkeypatch.setattr(Caller, name, end)
    function = call.function
    given = {name: f"<{name}>" for name in inspect.signature(function).parameters}
    given |= {name: x for name, x in {"extras": ("<extras>",), "reduction": "none"}.items() if name in given}
    with pytest.raises(SeenError):
        function(**given)
    (arrays, options, *others), declaration = seen[0], call.declaration
    assert [given[name] for name in declaration.options] == list(options)
    assert [f"<{name}>" for name in declaration.arrays] == list(arrays)
    config, check, unknown = (*others, False, {})[:3]
    assert (config, check, unknown) == (given.get("config"), given.get("check", False), {})


def test_help_shows_the_dimensions_of_arrays_and_the_types_of_options():
    found = inspect.signature(warploom.linear_cross_entropy)
    shown = str(found)
    for text in ("x: array (m, k)", "target: array (m,)", "softcap: float | None = None", "-> array (m,)"):
        assert text in shown
    assert "q: array (total_q, heads, head_dim)" in str(inspect.signature(warploom.attention_varlen))


@pytest.mark.parametrize("name", EAGER)
def test_an_operator_takes_what_its_function_takes(name):
    """By its schema, where a window is two numbers, but for what is written, waited for, or computed around it."""
    torch = pytest.importorskip("torch")
    from warploom.operators import operator_of

    operator_of(name)
    schema = getattr(torch.ops.warploom, name).default._schema
    taken = {argument.name for argument in schema.arguments}
    around = {"window", "out", "check", "extras", "return_lse", "return_index", "reduction"}
    unused = {"max_seqlen_q", "max_seqlen_k"}
    assert set(inspect.signature(EAGER[name]).parameters) <= taken | around | unused
    assert "window_left" in taken or "window" not in inspect.signature(EAGER[name]).parameters


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
