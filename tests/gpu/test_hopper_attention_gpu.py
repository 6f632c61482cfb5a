"""Every ``wgmma`` configuration that ships as a winner, on ragged, causal and grouped problems, against float64."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import warploom  # noqa: E402 (after the skip)
from warploom.kernels.attention.hopper_config import HopperConfig  # noqa: E402
from warploom.ops.backends import gpu_present, gpu_target  # noqa: E402
from warploom.winners.store import SHIPPED  # noqa: E402

if gpu_present() and not gpu_target(0).has_wgmma:
    pytest.skip("needs wgmma", allow_module_level=True)


def winners() -> list[str]:
    """The distinct configurations, by their notation."""
    records = json.loads((SHIPPED / "nvidia-h200.json").read_text(encoding="utf-8"))["winners"]
    return sorted({r["config"] for r in records if r["problem"]["family"] == "attention" and "wgmma" in r["config"]})


@pytest.mark.parametrize("config", winners())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads"), [(1000, 1000, 6, 3), (130, 900, 40, 40), (512, 77, 2, 1)]
)
def test_a_winner_is_right(config: str, causal: bool, q_len: int, kv_len: int, heads: int, kv_heads: int) -> None:
    head_dim = HopperConfig.parse(config).head_dim
    generator = torch.Generator("cuda").manual_seed(q_len)

    def some(length: int, count: int) -> Any:
        shape = (3, length, count, head_dim)
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    q, k, v = some(q_len, heads), some(kv_len, kv_heads), some(kv_len, kv_heads)
    out = warploom.attention(q, k, v, causal=causal, config=config)
    q64, k64, v64 = (x.transpose(1, 2).double() for x in (q, k, v))
    k64, v64 = (x.repeat_interleave(heads // kv_heads, 1) for x in (k64, v64))
    scores = q64 @ k64.transpose(-1, -2) / head_dim**0.5
    if causal:
        row = torch.arange(q_len, device="cuda")[:, None] + (kv_len - q_len)
        scores = scores.masked_fill(torch.arange(kv_len, device="cuda")[None] > row, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(nan=0.0)  # rows that see no key are zero
    exact, magnitude = p @ v64, p @ v64.abs()
    error = (out.transpose(1, 2).double() - exact).abs().nan_to_num(nan=torch.inf)
    assert float((error / (2.0**-8 * (exact.abs() + magnitude) + 2.0**-18 * magnitude + 1e-30)).max()) <= 1.0
