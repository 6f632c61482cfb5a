"""Annotations of parameters: arrays with their strides, and what stands for several parameters."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.lang.support import run
from warploom.core.arguments import fields, strides
from warploom.core.errors import ProblemError, TraceError
from warploom.cuda.printer import print_cuda
from warploom.emulate import emulate
from warploom.lang import (
    Compound,
    Global,
    Kernel,
    Launch,
    Strided,
    f32,
    kernel,
    u32,
)

RNG = np.random.default_rng(24)


@kernel(threads=32)
def copied(k: Kernel, x: Strided[f32, 2], cols: u32, y: Strided[f32, 2]) -> None:
    """y = x, a row by each CTA."""
    with k.loop(cols, start=k.lane, step=32) as col:
        y.at(k.cta_x, col).store(x.at(k.cta_x, col).load())


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


ARRAYS = {
    "row-major": numbers(5, 40),
    "transposed": numbers(40, 5).T,
    "every other": numbers(10, 80)[::2, ::2],
    "one row for all": np.broadcast_to(numbers(40), (5, 40)),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("to", ["row-major", "transposed", "every other"])
def test_an_array_is_read_and_written_by_its_strides(name: str, to: str) -> None:
    x, y = ARRAYS[name], np.zeros_like(ARRAYS[to].base if ARRAYS[to].base is not None else ARRAYS[to])
    y = {"row-major": y, "transposed": y.T, "every other": y[::2, ::2]}[to]
    run(copied, x, 40, y, grid=5)
    assert (y == x).all()


@kernel(threads=32)
def planes(k: Kernel, x: Strided[f32, 2], y: Global[f32]) -> None:
    """Row (cta_y, cta_x) of an array whose last elements lie side by side, by each way to name it."""
    row = x.at(k.cta_y, k.cta_x)
    first = x.at(k.cta_y) + k.mul_wide(k.cta_x, x.strides[1])
    sums = row.load(k.lane) + x.at(k.cta_y, k.cta_x, k.lane).load() + first.load(k.lane)
    y.store(sums, (k.cta_y * 3 + k.cta_x) * 32 + k.lane)


def test_of_one_more_dimension_the_last_elements_lie_side_by_side() -> None:
    x = numbers(2, 32 * 3).reshape(2, 3, 32).transpose(1, 0, 2)
    x, y = x.transpose(1, 0, 2), np.zeros((2, 3, 32), np.float32)
    emulate(planes.trace(), (3, 2), [x, y]).raise_if_found()
    np.testing.assert_array_equal(y, x + x + x)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (numbers(40), "argument x has 1 dimensions; the kernel takes 2, or 3 whose last elements lie side by side"),
        (numbers(5, 40, 2, 2), "argument x has 4 dimensions"),
        (numbers(5, 40)[:, ::-1], "argument x has the stride -1 in dimension 1; kernels take 0 to 4294967295"),
        (numbers(5, 40, 6)[:, :, ::2], "argument x has the stride 2 between its last elements; .*: copy it"),
        (np.zeros((5, 40)), r"argument x has elements of 8 bytes \(float64\); the kernel's are f32"),
        (5, "argument x must be a NumPy array, not int"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x: Any, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        emulate(copied.trace(), 5, [x, 40, np.zeros((5, 40), np.float32)])


def test_elements_that_lie_at_no_whole_strides_are_refused() -> None:
    x = np.zeros(40, np.dtype({"names": ["a"], "formats": ["<f4"], "offsets": [0], "itemsize": 6}))["a"]
    with pytest.raises(ProblemError, match="argument x has strides that are no multiples of its elements' size: copy"):
        emulate(copied.trace(), 5, [np.broadcast_to(x, (5, 40)), 40, np.zeros((5, 40), np.float32)])


@pytest.mark.parametrize(
    "x",
    [
        numbers(5, 40)[::-1][:1],
        np.lib.stride_tricks.as_strided(numbers(40), (1, 40), (2**40, 4)),
        numbers(0, 40, 4)[:, ::-1, ::2],
    ],
)
def test_strides_that_say_nothing_may_be_anything(x: np.ndarray) -> None:
    y = np.zeros(x.shape[:2], np.float32)
    run(copied, x, 40 * len(x), y)
    assert (y == x.reshape(y.shape)).all()


def test_strides_may_be_given_by_name() -> None:
    x, y = numbers(5, 80), np.zeros((5, 40), np.float32)
    given: dict[str, Any] = {"x": x.ravel(), "cols": 40, "y": y}
    emulate(copied.trace(), 5, given | strides(x=(80, 2))).raise_if_found()
    assert (y == x[:, ::2]).all()
    with pytest.raises(ProblemError, match=r"copied takes 3 arguments \(x, cols, y\), not 4"):
        emulate(copied.trace(), 5, [x, 40, y, 80])
    with pytest.raises(ProblemError, match=r"copied takes 3 arguments \(x, cols, y\), not 7"):
        emulate(copied.trace(), 5, [x, 40, y, 40, 1, 40, 1])


@kernel(threads=32, drop_unused=True)
def extents(k: Kernel, x: Strided[f32, 2], y: Global[u32], unused: Strided[f32, 1]) -> None:
    y.store(x.strides[1], k.lane)


def test_a_stride_keeps_its_array_among_the_parameters() -> None:
    y, program = np.zeros(32, np.uint32), extents.trace()
    assert [p.name for p in program.parameters] == ["x", "y", "x_stride1"]
    emulate(program, 1, [numbers(3, 14)[:, ::7], y]).raise_if_found()
    assert (y == 7).all()


def test_programs_differ_by_what_a_launch_takes() -> None:
    @kernel(threads=32, name="same")
    def by_hand(k: Kernel, x: Global[f32], x_stride0: u32) -> None:
        (x + k.mul_wide(k.lane, x_stride0)).store(1.0)

    @kernel(threads=32, name="same")
    def strided(k: Kernel, x: Strided[f32, 1]) -> None:
        x.at(k.lane).store(1.0)

    first, second = by_hand.trace(), strided.trace()
    assert first != second
    assert print_cuda(first, comments=False) == print_cuda(second, comments=False)


def test_strided_takes_a_type_and_a_count() -> None:
    for wrong in (f32, (f32, 0), (f32, "2"), ("f32", 2)):
        with pytest.raises(TraceError, match=r"Strided takes a type.*\(Strided\[f32, 2\]\), not"):
            Strided[wrong]


def test_more_indices_than_dimensions_are_refused() -> None:
    @kernel(threads=32)
    def wrong(k: Kernel, x: Strided[f32, 1]) -> None:
        x.at(0, 1, 2).store(1.0)

    with pytest.raises(TraceError, match=r"^test_parameters\.py:\d+: .*with 1 strides takes 1 to 2 indices, not 3"):
        wrong.trace()


@pytest.mark.parametrize(
    "wrong", [lambda x: x.at(-1), lambda x: x.at(0, -2), lambda x: x.at(1).at(1), lambda x: x[1, 2]]
)
def test_what_would_be_another_element_than_it_seems_is_refused(wrong: Callable[[Any], Any]) -> None:
    @kernel(threads=32)
    def indexed(k: Kernel, x: Strided[f32, 1]) -> None:
        wrong(x)

    with pytest.raises(TraceError, match=r"before it|GlobalPointer has no 'at'|write x\.at\(i, j\)"):
        indexed.trace()


def test_two_parameters_have_two_names() -> None:
    @kernel(threads=32)
    def twice(k: Kernel, x: Strided[f32, 1], x_stride0: u32) -> None:
        x.at(x_stride0).store(1.0)

    with pytest.raises(TraceError, match="two parameters are called x_stride0"):
        twice.trace()


class Scaled(Compound):
    """A matrix and a factor for each row."""

    rows: Strided[f32, 1]
    factors: Global[f32]
    cols: u32


def test_a_field_of_another_type_is_refused() -> None:
    class Wrong(Compound):
        rows: Global[f32]
        count: int

    def body(k: Kernel, x: Any) -> None:
        x.rows.store(1.0)

    body.__annotations__["x"] = Wrong
    with pytest.raises(TraceError, match="parameter 'x_count' of body needs a type: Global"):
        kernel(threads=32)(body).trace()


@kernel(threads=32)
def products(k: Kernel, x: Scaled, y: Strided[f32, 1], last: u32) -> None:
    with k.loop(x.cols, start=k.lane, step=32) as col, k.when(col < last):
        y.at(k.cta_x, col).store(x.rows.at(k.cta_x, col).load() * x.factors.load(k.cta_x))


@products.example
def _random(rng: np.random.Generator) -> Launch:
    x, factors = rng.random((3, 40), np.float32), rng.random(3, np.float32)
    y = np.zeros_like(x)
    return Launch(3, [x, factors, y, 40, 40], {"y": (x * factors[:, None], 0)})


def test_a_compound_parameter_may_hold_arrays_and_its_numbers_come_behind() -> None:
    x, factors, y = numbers(3, 80)[:, :40], numbers(3), np.zeros((3, 40), np.float32)
    program = products.trace()
    names = ["x_rows", "x_factors", "y", "last", "x_cols", "x_rows_stride0", "y_stride0"]
    assert [p.name for p in program.parameters] == names
    given: dict[str, Any] = {"x_rows": x, "x_factors": factors, "y": y, "last": 40}
    emulate(program, 3, given | fields("x", cols=40)).raise_if_found()
    np.testing.assert_array_equal(y, x * factors[:, None])
    launch = _random(RNG)
    emulate(program, launch.grid, launch.arguments).raise_if_found()
    np.testing.assert_array_equal(launch.arguments[2], launch.expect["y"][0])


def test_a_compound_parameter_without_fields_is_refused() -> None:
    def wrong(k: Kernel, x: Any) -> None: ...

    wrong.__annotations__["x"] = Compound
    with pytest.raises(TraceError, match="Compound has no fields"):
        kernel(threads=32)(wrong).trace()


class Unprefixed(Compound):
    """A factor for each row."""

    prefixed = False
    factors: Global[f32]


class Outer(Compound):
    """A matrix, and factors that are named as the matrix' own would be."""

    rows: Strided[f32, 1]
    more: Unprefixed


def test_fields_of_a_compound_parameter_may_have_their_names_alone() -> None:
    @kernel(threads=32)
    def scaled(k: Kernel, x: Unprefixed, y: Outer) -> None:
        y.rows.at(k.cta_x, k.lane).store(x.factors.load(k.cta_x) * y.more.factors.load(k.cta_x))

    assert [x.name for x in scaled.trace().parameters] == ["factors", "y_rows", "y_factors", "y_rows_stride0"]


@pytest.mark.parametrize("name", ["k", "values", "fields", "scaled", "cols"])
def test_a_field_that_hides_something_else_is_refused(name: str) -> None:
    class Wrong(Compound):
        cols: u32 = 3  # pyright: ignore[reportAssignmentType]

        def scaled(self) -> None: ...

    Wrong.__annotations__ = {name: u32}

    def body(k: Kernel, x: Any) -> None: ...

    body.__annotations__["x"] = Wrong
    with pytest.raises(TraceError, match=f"'{name}' of Wrong"):
        kernel(threads=32)(body).trace()


@pytest.mark.parametrize("within", [False, True])
def test_an_annotation_with_alternatives_is_refused(within: bool) -> None:
    class Either(Compound):
        x: Strided[f32, 1] | None

    def wrong(k: Kernel, x: Strided[f32, 1] | None) -> None: ...

    if within:
        wrong.__annotations__["x"] = Either
    with pytest.raises(TraceError, match=f"of {'Either' if within else 'wrong'} is no type .*gives every argument"):
        kernel(threads=32)(wrong).trace()
