"""Gradients as PyTorch's users ask for them: eager, compiled, checkpointed, under autocast; beside float64."""

from typing import Any

import pytest

import warploom
from warploom.core.errors import ProblemError
from warploom.lang.functions import gelu, silu

torch = pytest.importorskip("torch")
func = pytest.importorskip("torch.func")
F: Any = pytest.importorskip("torch.nn.functional")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

# vmap calls the operator in a loop
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

IGNORED = -100
TARGET = torch.arange(24) * 2
TARGET[5] = IGNORED


def tensors(*shapes, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def loss(x, w, **options):
    return warploom.linear_cross_entropy(x, w, TARGET, **options)


def plain_loss(x, w, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="none", bias=0.0):
    s = x @ w.T + bias
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    kept = TARGET != IGNORED
    more = z_loss * torch.logsumexp(s, 1) ** 2 * kept
    more = more if reduction == "none" else more.sum() / kept.sum()
    return F.cross_entropy(s, TARGET, label_smoothing=label_smoothing, reduction=reduction) + more


def with_log_sum(out, lse):
    """One value of both results."""
    return out.to(lse.dtype) + lse.mT[..., None]


def plain_attention(q, k, v, sinks=None, causal=False, softcap=None, window=None):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    apart = torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2] - torch.arange(s.shape[3])
    s = s.masked_fill((apart < 0) if causal else torch.zeros_like(apart, dtype=torch.bool), -torch.inf)
    s = s if window is None else s.masked_fill(apart > window, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1)[..., : k.shape[1]], v), torch.logsumexp(s, -1)


HEADS = (1, 24, 2, 16), (1, 40, 1, 16), (1, 40, 1, 16)
ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "reduction": "mean"}
FORMED = {**ALL, "softcap": None}
CALLS: dict[str, tuple[Any, Any, tuple[tuple[int, ...], ...]]] = {
    "matmul": (
        lambda a, b, c: warploom.matmul(a, b, bias=c, alpha=0.5),
        lambda a, b, c: 0.5 * (a @ b) + c,
        ((24, 40), (40, 56), (56,)),
    ),
    "matmul, f32": (
        lambda a, b: warploom.matmul(a, b, out_dtype=torch.float32),
        lambda a, b: a @ b,
        ((24, 40), (40, 56)),
    ),
    "matmul, rows in batches": (
        lambda a, b, c: warploom.matmul(a, b.mT, bias=c),
        lambda a, b, c: a @ b.mT + c,
        ((2, 3, 8, 24), (16, 24), (16,)),
    ),
    "matmul, broadcast": (lambda a, b: warploom.matmul(a, b), lambda a, b: a @ b, ((2, 1, 8, 24), (3, 24, 16))),
    "matmul, one for many": (lambda a, b: warploom.matmul(a, b), lambda a, b: a @ b, ((8, 24), (3, 24, 16))),
    "matmul, columns": (lambda a, b: warploom.matmul(a.mT, b), lambda a, b: a.mT @ b, ((40, 24), (40, 17))),
    "sum": (
        lambda a, b, c: warploom.matmul_reduce(a, b, "sum", scale=0.5, bias=c),
        lambda a, b, c: (0.5 * (a @ b) + c).sum(1),
        ((24, 40), (40, 56), (56,)),
    ),
    "logsumexp": (
        lambda a, b, c: warploom.matmul_reduce(a, b, "logsumexp", scale=0.5, bias=c),
        lambda a, b, c: torch.logsumexp(0.5 * (a @ b) + c, 1),
        ((24, 40), (40, 56), (56,)),
    ),
    "loss": (loss, plain_loss, ((24, 40), (56, 40))),
    "loss, options": (
        lambda x, w, b: loss(x, w, bias=b, **ALL),
        lambda x, w, b: plain_loss(x, w, bias=b, **ALL),
        ((24, 40), (56, 40), (56,)),
    ),
    "loss, sum": (
        lambda x, w: loss(x, w, reduction="sum"),
        lambda x, w: plain_loss(x, w, reduction="sum"),
        ((24, 40), (56, 40)),
    ),
    "loss, formed": (
        lambda x, w, b: loss(x, w, bias=b, **FORMED),
        lambda x, w, b: plain_loss(x, w, bias=b, **FORMED),
        ((24, 40), (56, 40), (56,)),
    ),
    "loss, in chunks": (
        lambda x, w: loss(x, w, reduction="mean", workspace_mib=1),
        lambda x, w: plain_loss(x, w, reduction="mean"),
        ((24, 40), (56, 40)),
    ),
    "loss, mean and log-sum-exp": (
        lambda x, w: (lambda a, b: a + b)(*loss(x, w, reduction="mean", return_lse=True)),
        lambda x, w: plain_loss(x, w, reduction="mean") + torch.logsumexp(x @ w.T, 1),
        ((24, 40), (56, 40)),
    ),
    "loss, log-sum-exp": (
        lambda x, w: (lambda a, b: a + b)(*loss(x, w, return_lse=True)),
        lambda x, w: plain_loss(x, w) + torch.logsumexp(x @ w.T, 1),
        ((24, 40), (56, 40)),
    ),
}
CALLS |= {
    "attention": (
        lambda q, k, v: warploom.attention(q, k, v, causal=True),
        lambda *x: plain_attention(*x, causal=True)[0],
        HEADS,
    ),
    "attention, options": (
        lambda q, k, v, s: warploom.attention(q, k, v, softcap=3.0, window=(9, 0), sinks=s),
        lambda *x: plain_attention(*x, causal=True, softcap=3.0, window=9)[0],
        (*HEADS, (2,)),
    ),
    "attention, log-sum-exp": (
        lambda *x: with_log_sum(*warploom.attention(*x, return_lse=True)),
        lambda *x: with_log_sum(*plain_attention(*x)),
        (*HEADS[:2], (1, 40, 1, 24)),
    ),
}
EPILOGUES: dict[str, tuple[Any, Any, tuple[tuple[int, ...], ...]]] = {
    "gelu": (
        lambda a, b, c: warploom.matmul(a, b, bias=c, epilogue=gelu),
        lambda a, b, c: F.gelu(a @ b + c, approximate="tanh"),
        ((24, 40), (40, 56), (56,)),
    ),
    "gate": (
        lambda a, b, h: warploom.matmul(a, b, alpha=0.5, epilogue=lambda x, y: silu(x) * y, extras=(h,)),
        lambda a, b, h: F.silu(0.5 * a @ b) * h,
        ((24, 40), (40, 56), (24, 56)),
    ),
    "a value for each row": (
        lambda a, b, r: warploom.matmul(a, b, epilogue=lambda x, y: x * y, extras=(r.float(),)),
        lambda a, b, r: (a @ b) * r,
        ((24, 40), (40, 56), (24, 1)),
    ),
    "a value for each column": (
        lambda a, b, r: warploom.matmul(a, b, epilogue=lambda x, y: silu(x) * y, extras=(r,)),
        lambda a, b, r: F.silu(a @ b) * r,
        ((24, 40), (40, 56), (1, 56)),
    ),
    "batches": (
        lambda a, b: warploom.matmul(a, b, epilogue=gelu),
        lambda a, b: F.gelu(a @ b, approximate="tanh"),
        ((2, 8, 24), (24, 16)),
    ),
}


def assert_gradients(call, reference, given, gradient=None):
    """Each gradient within a few roundings of 16 bits of float64's, for random or given gradients of the result."""
    own, exact = ([x.detach().to(kind or x.dtype).requires_grad_() for x in given] for kind in (None, torch.float64))
    result = call(*own)
    seed = torch.Generator().manual_seed(1)
    by = torch.randn(result.shape, generator=seed).to(result.dtype) if gradient is None else gradient(result)
    found = torch.autograd.grad(result, own, by)
    expected = torch.autograd.grad(reference(*exact), exact, by.double())
    for x, grad, want in zip(own, found, expected, strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        torch.testing.assert_close(grad.double(), want, rtol=2**-7, atol=2**-7 * want.abs().max().item())


@pytest.mark.parametrize("name", [*CALLS, *EPILOGUES])
def test_eager(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]
    assert_gradients(call, reference, tensors(*shapes))


@pytest.mark.parametrize("name", [*CALLS, *EPILOGUES])
def test_compiled_as_one_graph(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]
    torch._dynamo.reset()
    assert_gradients(torch.compile(call, backend="aot_eager", fullgraph=True), reference, tensors(*shapes))


@pytest.mark.parametrize("name", ["matmul", "loss, options", "gelu"])
def test_the_default_backend_compiles_it(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]
    torch._dynamo.reset()
    assert_gradients(torch.compile(call, fullgraph=True), reference, tensors(*shapes))


@pytest.mark.parametrize("name", ["matmul", "loss", "gelu"])
def test_half_precision(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]
    assert_gradients(call, reference, tensors(*shapes, dtype=torch.float16))


@pytest.mark.parametrize("name", ["matmul", "sum", "loss", "gelu", "attention"])
def test_gradients_that_lie_anyhow(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]
    ways = {
        "expanded": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
        "apart": lambda y: torch.randn(*y.shape, 2, dtype=y.dtype, generator=torch.Generator().manual_seed(2))[..., 0],
    }
    for gradient in ways.values():
        assert_gradients(call, reference, tensors(*shapes), gradient)


@pytest.mark.parametrize("name", ["matmul", "logsumexp", "loss", "gelu"])
def test_only_what_requires_a_gradient_gets_one(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]
    for number in range(len(shapes)):
        given = tensors(*shapes)

        def of_one(call, x, given=given, number=number):
            others = [y.to(x.dtype) for y in given]
            return call(*others[:number], x, *others[number + 1 :])

        assert_gradients(lambda x, f=of_one: f(call, x), lambda x, f=of_one: f(reference, x), [given[number]])


@pytest.mark.parametrize("name", ["matmul", "loss", "gelu", "attention"])
def test_checkpointing_and_double_use(name):
    call, reference, shapes = (CALLS | EPILOGUES)[name]

    def twice(f):
        return lambda *given: checkpoint(f, *given, use_reentrant=False) * 2 + f(*given)

    assert_gradients(twice(call), lambda *given: reference(*given) * 3, tensors(*shapes))


@pytest.mark.parametrize("name", ["matmul", "loss", "gelu", "attention"])
def test_autocast_takes_the_lower_precision(name):
    call, _, shapes = (CALLS | EPILOGUES)[name]
    given = [x.requires_grad_() for x in tensors(*shapes, dtype=torch.float32)]
    lower = [x.detach().bfloat16().requires_grad_() for x in given]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(*given)
        with torch.no_grad():
            torch.testing.assert_close(call(*given), found, rtol=0, atol=0)
    expected = call(*lower)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.float().sum().backward()
    expected.float().sum().backward()
    for x, y in zip(given, lower, strict=True):
        assert x.grad.dtype is torch.float32
        torch.testing.assert_close(x.grad, y.grad.float(), rtol=0, atol=0)


STARTS = torch.tensor([0, 5, 16], dtype=torch.int32)
PACKED = (16, 1, 16), (16, 1, 16), (16, 1, 16)


def packed(q, k, v):
    return warploom.attention_varlen(q, k, v, STARTS, causal=True)


@pytest.mark.parametrize("name", ["logsumexp", "loss, options", "attention", "packed"])
def test_a_backward_pass_compiled_under_autocast_is_the_eager_one(name):
    call, _, shapes = (CALLS | {"packed": (packed, None, PACKED)})[name]
    given = [x.requires_grad_() for x in tensors(*shapes, dtype=torch.float32)]
    torch._dynamo.reset()
    found = []
    for function in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = function(*given)
        found.append([result, *torch.autograd.grad(result.float().sum(), given)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_autocast_leaves_sinks_and_log_sum_exps_in_float32():
    q, k, v = (x.requires_grad_() for x in tensors(*HEADS))
    sinks = torch.tensor([0.1234, 2.3456]).requires_grad_()
    found, expected = [], []
    for results, on in ((found, True), (expected, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out, lse = warploom.attention(q, k, v, sinks=sinks, return_lse=True)
            results += [out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v, sinks))]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_gradient_of_sinks_alone():
    q, k, v = tensors(*HEADS)
    assert_gradients(
        lambda s: warploom.attention(q, k, v, sinks=s).to(s.dtype),
        lambda s: plain_attention(q.to(s.dtype), k.to(s.dtype), v.to(s.dtype), s)[0],
        [torch.tensor([0.5, -1.0])],
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_of_the_sinks_of_packed_sequences(compiled):
    q, k, v = tensors(*PACKED, dtype=torch.bfloat16)
    torch._dynamo.reset()

    def call(s):
        return warploom.attention_varlen(q, k, v, STARTS, sinks=s, causal=True).to(s.dtype)

    def reference(s):
        rows = [x.to(s.dtype).split([5, 11]) for x in (q, k, v)]
        parts = [
            plain_attention(*(x[None] for x in own), sinks=s, causal=True)[0][0] for own in zip(*rows, strict=True)
        ]
        return torch.cat(parts)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    assert_gradients(call, reference, [torch.tensor([0.5])])


def test_inference_mode_keeps_nothing():
    a, b = tensors((24, 40), (40, 56))
    with torch.inference_mode():
        assert not warploom.matmul(a.requires_grad_(), b).requires_grad


@pytest.mark.parametrize("way", ["grad", "vjp", "jacrev", "in vmap", "compiled"])
def test_transforms_of_functions(way):
    x, w = tensors((24, 40), (16, 40))

    def f(x):
        return warploom.matmul(x, w.mT).float().square().sum()

    def reference(x):
        return (x.float() @ w.float().mT).square().sum()

    ways: dict[str, Any] = {
        "grad": lambda f: func.grad(f)(x),
        "vjp": lambda f: func.vjp(f, x)[1](torch.ones(()))[0],
        "jacrev": lambda f: func.jacrev(f)(x),
        "in vmap": lambda f: func.vmap(func.grad(f))(x[None])[0],
        "compiled": lambda f: torch.compile(func.grad(f), backend="aot_eager", fullgraph=True)(x),
    }
    torch._dynamo.reset()
    found, expected = ways[way](f).float(), func.grad(reference)(x.float())
    torch.testing.assert_close(found, expected, rtol=2**-5, atol=2**-6 * expected.abs().max().item())


def test_products_are_differentiated_twice():
    x, w = (y.requires_grad_() for y in tensors((24, 40), (56, 40)))
    (once,) = torch.autograd.grad(warploom.matmul(x, w.mT).float().square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.float().sum(), x)
    exact = w.detach().double()
    expected = 2 * torch.ones(24, 40).double() @ (exact.T @ exact)
    torch.testing.assert_close(twice.double(), expected, rtol=2**-5, atol=2**-6 * expected.abs().max().item())
    nested = {
        "grad of grad": lambda f: func.grad(lambda x: func.grad(f)(x).float().sum())(x.detach()),
        "vjp of vjp": lambda f: func.vjp(lambda x: func.vjp(f, x)[1](torch.ones(()))[0].float().sum(), x.detach())[1](
            torch.ones(())
        )[0],
        "backward of grad": lambda f: torch.autograd.grad(func.grad(f)(x).float().sum(), x)[0],
    }
    for of in nested.values():
        found = of(lambda x: warploom.matmul(x, w.detach().mT).float().square().sum())
        torch.testing.assert_close(found.double(), expected, rtol=2**-5, atol=2**-6 * expected.abs().max().item())
    with torch.no_grad():
        assert not func.grad(lambda x: warploom.matmul(x, w.mT).float().sum())(x).requires_grad
    result = warploom.matmul(x, w.mT, epilogue=gelu).float().square().sum()
    with pytest.raises(ProblemError, match="is not differentiated twice"):
        torch.autograd.grad(result, x, create_graph=True)


@pytest.mark.parametrize("name", ["attention", "attention, log-sum-exp", "loss", "logsumexp", "packed"])
def test_gradients_are_recorded_and_not_differentiated_again(name):
    """``torch.func.grad`` records every backward pass."""
    call, _, shapes = (CALLS | {"packed": (packed, None, PACKED)})[name]
    x, *others = tensors(*shapes)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(call(leaf, *others).float().sum(), leaf)

    def once(x):
        return func.grad(lambda x: call(x, *others).float().sum())(x)

    torch.testing.assert_close(once(x), expected, rtol=0, atol=0)
    if name in ("attention", "packed"):  # which of two operators they are depends on what is asked for
        torch._dynamo.reset()
        compiled = torch.compile(once, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    with pytest.raises(ProblemError, match="is differentiated once"):
        func.grad(lambda x: once(x).float().sum())(x)


def test_what_has_no_gradient_is_named():
    a, b, h = (x.requires_grad_() for x in tensors((16, 24), (24, 32), (16, 32)))
    calls = {
        r"matmul_reduce\('max'\) has no backward": lambda: warploom.matmul_reduce(a, b),
        "an epilogue with 2 extra matrices has no backward": lambda: warploom.matmul(
            a, b, epilogue=lambda x, y, z: x * y + z, extras=(h, h)
        ),
        "alpha requires a gradient": lambda: warploom.matmul(a, b, alpha=torch.ones((), requires_grad=True)),
        "this tensor requires a gradient": lambda: warploom.matmul(a, b, out=torch.empty(16, 32).bfloat16()),
    }
    for match, call in calls.items():
        with pytest.raises(ProblemError, match=match):
            call()


def test_gradients_of_a_loss_are_written_once():
    """Zeros in the place of gradients that kernels make would cost the memory of the largest output layer again."""
    x, w = (y.requires_grad_() for y in tensors((24, 16), (48, 16)))
    rows = loss(x, w)
    with torch.profiler.profile(profile_memory=True) as seen:
        rows.backward(torch.ones_like(rows))
    assert sum(e.cpu_memory_usage for e in seen.key_averages() if e.key == "aten::new_zeros") == 0


def _is_formed(value):
    return type(value.grad_fn).__name__ == "warploom_loss_with_gradientsBackward"


@pytest.mark.parametrize("wanted", ["xwb", "xw", "x", "w", "b"])
def test_formed_gradients_are_those_of_every_backward_pass(wanted):
    x, w, b = (
        y.requires_grad_(name in wanted) for name, y in zip("xwb", tensors((24, 40), (56, 40), (56,)), strict=True)
    )
    by = [y for y in (x, w, b) if y.requires_grad]
    expected = torch.autograd.grad(plain_loss(x.float(), w.float(), bias=b.float(), reduction="mean"), by)
    value = loss(x, w, bias=b, reduction="mean")
    assert _is_formed(value)
    first = torch.autograd.grad(value, by, torch.tensor(0.3), retain_graph=True)
    for y in first:
        y.mul_(2)  # autograd has given it away
    second, third = (torch.autograd.grad(value, by, torch.tensor(f), retain_graph=True) for f in (-2.0, 1.0))
    for a, b, c, exact in zip(first, second, third, expected, strict=True):
        for found, factor in ((a, 0.6), (b, -2.0), (c, 1.0)):
            assert (found.float() - factor * exact).norm() <= 0.01 * abs(factor) * exact.norm()


def test_formed_gradients_become_those_of_parameters_without_a_copy(monkeypatch):
    x, w = (torch.nn.Parameter(y) for y in tensors((24, 40), (56, 40)))
    value = loss(x, w, reduction="mean")
    addresses = {y.data_ptr() for y in value.grad_fn.formed}
    value.backward()
    assert {x.grad.data_ptr(), w.grad.data_ptr()} == addresses
    assert value.grad_fn is None or not value.grad_fn.formed


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_form_gradients_of_any_number_of_rows(reduction, dynamic):
    x, w, b = (y.requires_grad_() for y in tensors((24, 40), (56, 40), (56,)))
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    @torch.compile(backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True, dynamic=dynamic)
    def compiled(x, w, b, target):
        return 0.3 * warploom.linear_cross_entropy(x, w, target, bias=b, reduction=reduction)

    for rows in (24, 17):
        given, target = x.detach()[:rows].requires_grad_(), TARGET[:rows]
        found = torch.autograd.grad(compiled(given, w, b, target), (given, w, b))
        plain = F.cross_entropy(given.float() @ w.float().T + b.float(), target, reduction=reduction)
        for got, exact in zip(found, torch.autograd.grad(0.3 * plain, (given, w, b)), strict=True):
            assert (got.float() - exact).norm() <= 0.01 * exact.norm()
    assert seen.count("warploom.loss_with_gradients.default") == (1 if dynamic else 2)
    assert not any("row_gradients" in name for name in seen)


def test_when_gradients_are_formed():
    x, w = (y.requires_grad_() for y in tensors((24, 40), (56, 40)))
    others = {"reduction": "none"}, {"reduction": "mean", "softcap": 3.0}, {"reduction": "mean", "return_lse": True}
    for options in others:
        found = loss(x, w, **options)
        assert not _is_formed(found[0] if isinstance(found, tuple) else found)
    assert not _is_formed(loss(x.half(), w.half(), reduction="mean"))
    with torch.no_grad():
        assert loss(x, w, reduction="mean").grad_fn is None
    with torch.autocast("cpu", torch.bfloat16):
        wide = [y.detach().float().requires_grad_() for y in (x, w)]
        assert _is_formed(loss(*wide, reduction="mean"))
    found = torch.autograd.grad(loss(x, w, reduction="sum"), (x, w), create_graph=True)
    with pytest.raises(ProblemError, match="is differentiated once"):
        found[0].float().sum().backward()


def test_rows_and_columns_of_nothing():
    for m, n, k in ((0, 8, 16), (8, 8, 0)):
        x, w, b = (y.requires_grad_() for y in tensors((m, k), (n, k), (n,)))
        target = torch.zeros(m, dtype=torch.int64)
        warploom.linear_cross_entropy(x, w, target, bias=b, reduction="sum").backward()
        hot = torch.nn.functional.one_hot(target, n).double()
        torch.testing.assert_close(
            b.grad.double(), (torch.softmax(b.detach().double(), 0) - hot).sum(0), rtol=0.01, atol=0
        )
        warploom.matmul(x, w.mT).float().sum().backward()
        assert x.grad.shape == x.shape
        assert (w.grad == 0).all()


def test_a_factor_that_is_a_tensor_is_read_in_every_call_with_a_history():
    """Tensors hash by identity: a recorded call that is known by one would keep its first value."""
    a, factor = torch.ones(16, 16).half().requires_grad_(), torch.tensor(2.0)
    sums = []
    for value in (2.0, 3.0, 2.0):
        factor.fill_(value)
        out = warploom.matmul(a, a, alpha=factor)
        sums.append((out[0, 0].item(), torch.autograd.grad(out.sum(), a)[0][0, 0].item()))
    assert sums == [(32, 64), (48, 96), (32, 64)]


def test_a_recorded_product_follows_what_its_epilogue_sees():
    """Equal functions are two: when one closes over another value later, calls with the other stay as they are."""

    def scaled(factor):
        return lambda x: x * factor

    a, one, twin = torch.ones(16, 16).half().requires_grad_(), scaled(2.0), scaled(2.0)
    for _ in range(3):
        warploom.matmul(a, a, epilogue=one)
    closure: Any = one.__closure__
    closure[0].cell_contents = 5.0
    for epilogue, factor in ((twin, 2.0), (one, 5.0), (twin, 2.0)):
        out = warploom.matmul(a.detach().clone().requires_grad_(), a, epilogue=epilogue)
        assert (out == 16 * factor).all()
        (gradient,) = torch.autograd.grad(out.sum(), a)
        assert (gradient == 16 * factor).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_deterministic_algorithms_are_asked_of_backward_passes(compiled):
    q = torch.randn(1, 16, 2, 16).half().requires_grad_()
    torch._dynamo.reset()
    call = torch.compile(warploom.attention, backend="aot_eager", fullgraph=True) if compiled else warploom.attention
    (expected,) = torch.autograd.grad(call(q, q, q).float().sum(), q)
    torch.use_deterministic_algorithms(True)
    try:
        (found,) = torch.autograd.grad(call(q, q, q).float().sum(), q)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected)


def test_the_backward_pass_alone_is_one_operator():
    q, sinks = *tensors((1, 24, 2, 16)), torch.randn(2)
    out, lse = warploom.attention(q, q, q, sinks=sinks, return_lse=True)

    def backward(dout, q, sinks):
        return warploom.attention_backward(dout, q, q, q, out, lse, sinks=sinks)

    given = torch.randn(out.shape).to(out.dtype), q, sinks
    compiled = torch.compile(backward, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*given), backward(*given), strict=True):
        assert found.equal(expected)
