"""``attention_varlen`` on arrays: right results, refusals by name, nothing compiled for new lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import is_right
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.dtypes import bf16
from warploom.core.errors import ConfigError, EmulationError, ProblemError
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose_packed
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Packed
from warploom.ops.attention_varlen import attention_varlen_backward

pytestmark = pytest.mark.usefixtures("emulated")
SM90 = "attention_sm90(head_dim=32, dtype=f16, tile_n=48, consumers=1)"
STARTS = np.array([0, 20, 20, 77, 90], np.int32)


def make(rows: int = 90, heads: int = 2, head_dim: int = 32, seed: int = 0) -> list[Any]:
    """Q, K and V."""
    numbers = np.random.default_rng(seed)
    return [numbers.standard_normal((rows, heads, head_dim)).astype(np.float16) for _ in range(3)]


def all_right(out: Any, q: Any, k: Any, v: Any, starts: Any = STARTS, causal: bool = False) -> bool:
    """Whether each sequence is as float64 has it."""
    window = (None, 0 if causal else None)
    return all(is_right(out[a:b], q[a:b], k[a:b], v[a:b], window) for a, b in pairwise(starts) if a < b)


call: Any = warploom.attention_varlen
"""Without its types: what is refused does not fit them."""


# -- right results
@pytest.mark.parametrize("config", [None, SM90])
def test_numpy_arrays(config: str | None) -> None:
    q, k, v = make()
    out, lse = warploom.attention_varlen(
        q, k, v, STARTS, causal=True, return_lse=True, max_seqlen_q=57, check=True, config=config
    )
    assert all_right(out, q, k, v, causal=True)
    one = warploom.attention(q[None, 20:77], k[None, 20:77], v[None, 20:77], causal=True, return_lse=True)
    assert np.allclose(lse[:, 20:77], one[1][0], atol=1e-3)


def test_values_with_a_head_dim_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    q, k, _ = make()
    v = make(head_dim=16)[2]
    out = call(q, k, v, STARTS, causal=True)
    assert out.shape == (90, 2, 16)
    assert all_right(out, q, k, v, causal=True)
    packed, alone = ([torch.from_numpy(x[:20]).requires_grad_() for x in (q, k, v)] for _ in range(2))
    call(*packed, torch.tensor([0, 20], dtype=torch.int32)).float().square().sum().backward()
    warploom.attention(*(x[None] for x in alone)).float().square().sum().backward()
    for x, y in zip(packed, alone, strict=True):
        assert torch.allclose(x.grad.float(), y.grad.float(), atol=2e-2)


def test_strided_arrays_and_an_output_of_the_caller_s() -> None:
    """Heads of one array side by side; rows of no sequence stay."""
    wide = np.random.default_rng(1).standard_normal((96, 6, 32)).astype(np.float16)
    q, k, v = wide[:, :2], wide[:, 2:4], wide[:, 4:]
    out = np.full((96, 2, 32), 7, np.float16)
    assert warploom.attention_varlen(q, k, v, STARTS, out=out) is out
    assert all_right(out, q, k, v)
    assert (out[90:] == 7).all()


def test_torch_tensors_and_operators() -> None:
    torch = pytest.importorskip("torch")
    arrays = q, k, v = [torch.from_numpy(x) for x in make()]
    starts = torch.from_numpy(STARTS)
    out = call(*arrays, starts)
    assert isinstance(out, torch.Tensor)
    assert all_right(out.numpy(), *(x.numpy() for x in arrays))
    compiled = torch.compile(
        lambda *given: warploom.attention_varlen(*given, return_lse=True), backend="eager", fullgraph=True
    )
    found, lse = compiled(q, k, v, starts)
    assert torch.equal(found, out)
    assert tuple(lse.shape) == (2, 90)


def test_nothing_to_compute() -> None:
    q, k, v = make()
    assert warploom.attention_varlen(q[:0], k[:0], v[:0], np.zeros(3, np.int32)).shape == (0, 2, 32)
    assert warploom.attention_varlen(q, k, v, np.zeros(1, np.int32)).shape == q.shape
    none = np.zeros(2, np.int32)
    out, lse = warploom.attention_varlen(q, k[:0], v[:0], np.array([0, 90], np.int32), none, return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


# -- refusals
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": make()[0][None]}, "total_q, heads, head_dim"),
        ({"k": make(heads=3)[1], "v": make(heads=3)[2]}, "multiple of the 3"),
        ({"k": make(rows=80)[1], "v": make(rows=80)[2]}, "cu_seqlens_k"),
        ({"cu_seqlens_q": STARTS.astype(np.int64)}, "cu_seqlens_q is int64"),
        ({"cu_seqlens_k": STARTS[:-1]}, "cu_seqlens_k has shape"),
        ({"seqused_k": STARTS}, "seqused_k has shape"),
        ({"out": make(rows=80)[0]}, "out has shape"),
        (
            {"out": np.zeros((90, 2, 33), np.float16)[..., 1:]},
            "out has rows that do not start at multiples of 16 bytes",
        ),
        ({"out": np.zeros((90, 2, 32), np.float16)[::-1]}, "out has a stride that is negative"),
        ({"out": np.zeros((90, 2, 32), np.float16)[..., ::-1]}, "last dimension of out is not contiguous"),
        ({"window": (-5, 0)}, "left side"),
        ({"v": make()[2][:-1]}, "v has shape"),
        ({"v": np.concatenate([make()[2]] * 2, 1)}, "v has shape"),
    ],
)
def test_what_the_host_knows_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    q, k, v = make()
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": STARTS} | change
    with pytest.raises(ProblemError, match=words):
        call(**given)


def test_configurations_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        call(*make(), STARTS, config="attention_sm80(head_dim=64, dtype=f16)")


def test_an_output_that_is_read() -> None:
    q, k, v = make()
    with pytest.raises(ProblemError, match="out shares memory with v"):
        warploom.attention_varlen(q, k, v, STARTS, out=v)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": [0, 20, 10, 90, 90]}, r"cu_seqlens_q\[2\] is 10: "),
        ({"cu_seqlens_q": [-1, 20, 30, 90, 90]}, r"cu_seqlens_q\[0\] is -1: "),
        ({"cu_seqlens_k": [0, 20, 30, 80, 91]}, r"cu_seqlens_k\[4\] is 91: .* at most 90"),
        ({"seqused_k": [3, 1, 57, 13]}, r"seqused_k\[1\] is 1: "),
    ],
)
def test_what_the_device_knows_is_named_where_somebody_asks(change: dict[str, Any], words: str) -> None:
    q, k, v = make()
    given = {"cu_seqlens_q": STARTS} | {name: np.array(x, np.int32) for name, x in change.items()}
    with pytest.raises(ProblemError, match=words):
        call(q, k, v, **given, check=True)


def findings(starts: list[int], config: str | None) -> set[str]:
    """What kinds of defects the emulator finds in a call with such lengths."""
    try:
        call(*make(), np.array(starts, np.int32), config=config)
    except EmulationError as error:
        return {found.kind for found in cast("Any", error.findings)}
    return set()


@pytest.mark.parametrize("config", [None, SM90])
def test_wrong_lengths_touch_nothing_beyond_the_arrays(config: str | None) -> None:
    """Rows of two sequences may be written twice, which the emulator objects to; never bytes outside."""
    assert findings([0, 60, 10, 2**31 - 1, 90], config) <= {"race", "in_flight"}
    assert findings([-7, 2**31 - 1, 0, 500, -1], config) <= {"race", "in_flight"}


# -- what is compiled
def test_no_length_makes_a_new_kernel() -> None:
    """1,000 steps with other batches, totals and lengths: for each GPU the two kernels of the first."""
    numbers = np.random.default_rng(0)
    for arch in ("sm_80", "sm_90a"):
        sources = set()
        for _ in range(500):
            batch, total_q, total_k = (int(x) for x in numbers.integers(1, (300, 100_000, 100_000)))
            problem = AttentionProblem(batch, 16, 4, Packed(total_q, total_k), 128, bf16, window=(None, 0), lse=True)
            config = choose_packed(problem, target(arch))
            lying = {"q": (2048, 128), "k": (512, 128), "v": (512, 128), "out": (2048, 128)}
            sources |= {call.source for call in config.calls(problem, ArrayStrides(lying), 132)}
        assert len(sources) == 2


def test_repeated_calls_are_prepared_once(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lengths in the same arrays, and hints of any kind, come to the kernels that were prepared."""
    gpu.hold(monkeypatch)
    q, k, v = make()
    starts = STARTS.copy()
    for lengths, hint in ([STARTS, None], [[0, 5, 40, 90, 90], 50], [[0, 0, 0, 0, 64], np.array(64)]):
        starts[:] = lengths
        out = warploom.attention_varlen(q, k, v, starts, max_seqlen_q=hint, max_seqlen_k=hint)
        assert all_right(out, q, k, v, starts)
    assert len(gpu.prepared) == 2


def test_every_call_is_held_to_where_its_out_lies(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.hold(monkeypatch)
    q, k, v = make()
    out = warploom.attention_varlen(q, k, v, STARTS, out=np.empty_like(q))
    assert all_right(out, q, k, v, STARTS)
    with pytest.raises(ProblemError, match="out shares memory with q"):
        warploom.attention_varlen(q, k, v, STARTS, out=q)
    out.flags.writeable = False
    with pytest.raises(ProblemError, match="read-only"):
        warploom.attention_varlen(q, k, v, STARTS, out=out)


def test_arrays_of_the_cpu_on_a_gpu(gpu: EmulatedGpu) -> None:
    """They travel there and back, what is in the output already with them."""
    assert gpu.prepared == []
    q, k, v = make(96)
    out = np.full((96, 2, 32), 7, np.float16)
    warploom.attention_varlen(q, k, v, STARTS, out=out)
    assert all_right(out, q, k, v)
    assert (out[90:] == 7).all()


# -- gradients
def test_gradients_in_pytorch_are_those_of_each_sequence() -> None:
    """Also of a result that is summed, whose gradient is one number; rows of no sequence have none."""
    torch = pytest.importorskip("torch")
    arrays, again = ([torch.from_numpy(x).requires_grad_() for x in make(96)] for _ in range(2))
    out, lse = call(*arrays, torch.from_numpy(STARTS), causal=True, return_lse=True)
    (out[:90].float().sum() + lse[:, :90].sum()).backward()
    total = torch.zeros(())
    for a, b in pairwise(STARTS.tolist()):
        if a < b:
            own, logs = warploom.attention(*(x[None, a:b] for x in again), causal=True, return_lse=True)
            total = total + own.float().sum() + logs.sum()
    total.backward()
    for x, y in zip(arrays, again, strict=True):
        assert torch.allclose(x.grad[:90].float(), y.grad[:90].float(), atol=2e-2)
        assert (x.grad[90:] == 0).all()


def test_without_keys_the_gradient_of_sinks_is_that_of_the_log_sum_exp() -> None:
    """Of the rows of sequences alone."""
    numbers = np.random.default_rng(0)
    q, none = numbers.standard_normal((9, 2, 16)).astype(np.float16), np.zeros((0, 2, 16), np.float16)
    starts, sinks = np.array([0, 4, 6], np.int32), np.array([0.5, -1.0], np.float32)
    of_keys, dlse = np.zeros(3, np.int32), numbers.standard_normal((2, 9)).astype(np.float32)
    out, lse = np.zeros_like(q), np.repeat(sinks[:, None], 9, 1)
    found = attention_varlen_backward(q, q, none, none, out, lse, starts, of_keys, dlse=dlse, sinks=sinks)
    assert not found[0].any()
    np.testing.assert_allclose(found[3], dlse[:, :6].sum(1), rtol=1e-6)


def test_gradients_are_prepared_once(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.hold(monkeypatch)
    q, k, v = make()
    out, lse = warploom.attention_varlen(q, k, v, STARTS, return_lse=True)
    first = attention_varlen_backward(np.ones_like(q), q, k, v, out, lse, STARTS)
    prepared = len(gpu.prepared)
    again = attention_varlen_backward(np.ones_like(q), q, k, v, out, lse, STARTS)
    assert len(gpu.prepared) == prepared
    assert all(
        np.allclose(x.astype(np.float32), y.astype(np.float32), atol=1e-2) for x, y in zip(first, again, strict=True)
    )
