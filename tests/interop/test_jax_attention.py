"""``warploom.jax.attention``: traced, compiled and differentiated by JAX, beside JAX's own derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warploom.core.errors import ProblemError

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
attention: Any = pytest.importorskip("warploom.jax").attention


def numbers(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def plain(q, k, v, sinks, softcap=3.0):
    """Causal attention with grouped heads, sinks and a soft cap, (batch, q_len, heads, head_dim), in float32."""
    q, k, v, sinks = (x.astype(jnp.float32) for x in (q, k, v, sinks))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = softcap * jnp.tanh(jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 / softcap)
    seen = jnp.tril(jnp.ones(s.shape[2:], bool), k.shape[1] - q.shape[1])
    s = jnp.where(seen, s, -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s, -1)[..., :-1], v)
    return out, jax.scipy.special.logsumexp(s, -1)


def own(q, k, v, sinks):
    return attention(q, k, v, causal=True, softcap=3.0, sinks=sinks, return_lse=True)


Q, K, V, SINKS = numbers(1, 20, 2, 16), numbers(1, 24, 1, 16, seed=1), numbers(1, 24, 1, 16, seed=2), numbers(2, seed=3)


def test_inside_jit_values_and_gradients_are_those_of_jax():
    weights = numbers(1, 20, 2, 16, seed=4), numbers(1, 2, 20, seed=5)

    def total(function):
        def value(*given):
            results = function(*given)
            return sum((w.astype(jnp.float32) * y).sum() for w, y in zip(weights, results, strict=True)), results

        return value

    arguments = Q, K, V, SINKS
    by = (0, 1, 2, 3)
    (_, found), gradients = jax.jit(jax.value_and_grad(total(own), by, has_aux=True))(*arguments)
    (_, expected), exact = jax.value_and_grad(total(plain), by, has_aux=True)(*arguments)
    for x, y in (*zip(found, expected, strict=True), *zip(gradients, exact, strict=True)):
        y = np.asarray(y, np.float32)
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=2**-6 * np.abs(y).max())
    assert [g.dtype for g in gradients] == [x.dtype for x in arguments]


def test_mapped_over_an_axis():
    q = jnp.stack([Q, 2 * Q])
    found = jax.jit(jax.vmap(lambda x: attention(x, K, V)))(q)
    assert (found[1] == attention(2 * Q, K, V)).all()


def test_what_attention_does_not_take_is_refused_while_tracing():
    with pytest.raises(ProblemError, match=r"it must be \(batch, q_len"):
        jax.jit(lambda q: attention(q[0], K, V))(Q)
    with pytest.raises(ProblemError, match="q is f32"):
        jax.eval_shape(lambda q: attention(q.astype(jnp.float32), K, V), Q)
    with pytest.raises(ProblemError, match="q is a list"):
        attention([1.0], K, V)
    with pytest.raises(TypeError, match="keyword argument 'casual': write causal="):
        attention(Q, K, V, casual=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ProblemError, match=r"^config: warploom\.jax\.attention chooses it"):
        attention(Q, K, V, config="attention_sm80()")
