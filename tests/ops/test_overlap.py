"""``out`` beside the arrays that are read: what shares memory is refused, what only lies among it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.errors import ProblemError
from warploom.interop.arrays import describe
from warploom.interop.overlap import overlaps_itself, share_memory
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90

SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=3)
BULK = MatmulSm90(tile_m=64, tile_n=64, stages=2, consumers=1)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float16)


def strided(
    rng: np.random.Generator, memory: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A view of ``memory`` with any shape and strides, and the index of every element."""
    shape, strides = rng.integers(0, 5, (2, rng.integers(1, 4)))
    strides = strides * rng.integers(-3, 4, len(strides))
    indices = np.zeros(tuple(shape), int)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        indices = indices + (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    indices += rng.integers(0, 20) - min(0, indices.min(initial=0))
    first = int(indices.flat[0]) if indices.size else 0
    view = np.lib.stride_tricks.as_strided(memory[first:], shape, 2 * strides)
    return view, indices.ravel()


def test_sharing_is_told_exactly():
    rng = np.random.default_rng(0)
    memory = np.zeros(200, np.float16)
    shared = 0
    for _ in range(1500):
        (x, of_x), (y, of_y) = strided(rng, memory), strided(rng, memory)
        expected = bool(set(of_x) & set(of_y))
        shared += expected
        assert share_memory(describe(x), describe(y)) == expected
        assert overlaps_itself(describe(x)) or len(set(of_x)) == len(of_x)
    assert 150 < shared < 1350


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_slices_and_transposes_never_overlap_themselves(axes):
    whole = random(6, 7, 8).transpose(axes)
    for view in (whole, whole[::2, 1:, ::3], whole[:, ::-1], whole[:1], whole[:0]):
        assert not overlaps_itself(describe(view))


A, B, ROWS = random(32, 32), random(32, 32), random(33, 32)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"out": A}, "a"),
        ({"out": B}, "b"),
        ({"a": A[:16], "out": A[15:31]}, "a"),
        ({"a": A.T, "out": A}, "a"),
        ({"a": A[::-1], "out": A}, "a"),
        ({"a": ROWS[::2][:16], "out": ROWS[1:17]}, "a"),
        ({"bias": ROWS[3], "out": ROWS[:32]}, "bias"),
        ({"extras": (ROWS[1:],), "epilogue": lambda x, y: x + y, "out": ROWS[:32]}, r"extras\[0\]"),
        ({"extras": (A, ROWS[:32].T), "epilogue": lambda x, y, z: x + z, "out": ROWS[:32]}, r"extras\[1\]"),
        ({"bias": B[0], "extras": (ROWS[1:],), "epilogue": lambda x, y: x + y, "out": ROWS[:32]}, r"extras\[0\]"),
    ],
)
def test_an_out_that_is_still_read_is_refused(arguments: dict[str, Any], named: str):
    before = arguments["out"].copy()
    asked: dict[str, Any] = {"a": A, "b": B, **arguments}
    for call in (warploom.matmul, warploom.plan_matmul):
        with pytest.raises(ProblemError, match=f"out shares memory with {named}, which would be overwritten"):
            call(**asked)
    assert (arguments["out"] == before).all()


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, split_k=2), BULK])
def test_halves_of_one_buffer_and_an_extra_in_place(config):
    buffer, w = random(96, 256), random(128, 128)
    x, out = buffer[:, :128], buffer[:, 128:]
    expected = warploom.matmul(x.copy(), w, config=config)
    assert warploom.matmul(x, w, out=out, config=config) is out
    assert (out == expected).all()
    rows = random(192, 128)
    even, odd = rows[::2], rows[1::2]
    expected = warploom.matmul(even.copy(), w, config=config)
    assert (warploom.matmul(even, w, out=odd, config=config) == expected).all()
    residual = random(96, 128)
    expected = warploom.matmul(x, w, epilogue=lambda s, r: s + r, extras=(residual.copy(),), config=config)
    warploom.matmul(x, w, epilogue=lambda s, r: s + r, extras=(residual,), out=residual, config=config)
    assert (residual == expected).all()


def test_an_out_whose_elements_lie_on_each_other_is_refused():
    out = np.lib.stride_tricks.as_strided(random(64), (8, 8), (8, 2))
    with pytest.raises(ProblemError, match="some of its elements lie on each other"):
        warploom.matmul(random(8, 8), random(8, 8), out=out)


def test_repeated_calls_look_at_their_own_arrays(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch):
    """The prepared call of a GPU knows shapes; addresses are each call's own."""
    gpu.hold(monkeypatch)
    buffer, w = random(64, 128), random(64, 64)
    left, right = buffer[:, :64], buffer[:, 64:]
    gpu.keep(buffer)
    for _ in range(2):
        right[:] = 0
        warploom.matmul(left, w, out=right)
        assert np.abs(right - left.astype(np.float64) @ w.astype(np.float64)).max() < 0.05
    for overlapping in (left, buffer[:, 32:96]):
        with pytest.raises(ProblemError, match="out shares memory with a"):
            warploom.matmul(left, w, out=overlapping)
    read_only = np.lib.stride_tricks.as_strided(random(64, 128), (64, 64), (256, 2), writeable=False)
    with pytest.raises(ProblemError, match="read-only"):
        warploom.matmul(left, w, out=read_only)
    warploom.matmul(left, w, out=right)
    assert len(gpu.prepared) == 1
