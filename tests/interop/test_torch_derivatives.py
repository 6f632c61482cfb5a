# pyright: reportInvalidTypeForm=false
"""Derivatives that there are none of are refused, and what PyTorch records is right: never zeros or old memory."""

import warnings

import pytest

import warploom
from warploom.core.errors import EmulationWarning, ProblemError
from warploom.interop.arrays import describe
from warploom.lang import Global, Kernel, f32, kernel

torch = pytest.importorskip("torch")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")
func = pytest.importorskip("torch.func")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

REFUSED = "no backward pass|no forward-mode derivatives yet"
GENERATOR = torch.Generator().manual_seed(0)


def matrix(*shape):
    return torch.randn(shape, generator=GENERATOR).to(torch.bfloat16)


OTHER, KEYS, WORDS = matrix(16, 16), matrix(1, 16, 1, 16), torch.arange(16)
OPERATIONS = {
    "attention": lambda x: warploom.attention(x[None, :, None], KEYS, KEYS).float().sum(),
    "matmul": lambda x: warploom.matmul(x, OTHER).float().sum(),
    "matmul_reduce": lambda x: warploom.matmul_reduce(x, OTHER).sum(),
    "linear_cross_entropy": lambda x: warploom.linear_cross_entropy(x, OTHER, WORDS).sum(),
}


def by_backward(f, x):
    y = x.clone().requires_grad_()
    torch.autograd.grad(f(y), y)


def by_dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


WAYS = {
    "backward": by_backward,
    "checkpoint": lambda f, x: checkpoint(f, x.clone().requires_grad_(), use_reentrant=False),
    "grad": lambda f, x: func.grad(f)(x),
    "vjp": lambda f, x: func.vjp(f, x),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "grad in vmap": lambda f, x: func.vmap(func.grad(f))(x[None]),
    "dual": by_dual,
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "linearize": lambda f, x: func.linearize(f, x),
    "make_fx": lambda f, x: make_fx(func.grad(f))(x),
}


FORWARD = ("dual", "jvp", "jacfwd", "linearize", "hessian")
NO_BACKWARD = ("matmul_reduce",)
"""A reduction to maxima is not differentiated."""


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in OPERATIONS for way in WAYS if name in NO_BACKWARD or way in FORWARD]
)
def test_a_derivative_is_refused(name, way):
    with pytest.raises(ProblemError, match=REFUSED):
        WAYS[way](OPERATIONS[name], matrix(16, 16))


def test_a_tangent_below_a_gradient_is_refused():
    """Of a level around ``torch.func.grad``, which PyTorch would drop."""
    x, f = matrix(16, 16), OPERATIONS["matmul"]
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="carries a tangent"):
        func.grad(f)(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="carries a tangent"):
        func.vjp(f, x)[1](forward_ad.make_dual(torch.ones(()), torch.ones(())))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in NO_BACKWARD])
def test_gradients_where_only_others_carry_tangents(name):
    x, f = matrix(16, 16), OPERATIONS[name]
    expected = func.grad(f)(x)
    with forward_ad.dual_level():
        assert func.grad(f)(x).equal(expected)
        y = x.clone().requires_grad_()
        assert torch.autograd.grad(f(y), y)[0].equal(expected)
    _, found = func.jvp(lambda factor: factor * func.grad(f)(x), (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert found.equal(expected)


INTO = {
    "attention_varlen": lambda x, out: warploom.attention_varlen(
        x[:, None], KEYS[0], KEYS[0], torch.tensor([0, 16], dtype=torch.int32), out=out[:, None]
    ),
    "matmul": lambda x, out: warploom.matmul(x, OTHER, out=out),
}


@pytest.mark.parametrize("name", INTO)
def test_what_is_written_to_out_has_no_history(name):
    out = matrix(16, 16)
    with pytest.raises(ProblemError, match="no backward pass"):
        INTO[name](matrix(16, 16).requires_grad_(), out)
    with torch.autocast("cpu", torch.bfloat16):
        INTO[name](matrix(16, 16), out)


TRACED = ("backward", "grad", "vjp", "jacrev", "grad in vmap", "jvp", "jacfwd")
CASES = [("matmul_reduce", way) for way in TRACED] + [("matmul", "jvp"), ("linear_cross_entropy", "jacfwd")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_derivative_inside_a_compiled_function_is_refused(name, way):
    torch._dynamo.reset()
    function = torch.compile(lambda x: WAYS[way](OPERATIONS[name], x), backend="aot_eager", fullgraph=way != "backward")
    with pytest.raises(Exception, match=REFUSED):
        function(matrix(16, 16))


@pytest.mark.parametrize(("name", "way"), [("matmul_reduce", "backward"), ("matmul_reduce", "grad"), ("matmul", "jvp")])
def test_a_derivative_of_a_compiled_function_is_refused(name, way):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=REFUSED):
        WAYS[way](torch.compile(OPERATIONS[name], backend="aot_eager"), matrix(16, 16))


def test_a_derivative_inside_an_exported_module_is_refused():
    class Model(torch.nn.Module):
        def forward(self, x):
            return func.grad(OPERATIONS["matmul_reduce"])(x)

    with pytest.raises(Exception, match=REFUSED):
        torch.export.export(Model(), (matrix(16, 16),))


def test_the_operators_refuse_for_themselves():
    from warploom.operators.matmul import matmul_operator
    from warploom.operators.reduce import reduce_operator

    for operator, ways in ((matmul_operator, ("dual", "jvp")), (reduce_operator, ("backward", "dual", "jvp", "grad"))):
        for way in ways:
            with pytest.raises(ProblemError, match=REFUSED):
                WAYS[way](lambda x, operator=operator: operator(x, OTHER).float().sum(), matrix(16, 16))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_recorded_call_computes_again(name):
    function, first, second = OPERATIONS[name], matrix(16, 16), matrix(16, 16)
    for recorded in (make_fx(function, tracing_mode="real")(first), torch.jit.trace(function, (first,))):
        torch.testing.assert_close(recorded(second), function(second), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_and_functionalize_compute_what_single_calls_do(name):
    function, batch = OPERATIONS[name], matrix(2, 16, 16)
    expected = torch.stack([function(x) for x in batch])
    torch._dynamo.reset()
    for mapped in (func.vmap(function), torch.compile(func.vmap(function), backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(mapped(batch), expected, rtol=0, atol=0)
    torch.testing.assert_close(func.functionalize(function)(batch[1]), expected[1], rtol=0, atol=0)


def test_a_call_that_is_refused_inside_vmap_says_so_whatever_was_called_before():
    q = matrix(3, 1, 16, 2, 16)
    mapped = func.vmap(func.grad(lambda x: warploom.attention(x, q[0], q[0]).float().sum()), in_dims=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", EmulationWarning)
        gradient = func.vmap(func.grad(lambda x: warploom.attention(x, q[0], q[0]).float().sum()))(q)
        assert gradient.shape == q.shape
        with pytest.raises(ProblemError, match="last dimension of q is not contiguous"):
            mapped(q.movedim(0, -1).contiguous())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_takes_a_batch_in_any_dimension(axis):
    x, by = matrix(3, 16, 16), matrix(16)
    function = lambda x, by: warploom.matmul(x, OTHER, bias=by, epilogue=lambda s, e: s * e, extras=(OTHER,))  # noqa: E731
    found = func.vmap(function, in_dims=(axis, None))(x.movedim(0, axis), by)
    torch.testing.assert_close(found, torch.stack([function(one, by) for one in x]), rtol=0, atol=0)


class Log(TorchDispatchMode):
    """A mode of somebody's own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


@kernel(threads=32)
def fill(k: Kernel, x: Global[f32]) -> None:
    x.store(1.0, k.thread)


def test_modes_see_the_operator_and_every_call_runs():
    x, zeros = matrix(16, 16), torch.zeros(32)
    expected, grid = warploom.matmul(x, OTHER, epilogue=lambda s: s * 2), warploom.plan_matmul(x, OTHER).grid
    with Log(), Log() as log:
        product = warploom.matmul(x, OTHER)
        doubled = warploom.matmul(x, OTHER, epilogue=lambda s: s * 2)
        assert warploom.plan_matmul(x, OTHER).grid == grid
        warploom.launch(fill, 1, [zeros])
    assert log.seen == ["warploom.matmul.default"] * 2
    torch.testing.assert_close(product * 2, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(doubled, expected, rtol=0, atol=0)
    assert (zeros == 1).all()


LOST = {
    "launch": lambda x: (warploom.launch(fill, 1, [x]), x)[1],
    "plan": lambda x: (warploom.plan_matmul(x, OTHER), x)[1],
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_recording_would_lose_is_refused(name):
    x = torch.zeros(32) if name == "launch" else matrix(16, 16)
    for record in (make_fx(LOST[name]), lambda x: torch.jit.trace(LOST[name], (x,)), func.vmap(LOST[name])):
        with pytest.raises(ProblemError, match="cannot be recorded or transformed"):
            record(x)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_named(layout):
    nested = torch.nested.nested_tensor([matrix(16, 16)] * 2, layout=layout)
    with pytest.raises(ProblemError, match="nested tensors are not supported"):
        warploom.matmul(nested, OTHER)
    if layout is torch.strided:  # jagged ones decide themselves what operators they take
        from warploom.operators.matmul import matmul_operator

        with pytest.raises(ProblemError, match="nested tensors are not supported"):
            matmul_operator(nested, OTHER)


def test_where_no_operator_stands_wrapped_tensors_are_named():
    with pytest.raises(ProblemError, match=r"inside torch\.vmap"):
        func.vmap(describe)(torch.zeros(2, 3))
