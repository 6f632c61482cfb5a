"""The PyTorch operator: torch.compile without graph breaks, opcheck, gradients refused, and the eager call's cost."""

import gc
import time

import pytest

import warploom
from warploom.core.errors import EmulationWarning, ProblemError
from warploom.kernels.attention.sm80 import ForwardSm80
from warploom.ops import attention as ops

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning"),
    pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward"),  # autograd tells that it saw the error
]

SMALL = ForwardSm80(tile_m=64, tile_n=32, num_warps=4, head_dim=64)


def tensors(q_len=32, kv_len=32, heads=2, kv_heads=2, head_dim=64, *, layout="bshd", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def one(length, count):
        shape = (1, length, count, head_dim) if layout == "bshd" else (1, count, length, head_dim)
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return one(q_len, heads), one(kv_len, kv_heads), one(kv_len, kv_heads)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_compiles_without_graph_breaks():
    q, k, v = tensors()
    found = compiled(lambda q, k, v: warploom.attention(q * 1, k, v, causal=True) + 1)(q, k, v)
    torch.testing.assert_close(found, warploom.attention(q, k, v, causal=True) + 1, rtol=0, atol=0)


def test_the_default_backend_compiles_it():
    q, k, v = tensors()
    torch._dynamo.reset()
    found = torch.compile(lambda q, k, v: warploom.attention(q, k, v) * 2, fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, warploom.attention(q, k, v) * 2)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_every_option_reaches_the_kernel(layout):
    q, k, v = tensors(24, 40, heads=4, kv_heads=2, layout=layout)
    options = {
        "window": (9, -1), "scale": 0.25, "softcap": 3.0, "return_lse": True, "layout": layout, "config": SMALL,
    }  # fmt: skip
    out, lse = compiled(lambda q, k, v: warploom.attention(q, k, v, **options))(q, k, v)
    expected, expected_lse = warploom.attention(q, k, v, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)


def test_dynamic_shapes_compile_once():
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: warploom.attention(q, k, v, causal=True), fullgraph=True, backend=counting, dynamic=True
    )
    for length in (16, 24, 40):
        q, k, v = tensors(length, length)
        torch.testing.assert_close(function(q, k, v), warploom.attention(q, k, v, causal=True), rtol=0, atol=0)
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.warploom.attention.default in targets or torch.ops.warploom.attention in targets


def test_export_holds_the_operator():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((64,), 2.0, dtype=torch.bfloat16))

        def forward(self, q, k, v):
            return warploom.attention(q * self.scale, k, v)

    q, k, v = tensors()
    exported = torch.export.export(Model(), (q, k, v))
    assert "torch.ops.warploom.attention" in exported.graph_module.code
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(q, k, v), warploom.attention(q * 2, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["attention", "attention_lse"])
def test_opcheck(name, transposed):
    from warploom.operators import attention as operators

    q, k, v = tensors(16, 48, heads=2, kv_heads=1)
    if transposed:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    operator = getattr(operators, f"{name}_operator")
    layout = "bhsd" if transposed else "bshd"
    torch.library.opcheck(operator, (q, k, v), {"causal": True, "layout": layout, "window_left": 20})


def test_gradients_are_refused_in_words():
    q, k, v = tensors(16, 16)
    q.requires_grad_()
    with pytest.raises(ProblemError, match="no_grad"):
        warploom.attention(q, k, v)
    with pytest.raises(Exception, match="no backward pass yet"):
        compiled(lambda q, k, v: warploom.attention(q, k, v).sum())(q, k, v)
    from warploom.operators.attention import attention_operator

    with pytest.raises(ProblemError, match="no_grad"):
        attention_operator(q, k, v)
    expected = warploom.attention(q.detach(), k, v)
    with torch.no_grad():
        torch.testing.assert_close(attention_operator(q, k, v), expected, rtol=0, atol=0)
        torch.testing.assert_close(compiled(warploom.attention)(q, k, v), expected, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(attention_operator(q, k, v), expected, rtol=0, atol=0)


def test_a_wrong_call_says_why_when_it_runs():
    q, k, v = tensors()
    with pytest.raises(Exception, match="head_dim must be equal"):
        compiled(lambda q, k, v: warploom.attention(q, k, v))(q, k[..., :32], v[..., :32])


class FakeCall:
    """A launch that costs nothing: what is left is the path from tensors to it."""

    def __init__(self):
        self.launches = 0

    def launch_again(self, pointers, kind):
        self.launches += 1
        return True


def one_yardstick(tensor, rounds=2000):
    """Seconds that four descriptions of a tensor take here and now: what a busy machine slows down as much."""
    start = time.perf_counter()
    for _ in range(rounds):
        _ = ops.describe(tensor), ops.describe(tensor), ops.describe(tensor), ops.describe(tensor)
    return (time.perf_counter() - start) / rounds


def test_an_eager_call_costs_little_beyond_looking_at_its_tensors(monkeypatch):
    """The microseconds are measured on the GPU machine; a shared CI machine can only compare."""
    q, k, v = tensors()
    views = [ops.describe(x) for x in (q, k, v)]
    key = ((True, None, None, None, False, "bshd", None), *[view[1:5] for view in views])
    call = FakeCall()
    monkeypatch.setitem(ops._prepared, key, call)

    def batch(calls=500):
        start = time.perf_counter()
        for _ in range(calls):
            warploom.attention(q, k, v, causal=True)
        return (time.perf_counter() - start) / calls

    batch()
    gc.disable()
    try:
        ratio = min(batch() / one_yardstick(q) for _ in range(15))
    finally:
        gc.enable()
    assert call.launches == 16 * 500
    assert ratio < 3, f"{ratio:.1f} times as much as describing four tensors"


def test_the_emulator_still_says_that_it_runs():
    q, k, v = tensors(16, 16)
    with pytest.warns(EmulationWarning):
        compiled(lambda q, k, v: warploom.attention(q, k, v))(q, k, v)


@pytest.mark.gpu
def test_in_cuda_graphs():
    shape = (2, 512, 4, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    function = torch.compile(
        lambda q, k, v: warploom.attention(q, k, v, causal=True), fullgraph=True, mode="reduce-overhead"
    )
    found = [function(q, k, v).clone() for _ in range(4)]  # eager, recorded, replayed
    torch.testing.assert_close(found[-1], warploom.attention(q, k, v, causal=True), rtol=0, atol=0)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention(q, k, v)
    q.normal_()
    graph.replay()
    torch.testing.assert_close(out, warploom.attention(q, k, v), rtol=0, atol=0)
