"""A launch of a user's kernel under ``torch.compile``: an operator that changes the declared tensors."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch")

import warploom  # noqa: E402
from warploom.core.errors import ProblemError, TraceError  # noqa: E402
from warploom.lang import Compound, Global, Kernel, Strided, f32, kernel, u32  # noqa: E402


def body(k: Kernel, x: Global[f32], y: Global[f32], n: u32, factor: f32, *, tile: int = 64) -> None:
    i = k.cta_x * tile + k.thread
    with k.when(i < n):
        y.store(x.load(i) * factor, i)


scaled = kernel(threads=lambda tile: tile, outputs=["y"])(body)


def six_times(x):
    y = torch.empty_like(x)
    warploom.launch(scaled, -(-x.numel() // 32), [x + 1, y, x.numel(), 3.0], tile=32)
    return y * 2


def by_name(x):
    y = torch.empty_like(x)
    warploom.launch(scaled, (-(-x.numel() // 64),), {"y": y, "x": x + 1, "factor": 6.0, "n": x.numel()})
    return y


@pytest.mark.parametrize("function", [six_times, by_name])
def test_a_declared_launch_is_part_of_the_graph(function):
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (100, 77):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), (x + 1) * 6)
    torch.testing.assert_close(function(x), (x + 1) * 6)


@kernel(threads=32, outputs=["y"])
def rows(k: Kernel, x: Strided[f32, 2], y: Strided[f32, 2]) -> None:
    y.at(k.cta_x, k.lane).store(x.at(k.cta_x, k.lane).load() + 1.0)


def test_the_strides_of_a_tensor_are_those_of_the_graph():
    def plus_one(x):
        y = torch.empty_like(x)
        warploom.launch(rows, 5, [x.t(), y.t()])
        return y

    x = torch.randn(32, 5)
    torch.testing.assert_close(torch.compile(plus_one, fullgraph=True, backend="aot_eager")(x), x + 1)


class Factor(Compound):
    of: u32


@kernel(threads=32, outputs=["y"])
def multiples(k: Kernel, factor: Factor, y: Global[u32]) -> None:
    y.store(k.lane * factor.of, k.lane)


class Results(Compound):
    sums: Global[f32]
    products: Global[f32]


@kernel(threads=32, outputs=["results_sums", "results_products"])
def both(k: Kernel, x: Global[f32], results: Results) -> None:
    results.sums.store(x.load(k.lane) + 2.0, k.lane)
    results.products.store(x.load(k.lane) * 2.0, k.lane)


def test_fields_of_compound_parameters_are_arguments_of_the_operator():
    def on_all(x):
        y, sums, products = torch.zeros(32, dtype=torch.int32), torch.zeros(32), torch.zeros(32)
        warploom.launch(multiples, 1, [y, 3])
        warploom.launch(both, 1, [x, sums, products])
        return y + 1, sums + 1, products + 1

    x = torch.randn(32)
    y, sums, products = torch.compile(on_all, fullgraph=True, backend="aot_eager")(x)
    assert (y == torch.arange(32) * 3 + 1).all()
    torch.testing.assert_close(sums, x + 3)
    torch.testing.assert_close(products, x * 2 + 1)


def test_arguments_of_another_count_are_refused_where_they_are_run():
    def too_few(x):
        warploom.launch(rows, 5, [x])
        return x

    with pytest.raises(ProblemError, match=r"rows takes 2 arguments \(x, y\), not 1"):
        torch.compile(too_few, backend="aot_eager")(torch.randn(5, 32))


def test_what_is_written_in_place_is_seen_by_what_follows():
    def twice(x, y):
        warploom.launch(scaled, 1, [x, y, 32, 2.0])
        first = y + 0
        warploom.launch(scaled, 1, [first, y, 32, 2.0])
        return first + y

    x, y = torch.randn(32), torch.zeros(32)
    torch.testing.assert_close(torch.compile(twice, fullgraph=True, backend="aot_eager")(x, y), 6 * x)
    torch.testing.assert_close(y, 4 * x)


def test_the_operator_keeps_to_its_schema():
    importlib.import_module("warploom.operators.graphs")  # defines it; a call does so by itself
    x, y = torch.randn(32), torch.zeros(32)
    arguments = (scaled.key, [1], "rwif", [y], [x], [32], [2.0], "{}")
    torch.library.opcheck(torch.ops.warploom.launch.default, arguments, test_utils="test_schema")
    torch.library.opcheck(torch.ops.warploom.launch.default, arguments, test_utils="test_faketensor")


WAYS = {
    "backward": lambda f, x: f(x.requires_grad_()).backward(),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize(("way", "compiled"), [*((way, False) for way in WAYS), ("backward", True), ("grad", True)])
def test_a_derivative_is_refused(way, compiled):
    def ask(x):
        WAYS[way](lambda x: six_times(x).sum() + x.sum(), x)

    torch._dynamo.reset()
    function = torch.compile(ask, backend="aot_eager") if compiled else ask
    with pytest.raises(Exception, match=r"no backward pass|no forward-mode derivatives"):
        function(torch.randn(64))


@pytest.mark.parametrize("compiled", [False, True])
def test_its_users_write_their_own_backward_pass(compiled):
    class SixTimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return six_times(x)

        @staticmethod
        def backward(ctx, by):
            return six_times(by - 1)

    x = torch.randn(64, requires_grad=True)
    function = torch.compile(SixTimes.apply, backend="aot_eager", fullgraph=True) if compiled else SixTimes.apply
    torch.testing.assert_close(result := function(x), (x + 1) * 6)
    result.backward(torch.full_like(x, 2.0))
    torch.testing.assert_close(x.grad, torch.full_like(x, 12.0))


def test_declarations_are_checked():
    with pytest.raises(TraceError, match="no parameter 'out'"):
        kernel(threads=32, outputs=["out"])(body)
    wrong = kernel(threads=lambda tile: tile, outputs=["x"])(body)
    with pytest.raises(ProblemError, match="writes to y"):
        warploom.launch(wrong, 1, [torch.zeros(32), torch.zeros(32), 32, 1.0])


def test_a_launch_has_no_batches():
    with pytest.raises(ProblemError, match=r"outside of torch\.vmap"):
        torch.vmap(six_times)(torch.ones(2, 64))
