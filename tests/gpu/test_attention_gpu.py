"""Attention on the GPU against float64: rungs, the default plan, layouts, strides, streams, graphs, host arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import warploom  # noqa: E402 (after the skip)
from tests.kernels.attention_cases import RUNGS  # noqa: E402
from warploom.core.dtypes import bf16, f16  # noqa: E402
from warploom.core.errors import ProblemError  # noqa: E402
from warploom.kernels.attention.reference import attention_error, attention_reference  # noqa: E402

TYPES = {torch.bfloat16: bf16, torch.float16: f16}


def make(batch, q_len, kv_len, heads, head_dim, dtype=torch.bfloat16, scale=1.0):
    """Q, K, V in layout bshd."""
    generator = torch.Generator("cuda").manual_seed(q_len + kv_len + heads)
    lengths = (q_len, kv_len, kv_len)
    return [
        (scale * torch.randn(batch, n, heads, head_dim, device="cuda", generator=generator)).to(dtype) for n in lengths
    ]


def excess(out, q, k, v) -> float:
    """The largest error over its bound, element by element; all bshd."""
    q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
    dtype = TYPES[out.dtype]
    return attention_error(out, attention_reference(q, k, v, dtype), dtype).value


@pytest.mark.parametrize("key", RUNGS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_rung(key, head_dim, dtype):
    config = replace(RUNGS[key], head_dim=head_dim, dtype=TYPES[dtype])
    for kv_len in (config.tile_n, 3 * config.tile_n, 1024):
        q, k, v = make(2, 512, kv_len, 3, head_dim, dtype)
        out = warploom.attention(q, k, v, config=config)
        assert excess(out, q, k, v) <= 1.0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_default_plan(head_dim, dtype):
    for q_len, kv_len in ((64, 64), (128, 512), (1024, 1024), (2048, 64)):
        q, k, v = make(1, q_len, kv_len, 4, head_dim, dtype)
        assert excess(warploom.attention(q, k, v), q, k, v) <= 1.0


def test_large_scores_and_a_growing_maximum():
    """Rows whose maximum rises in every block: what lazy rescaling must not miss."""
    q, k, v = make(1, 256, 2048, 2, 128)
    k *= torch.linspace(0.1, 6.0, 2048, device="cuda")[None, :, None, None].to(k.dtype)
    assert excess(warploom.attention(q, k, v), q, k, v) <= 1.0


def test_layouts_agree():
    q, k, v = make(2, 256, 512, 3, 128)
    expected = warploom.attention(q, k, v)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = warploom.attention(*swapped, layout="bhsd")
    assert out.shape == swapped[0].shape
    assert torch.equal(out.transpose(1, 2), expected)


def test_strided_views_are_read_where_they_lie():
    """Q, K and V as slices of one projection, as a model has them."""
    qkv = torch.randn(2, 256, 3, 4, 128, device="cuda").to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    out = warploom.attention(q, k, v)
    assert torch.equal(out, warploom.attention(q.contiguous(), k.contiguous(), v.contiguous()))
    every_other = make(1, 512, 512, 8, 128)
    views = [x[:, ::2, ::2] for x in every_other]
    assert torch.equal(warploom.attention(*views), warploom.attention(*(x.contiguous() for x in views)))


def test_rows_that_are_not_aligned_are_copied():
    base = [torch.randn(256 * 4 * 128 + 1, device="cuda").to(torch.float16) for _ in range(3)]
    shifted = [x[1:].view(1, 256, 4, 128) for x in base]
    assert shifted[0].data_ptr() % 16
    for _ in range(2):  # the second call takes the short path, if it may
        assert excess(warploom.attention(*shifted), *shifted) <= 1.0
    aligned = [x.clone() for x in shifted]
    assert torch.equal(warploom.attention(*aligned), warploom.attention(*shifted))


def test_every_output_element_is_written():
    """Freed memory full of NaN is what the next output most likely lies in."""
    q, k, v = make(1, 1024, 256, 4, 128)
    poison = torch.full((1, 1024, 4, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    address = poison.data_ptr()
    del poison
    out = warploom.attention(q, k, v)
    assert out.data_ptr() == address
    assert torch.isfinite(out).all()


def test_the_callers_stream_is_used():
    q, k, v = make(1, 512, 512, 4, 128)
    expected = warploom.attention(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = warploom.attention(late, k, v)
        assert not stream.query(), "the call must not wait"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_graphs_capture_a_call():
    q, k, v = make(1, 512, 512, 4, 128)
    warploom.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert excess(out, q, k, v) <= 1.0


def test_repeated_calls_give_the_same_bits():
    q, k, v = make(2, 1024, 1024, 4, 128)
    first = warploom.attention(q, k, v)
    assert all(torch.equal(warploom.attention(q, k, v), first) for _ in range(5))


def test_host_arrays_go_there_and_back():
    q, k, v = make(1, 128, 256, 2, 64, torch.float16)
    from_torch = warploom.attention(q.cpu(), k.cpu(), v.cpu())
    assert from_torch.device.type == "cpu"
    assert excess(from_torch.cuda(), q, k, v) <= 1.0
    from_numpy = warploom.attention(*(x.cpu().numpy() for x in (q, k, v)))
    assert isinstance(from_numpy, np.ndarray)
    assert excess(torch.from_numpy(from_numpy).cuda(), q, k, v) <= 1.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_spreads_as_in_torchs_math(bad, which):
    q, k, v = make(1, 256, 256, 2, 128)
    {"q": q, "k": k, "v": v}[which][0, 70, 1, 5] = bad
    out = warploom.attention(q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        swapped = (x.transpose(1, 2).float() for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(torch.isinf(out), torch.isinf(expected))


def test_arrays_on_different_devices_are_refused():
    q, k, v = make(1, 128, 128, 1, 64)
    with pytest.raises(ProblemError, match="one device"):
        warploom.attention(q, k.cpu(), v)
