"""The PyTorch operators: torch.compile without graph breaks, opcheck, export, and what breaks a graph."""

from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.dtypes import f16
from warploom.core.errors import EmulationWarning, ProblemError
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.lang.functions import relu

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward"),  # autograd tells that it saw the error
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def tensors(*shapes, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager", **options})


def heads(length=32, count=2):
    return 1, length, count, 64


TILE = ForwardSm80(tile_m=64, tile_n=32, num_warps=4, head_dim=64, dtype=f16)
WINDOW = {"window": (9, -1), "scale": 0.25, "softcap": 3.0, "return_lse": True, "config": TILE}
SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=2)
PRODUCT: dict[str, Any] = {"accumulate": "f16", "alpha": 0.5, "config": MatmulSm80(32, 32, 32, 16, 16, 2, f16, f16)}
A_B_BIAS = (24, 40), (40, 56), (56,)
reduce: Any = warploom.matmul_reduce
loss: Any = warploom.linear_cross_entropy
CALLS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "attention": (lambda q, k, v: warploom.attention(q * 1, k, v, causal=True) + 1, (heads(), heads(), heads())),
    "attention, options": (lambda q, k, v: warploom.attention(q, k, v, **WINDOW), (heads(24, 4), heads(40), heads(40))),
    "attention, bhsd": (
        lambda q, k, v: warploom.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", **WINDOW),
        (heads(24, 4), heads(40), heads(40)),
    ),
    "matmul": (lambda a, b, _: warploom.matmul(a * 1, b) + 1, A_B_BIAS),
    "matmul, options": (
        lambda a, b, bias: warploom.matmul(a[None], b, bias=bias, out_dtype="f32", **PRODUCT),
        A_B_BIAS,
    ),
    "matmul, torch's type": (lambda a, b, _: warploom.matmul(a, b, out_dtype=torch.float32), A_B_BIAS),
    **{
        op: (lambda a, b, bias, op=op: reduce(a * 1, b, op, scale=0.5, bias=bias, config=SMALL) + 1, A_B_BIAS)
        for op in ("max", "sum", "logsumexp")
    },
    "argmax": (lambda a, b, _: warploom.matmul_reduce(a, b, return_index=True), A_B_BIAS),
    "loss": (lambda a, b, _: warploom.linear_cross_entropy(a, b.T, torch.arange(24) * 2).mean(), A_B_BIAS),
    **{
        f"loss, {reduction}": (
            lambda a, b, _, reduction=reduction: loss(
                a, b.T, torch.arange(24) * 2, reduction=reduction, return_lse=True, ignore_index=6
            ),
            A_B_BIAS,
        )
        for reduction in ("sum", "mean")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_gives_what_an_eager_one_gives(name):
    function, shapes = CALLS[name]
    given = tensors(*shapes)
    torch.testing.assert_close(compiled(function)(*given), function(*given), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["attention", "matmul", "argmax"])
def test_the_default_backend_compiles_it(name):
    function, shapes = CALLS[name]
    given = tensors(*shapes)
    torch.testing.assert_close(compiled(function, backend="inductor")(*given), function(*given))


@pytest.mark.parametrize(("wanted", "expected"), [(False, "attention"), (True, "attention_lse")])
def test_log_sum_exps_are_computed_where_a_gradient_is_wanted(wanted, expected):
    met = []

    def backend(graph, _):
        met.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    q = torch.randn(heads(), dtype=torch.float16).requires_grad_(wanted)
    compiled(lambda q: warploom.attention(q, q, q), backend=backend)(q)
    operators = torch.ops.warploom
    assert getattr(operators, expected) in met or getattr(operators, expected).default in met


def attention_of(rows):
    q = rows[None, :, None]
    return warploom.attention(q, q, q, causal=True)


@pytest.mark.parametrize(
    "function",
    [
        attention_of,
        lambda rows: warploom.matmul(rows, rows[:16].T),
        lambda rows: warploom.linear_cross_entropy(rows, rows[:16], torch.arange(rows.shape[0]) % 16).mean(),
    ],
    ids=["attention", "matmul", "loss"],
)
def test_dynamic_shapes_compile_once(function):
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph

    dynamic = compiled(function, backend=counting, dynamic=True)
    for length in (16, 24, 40):
        (rows,) = tensors((length, 32))
        torch.testing.assert_close(dynamic(rows), function(rows), rtol=0, atol=0)
    assert len(graphs) == 1


def test_export_holds_the_operator():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((64,), 2.0, dtype=torch.float16))

        def forward(self, q, k, v):
            return warploom.attention(q * self.scale, k, v)

    q, k, v = tensors(heads(), heads(), heads())
    exported = torch.export.export(Model(), (q, k, v))
    assert "torch.ops.warploom.attention" in exported.graph_module.code
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(q, k, v), warploom.attention(q * 2, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", ["attention", "attention_lse"])
def test_opcheck_of_attention(name, layout):
    from warploom.operators import attention as operators

    q, k, v = tensors(heads(16), heads(48, 1), heads(48, 1))
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    operator = getattr(operators, f"{name}_operator")
    torch.library.opcheck(operator, (q, k, v), {"causal": True, "layout": layout, "window_left": 20})


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((16, 24), (24, 8)), {}),
        (((2, 1, 16, 24), (3, 24, 8)), {"out_dtype": "f32", "alpha": 2.0}),
        (((0, 24), (24, 8)), {}),
        (((16, 24), (24, 8)), {"epilogue": relu}),
    ],
)
def test_opcheck_of_products(shapes, options):
    from warploom.operators.matmul import matmul_operator, name_of

    named = {name: name_of(x) if name == "epilogue" else x for name, x in options.items()}
    torch.library.opcheck(matmul_operator, tensors(*shapes), named)


@pytest.mark.parametrize("rows", [16, 0])
def test_opcheck_of_reductions(rows):
    from warploom.operators.reduce import argmax_operator, gradients_operator, loss_operator, reduce_operator

    a, b, bias = tensors((rows, 24), (24, 40), (40,))
    torch.library.opcheck(reduce_operator, (a, b, "logsumexp"), {"scale": 2.0, "bias": bias})
    torch.library.opcheck(argmax_operator, (a, b))
    operators = torch.ops.warploom
    means = (operators.linear_cross_entropy_mean,) if rows else ()  # that of no row is NaN, which equals nothing
    for operator in (loss_operator, operators.linear_cross_entropy_sum, *means):
        torch.library.opcheck(operator, (a, b.T.contiguous(), torch.arange(rows)))
    of_rows = {"lse": torch.zeros(rows), "by_lse": torch.ones(rows), "wants_w": False}
    which = "test_schema", "test_faketensor"
    torch.library.opcheck(gradients_operator, (a, b.T.contiguous()), of_rows, test_utils=which)


def test_out_breaks_the_graph():
    a, b = tensors((16, 32), (32, 16))
    out = torch.empty(16, 16).half()
    expected = warploom.matmul(a * 2, b) + 1
    found = compiled(lambda a, b: warploom.matmul(a * 2, b, out=out) + 1, fullgraph=False)(a, b)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(Exception, match=r"takes no out"):
        compiled(lambda a, b: warploom.matmul(a * 2, b, out=out) + 1)(a, b)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def scaled(factor):
    return lambda x: x * factor


FACTOR = 2.0
EPILOGUES: dict[str, Any] = {
    "def": relu,
    "lambda": lambda x: relu(x) * FACTOR,
    "closure": scaled(3.0),
    "object": Scaled(3.0),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_product_with_an_epilogue_is_one_node(name):
    a, b = tensors((16, 32), (32, 16))
    epilogue = EPILOGUES[name]

    def call(a, b):
        return warploom.matmul(a * 2, b, epilogue=epilogue) + 1

    torch.testing.assert_close(compiled(call)(a, b), call(a, b), rtol=0, atol=0)


def test_an_epilogue_of_extra_matrices_written_in_a_compiled_function_is_part_of_its_graph():
    a, b, gate, row = tensors((16, 32), (32, 16), (16, 16), (1, 16))

    def call(a, b):
        return warploom.matmul(a, b, alpha=2.0, epilogue=lambda x, y, z: relu(x) * y + z, extras=[gate, row])

    torch.testing.assert_close(compiled(call)(a, b), call(a, b), rtol=0, atol=0)
    with pytest.raises(Exception, match="at most 2 extra matrices, not 3"):
        compiled(lambda a, b: warploom.matmul(a, b, epilogue=lambda x, *y: x, extras=[gate] * 3))(a, b)


@pytest.mark.parametrize("make", [scaled, Scaled], ids=["closures", "objects"])
def test_graphs_follow_the_epilogue_that_they_are_called_with(make, monkeypatch):
    """Equal functions are two: what one of them sees may change."""
    a, b = tensors((16, 32), (32, 16))
    run, one, other = compiled(lambda a, b, f: warploom.matmul(a, b, epilogue=f)), make(2.0), make(3.0)
    twin = make(2.0)
    for epilogue in (one, other, twin, one):
        torch.testing.assert_close(run(a, b, epilogue), warploom.matmul(a, b, epilogue=epilogue), rtol=0, atol=0)
    if make is Scaled:
        one.factor = 5.0
    else:
        one.__closure__[0].cell_contents = 5.0
    for epilogue, factor in ((twin, 2.0), (one, 5.0)):
        expected = warploom.matmul(a, b, epilogue=lambda x, factor=factor: x * factor)
        torch.testing.assert_close(run(a, b, epilogue), expected, rtol=0, atol=0)
    graph = compiled(lambda a, b: warploom.matmul(a, b, epilogue=lambda x: x * FACTOR))
    for factor in (2.0, 7.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        expected = warploom.matmul(a, b, epilogue=lambda x, factor=factor: x * factor)
        torch.testing.assert_close(graph(a, b), expected, rtol=0, atol=0)


def test_an_epilogue_that_closes_over_what_changes_breaks_the_graph():
    a, b = tensors((16, 32), (32, 16))

    def call(a, b, factor):
        return warploom.matmul(a * 1, b, epilogue=lambda x: x * factor)

    run = compiled(call, fullgraph=False)
    for factor in (2.0, 3.0, 4.0):
        torch.testing.assert_close(run(a, b, factor), call(a, b, factor), rtol=0, atol=0)


def test_an_epilogue_of_another_process_is_named():
    from warploom.operators.matmul import matmul_operator

    a, b = tensors((16, 32), (32, 16))
    with pytest.raises(ProblemError, match=r"gelu\.77 is a function of the process that traced"):
        matmul_operator(a, b, epilogue="gelu.77")


def test_plans_break_the_graph():
    a, b, q = tensors((16, 32), (32, 16), (1, 16, 1, 16))

    def planned(a, b):
        plans = warploom.plan_matmul(a * 1, b), warploom.plan_matmul_reduce(a * 1, b), warploom.plan(*[q * 1] * 3)
        return a + 1, [plan.grid for plan in plans]

    assert compiled(planned, fullgraph=False)(a, b)[1] == planned(a, b)[1]
    with pytest.raises(Exception, match="plans are made outside of graphs"):
        compiled(planned)(a, b)


def test_where_gradients_are_switched_off_a_call_runs():
    q, k, v = tensors(heads(16), heads(16), heads(16))
    expected = warploom.attention(q, k, v)
    q.requires_grad_()
    from warploom.operators.attention import attention_operator

    with pytest.raises(ProblemError, match="no_grad"):
        attention_operator(q, k, v)
    with torch.no_grad():
        torch.testing.assert_close(attention_operator(q, k, v), expected, rtol=0, atol=0)
        torch.testing.assert_close(compiled(warploom.attention)(q, k, v), expected, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(attention_operator(q, k, v), expected, rtol=0, atol=0)


def test_the_emulator_still_says_that_it_runs():
    q, k, v = tensors(heads(16), heads(16), heads(16))
    with pytest.warns(EmulationWarning):
        compiled(lambda q, k, v: warploom.attention(q, k, v))(q, k, v)


# -- on a GPU


def on_gpu(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
def test_graphs_replay_on_new_data():
    q, k, v, x, w = *(on_gpu(2, 512, 4, 128) for _ in range(3)), on_gpu(512, 256), on_gpu(5000, 256)
    target = torch.randint(5000, (512,), device="cuda")

    def everything():
        return (
            warploom.attention(q, k, v),
            *warploom.matmul_reduce(x, w.T, return_index=True),
            warploom.matmul_reduce(x, w.T, "logsumexp"),
            warploom.linear_cross_entropy(x, w, target),
        )

    everything()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = everything()
    q.normal_()
    x.normal_()
    target.random_(5000)
    graph.replay()
    torch.cuda.synchronize()
    for one, expected in zip(found, everything(), strict=True):
        assert torch.equal(one, expected)
    loss = torch.nn.functional.cross_entropy(x.double() @ w.double().T, target, reduction="none")
    assert float((found[-1].double() - loss).abs().max()) < 1e-3


@pytest.mark.gpu
def test_compiled_with_graphs_of_their_own():
    q, k, v, w = *(on_gpu(2, 512, 4, 128) for _ in range(3)), on_gpu(1000, 128)
    both = compiled(
        lambda q, x: (warploom.attention(q, k, v, causal=True), warploom.matmul_reduce(x + 1, w.T, "logsumexp") * 2),
        backend="inductor",
        mode="reduce-overhead",
    )
    for _ in range(4):  # eager, recorded, replayed
        x = on_gpu(300, 128)
        out, sums = (y.clone() for y in both(q, x))
        torch.testing.assert_close(out, warploom.attention(q, k, v, causal=True), rtol=0, atol=0)
        expected = torch.logsumexp((x + 1).double() @ w.double().T, -1) * 2
        assert float((sums.double() - expected).abs().max()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "jax"])
def test_reductions_of_other_frameworks_arrays(framework):
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
