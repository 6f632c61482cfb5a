"""Row reductions of products as PyTorch operators: no graph breaks, opcheck, and what they refuse."""

from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.errors import ProblemError
from warploom.kernels.matmul.sm80 import MatmulSm80

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning")
SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=2)


def tensors(*shapes, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
def test_reductions_compile_without_graph_breaks(op):
    a, b, bias = tensors((24, 40), (40, 50), (50,))
    options: dict[str, Any] = {"scale": 0.5, "bias": bias, "config": SMALL}
    found = compiled(lambda a, b: warploom.matmul_reduce(a * 1, b, op, **options) + 1)(a, b)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, warploom.matmul_reduce(a, b, op, **options) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_index_comes_with_the_maximum(backend):
    a, b = tensors((24, 40), (50, 40))
    values, index = compiled(lambda a, b: warploom.matmul_reduce(a, b.T, return_index=True), backend=backend)(a, b)
    best, where = (a.float() @ b.T.float()).max(-1)
    torch.testing.assert_close(values, best)
    assert index.dtype == torch.int32
    assert (index == where).all()


def test_the_loss_compiles_for_any_number_of_tokens():
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph

    function = compiled(lambda x, w, t: warploom.linear_cross_entropy(x, w, t).mean(), backend=counting, dynamic=True)
    for tokens in (16, 24, 40):
        x, w = tensors((tokens, 32), (48, 32))
        target = torch.arange(tokens) % 48
        expected = torch.nn.functional.cross_entropy(x.double() @ w.double().T, target)
        torch.testing.assert_close(function(x, w, target).double(), expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("rows", [16, 0])
def test_opcheck(rows):
    from warploom.operators.reduce import argmax_operator, loss_operator, reduce_operator

    a, b, bias = tensors((rows, 24), (24, 40), (40,))
    for op in ("max", "logsumexp"):
        torch.library.opcheck(reduce_operator, (a, b, op), {"scale": 2.0, "bias": bias})
    torch.library.opcheck(argmax_operator, (a, b))
    torch.library.opcheck(loss_operator, (a, b.T.contiguous(), torch.arange(rows)))


def test_gradients_are_refused_in_words():
    a, b = tensors((16, 32), (32, 16))
    a.requires_grad_()
    target = torch.zeros(16, dtype=torch.int64)
    calls = (
        lambda a: warploom.matmul_reduce(a, b),
        lambda a: warploom.matmul_reduce(a, b, return_index=True)[0],
        lambda a: warploom.linear_cross_entropy(a, b.T, target),
    )
    for call in calls:
        with pytest.raises(ProblemError, match="no backward pass yet"):
            call(a)
        with pytest.raises(Exception, match="no backward pass yet"):
            compiled(lambda a, call=call: call(a * 2).sum())(a)
        with torch.no_grad():
            assert call(a).shape == (16,)


def test_a_wrong_call_says_why():
    a, b = tensors((16, 32), (24, 16))
    with pytest.raises(Exception, match="must be equal"):
        compiled(warploom.matmul_reduce)(a, b)
    with pytest.raises(Exception, match="are matrices"):
        compiled(warploom.matmul_reduce)(a, b[0])
    with pytest.raises(Exception, match="op is 'max'"):
        compiled(lambda a, b: warploom.matmul_reduce(a, b, "min"))(a, b.T)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.gpu
def test_cuda_graphs_replay_on_new_data():
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(5000, (512,), device="cuda")

    def everything():
        return (*warploom.matmul_reduce(x, w.T, return_index=True), warploom.matmul_reduce(x, w.T, "logsumexp"),
                warploom.linear_cross_entropy(x, w, target))  # fmt: skip

    everything()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = everything()
    x.copy_(torch.randn(512, 256, device="cuda"))
    target.copy_(torch.randint(5000, (512,), device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    for one, expected in zip(found, everything(), strict=True):
        assert torch.equal(one, expected)
    loss = torch.nn.functional.cross_entropy(x.double() @ w.double().T, target, reduction="none")
    assert float((found[3].double() - loss).abs().max()) < 1e-3


@pytest.mark.gpu
def test_compiled_on_a_gpu_with_cuda_graphs():
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1000, 128, device="cuda", dtype=torch.bfloat16)
    function = compiled(lambda x: warploom.matmul_reduce(x + 1, w.T, "logsumexp") * 2, backend="inductor",
                        mode="reduce-overhead")  # fmt: skip
    for _ in range(3):
        x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
        expected = torch.logsumexp((x + 1).double() @ w.double().T, -1) * 2
        assert float((function(x).double() - expected).abs().max()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "jax"])
def test_arrays_of_other_frameworks(framework):
    module = pytest.importorskip(framework)
    if framework == "jax" and module.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    asarray = module.numpy.asarray if framework == "jax" else module.asarray
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((100, 64), (64, 333)))
    target = rng.integers(333, size=100).astype(np.int32)
    values, index = warploom.matmul_reduce(asarray(a), asarray(b), return_index=True)
    losses = warploom.linear_cross_entropy(asarray(a), asarray(np.ascontiguousarray(b.T)), asarray(target))
    assert type(values).__module__.split(".")[0] in (framework, "jaxlib")
    host = module.asnumpy if framework == "cupy" else np.asarray
    product = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(host(values) - product.max(1)).max() < 1e-3
    assert (host(index) == product.argmax(1)).all()
    expected = np.logaddexp.reduce(product, 1) - product[np.arange(100), target]
    assert np.abs(host(losses) - expected).max() < 1e-3
