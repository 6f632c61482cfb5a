"""Arrays are checked, and results made, by what an operation's signature says of them."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.errors import ProblemError
from warploom.interop.arrays import compact, describe
from warploom.ops.arrays import (
    CACHE,
    FEW,
    FLOAT32,
    GRADIENT,
    IN_PLACE,
    LINES,
    MATRIX,
    OUTPUT,
    RESULT,
    ROW_MAJOR,
    ROWS,
    TABLE,
    WRITTEN_CACHE,
    ArrayArgument,
    MemoryDemands,
    ResultArray,
)
from warploom.ops.declare import Declaration

Matrix = Annotated[Any, ArrayArgument("batch rows cols", memory=MATRIX)]
Results = Annotated[
    Any,
    ResultArray("sums", "batch rows", "f32"),
    ResultArray("copy", "", "x", when="keep"),
    ResultArray("of_w", "cols if starts | rows", "w", when="w"),
]


def operation(
    x: Matrix,
    y: Annotated[Any, ArrayArgument("batch rows cols", "x", MATRIX, hint="x again")],
    w: Annotated[Any, ArrayArgument("cols if starts | rows | 1", "T f32", FEW)] = None,
    starts: Annotated[Any, ArrayArgument("batch+1", "s32", IN_PLACE)] = None,
    out: Annotated[Any, ArrayArgument("batch rows cols", "x", RESULT, written=True, over="x")] = None,
    *,
    keep: bool = False,
) -> Results:
    """An operation that nothing computes."""


DECLARED = Declaration.of(operation)
HALF = np.zeros((4, 6, 16), np.float16)
ODD = np.zeros(129, np.uint8)[1:].view(np.float16).reshape(4, 16)


def bound(*, keep: bool = False, **changed: Any) -> Any:
    given = {"x": np.zeros((2, 3, 8), np.float16), "y": np.zeros((2, 3, 8), np.float16)} | changed
    views = {name: describe(given[name]) for name in DECLARED.arrays if given.get(name) is not None}
    DECLARED.refuse_writes(views)
    return DECLARED.bind(views, {"keep": keep})


def test_sizes_and_results_have_the_names_of_the_signature() -> None:
    given = bound(w=np.zeros(3, np.float32))
    assert given.sizes == {"batch": 2, "rows": 3, "cols": 8}
    assert {name: (shape, str(kind)) for name, (shape, kind) in given.results.items()} == {
        "sums": ((2, 3), "f32"),
        "of_w": ((3,), "f32"),
    }
    assert set(bound(keep=True).results) == {"sums", "copy"}
    made = bound(keep=True).made(sums=2.0)
    assert (made["sums"] == 2).all()
    assert made["copy"].shape == (2, 3, 8)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": np.zeros((3, 8), np.float16)}, r"^x has shape \(3, 8\); it must be \(batch, rows, cols\)$"),
        ({"y": np.zeros((2, 4, 8), np.float16)}, r"^y has shape .* with rows = 3, as x has; x again$"),
        (
            {"y": np.zeros((2, 3), np.float16)},
            r"^y has .* with batch = 2 and rows = 3 and cols = 8, as x has; x again$",
        ),
        ({"x": np.zeros((2, 3, 8), np.int8)}, "^x is int8, .*: convert it to f16 or bf16$"),
        ({"y": np.zeros((2, 3, 8), np.float32)}, "^x is f16 and y is f32: convert them to one type$"),
        ({"w": np.zeros(3, np.int32)}, "^w is int32, .*: convert it to f16 or f32$"),
        ({"w": np.zeros(8, np.float32)}, r"^w has shape \(8,\); it must be \(rows,\) or \(1,\) with rows = 3"),
        (
            {"w": np.zeros(3, np.float32), "starts": np.zeros(3, np.int32)},
            r"^w has .* with starts it must be \(cols,\)",
        ),
        ({"starts": np.zeros(0, np.int32)}, r"^starts has shape \(0,\); it must be \(batch\+1,\) with batch\+1 = 3"),
        ({"starts": np.zeros(6, np.int32)[::2]}, "^the last dimension of starts is not contiguous .*: copy it$"),
        ({"out": np.broadcast_to(np.zeros(8, np.float16), (2, 3, 8))}, "^out is read-only: pass an array that can"),
        ({"out": np.zeros((2, 8, 3), np.float16).swapaxes(1, 2)}, "^out has strides .*: it must be row-major"),
    ],
)
def test_what_is_wrong_is_said_with_the_argument_its_value_and_a_cure(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        bound(**changed)


def test_a_result_may_lie_exactly_over_the_array_declared() -> None:
    x = np.zeros((3, 3, 8), np.float16)
    assert bound(x=x[:2], out=x[:2]).sizes["batch"] == 2
    with pytest.raises(ProblemError, match=r"^out shares memory with x, .* pass another array, or exactly that one$"):
        bound(x=x[:2], out=x[1:])
    with pytest.raises(ProblemError, match=r"^out shares memory with y, .*: pass another array$"):
        bound(y=x[:2], out=x[:2])


LYING: dict[str, tuple[Any, MemoryDemands, bool]] = {
    "rows in place": (HALF[:, ::2], ROWS, False),
    "rows that are not aligned": (HALF[..., 1:], ROWS, True),
    "a gradient of one number": (np.broadcast_to(HALF[0, 0, 0], (4, 6, 16)), GRADIENT, True),
    "columns of a matrix": (HALF[0].T, MATRIX, False),
    "columns where lines are wanted": (HALF[0].T, LINES, True),
    "neither": (HALF[0, ::2, ::2], MATRIX, True),
    "few numbers apart": (HALF[0, 0, ::2], FEW, True),
    "halves where float32 is wanted": (HALF[0, 0], FLOAT32, True),
    "a cache": (HALF[None], CACHE, False),
}


@pytest.mark.parametrize("name", LYING)
def test_only_what_kernels_cannot_take_in_place_is_copied(name: str) -> None:
    array, memory, copied = LYING[name]
    view = describe(array)
    laid = memory.take("x", view, compact)
    assert (laid.pointer != view.pointer) == copied
    assert tuple(laid.shape) == array.shape


@pytest.mark.parametrize(
    ("memory", "array"),
    [
        (ROWS, HALF[..., ::2]),
        (CACHE, HALF[None, ..., 1:]),
        (IN_PLACE, HALF[0, 0, ::2]),
        (ROW_MAJOR, HALF[0].T),
        (TABLE, HALF[0].reshape(-1)[1:]),
        (OUTPUT, HALF[..., 1:]),
        (RESULT, HALF[::-1]),
        (RESULT, np.broadcast_to(HALF[0], (4, 6, 16))),
        (WRITTEN_CACHE, np.broadcast_to(HALF[0], (1, 4, 6, 16))),
        *[(memory, ODD[0]) for memory in (FEW, FLOAT32, ROW_MAJOR, IN_PLACE)],
        *[(memory, ODD) for memory in (MATRIX, LINES, RESULT)],
    ],
)
def test_what_no_kernel_takes_and_nobody_copies_is_refused_by_name(memory: MemoryDemands, array: Any) -> None:
    with pytest.raises(ProblemError, match=r"\bx\b"):
        memory.take("x", describe(array), compact)


def test_a_call_whose_strides_say_nothing_is_found_as_it_is_the_third_time(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of dimensions with one element are settled for kernels; the array's own are looked up all the same."""
    gpu.hold(monkeypatch)
    whole = np.random.default_rng(0).standard_normal((1, 16, 3, 2, 16)).astype(np.float16)
    parts = [whole[:, :, i] for i in range(3)]
    q, k, v = (np.lib.stride_tricks.as_strided(x, strides=(2, *x.strides[1:])) for x in parts)
    first, second = (warploom.attention(q, k, v) for _ in range(2))
    monkeypatch.setattr(Declaration, "bind", lambda *_, **__: pytest.fail("checked again"))
    for found in (second, warploom.attention(q, k, v)):
        assert (found == first).all()


@pytest.mark.parametrize(
    ("batch", "of_out"), [((2,), (1,)), ((2,), ()), ((1,), (2,)), ((2,), (1, 2)), ((2, 1), (2, 3))]
)
def test_what_is_written_to_has_the_leading_dimensions_of_the_result(batch: Any, of_out: Any) -> None:
    """Of what is read they broadcast; what is written would have other places for the same elements."""
    a, b, out = (np.ones((*outer, 16, 16), np.float16) for outer in (batch, (), of_out))
    with pytest.raises(ProblemError, match=r"^out has the leading dimensions \(.*\), the result \("):
        warploom.matmul(a, b, out=out)
    assert (out == 1).all()
