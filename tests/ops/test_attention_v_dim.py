"""V with a head_dim of its own on CPU arrays: shapes of results, calls again, and the kernels that are chosen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import is_right
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.dtypes import bf16
from warploom.core.errors import ProblemError
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionProblem, Even


def make(kv_len: int = 40, seed: int = 0) -> list[Any]:
    """Q and K of 24 columns, V of 40."""
    numbers = np.random.default_rng(seed)
    shapes = (1, 33, 2, 24), (1, kv_len, 2, 24), (1, kv_len, 2, 40)
    return [numbers.standard_normal(shape).astype(np.float16) for shape in shapes]


@pytest.mark.usefixtures("gpu")
def test_host_arrays_travel_to_a_gpu() -> None:
    arrays = make()
    out = warploom.attention(*arrays)
    assert out.shape == (1, 33, 2, 40)
    assert is_right(out, *arrays)


def test_a_call_again_prepares_nothing(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(), make(seed=1)
    gpu.hold(monkeypatch)
    gpu.prepared.clear()
    for arrays in (first, second, first):
        assert is_right(warploom.attention(*arrays), *arrays)
    assert len(gpu.prepared) == 1


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    arrays = make()
    assert is_right(warploom.attention(*map(torch.from_numpy, arrays)), *arrays)
    mode = pytest.importorskip("torch._subclasses").FakeTensorMode()
    with mode:
        out, lse = warploom.attention(*(torch.empty(x.shape, dtype=torch.float16) for x in arrays), return_lse=True)
    assert (out.shape, lse.shape) == ((1, 33, 2, 40), (1, 2, 33))


def test_without_keys_the_result_has_vs_shape() -> None:
    out = warploom.attention(*make(0))
    assert out.shape == (1, 33, 2, 40)
    assert not out.any()


def test_sizes_that_no_kernel_takes() -> None:
    q, k, v = make()
    with pytest.raises(ProblemError, match="head_dim of v is 36"):
        warploom.attention(q, k, v[..., :36])
    with pytest.raises(ProblemError, match=r"v has shape .* kv_len = .*, as k has"):
        warploom.attention(q, k, v[:, :30])


@pytest.mark.parametrize("window", [(None, None), (None, 0)], ids=["full", "causal"])
def test_hopper_has_a_kernel_for_every_pair(window: tuple[int | None, int | None]) -> None:
    sizes, lengths = (8, 64, 128, 192, 256), (100, 1000, 3000, 16384)
    for d, v_dim, length, lse in itertools.product(sizes, sizes, lengths, (False, True)):
        own = 0 if d == v_dim else v_dim
        problem = AttentionProblem(1, 4, 4, Even(length, length), d, bf16, window=window, lse=lse, v_dim=own)
        assert isinstance(choose(problem, target("sm_90a"))[0], ForwardSm90), problem
