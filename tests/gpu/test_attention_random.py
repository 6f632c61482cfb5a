"""Two thousand random attention problems on the GPU, every element against float64."""

import math
import random

import pytest

import warploom
from tests.kernels.attention64 import near
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.reference import attention_reference
from warploom.kernels.attention.scores import seen_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FAMILIES = 40
PROBLEMS_PER_FAMILY = 50


def family(number):
    """What compiles a kernel of its own; lengths, batches and head counts then vary freely."""
    draw = random.Random(number)
    return {
        "head_dim": draw.choice([8, 24, 40, 64, 72, 96, 128, 160, 192, 224, 256]),
        "v_dim": draw.choice([None, None, None, 64, 128, 72]),
        "group": draw.choice([1, 1, 2, 4]),
        "dtype": draw.choice([torch.bfloat16, torch.float16]),
        "causal": draw.random() < 0.4,
        "window": draw.choice([None, None, None, (draw.choice([None, 0, 17, 100]), draw.choice([None, 0, 9]))]),
        "softcap": draw.choice([None, None, None, 12.0]),
        "scale": draw.choice([None, None, 0.2]),
        "layout": draw.choice(["bshd", "bhsd"]),
        "sinks": draw.choice([None, None, torch.float32, torch.bfloat16]),
    }


@pytest.mark.parametrize("number", range(FAMILIES))
def test_random_problems(number):
    f, draw = family(number), random.Random(1000 + number)
    torch.manual_seed(number)
    seq = 1 if f["layout"] == "bshd" else 2
    for _ in range(PROBLEMS_PER_FAMILY):
        batch, kv_heads = draw.randint(1, 3), draw.randint(1, 3)
        q_len, kv_len = (draw.choice([1, 2, 63, 64, 65, 128, draw.randint(1, 700)]) for _ in range(2))
        heads = kv_heads * f["group"]

        def make(length, count, cols=f["head_dim"], batch=batch):
            heads_first = torch.randn(batch, count, length, cols, device="cuda").to(f["dtype"])
            return heads_first if seq == 2 else heads_first.transpose(1, 2).contiguous()

        q, k, v = make(q_len, heads), make(kv_len, kv_heads), make(kv_len, kv_heads, f["v_dim"] or f["head_dim"])
        options = {key: f[key] for key in ("causal", "window", "softcap", "scale", "layout")}
        sinks = None if f["sinks"] is None else (3 * torch.randn(heads, device="cuda")).to(f["sinks"])
        torch.full_like(q, math.nan)  # what the output's memory is likely to hold
        out, lse = warploom.attention(q, k, v, return_lse=True, sinks=sinks, **options)
        heads_first = [x if seq == 2 else x.transpose(1, 2) for x in (q, k, v, out)]
        left, right = f["window"] or (None, None)
        if f["causal"]:
            right = 0 if right is None else min(right, 0)
        dtype = bf16 if f["dtype"] is torch.bfloat16 else f16
        exact = attention_reference(
            *heads_first[:3],
            dtype=dtype,
            scale=f["scale"],
            seen=seen_of(q_len, kv_len, (left, right), device="cuda"),
            sinks=sinks,
            softcap=f["softcap"],
        )
        assert bool(near(heads_first[3].double(), exact, dtype).all()), (f, q.shape, k.shape)
        lse64 = exact.lse
        finite = torch.isfinite(lse64)
        assert torch.equal(torch.isfinite(lse), finite)
        assert float((lse.double() - lse64)[finite].abs().max() if finite.any() else 0.0) < 1e-4
