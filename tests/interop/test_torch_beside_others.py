"""Calls that PyTorch records, casts or watches, with what its operators do not take: served, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import warploom
from warploom.core.errors import ConfigError, ProblemError

torch = pytest.importorskip("torch")


def half(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()


Q, A, B = half(1, 16, 2, 16), half(16, 32), half(32, 24)
STARTS, TARGET = torch.tensor([0, 16], dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
varlen: Any = warploom.attention_varlen
CALLS: dict[Callable[..., Any], tuple[Any, ...]] = {
    warploom.attention: (Q, Q, Q),
    varlen: (Q[0], Q[0], Q[0], STARTS),
    warploom.matmul: (A, B),
    warploom.matmul_reduce: (A, B, "sum"),
    warploom.linear_cross_entropy: (A, B.T.contiguous(), TARGET),
}
NEEDED = {
    warploom.attention: ("q", "k", "v"),
    varlen: ("q", "k", "v", "cu_seqlens_q"),
    warploom.matmul: ("a", "b"),
    warploom.matmul_reduce: ("a", "b"),
    warploom.linear_cross_entropy: ("x", "w", "target"),
}
NAMED = pytest.mark.parametrize(
    ("call", "place"), [pytest.param(c, i, id=f"{c.__name__}-{n}") for c in CALLS for i, n in enumerate(NEEDED[c])]
)


def replaced(call: Callable[..., Any], place: int, value: Callable[[Any], Any]) -> list[Any]:
    """Its arguments, one of them another and a neighbour with a gradient that is wanted."""
    given = list(CALLS[call])
    other = 1 if place == 0 else 0
    given[other] = given[other].clone().requires_grad_()
    given[place] = value(given[place])
    return given


@NAMED
def test_an_array_of_numpy_beside_a_gradient_is_refused_by_name(call, place):
    given = replaced(call, place, lambda x: x.numpy())
    with pytest.raises(ProblemError, match=f"^{NEEDED[call][place]} is of numpy") as refused:
        call(*given)
    assert len(str(refused.value)) < 300  # no elements
    with torch.autocast("cpu"), pytest.raises(ProblemError, match=f"^{NEEDED[call][place]} is of numpy"):
        call(*(x.detach() if isinstance(x, torch.Tensor) else x for x in given))


@NAMED
def test_none_beside_a_gradient_is_refused_by_name(call, place):
    with pytest.raises(ProblemError, match=rf"^{NEEDED[call][place]}\b.*: NoneType is not an array"):
        call(*replaced(call, place, lambda _: None))


def test_so_are_a_bias_and_extra_matrices():
    a = A.clone().requires_grad_()
    with pytest.raises(ProblemError, match=r"^bias is of numpy"):
        warploom.matmul(a, B, bias=B[0].numpy())
    with pytest.raises(ProblemError, match=r"^bias: float is not an array"):
        warploom.matmul(a, B, bias=0.0)
    with pytest.raises(ProblemError, match=r"^extra0 is of numpy"):
        warploom.matmul(a, B, extras=(half(16, 24).numpy(),), epilogue=lambda x, y: x + y)


@pytest.mark.parametrize("call", CALLS)
def test_arrays_of_numpy_alone_are_no_concern_of_autocast_and_modes(call):
    given = [x.numpy() if isinstance(x, torch.Tensor) else x for x in CALLS[call]]
    expected = call(*given)
    with torch.autocast("cpu"):
        assert (call(*given) == expected).all()
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert (call(*given) == expected).all()


# -- lengths that are looked at
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_lengths_are_looked_at_beside_a_gradient_and_under_autocast(wanted, autocast):
    q = Q[0].clone().requires_grad_(wanted)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = varlen(q, Q[0], Q[0], STARTS, check=True)
        torch.testing.assert_close(out, varlen(Q[0], Q[0], Q[0], STARTS), rtol=0, atol=0)
        with pytest.raises(ProblemError, match=r"cu_seqlens_q\[1\] is 17"):
            varlen(q, Q[0], Q[0], STARTS + torch.tensor([0, 1], dtype=torch.int32), check=True)
    if wanted:
        out.float().sum().backward()
        gradient, q.grad = q.grad, None
        varlen(q, Q[0], Q[0], STARTS).float().sum().backward()
        torch.testing.assert_close(gradient, q.grad, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_lengths_of_a_wrong_shape_are_refused_by_name(name, wanted):
    q = Q[0].clone().requires_grad_(wanted)
    for lengths in (torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor(3, dtype=torch.int32)):
        with pytest.raises(ProblemError, match=f"^{name} has shape"):
            varlen(q, Q[0], Q[0], STARTS, check=True, **{name: lengths})


def test_check_is_true_or_false():
    lengths, several = STARTS[1:], torch.tensor([True, False])
    calls = (
        lambda: varlen(Q[0], Q[0], Q[0], STARTS, check=several),
        lambda: varlen(Q[0].clone().requires_grad_(), Q[0], Q[0], STARTS, check=several),
        lambda: warploom.attention_paged(Q[:, :1], Q, Q, lengths, check=several),
        lambda: warploom.append_to_cache(Q.clone(), Q.clone(), Q, Q, lengths, check=several),
    )
    for call in calls:
        with pytest.raises(ProblemError, match="check is True or False"):
            call()


# -- products
def test_a_factor_beside_an_epilogue_whose_gradient_is_wanted_is_refused():
    alpha = torch.tensor(0.5, requires_grad=True)
    for a in (A, A.clone().requires_grad_()):
        with pytest.raises(ProblemError, match=r"^alpha requires a gradient"):
            warploom.matmul(a, B, alpha=alpha, epilogue=lambda x: x * 2)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_of_products_are_batched(batch):
    a, b, bias = half(*batch, 16, 32).requires_grad_(), B.clone().requires_grad_(), half(24).requires_grad_()
    out, directions = warploom.matmul(a, b, bias=bias), half(3, *batch, 16, 24)
    batched = torch.autograd.grad(out, (a, b, bias), directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        for found, one in zip(
            batched, torch.autograd.grad(out, (a, b, bias), direction, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(found[i], one, rtol=0, atol=0)


def test_mapped_over_the_last_dimension():
    both = torch.stack([Q, 2 * Q], -1)

    def gradient(copy: Callable[[Any], Any]) -> Any:
        function = torch.func.grad(lambda q: warploom.attention(copy(q), Q, Q).float().sum())
        return torch.func.vmap(function, in_dims=-1)(both)

    with pytest.raises(ProblemError, match=r"the last dimension of q is not contiguous .*: copy it"):
        gradient(lambda q: q)
    found = gradient(lambda q: q.contiguous())
    q = (2 * Q).requires_grad_()
    warploom.attention(q, Q, Q).float().sum().backward()
    torch.testing.assert_close(found[1], q.grad, rtol=0, atol=0)


@pytest.mark.parametrize("config", ["zz", "attention_decode(num_warps=7)"])
def test_a_configuration_of_a_cache_is_refused_while_it_is_traced(config):
    call = lambda q: warploom.attention_paged(q, Q, Q, STARTS[1:], config=config)  # noqa: E731
    with pytest.raises(ConfigError) as eager:
        call(Q[:, :1])
    torch._dynamo.reset()
    with pytest.raises(Exception) as traced:  # PyTorch wraps it in an error of its own
        torch.export.export(Module(call), (Q[:, :1],))
    assert str(eager.value).partition(": ")[0] in str(traced.value)


class Module(torch.nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)
