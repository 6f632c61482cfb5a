"""Under ``torch.compile`` and ``torch.export`` a wrong call is refused while tracing, in an eager call's words."""

from typing import Any

import pytest

import warploom
from warploom.core.errors import WarploomError

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")


def half(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


Q, A, B = half(1, 16, 2, 16), half(16, 32), half(32, 24)
K3 = half(1, 16, 3, 16)
attention: Any = warploom.attention
matmul: Any = warploom.matmul
reduce: Any = warploom.matmul_reduce
loss: Any = warploom.linear_cross_entropy
WRONG = {
    "lengths of k and v": lambda: (lambda q: attention(q, q, q[:, :8]), Q),
    "head_dim": lambda: (lambda q: attention(q, q, q), half(1, 16, 2, 12)),
    "head_dims": lambda: (lambda q: attention(q, q[..., :8], q[..., :8]), Q),
    "groups of heads": lambda: (lambda q: attention(q, K3, K3), Q),
    "three dimensions": lambda: (lambda q: attention(q, q, q), Q[0]),
    "f32": lambda: (lambda q: attention(q, q, q), Q.float()),
    "two types": lambda: (lambda q: attention(q, q.bfloat16(), q), Q),
    "last dimension": lambda: (lambda q: attention(q, q, q), Q.transpose(1, 3)),
    "layout": lambda: (lambda q: attention(q, q, q, layout="sbhd"), Q),
    "window": lambda: (lambda q: attention(q, q, q, window=(-2, 3)), Q),
    "softcap": lambda: (lambda q: attention(q, q, q, softcap=-1.0), Q),
    "scale": lambda: (lambda q: attention(q, q, q, scale=float("inf")), Q),
    "config of attention": lambda: (lambda q: attention(q, q, q, config="nonsense"), Q),
    "another head_dim": lambda: (lambda q: attention(q, q, q, config="(FP16, 128, 64, 64, 4): async"), Q),
    "columns and rows": lambda: (lambda a: matmul(a, B[:8]), A),
    "a vector": lambda: (lambda a: matmul(a, B[0]), A),
    "batches": lambda: (lambda a: matmul(a.expand(2, 16, 32), B.expand(3, 32, 24)), A),
    "types of a product": lambda: (lambda a: matmul(a, B.bfloat16()), A),
    "integers": lambda: (lambda a: matmul(a.int(), B.int()), A),
    "bias": lambda: (lambda a: matmul(a, B, bias=B[0, :5]), A),
    "type of the bias": lambda: (lambda a: matmul(a, B, bias=B[0].float()), A),
    "out_dtype": lambda: (lambda a: matmul(a, B, out_dtype="f64"), A),
    "no type": lambda: (lambda a: matmul(a, B, out_dtype="quaternion"), A),
    "accumulate": lambda: (lambda a: matmul(a, B, accumulate="s32"), A),
    "alpha": lambda: (lambda a: matmul(a, B, alpha=1e39), A),
    "config of products": lambda: (lambda a: matmul(a, B, config="BM=7"), A),
    "rows to reduce": lambda: (lambda a: reduce(a, B[:8]), A),
    "three dimensions to reduce": lambda: (lambda a: reduce(a[None], B), A),
    "nothing to reduce": lambda: (lambda a: reduce(a, B[:, :0]), A),
    "argmax": lambda: (lambda a: reduce(a, B[:8], return_index=True), A),
    "scale of a reduction": lambda: (lambda a: reduce(a, B, scale=float("nan")), A),
    "target": lambda: (lambda a: loss(a, B.T, torch.zeros(16)), A),
    "targets": lambda: (lambda a: loss(a, B.T, torch.zeros(15, dtype=torch.int64)), A),
    "words": lambda: (lambda a: loss(a, B, torch.zeros(16, dtype=torch.int64)), A),
}


class Module(torch.nn.Module):
    """A function of one tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_while_tracing(name):
    function, x = WRONG[name]()
    with pytest.raises(WarploomError) as eager:
        function(x)
    says = str(eager.value).split(" (")[0]
    torch._dynamo.reset()
    for trace in (
        lambda: torch.compile(function, backend="eager", fullgraph=True)(x),
        lambda: torch.export.export(Module(function), (x,)),
    ):
        with pytest.raises(Exception) as traced:  # PyTorch wraps it in an error of its own
            trace()
        assert says in str(traced.value).replace("s0", "16")


@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_numpys_numbers_are_options_of_attention(option):
    outside, of_one = np.float32(0.5), np.array(0.5)
    calls = (
        lambda q: attention(q, q, q, **{option: 2 / np.sqrt(q.shape[-1])}),
        lambda q: attention(q, q, q, **{option: outside}),
        lambda q: attention(q, q, q, **{option: of_one}),
    )
    for call in calls:
        torch._dynamo.reset()
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(Q)
        torch.testing.assert_close(found, attention(Q, Q, Q, **{option: 0.5}), rtol=0, atol=0)


def test_numpys_numbers_are_factors_of_products():
    half_ = np.float64(0.5)
    calls = {
        lambda a: warploom.matmul(a, B, alpha=half_): warploom.matmul(A, B, alpha=0.5),
        lambda a: warploom.matmul_reduce(a, B, scale=half_): warploom.matmul_reduce(A, B, scale=0.5),
        lambda a: warploom.matmul_reduce(a, B, scale=half_, return_index=True)[1]: warploom.matmul_reduce(
            A, B, return_index=True
        )[1],
        lambda a: warploom.matmul(a, B, alpha=np.sqrt(0.25)): warploom.matmul(A, B, alpha=0.5),
    }
    for call, expected in calls.items():
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(A), expected)


def test_a_number_in_a_tensor_is_read_when_the_graph_runs():
    torch._dynamo.reset()
    function = torch.compile(lambda a, x: matmul(a, B, alpha=x), backend="aot_eager", fullgraph=True)
    for value in (1.0, 3.0):
        found = function(A, torch.tensor(value))
        torch.testing.assert_close(found, warploom.matmul(A, B, alpha=value), rtol=0, atol=0)


def test_a_number_whose_gradient_is_wanted_is_refused():
    temperature = torch.tensor(0.5, requires_grad=True)
    for call in (
        lambda: attention(Q, Q, Q, scale=temperature),
        lambda: matmul(A, B, alpha=temperature),
        lambda: torch.compile(lambda a: matmul(a, B, alpha=temperature), backend="aot_eager")(A),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="no backward pass"):
            call()
    with torch.no_grad():
        assert matmul(A, B, alpha=temperature).shape == (16, 24)


def test_sizes_that_only_the_data_tells_are_checked_when_it_is_there():
    def chosen(x, keep):
        rows = x[keep]
        return warploom.matmul(rows, B), warploom.matmul_reduce(rows, B), warploom.attention(*[rows[None, :, None]] * 3)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = torch.compile(chosen, backend="eager", fullgraph=True)
        for count in (5, 9):
            keep = torch.arange(16) < count
            for found, expected in zip(function(A, keep), chosen(A, keep), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
