"""``warploom::matmul`` as a PyTorch operator: torch.compile without graph breaks, opcheck, and what it refuses."""

from typing import Any

import pytest

import warploom
from warploom.core.dtypes import f16
from warploom.core.errors import ProblemError
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.lang.functions import relu

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning"),
    pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward"),
]


def tensors(*shapes, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager", **options})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_breaks(backend):
    x, w = tensors((24, 40), (32, 40))
    found = compiled(lambda x, w: warploom.matmul(x * 1, w.T) + 1, backend=backend)(x, w)
    torch.testing.assert_close(found, warploom.matmul(x, w.T) + 1)


@pytest.mark.parametrize("out_dtype", ["f32", torch.float32, None])
def test_every_option_reaches_the_kernel(out_dtype):
    a, b, bias = tensors((3, 16, 32), (32, 24), (24,))
    config = MatmulSm80(32, 32, 32, 16, 16, stages=2, accumulate=f16)
    options = {"out_dtype": out_dtype, "accumulate": "f16", "alpha": 0.5, "config": config}
    found = compiled(lambda a, b, bias: warploom.matmul(a, b, bias=bias, **options))(a, b, bias)
    expected = warploom.matmul(a, b, bias=bias, **options)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_dynamic_shapes_compile_once():
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph

    function = compiled(warploom.matmul, backend=counting, dynamic=True)
    for rows in (16, 24, 40):
        a, b = tensors((rows, 32), (32, 24))
        torch.testing.assert_close(function(a, b), warploom.matmul(a, b), rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((16, 24), (24, 8)), {}),
        (((2, 1, 16, 24), (3, 24, 8)), {"out_dtype": "f32", "alpha": 2.0}),
        (((0, 24), (24, 8)), {}),
    ],
)
def test_opcheck(shapes, options):
    from warploom.operators.matmul import matmul_operator

    torch.library.opcheck(matmul_operator, tensors(*shapes), options)


OPTIONS: list[dict[str, Any]] = [
    {"epilogue": relu},
    {"out": True},
    {"epilogue": lambda x, y: x + y, "extras": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["epilogue", "out", "extras"])
def test_what_no_operator_takes_breaks_the_graph(options):
    a, b, gate = tensors((16, 32), (32, 16), (16, 16))
    given = options | ({"out": torch.empty(16, 16).half()} if "out" in options else {})
    given |= {"extras": (gate,)} if "extras" in options else {}
    expected = warploom.matmul(a * 2, b, **given) + 1
    found = compiled(lambda a, b: warploom.matmul(a * 2, b, **given) + 1, fullgraph=False)(a, b)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(Exception, match=r"takes no epilogue, extras or out under torch\.compile: leave what follows"):
        compiled(lambda a, b: warploom.matmul(a * 2, b, **given) + 1)(a, b)


def test_plans_break_the_graph():
    a, b = tensors((16, 32), (32, 16))

    def planned(a, b):
        plans = warploom.plan_matmul(a * 1, b), warploom.plan_matmul_reduce(a * 1, b), warploom.plan(*[q * 1] * 3)
        return a + 1, [plan.grid for plan in plans]

    (q,) = tensors((1, 16, 1, 16))
    found = compiled(planned, fullgraph=False)(a, b)
    assert found[1] == planned(a, b)[1]
    with pytest.raises(Exception, match="plans are made outside of graphs"):
        compiled(planned)(a, b)


def test_gradients_are_refused_in_words():
    a, b = tensors((16, 32), (32, 16))
    a.requires_grad_()
    from warploom.operators.matmul import matmul_operator

    with pytest.raises(ProblemError, match="no backward pass yet"):
        matmul_operator(a, b)
    with pytest.raises(Exception, match="no backward pass yet"):
        compiled(lambda a, b: warploom.matmul(a * 2, b).sum())(a, b)


def test_a_wrong_call_says_why():
    a, b = tensors((16, 32), (24, 16))
    with pytest.raises(Exception, match="must be equal"):
        compiled(warploom.matmul)(a, b)
    with pytest.raises(Exception, match="add a dimension"):
        compiled(warploom.matmul)(a, b[0])
