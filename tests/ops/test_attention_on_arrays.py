"""``attention`` and ``plan`` on CPU arrays through the emulator: right results, clear refusals of what cannot be."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import is_right
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ConfigError, EmulationWarning, ProblemError
from warploom.core.targets import target
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.ops import backends
from warploom_lab.kernels.attention.ladder_config import RungSm80

pytestmark = pytest.mark.usefixtures("emulated")
NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def make(batch=1, q_len=64, kv_len=64, heads=2, head_dim=64, dtype="f16", seed=0) -> list[Any]:
    """Q, K, V in layout bshd."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, n, heads, head_dim)).astype(NUMPY[dtype]) for n in (q_len, kv_len, kv_len)]


# -- right results


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_numpy_arrays(dtype, head_dim):
    q, k, v = make(2, 128, 192, 2, head_dim, dtype)
    out = warploom.attention(q, k, v)
    assert isinstance(out, np.ndarray)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert is_right(out, q, k, v)


def test_it_says_that_it_runs_on_the_emulator_and_how_long():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warploom.attention(*make())
    (message,) = [str(w.message) for w in caught if issubclass(w.category, EmulationWarning)]
    assert "no GPU" in message
    assert "takes about" in message


def shifted(x: Any, elements: int) -> Any:
    """A copy whose rows start so many elements behind a multiple of 16 bytes."""
    memory = np.zeros(x.size + 16, x.dtype)
    start = (-memory.ctypes.data % 16) // 2 + elements
    view = memory[start : start + x.size].reshape(x.shape)
    view[:] = x
    assert view.ctypes.data % 16
    return view


Q, K, V = make()
PROJECTION = np.random.default_rng(1).standard_normal((1, 64, 3, 2, 64)).astype(np.float16)
VIEWS: dict[str, Any] = {
    "one projection": np.moveaxis(PROJECTION, 2, 0),
    "every other head and position": tuple(x[:, ::2, ::2] for x in make(1, 128, 128, 4)),
    "k of other strides": (Q, np.ascontiguousarray(K.swapaxes(1, 2)).swapaxes(1, 2), V),
    "2 bytes off": (shifted(Q, 1), shifted(K, 1), shifted(V, 1)),
    "8 bytes off": (shifted(Q, 4), shifted(K, 4), shifted(V, 4)),
    "odd rows": tuple(np.pad(x, [(0, 0), (0, 0), (0, 0), (0, 1)])[..., :64] for x in (Q, K, V)),
    "reversed": (Q, K[:, ::-1], V[:, ::-1]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_as_what_they_show(name):
    views = VIEWS[name]
    compact = (np.array(x, order="C") for x in views)
    np.testing.assert_array_equal(warploom.attention(*views), warploom.attention(*compact))


def test_inputs_are_left_alone():
    arrays = make()
    copies = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    warploom.attention(*arrays)
    assert all(np.array_equal(x, y) for x, y in zip(arrays, copies, strict=True))


def test_a_configuration_of_the_callers_is_used():
    config = RungSm80(head_dim=64, dtype=f16, swizzle=True)
    for given in (config, str(config)):
        assert warploom.plan(Q, K, V, config=given).config == config
    assert is_right(warploom.attention(Q, K, V, config=config), Q, K, V)


# -- torch tensors


def test_torch_tensors_come_back_as_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 64, 2, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
        out = warploom.attention(q, k, v)
        assert isinstance(out, torch.Tensor)
        assert (out.dtype, out.shape) == (dtype, q.shape)
        swapped = (x.transpose(1, 2).float() for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
        transposed = warploom.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd")
        assert torch.equal(transposed.transpose(1, 2), out)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("blocks", [1, 3])
def test_what_is_not_finite_spreads_as_in_torchs_math(which, bad, blocks):
    torch = pytest.importorskip("torch")
    arrays = dict(zip("qkv", make(1, 64, 64 * blocks, 1), strict=True))
    arrays[which][0, 40, 0, 5] = bad
    out = warploom.attention(*arrays.values())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        swapped = (torch.from_numpy(x).transpose(1, 2).float() for x in arrays.values())
        expected = torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2).numpy()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(out[finite].astype(np.float32), expected[finite], rtol=0.01, atol=0.01)


def test_a_whole_row_of_infinities():
    """Every score of one query is minus infinity: torch gives zeros, and so do we."""
    q, k, v = make(1, 64, 64, 1)
    q[0, 3, 0, :], k[0, :, 0, :] = 0, np.abs(k[0, :, 0, :]) + 1
    q[0, 3, 0, 0] = -np.inf
    out = warploom.attention(q, k, v)
    assert (out[0, 3] == 0).all()
    assert np.isfinite(np.delete(out, 3, axis=1)).all()


# -- refusals


def _cast(arrays: list[Any], index: int, dtype: Any) -> list[Any]:
    return [x.astype(dtype) if i == index else x for i, x in enumerate(arrays)]


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "rank 3": (lambda: [x[0] for x in make()], ProblemError, r"q has shape .* must be \(batch, q_len, heads"),
    "one array of rank 5": (lambda: [*make()[:2], make()[2][None]], ProblemError, "v has shape"),
    "mixed types": (lambda: _cast(make(), 1, NUMPY["bf16"]), ProblemError, "q is f16 and k is bf16"),
    "float32": (lambda: [x.astype(np.float32) for x in make()], ProblemError, "q is f32.*convert it to f16 or bf16"),
    "integers": (lambda: [x.astype(np.int32) for x in make()], ProblemError, "q is int32"),
    "last dimension strided": (
        lambda: [x[..., ::2] for x in make(head_dim=128)],
        ProblemError,
        "last dimension of q is not contiguous",
    ),
    "transposed": (lambda: [x.swapaxes(1, 3) for x in make()], ProblemError, "last dimension of q is not contiguous"),
    "k and v differ": (lambda: [*make()[:2], make(kv_len=128)[2]], ProblemError, "v has .* kv_len = .*, as k has"),
    "batches differ": (lambda: [make(2)[0], *make(1)[1:]], ProblemError, "batch"),
    "head_dims differ": (lambda: [make(head_dim=64)[0], *make(head_dim=128)[1:]], ProblemError, "head_dim"),
    "heads that do not divide": (lambda: [make(heads=3)[0], *make(heads=2)[1:]], ProblemError, "heads"),
    "head_dim too large": (lambda: make(head_dim=264), ProblemError, "head_dim"),
    "no array": (lambda: [*make()[:2], "v"], ProblemError, "array"),
    "a list": (lambda: [make()[0].tolist(), *make()[1:]], ProblemError, "array"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("call", [warploom.attention, warploom.plan], ids=["attention", "plan"])
def test_bad_input_gets_a_clear_error(case, call):
    build, kind, says = BAD[case]
    with pytest.raises(kind, match=says):
        call(*build())


def test_a_config_that_does_not_fit_says_every_reason():
    config = RungSm80(head_dim=128, dtype=bf16, tile_m=512, tile_n=128, num_warps=8)
    with pytest.raises(ConfigError) as caught:
        warploom.attention(*make(), config=config)
    for says in ("head_dim is 64", "the arrays are f16", "shared memory"):
        assert says in str(caught.value)


# -- plans


def test_a_plan_says_what_would_run_and_why_and_runs_nothing(monkeypatch):
    monkeypatch.setattr(backends, "run_on_emulator", lambda *_: pytest.fail("a plan runs nothing"))
    q, k, v = make(1, 256, 256, 2, 128, "bf16")
    plan = warploom.plan(q, k, v)
    assert plan.config.check() == []
    assert plan.reason
    assert "emulator" in plan.device
    assert str(plan.config) in str(plan)
    assert plan.program.name in plan.cuda
    assert set(plan.calls[0].scalars) >= {p.name for p in plan.program.parameters if p.kind == "scalar"}


def test_larger_kernels_than_shared_memory_holds_are_not_chosen():
    plan = warploom.plan(*make(1, 256, 256, 1, 128, "bf16"))
    assert plan.program.shared_bytes <= target(plan.target).shared_per_block
    assert isinstance(plan.config, ForwardSm80)
    too_large = replace(plan.config, tile_m=512, num_warps=16)
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        warploom.plan(*make(1, 512, 256, 1, 128, "bf16"), config=too_large)
