"""Random backward passes on the GPU, every element against float64; sums in turn twice, bit by bit."""

import random

import pytest

import warploom
from tests.kernels.gradient_reference import gradient_reference
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.scores import seen_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FAMILIES = 30
PROBLEMS_PER_FAMILY = 10


def family(number):
    """What compiles kernels of its own; lengths, batches and head counts then vary freely."""
    draw = random.Random(number)
    return {
        "head_dim": draw.choice([8, 40, 64, 72, 96, 128, 160, 192, 224, 256]),
        "v_dim": draw.choice([None, None, None, 64, 128, 72]),
        "group": draw.choice([1, 1, 2, 4]),
        "dtype": draw.choice([torch.bfloat16, torch.float16]),
        "causal": draw.random() < 0.4,
        "window": draw.choice([None, None, None, (draw.choice([None, 0, 17, 100]), draw.choice([None, 0, 9]))]),
        "softcap": draw.choice([None, None, None, 12.0]),
        "scale": draw.choice([None, None, 0.2]),
        "layout": draw.choice(["bshd", "bhsd"]),
        "sinks": draw.random() < 0.4,
        "sync": draw.random() < 0.3,
    }


def seen_by(q_len, kv_len, causal, window):
    """Which scores count."""
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    return seen_of(q_len, kv_len, (left, right), device="cuda")


@pytest.mark.parametrize("number", range(FAMILIES))
def test_random_problems(number):
    f, draw = family(number), random.Random(1000 + number)
    torch.manual_seed(number)
    dtype = bf16 if f["dtype"] is torch.bfloat16 else f16
    options = {key: f[key] for key in ("causal", "window", "softcap", "scale", "layout")}
    rows = 64 if max(f["head_dim"], f["v_dim"] or 0) <= 128 else 32
    v_dim = 0 if f["v_dim"] == f["head_dim"] else f["v_dim"] or 0
    text = (
        f"attention_backward_sm80(tile_m={rows}, head_dim={f['head_dim']}, dtype={dtype}, v_dim={v_dim}, in_turn=true)"
    )
    config = text if f["sync"] else None
    for _ in range(PROBLEMS_PER_FAMILY):
        batch, kv_heads = draw.randint(1, 3), draw.randint(1, 3)
        q_len, kv_len = (draw.choice([1, 2, 63, 64, 65, 128, draw.randint(1, 700)]) for _ in range(2))

        def make(length, count, cols=f["head_dim"], batch=batch):
            heads_first = torch.randn(batch, count, length, cols, device="cuda").to(f["dtype"])
            return heads_first if f["layout"] == "bhsd" else heads_first.transpose(1, 2).contiguous()

        heads = kv_heads * f["group"]
        cols = f["v_dim"] or f["head_dim"]
        q, k, v, dout = (
            make(q_len, heads),
            make(kv_len, kv_heads),
            make(kv_len, kv_heads, cols),
            make(q_len, heads, cols),
        )
        sinks = 3 * torch.randn(heads, device="cuda") if f["sinks"] else None
        out, lse = warploom.attention(q, k, v, return_lse=True, sinks=sinks, **options)
        dlse = torch.randn_like(lse) if draw.random() < 0.5 else None
        for like in (q, k, v):
            torch.full_like(like, float("nan"))  # what the gradients' memory is likely to hold

        def call(arrays=(dout, q, k, v, out, lse), dlse=dlse, sinks=sinks):
            return warploom.attention_backward(
                *arrays, dlse=dlse, sinks=sinks, config=config, deterministic=True, **options
            )

        found, again = call(), call()
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, again, strict=True))
        turned = (lambda x: x) if f["layout"] == "bhsd" else (lambda x: x.transpose(1, 2))
        reference = gradient_reference(
            *map(turned, (dout, q, k, v, out)),
            dtype=dtype,
            scale=f["scale"],
            softcap=f["softcap"],
            dlse=dlse,
            sinks=sinks,
            seen=seen_by(q_len, kv_len, f["causal"], f["window"]),
        )
        excess = reference.excess(*map(turned, found[:3]), *found[3:])
        assert max(excess.values()) <= 1.0, (f, q.shape, k.shape, excess)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="these run on sm_90a"
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "tile_m", "alternating"), [(64, 128, False), (96, 64, True)])
def test_ctas_that_take_tile_after_tile_in_turn(head_dim, tile_m, alternating, causal):
    """More tiles than multiprocessors; the second time from a CUDA graph."""
    torch.manual_seed(head_dim)
    q, k, v, dout = (torch.randn(4, 500, 24, head_dim, device="cuda").bfloat16() for _ in range(4))
    out, lse = warploom.attention(q, k, v, return_lse=True, causal=causal)
    config = (
        f"attention_backward_sm90(tile_m={tile_m}, head_dim={head_dim}, in_turn=true, persistent=true, "
        f"alternating={str(alternating).lower()})"
    )

    def call():
        return warploom.attention_backward(dout, q, k, v, out, lse, causal=causal, config=config, deterministic=True)

    found, graph = call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = call()
    graph.replay()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, again, strict=True))
    dout, q, k, v, out, *found = (x.transpose(1, 2)[1] for x in (dout, q, k, v, out, *found))
    reference = gradient_reference(dout, q, k, v, out, dtype=bf16, seen=seen_by(500, 500, causal, None))
    assert max(reference.excess(*found).values()) <= 1.0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "layout", "sync"),
    [(64, 12, 1, "bshd", False), (128, 8, 2, "bhsd", False), (192, 6, 1, "bshd", False), (128, 14, 2, "bhsd", True)],
)
def test_ctas_divide_the_query_heads_of_few_key_heads(head_dim, heads, kv_heads, layout, sync, deterministic):
    """Lengths that no tile divides, a window, a soft cap and a gradient of the log-sum-exp; two calls have equal dK."""
    torch.manual_seed(heads)
    sizes = {"q": (1300, heads), "k": (1100, kv_heads), "v": (1100, kv_heads), "dout": (1300, heads)}
    sizes = {n: (a, b) if layout == "bshd" else (b, a) for n, (a, b) in sizes.items()}
    q, k, v, dout = (torch.randn(1, *sizes[n], head_dim, device="cuda").half() for n in ("q", "k", "v", "dout"))
    options = {"window": (700, 0), "softcap": 12.0, "layout": layout}
    out, lse = warploom.attention(q, k, v, return_lse=True, **options)
    arrays, options["dlse"] = (dout, q, k, v, out, lse), torch.randn_like(lse)
    turn = f"in_turn={str(deterministic).lower()}"
    options["config"] = f"attention_backward_sm80(head_dim={head_dim}, dtype=f16, {turn})" if sync else None
    options["deterministic"] = deterministic
    plan = warploom.plan_attention_backward(*arrays, **options)
    assert any("shares" in call.arrays for call in plan.calls)
    memory = [torch.full((n,), float("nan"), device="cuda") for n in (plan.workspace_bytes // 4, q.numel(), k.numel())]
    del memory  # what the call's arrays are likely to hold
    found, again = (warploom.attention_backward(*arrays, **options) for _ in range(2))
    same = found if deterministic else found[1:]
    assert all(torch.equal(a, b) for a, b in zip(same, again if deterministic else again[1:], strict=True))

    def turned(x):
        return x if layout == "bhsd" else x.transpose(1, 2)

    reference = gradient_reference(
        *map(turned, (dout, q, k, v, out)),
        dtype=f16,
        softcap=12.0,
        dlse=options["dlse"],
        seen=seen_by(1300, 1100, False, (700, 0)),
    )
    assert max(reference.excess(*map(turned, found)).values()) <= 1.0
