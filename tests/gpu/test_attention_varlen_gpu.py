"""``attention_varlen`` on a GPU: ragged tensor maps, lengths read there, CUDA graphs with other lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from tests.kernels.gradient_reference import Gradient, gradient_reference
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ProblemError
from warploom.kernels.attention.reference import AttentionReference, attention_error, attention_reference
from warploom.kernels.attention.scores import seen_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
TYPES = {"f16": (torch.float16, f16), "bf16": (torch.bfloat16, bf16)}


def make(total: int, heads: int, head_dim: int, dtype: str = "bf16", pad: int = 37) -> Any:
    """Rows of sequences, and of none, which hold NaN."""
    x = torch.randn(total + pad, heads, head_dim, device="cuda").to(TYPES[dtype][0])
    x[total:] = float("nan")
    return x


def starts_of(lengths: Any) -> Any:
    """Where sequences begin."""
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device="cuda")


def wrong(arrays: tuple[Any, ...], out: Any, lengths: tuple[Any, Any], window: Any, dtype: str) -> list[str]:
    """The sequences that float64 has otherwise; rounding is judged over all of them, one may have few elements."""
    q, k, v = (x.float().cpu().numpy() for x in arrays)
    found, outputs, exacts = [], [], []
    got, at_q, at_k = out.float().cpu().numpy(), 0, 0
    for number, (n, m) in enumerate(zip(*lengths, strict=True)):
        rows, keys = slice(at_q, at_q + n), slice(at_k, at_k + m)
        at_q, at_k = at_q + n, at_k + m
        if n == 0:
            continue
        if m == 0:
            found += [f"{number} without keys"] if np.any(got[rows] != 0) else []
            continue
        own = (np.swapaxes(x, 0, 1) for x in (q[rows], k[keys], v[keys]))
        exact = attention_reference(*own, dtype=TYPES[dtype][1], seen=seen_of(n, m, window))
        error = attention_error(np.swapaxes(got[rows], 0, 1), exact, TYPES[dtype][1])
        found += [] if error.value <= error.bound else [f"{number}: {error}"]
        outputs.append(np.swapaxes(got[rows], 0, 1).ravel())
        exacts.append([x.ravel() for x in (exact.output, exact.magnitude, exact.rounded_p, exact.lse)])
    together = AttentionReference(*(np.concatenate(x) for x in zip(*exacts, strict=True)))
    error = attention_error(np.concatenate(outputs), together, TYPES[dtype][1])
    return found if error.ok else [*found, f"all: {error}"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 0), (30, 50)])
def test_uneven_lengths(head_dim: int, window: Any, dtype: str) -> None:
    numbers = np.random.default_rng(head_dim)
    q_lens, k_lens = numbers.integers(0, 700, (2, 9))
    q_lens[2], k_lens[5] = 0, 0
    q, k, v = (make(int(n.sum()), h, head_dim, dtype) for n, h in ((q_lens, 4), (k_lens, 2), (k_lens, 2)))
    out = torch.full_like(q, 7)
    _, lse = warploom.attention_varlen(
        q, k, v, starts_of(q_lens), starts_of(k_lens), window=window, return_lse=True, out=out, check=True
    )
    total = int(q_lens.sum())
    assert wrong((q, k, v), out, (q_lens, k_lens), window, dtype) == []
    assert (out[total:] == 7).all()
    assert not lse[:, :total].isnan().any()


@pytest.mark.parametrize("tiles", ["tile_m=256", "tile_m=64, num_warps=4"])
def test_the_kernels_without_the_tma(tiles: str) -> None:
    lengths = np.array([5, 0, 700, 64, 300])
    q, k, v = (make(int(lengths.sum()), 4, 128) for _ in range(3))
    out = warploom.attention_varlen(
        q, k, v, starts_of(lengths), causal=True, config=f"attention_sm80({tiles}, head_dim=128)"
    )
    assert wrong((q, k, v), out, (lengths, lengths), (None, 0), "bf16") == []


def test_a_graph_is_replayed_with_other_lengths() -> None:
    total = 2000
    q, k, v = (make(total, 4, 128) for _ in range(3))
    starts = starts_of([500, 500, 500, 500])
    warploom.attention_varlen(q, k, v, starts, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention_varlen(q, k, v, starts, causal=True)
    for lengths in ([500, 500, 500, 500], [0, 1900, 3, 97], [2000, 0, 0, 0], [7, 13, 900, 5]):
        starts.copy_(starts_of(lengths))
        graph.replay()
        assert wrong((q, k, v), out, (lengths, lengths), (None, 0), "bf16") == []


def test_wrong_lengths_are_cut_and_named() -> None:
    q, k, v = (make(1000, 4, 128, pad=0) for _ in range(3))
    starts = torch.tensor([0, 600, 100, 2**31 - 1, -5], dtype=torch.int32, device="cuda")
    warploom.attention_varlen(q, k, v, starts)
    torch.cuda.synchronize()
    with pytest.raises(ProblemError, match=r"cu_seqlens_q\[2\]"):
        warploom.attention_varlen(q, k, v, starts, check=True)


def test_arrays_of_the_cpu() -> None:
    lengths = np.array([70, 0, 130])
    q, k, v = (np.random.default_rng(i).standard_normal((200, 2, 64)).astype(np.float16) for i in range(3))
    out = warploom.attention_varlen(q, k, v, np.array([0, 70, 70, 200], np.int32), causal=True)
    arrays = tuple(torch.from_numpy(x) for x in (q, k, v))
    assert wrong(arrays, torch.from_numpy(out), (lengths, lengths), (None, 0), "f16") == []


@pytest.mark.parametrize(
    ("head_dim", "v_dim", "group", "causal"),
    [
        (64, 64, 2, False),
        (64, 64, 1, False),
        (64, 64, 1, True),
        (128, 128, 2, True),
        (256, 256, 2, True),
        (128, 64, 2, False),
        (192, 128, 2, True),
        (64, 128, 2, True),
    ],
)
def test_gradients_are_those_of_each_sequence(head_dim: int, v_dim: int, group: int, causal: bool) -> None:
    """Those of sinks are their sum, and those of rows in front of all sequences, and behind them, zero."""
    front, lengths, kv_heads = 7, [300, 0, 65, 700, 1], 4 // group
    total = front + sum(lengths)
    q, k, v = (make(total, h, d).requires_grad_() for h, d in ((4, head_dim), (kv_heads, head_dim), (kv_heads, v_dim)))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device="cuda", requires_grad=True)
    change = make(total, 4, v_dim)
    out = warploom.attention_varlen(q, k, v, starts_of(lengths) + front, causal=causal, sinks=sinks)
    (out * change)[front:total].sum().backward()
    first, of_sinks = front, []
    for n in filter(None, lengths):

        def of(x: Any, rows: slice = slice(first, first + n)) -> Any:
            return x.detach()[rows].transpose(0, 1)

        seen = torch.ones(n, n, device="cuda", dtype=torch.bool)
        reference = gradient_reference(
            *(of(x) for x in (change, q, k, v, out)),
            dtype=bf16,
            seen=seen.tril() if causal else seen,
            sinks=sinks.detach(),
        )
        assert reference.dsinks is not None
        of_sinks.append(reference.dsinks)
        for x, gradient in zip((q, k, v), (reference.dq, reference.dk, reference.dv), strict=True):
            assert gradient.excess(of(x.grad)) <= 1
        first += n
    assert all((rest == 0).all() for x in (q, k, v) for rest in (x.grad[:front], x.grad[total:]))
    sums = Gradient(*(sum(getattr(x, name) for x in of_sinks) for name in ("value", "allowed")))
    assert sums.excess(sinks.grad) <= 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_have_equal_bits(head_dim: int) -> None:
    from warploom.ops.attention_varlen import attention_varlen_backward

    lengths = [900, 30, 0, 1500]
    q, k, v = (make(sum(lengths), h, head_dim) for h in (4, 2, 2))
    starts = starts_of(lengths)
    out, lse = warploom.attention_varlen(q, k, v, starts, causal=True, return_lse=True)
    change = torch.randn_like(out)
    runs = [
        attention_varlen_backward(change, q, k, v, out, lse, starts, causal=True, deterministic=True) for _ in range(3)
    ]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
