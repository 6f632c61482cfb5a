"""Numbers that a framework watches (traced, differentiated, mapped over) given for options: refused by name, or right.

Were they read as plain numbers, a derivative would be lost without a word. So it would of arrays that an epilogue sees.
"""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.errors import ProblemError
from warploom.lang import Global, Kernel, f32, kernel

jax_is_there = importlib.util.find_spec("jax") is not None


def random(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


A, B, Q = random(16, 32), random(32, 16), random(1, 16, 2, 16)
LENGTHS, TARGET = np.array([0, 16], np.int32), np.zeros(16, np.int32)
LSE = np.zeros((1, 2, 16), np.float32)
GIVEN: dict[Callable[..., Any], tuple[np.ndarray[Any, Any], ...]] = {
    warploom.attention: (Q, Q, Q),
    warploom.plan: (Q, Q, Q),
    warploom.attention_varlen: (Q[0], Q[0], Q[0], LENGTHS),
    warploom.attention_paged: (Q[:, :1], Q, Q, LENGTHS[1:]),
    warploom.plan_attention_paged: (Q[:, :1], Q, Q, LENGTHS[1:]),
    warploom.append_to_cache: (Q.copy(), Q.copy(), Q, Q, LENGTHS[1:]),
    warploom.attention_backward: (Q, Q, Q, Q, Q, LSE),
    warploom.plan_attention_backward: (Q, Q, Q, Q, Q, LSE),
    warploom.matmul: (A, B),
    warploom.plan_matmul: (A, B),
    warploom.matmul_reduce: (A, B),
    warploom.plan_matmul_reduce: (A, B),
    warploom.linear_cross_entropy: (A, A, TARGET),
    warploom.plan_linear_cross_entropy: (A, A),
}


def options(kinds: tuple[str, ...]) -> list[Any]:
    """(function, option) for all options of these types, as the functions' signatures have them."""
    return [
        pytest.param(call, name, id=f"{call.__name__}-{name}")
        for call in GIVEN
        for name, p in signature(call).parameters.items()
        if str(p.annotation).partition(" ")[0] in kinds
    ]


# -- JAX
def jax_transforms() -> dict[str, Callable[[Callable[[Any], Any], float], Any]]:
    import jax

    return {
        "grad": lambda function, x: jax.grad(function)(x),
        "jvp": lambda function, x: jax.jvp(function, (x,), (1.0,)),
        "jit": lambda function, x: jax.jit(function)(x),
        "vmap": lambda function, x: jax.vmap(function)(np.array([x, x], np.float32)),
    }


@pytest.mark.parametrize("transform", ["grad", "jvp", "jit", "vmap"])
@pytest.mark.parametrize(("call", "option"), options(("float",)))
def test_a_number_that_jax_traces_is_refused_by_name(call, option, transform):
    pytest.importorskip("jax")
    with pytest.raises(ProblemError, match=f"^{option} is traced by JAX"):
        jax_transforms()[transform](lambda x: call(*GIVEN[call], **{option: x}), 0.5)


@pytest.mark.parametrize(("call", "option"), options(("int", "bool")))
def test_a_switch_that_jax_traces_is_refused_by_name(call, option):
    jax = pytest.importorskip("jax")
    with pytest.raises(ProblemError, match=f"^{option} is traced by JAX"):
        jax.jit(lambda x: call(*GIVEN[call], **{option: x}))(1)


@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("transform", ["grad", "jvp", "jit", "vmap"])
def test_so_it_is_by_the_attention_that_jax_differentiates(option, transform):
    jnp = pytest.importorskip("jax.numpy")
    attention = importlib.import_module("warploom.jax").attention
    q = jnp.asarray(Q)
    with pytest.raises(ProblemError, match=f"^{option} is traced by JAX"):
        jax_transforms()[transform](lambda x: attention(q, q, q, **{option: x}).sum(), 0.5)


def test_a_window_that_jax_traces_is_refused_by_name():
    jax = pytest.importorskip("jax")
    for window in (lambda x: x, lambda x: (x[0], 0)):
        with pytest.raises(ProblemError, match=r"^window is traced by JAX"):
            jax.jit(lambda x, window=window: warploom.attention(Q, Q, Q, window=window(x)))(np.array([3, 3]))


@kernel(threads=32)
def scaled(k: Kernel, x: Global[f32], y: Global[f32], factor: f32) -> None:
    """y = factor · x."""
    y.store(x.load(k.thread) * factor, k.thread)


def test_a_number_for_a_kernel_of_ones_own_is_refused_by_name():
    x = np.ones(32, np.float32)
    launch = lambda factor: warploom.launch(scaled, 1, [x, x.copy(), factor])  # noqa: E731
    if jax_is_there:
        for transform in jax_transforms().values():
            with pytest.raises(ProblemError, match=r"^factor is traced by JAX"):
                transform(launch, 0.5)
    torch = pytest.importorskip("torch")
    with pytest.raises(ProblemError, match=r"^factor requires a gradient"):
        launch(torch.tensor(0.5, requires_grad=True))


# -- PyTorch
def tensors(arrays: tuple[np.ndarray[Any, Any], ...]) -> list[Any]:
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(x) for x in arrays]


DIFFERENTIABLE = warploom.attention, warploom.attention_varlen, warploom.matmul, warploom.linear_cross_entropy


@pytest.mark.parametrize(("call", "option"), options(("float",)))
def test_a_number_whose_gradient_is_wanted_is_refused_by_name(call, option):
    first, *others = tensors(GIVEN[call])
    refuse_by_gradient(call, first, others, option)
    if call in DIFFERENTIABLE:
        refuse_by_gradient(call, first.clone().requires_grad_(), others, option)


def refuse_by_gradient(call: Callable[..., Any], first: Any, others: list[Any], option: str) -> None:
    import torch

    for number in (torch.tensor(0.5, requires_grad=True), torch.nn.Parameter(torch.tensor([0.5]))):
        with pytest.raises(ProblemError, match=f"^{option} requires a gradient"):
            call(first, *others, **{option: number})
        with torch.autocast("cpu"), pytest.raises(ProblemError, match=f"^{option} requires a gradient"):
            call(first, *others, **{option: number})


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual"])
@pytest.mark.parametrize(("call", "option"), options(("float",)))
def test_a_number_that_pytorch_transforms_is_refused_by_name(call, option, transform):
    torch = pytest.importorskip("torch")
    given = tensors(GIVEN[call])
    function = lambda x: call(*given, **{option: x})  # noqa: E731
    one, forward = torch.tensor(0.5), torch.autograd.forward_ad

    def dual() -> None:
        with forward.dual_level():
            function(forward.make_dual(one, one))

    transforms = {
        "grad": lambda: torch.func.grad(function)(one),
        "jvp": lambda: torch.func.jvp(function, (one,), (one,)),
        "dual": dual,
    }
    refused = f"^{option}( requires a gradient| is transformed|: this tensor carries a tangent)|^this call cannot be"
    with pytest.raises(ProblemError, match=refused):
        transforms[transform]()


MAPPED = (
    warploom.attention,
    warploom.attention_backward,
    warploom.attention_varlen,
    warploom.attention_paged,
    warploom.matmul,
    warploom.matmul_reduce,
)
"""Whose operators take numbers in tensors."""


@pytest.mark.parametrize(("call", "option"), options(("float",)))
def test_a_number_that_torch_vmap_maps_over_is_right_or_refused(call, option):
    torch = pytest.importorskip("torch")
    given, numbers = tensors(GIVEN[call]), torch.tensor([0.25, 0.5])
    mapped = torch.func.vmap(lambda x: call(*given, **{option: x}))
    if call not in MAPPED:
        with pytest.raises(ProblemError, match=f"^{option} is transformed|cannot be recorded or transformed"):
            mapped(numbers)
        return
    found = mapped(numbers)
    for i, x in enumerate(numbers):
        row = tuple([part[i] for part in found]) if isinstance(found, tuple) else found[i]
        torch.testing.assert_close(row, call(*given, **{option: x.item()}), rtol=0, atol=0)


@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
def test_so_it_is_by_flash_attentions_functions(option):
    torch = pytest.importorskip("torch")
    flash = importlib.import_module("warploom.flash_attn")
    q, starts = torch.from_numpy(Q), torch.from_numpy(LENGTHS)
    calls = {
        flash.flash_attn_func: (q, q, q),
        flash.flash_attn_varlen_func: (q[0], q[0], q[0], starts, starts, 16, 16),
        flash.flash_attn_with_kvcache: (q, q, q),
    }
    for call, given in calls.items():
        for value in (0.5, 0.0):
            with pytest.raises(ProblemError, match=r"(scale|softcap) requires a gradient"):
                call(*given, **{option: torch.tensor(value, requires_grad=True)})


def test_flash_attention_refuses_a_soft_cap_before_it_reads_it():
    torch = pytest.importorskip("torch")
    flash_attn_func = importlib.import_module("warploom.flash_attn").flash_attn_func
    q = torch.from_numpy(Q)
    call = lambda x: flash_attn_func(q, q, q, softcap=x)  # noqa: E731
    with pytest.raises(ProblemError, match=r"^softcap is transformed"):
        torch.vmap(call)(torch.tensor([0.5, 0.6]))
    if jax_is_there:
        with pytest.raises(ProblemError, match=r"^softcap is traced by JAX"):
            jax_transforms()["jit"](call, 0.5)


@pytest.mark.parametrize("call", [warploom.attention, warploom.matmul])
def test_a_tangent_beside_a_tensor_whose_gradient_is_wanted_is_refused_by_name(call):
    torch = pytest.importorskip("torch")
    first, second, *others = tensors(GIVEN[call])
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises(ProblemError, match="carries a tangent"):
        call(forward.make_dual(first, first), second.clone().requires_grad_(), *others)


def test_torch_compile_refuses_it_too():
    torch = pytest.importorskip("torch")
    number = torch.tensor(0.5, requires_grad=True)
    x, w, target = tensors((A, A, TARGET))
    for option in ("z_loss", "label_smoothing", "softcap"):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda p, option=option: warploom.linear_cross_entropy(x, w, target, **{option: p}), backend="aot_eager"
        )
        with pytest.raises(Exception, match=f"{option} requires a gradient"):
            compiled(number)
        given: Any = {option: 0.5}
        expected = warploom.linear_cross_entropy(x, w, target, **given)
        torch.testing.assert_close(compiled(number.detach()), expected, rtol=0, atol=0)


# -- arrays that an epilogue sees
class Gated:
    """What has a gain and epilogues that read it."""

    def __init__(self, gain: Any) -> None:
        self.gain = gain

    def method(self, x: Any) -> Any:
        return x * float(self.gain)

    def read(self) -> float:
        return float(self.gain)


def arrays_of_frameworks() -> dict[str, Callable[[], Any]]:
    return {
        "numpy": lambda: np.array(2.0, np.float32),
        "torch": lambda: pytest.importorskip("torch").tensor(2.0),
        "parameter": lambda: pytest.importorskip("torch").nn.Parameter(pytest.importorskip("torch").tensor(2.0)),
        "jax": lambda: pytest.importorskip("jax.numpy").float32(2.0),
    }


def epilogues(gain: Any) -> dict[str, Callable[..., Any]]:
    gated, kept = Gated(gain), {"gain": [gain]}
    return {
        "closure": lambda x: x * float(gain),
        "attribute": lambda x: x * float(gated.gain),
        "method": gated.method,
        "container": lambda x: x * float(kept["gain"][0]),
        "default": lambda x, by=gain: x * float(by),
        "itself": lambda x: x * gain,
        "partial": partial(lambda by, x: x * float(by), gain),
    }


@pytest.mark.parametrize("kind", ["numpy", "torch", "parameter", "jax"])
@pytest.mark.parametrize("where", epilogues(0))
def test_an_epilogue_that_sees_an_array_is_refused(kind, where):
    epilogue = epilogues(arrays_of_frameworks()[kind]())[where]
    for call in (warploom.matmul, warploom.plan_matmul):
        with pytest.raises(ProblemError, match=r"reads ((gain|gated|kept|by), a|a bound) .*pass it in extras"):
            call(A, B, epilogue=epilogue)
    torch = pytest.importorskip("torch")
    a, b = tensors((A, B))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(ProblemError, match="pass it in extras"):
            warploom.matmul(a.clone().requires_grad_(), b, epilogue=epilogue)


def test_the_same_epilogues_with_a_number_are_taken():
    for epilogue in epilogues(2.0).values():
        warploom.plan_matmul(A, B, epilogue=epilogue)
    found = warploom.matmul(A, B, epilogue=epilogues(2.0)["method"])
    np.testing.assert_array_equal(found, warploom.matmul(A, B, alpha=2.0))


@pytest.mark.parametrize("wanted", [False, True])
def test_an_epilogue_that_reads_a_tensor_somewhere_behind_is_refused(wanted):
    torch = pytest.importorskip("torch")

    class Gain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Any) -> Any:
            return x * self.gain.item()

    gated, module = Gated(torch.tensor(2.0)), Gain()
    a, b = tensors((A, B))
    a = a.clone().requires_grad_(wanted)
    for epilogue in (lambda x: x * gated.read(), module):
        with pytest.raises(ProblemError, match="the epilogue reads a tensor"):
            warploom.matmul(a, b, epilogue=epilogue)


def test_a_gain_among_the_extras_is_seen_and_gets_its_gradient():
    torch = pytest.importorskip("torch")
    a, b = tensors((A, B))
    gain = torch.nn.Parameter(torch.tensor(2.0))

    def gained() -> Any:
        return warploom.matmul(a, b, epilogue=lambda x, g: x * g, extras=(gain.expand(1, 16),), out_dtype="f32")

    product = a.double() @ b.double()
    for _ in range(2):
        gain.grad = None
        found = gained()
        torch.testing.assert_close(found.double(), product * gain.detach().double(), rtol=1e-3, atol=1e-2)
        found.sum().backward()
        gradient: Any = gain.grad
        torch.testing.assert_close(gradient.double(), product.sum(), rtol=1e-2, atol=1e-1)
        with torch.no_grad():
            gain.mul_(3)
