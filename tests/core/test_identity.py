"""Functions made anew are recognised; whatever changes what they compute makes another key."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import types
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

import warploom.lang.functions as words
from warploom.core.dtypes import bf16, f16
from warploom.core.identity import UnstableError, Versioned, function_key, stable_text
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.kernels.matmul.features import Epilogue, MatmulFeatures
from warploom.lang.functions import relu


def made(source: str, **scope: Any) -> Any:
    """A function as it comes from a module of its own with these globals."""
    return eval(source, scope)


def key_and_text(function: Any) -> tuple[Any, str]:
    key = function_key(function)
    return key, stable_text(key)


ALIKE = [
    "lambda x: x * 2.0",
    "lambda x, c=3.0: x * c",
    "lambda x, *, c=3.0: x * c",
    "lambda x: relu(x) + words.gelu(x) * math.pi",
    "lambda x: abs(x) if flag else helper(x)",
    "(lambda c: lambda x: x * c)(4.0)",
]


def scope(**changed: Any) -> dict[str, Any]:
    return {"relu": relu, "words": words, "math": math, "flag": True, "helper": made("lambda x: x + 1.0")} | changed


@pytest.mark.parametrize("source", ALIKE)
def test_a_function_made_anew_is_recognised(source):
    assert key_and_text(made(source, **scope())) == key_and_text(made(source, **scope()))
    moved = made(f"(\n\n{source})", **scope())
    assert stable_text(function_key(moved)) == stable_text(function_key(made(source, **scope())))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (made("lambda x: x * 2.0"), made("lambda x: x * 3.0")),
        (made("lambda x: x * 2.0"), made("lambda x: x + 2.0")),
        (made("lambda x: x * 2"), made("lambda x: x * 2.0")),
        (made("lambda x, c=2.0: x * c"), made("lambda x, c=3.0: x * c")),
        (made("lambda x, *, c=2.0: x * c"), made("lambda x, *, c=3.0: x * c")),
        (made("lambda x, c=1: x * c"), made("lambda x, c=True: x * c")),
        (made("(lambda c: lambda x: x * c)(0.0)"), made("(lambda c: lambda x: x * c)(-0.0)")),
        (made("lambda x: x * c", c=2.0), made("lambda x: x * c", c=3.0)),
        (made("lambda x: x * c", c=2.0), made("lambda x: x * c")),
        (made("lambda x: f(x)", f=made("lambda x: x")), made("lambda x: f(x)", f=made("lambda x: -x"))),
        (made("lambda x: (lambda y: y * c)(x)", c=2.0), made("lambda x: (lambda y: y * c)(x)", c=3.0)),
        (made("lambda x: f(x)", f=relu), made("lambda x: f(x)", f=words.gelu)),
    ],
)
def test_what_changes_the_result_changes_the_key(one, other):
    (key, text), (other_key, other_text) = key_and_text(one), key_and_text(other)
    assert key != other_key
    assert text != other_text


def test_a_function_that_calls_itself_has_a_key():
    source = "lambda x, n=3: x if n == 0 else again(x * 2.0, n - 1)"
    one: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for names in (one, other):
        names["again"] = eval(source, names)
    assert key_and_text(one["again"]) == key_and_text(other["again"])


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x * self.factor


@dataclass(frozen=True)
class UsersOwn:
    factor: float


@pytest.mark.parametrize(
    "seen",
    [Scaler(2.0), UsersOwn(2.0), types.ModuleType("mine"), np.float32, Scaler, object(), np.ones(3)],
    ids=lambda value: type(value).__name__,  # not repr: addresses differ from one worker to the next
)
def test_what_only_this_process_knows_has_no_text(seen):
    function = made("lambda x: seen(x)", seen=seen)
    assert function_key(function) == function_key(function)
    with pytest.raises(UnstableError):
        stable_text(function_key(function))


def importing(x):
    from os.path import sep

    return x if sep else -x


def importing_renamed(x):
    import colorsys as found

    return x if found else -x


@pytest.mark.parametrize(
    "function",
    [
        importing,
        importing_renamed,
        lambda x: importing(x),
        made("lambda x: eval('x * c')"),
        made("lambda x: x * globals()['c']"),
    ],
    ids=["from", "as", "called", "eval", "globals"],
)
def test_what_looks_things_up_when_it_runs_has_no_text(function):
    with pytest.raises(UnstableError, match="looks things up"):
        stable_text(function_key(function))


def test_methods_of_two_objects_are_two_functions():
    one, other = Scaler(2.0), Scaler(3.0)
    assert function_key(one.apply) == function_key(one.apply)
    assert function_key(one.apply) != function_key(other.apply)
    with pytest.raises(UnstableError):
        stable_text(function_key(one.apply))


@dataclass(slots=True)
class Slotted:
    factor: float = 1.0


class Applied(Scaler):
    bias = 0.0

    def __call__(self, x):
        return x * self.factor + self.bias


class Stubborn:
    """Says that all are equal, cannot be hashed, and computes its attributes."""

    def __init__(self, **values):
        self.values = values

    def __eq__(self, other):
        raise RuntimeError

    def __getattr__(self, name):
        return self.values[name]


@dataclass(frozen=True)
class Sizes:
    tiles: list[int]
    factor: float = field(default=1.0, compare=False)


def changing() -> dict[str, tuple[Any, Any]]:
    """A function, and what changes a value that it reads through another."""
    scaler, applied, module, array = Scaler(2.0), Applied(2.0), types.ModuleType("mine"), np.ones(2)
    items, named, of_class = [1.0], {"a": {"b": 1.0}}, type("Constants", (), {"factor": 1.0})
    nested = types.SimpleNamespace(scaler=scaler)
    module.factor = 1.0  # type: ignore[attr-defined]
    slotted = Slotted()
    ordered, double, own = OrderedDict(a=1.0), deque([1.0]), {1.0}
    sizes, stubborn = Sizes([1]), Stubborn(factor=1.0)
    unhashable = made("lambda x: x * c * len(s.tiles)", c=1.0, s=sizes)
    chain = types.SimpleNamespace(n=types.SimpleNamespace(n=1.0))
    marked = made("lambda x: x * f.mark", f=importing)
    called = made("lambda x: x * helper(x)", helper=made("lambda x: x * c", c=1.0))
    return {
        "method": (scaler.apply, lambda: setattr(scaler, "factor", 3.0)),
        "object": (applied, lambda: setattr(applied, "factor", 3.0)),
        "attribute of its class": (applied, lambda: setattr(applied, "bias", 1.0)),
        "partial": (partial(scaler.apply), lambda: setattr(scaler, "factor", 3.0)),
        "module": (made("lambda x: x * m.factor", m=module), lambda: setattr(module, "factor", 3.0)),
        "class": (made("lambda x: x * C.factor", C=of_class), lambda: setattr(of_class, "factor", 3.0)),
        "slot": (made("lambda x: x * s.factor", s=slotted), lambda: setattr(slotted, "factor", 3.0)),
        "nested": (made("lambda x: x * n.scaler.factor", n=nested), lambda: setattr(scaler, "factor", 3.0)),
        "list": (made("lambda x: x * items[0]", items=items), lambda: items.__setitem__(0, 3.0)),
        "list that grew": (made("lambda x: x * items[-1]", items=items), lambda: items.append(3.0)),
        "dict": (made("lambda x: x * d['a']['b']", d=named), lambda: named["a"].update(b=3.0)),
        "beside an array": (made("lambda x: m.factor * a", a=array, m=module), lambda: setattr(module, "factor", 3.0)),
        "dict of its own kind": (made("lambda x: x * o['a']", o=ordered), lambda: ordered.update(a=2.0)),
        "deque": (made("lambda x: x * d[0]", d=double), lambda: double.append(2.0)),
        "set": (made("lambda x: x * len(s)", s=own), lambda: own.add(2.0)),
        "beside what has no hash": (unhashable, lambda: unhashable.__globals__.update(c=2.0)),
        "in what has no hash": (unhashable, lambda: sizes.tiles.append(2)),
        "field that is not compared": (
            made("lambda x: x * s.factor", s=sizes),
            lambda: object.__setattr__(sizes, "factor", 2.0),
        ),
        "computed": (made("lambda x: x * s.factor", s=stubborn), lambda: stubborn.values.update(factor=2.0)),
        "one name twice": (made("lambda x: x * n.n.n", n=chain), lambda: setattr(chain.n, "n", 2.0)),
        "attribute of a function": (marked, lambda: setattr(importing, "mark", object())),
        "helper": (called, lambda: called.__globals__["helper"].__globals__.update(c=3.0)),
    }


@pytest.mark.parametrize("name", changing())
def test_what_is_read_through_a_value_changes_the_key_too(name):
    function, change = changing()[name]
    watched, before = Versioned(function), function_key(function)
    version = watched.version()
    assert function_key(function) == before
    assert watched.version() == version
    change()
    assert function_key(function) != before
    assert watched.version() != version


def test_objects_that_name_each_other_are_read_once_each():
    circle = [types.SimpleNamespace() for _ in range(12)]
    for one in circle:
        one.__dict__.update({f"a{i}": other for i, other in enumerate(circle)}, factor=1.0)
    function = made(f"lambda x: x * root.factor + {' + '.join(f'root.a{i}' for i in range(12))}", root=circle[0])
    before = function_key(function)
    circle[7].factor = 3.0
    assert function_key(function) != before


def test_objects_of_this_package_that_have_no_hash_are_apart():
    one, other = (made("lambda x: x if s else -x", s=Versioned.__new__(Versioned)) for _ in range(2))
    assert function_key(one) != function_key(other)
    mutable = [made("lambda x: x if s else -x", s=bytearray(b)) for b in (b"1", b"2")]
    assert function_key(mutable[0]) != function_key(mutable[1])


def test_helpers_that_call_each_other_are_read_once_each():
    scope: dict[str, Any] = {"g0": made("lambda x: x * c", c=1.0)}
    for i in range(1, 40):
        scope[f"g{i}"] = eval("lambda x: " + " + ".join(f"g{j}(x)" for j in range(i)), scope)
    assert function_key(scope["g39"]) == function_key(scope["g39"])


def test_a_watch_lets_go_of_what_was_seen_long_ago():
    function = made("lambda x: x * len(a)", a=None)
    watched, seen = Versioned(function), list[Any]()
    for _ in range(64):
        function.__globals__["a"] = np.ones(2)
        seen.append(weakref.ref(function.__globals__["a"]))
        watched.version()
    assert sum(one() is not None for one in seen) < len(seen) / 2


def test_texts_of_features_tell_them_apart():
    values = [
        AttentionFeatures(),
        AttentionFeatures(window=(None, 0)),
        AttentionFeatures(window=(0, None)),
        AttentionFeatures(scale=0.5),
        AttentionFeatures(scale=np.float64(0.5)),  # type: ignore[arg-type]
        AttentionFeatures(softcap=0.5),
        MatmulFeatures(out_dtype=f16),
        MatmulFeatures(out_dtype=bf16),
        MatmulFeatures(epilogue=Epilogue(key=function_key(relu))),
        ("1,2",),
        ("1", "2"),
        (1, 2),
        ((1,), 2),
        (b"1",),
        (frozenset({1, 2}),),
    ]
    assert len({stable_text(x) for x in values}) == len(values)
    assert stable_text(frozenset({3, 1, 2})) == stable_text(frozenset({2, 3, 1}))


def test_texts_are_the_same_in_another_process():
    script = textwrap.dedent("""
        import math
        from warploom.core.identity import function_key, stable_text
        from warploom.kernels.matmul.features import Epilogue, MatmulFeatures
        from warploom.lang.functions import silu
        def helper(x):
            return x * 2.0
        key = function_key(lambda x, gate: silu(x) * helper(gate) + math.pi if x in {1, 2, "a", "b"} else x)
        print(stable_text((MatmulFeatures(epilogue=Epilogue(key=key)),)))
    """)
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "silu" in texts.pop()
