"""``sinks`` of attention on CPU arrays: their types and strides, calls again, lengths of zero, and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import is_right
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.errors import ConfigError, ProblemError
from warploom_lab.kernels.attention.ladder_config import RungSm80

SINKS = np.array([1.0, -2.0, 4.0, 0.5], np.float32)


def make(q_len: int = 33, kv_len: int = 40) -> list[Any]:
    """Q, K and V, four heads that share two."""
    numbers = np.random.default_rng(q_len)
    shapes = (q_len, 4), (kv_len, 2), (kv_len, 2)
    return [numbers.standard_normal((1, *shape, 16)).astype(ml_dtypes.bfloat16) for shape in shapes]


@pytest.mark.parametrize("sinks", [SINKS.astype(np.float16), np.repeat(SINKS, 2)[::2]], ids=["16 bits", "strided"])
def test_types_and_strides(sinks: Any) -> None:
    arrays = make()
    out = warploom.attention(*arrays, sinks=sinks)
    assert is_right(out, *arrays, sinks=SINKS)
    np.testing.assert_array_equal(out, warploom.attention(*arrays, sinks=SINKS.copy()))


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    arrays = make()
    q, k, v = (torch.tensor(x.astype(np.float32)).bfloat16() for x in arrays)
    out, lse = warploom.attention(q, k, v, sinks=torch.tensor(SINKS).bfloat16(), return_lse=True)
    expected = warploom.attention(*arrays, sinks=SINKS, return_lse=True)
    np.testing.assert_array_equal(out.float().numpy(), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse.numpy(), expected[1])


@pytest.mark.usefixtures("gpu")
def test_host_arrays_travel_to_a_gpu() -> None:
    arrays = make()
    assert is_right(warploom.attention(*arrays, sinks=SINKS, return_lse=True)[0], *arrays, sinks=SINKS)


def test_a_call_again_prepares_nothing(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(), make()
    gpu.hold(monkeypatch)
    gpu.prepared.clear()
    for arrays, sinks in ((first, SINKS.copy()), (second, SINKS[::-1].copy())):
        assert is_right(warploom.attention(*arrays, sinks=sinks), *arrays, sinks=sinks)
    assert len(gpu.prepared) == 1
    assert is_right(warploom.attention(*first), *first)


def test_without_keys_the_log_sum_exp_is_the_sink() -> None:
    out, lse = warploom.attention(*make(5, 0), sinks=SINKS, return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(SINKS[:, None], (1, 4, 5)))


@pytest.mark.parametrize("sinks", [SINKS[:2], SINKS[None], SINKS.astype(np.float64)], ids=["few", "matrix", "double"])
def test_sinks_that_do_not_fit(sinks: Any) -> None:
    for call in (warploom.attention, warploom.plan):
        with pytest.raises(ProblemError, match=r"sinks (has shape .*heads = 4.*each query head|is f64)"):
            call(*make(), sinks=sinks)


def test_rungs_of_the_ladder_take_none() -> None:
    with pytest.raises(ConfigError, match="no sinks"):
        warploom.plan(*make(), sinks=SINKS, config=RungSm80(head_dim=16))
