"""JAX arrays on the CPU: what they are taken for, and results of their own kind."""

from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from warploom.core.errors import ProblemError
from warploom.interop.arrays import describe, describe_new, empty
from warploom.lang.functions import relu

jax = pytest.importorskip("jax")

with suppress(RuntimeError):  # JAX is at work already
    jax.config.update("jax_num_cpu_devices", 2)


def numbers(*shape, dtype: Any = np.float16):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def on_cpu(array):
    return jax.device_put(array, jax.devices("cpu")[0])


Q, KEYS = (numbers(1, n, 2, 16, dtype=ml_dtypes.bfloat16) for n in (20, 36))
A, B, BIAS, GATE, WORDS = (
    numbers(24, 40),
    numbers(40, 16),
    numbers(16),
    numbers(24, 16),
    np.arange(24, dtype=np.int32) % 16,
)
CALLS = {
    "attention": (lambda q, k: warploom.attention(q, k, k, causal=True, return_lse=True), (Q, KEYS)),
    "attention without keys": (lambda q, k: warploom.attention(q, k[:, :0], k[:, :0], return_lse=True), (Q, KEYS)),
    "matmul": (lambda a, b, bias: warploom.matmul(a, b, bias=bias, out_dtype="f32"), (A, B, BIAS)),
    "matmul batched": (lambda a, b: warploom.matmul(a.reshape(2, 12, 40), b), (A, B)),
    "epilogue": (lambda a, b, g: warploom.matmul(a, b, epilogue=lambda x, y: relu(x) * y, extras=(g,)), (A, B, GATE)),
    "matmul in parts": (warploom.matmul, (numbers(16, 2048), numbers(2048, 16))),
    "matmul_reduce": (lambda a, b: warploom.matmul_reduce(a, b, "logsumexp"), (A, B)),
    "argmax": (lambda a, b: warploom.matmul_reduce(a, b, return_index=True), (A, B)),
    "linear_cross_entropy": (lambda x, w, words: warploom.linear_cross_entropy(x, w.T, words), (A, B, WORDS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_it_gives_for_numpy(name):
    call, given = CALLS[name]
    arrays = [on_cpu(x) for x in given]
    found, expected = call(*arrays), call(*given)
    if not isinstance(expected, tuple):
        found, expected = (found,), (expected,)
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, jax.Array)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), y)
    for array, before in zip(arrays, given, strict=True):
        np.testing.assert_array_equal(np.asarray(array), before)


INSIDE = {
    "jit": lambda function: jax.jit(function)(1.0),
    "grad of jit": lambda function: jax.jit(jax.grad(lambda x: function(x).sum()))(1.0) * function(1.0),
    "vmap": lambda function: jax.vmap(function)(np.ones(2, np.float32))[1],
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", ["attention", "matmul", "matmul in parts", "matmul_reduce", "argmax"])
def test_arrays_made_outside_of_a_trace_may_be_passed_inside(name, inside):
    call, given = CALLS[name]
    arrays = [on_cpu(x) for x in given]
    first = jax.tree.leaves(call(*given))[0].astype(np.float32)
    found = INSIDE[inside](lambda x: jax.tree.leaves(call(*arrays))[0].astype(np.float32) * x)
    expected = first * first.sum() if inside == "grad of jit" else first
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)


def test_results_have_memory_of_their_own():
    view = describe(on_cpu(A))
    first, second = (empty(view.kind, view.shape, view.dtype, view.device) for _ in range(2))
    assert describe(first).readonly
    assert not describe_new(first).readonly
    assert describe(first).pointer != describe(second).pointer


def test_arrays_are_not_written_for_their_users():
    with pytest.raises(ProblemError, match="read-only"):
        warploom.matmul(on_cpu(A), on_cpu(B), out=on_cpu(GATE))


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_traced_values_are_told_what_to_do(name):
    with pytest.raises(ProblemError, match=r"warploom\.jax\.attention.*jax\.pure_callback"):
        TRANSFORMS[name](lambda a: warploom.matmul(a, on_cpu(B)))(on_cpu(A))


def test_a_callback_takes_a_call_into_compiled_code():
    result = jax.ShapeDtypeStruct((24, 16), np.float16)
    found = jax.jit(lambda a, b: jax.pure_callback(warploom.matmul, result, a * 1, b))(on_cpu(A), on_cpu(B))
    np.testing.assert_array_equal(np.asarray(found), warploom.matmul(A, B))


def test_arrays_that_cannot_be_read_say_why():
    gone = on_cpu(A) + 1
    gone.delete()
    for array, says in (
        (gone, "deleted"),
        (jax.random.key(0), "PRNGKeyArray cannot be read through DLPack"),
        (jax.numpy.ones((4, 4), jax.numpy.int4), "cannot be read through DLPack"),
    ):
        with pytest.raises(ProblemError, match=says):
            describe(array)


def test_an_array_on_several_devices_is_refused():
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("JAX sees one device")
    rows = jax.sharding.PartitionSpec("rows")
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices[:2]), ("rows",)), rows)
    with pytest.raises(ProblemError, match="sharded over several devices"):
        describe(jax.device_put(A, sharding))
