"""Attention for JAX programs: ``warploom.jax.attention`` inside ``jax.jit``, ``grad`` and ``vmap``.

A call becomes a callback to the host (``jax.pure_callback``), which runs the kernels. Outside such transformations
``warploom.attention`` takes JAX arrays where they lie and is the shorter way.

Source: JAX, "External callbacks" and "Custom derivative rules".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from warploom.core.dtypes import dtype_of, f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import CPU, ArrayView
from warploom.interop.dlpack import row_major_strides
from warploom.ops import attention as eager
from warploom.ops.attention_arrays import AXES, Layout, Options, Window, checked
from warploom.ops.attention_backward import attention_backward


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
) -> Any:
    """:func:`warploom.attention` that JAX may trace, compile and differentiate (in reverse mode, by q, k, v and sinks).

    Shapes, dtypes and options are those of :func:`warploom.attention`; options are Python values. The kernels see the
    arrays in the host's memory: on a GPU they are copied there and back. Raises ProblemError while tracing for shapes
    and types that attention does not take.
    """
    options = Options(causal, scale, window, softcap, True, layout).plain()
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    checked({name: _seen(name, x) for name, x in given.items() if x is not None}, options)
    found: Any = _attention(options, q, k, v, sinks)
    return tuple(found) if return_lse else found[0]


def _seen(name: str, array: Any) -> ArrayView:
    """An array of a trace as the checks see it, with no address."""
    if not isinstance(array, jax.Array | np.ndarray):
        raise ProblemError(f"{name} is a {type(array).__name__}: pass an array of JAX")
    shape = tuple(array.shape)
    try:
        dtype = dtype_of(array.dtype)
    except ValueError:
        raise ProblemError(f"{name} is {array.dtype}: attention takes float16 and bfloat16") from None
    return ArrayView(0, shape, row_major_strides(shape), dtype, CPU, "jax", array)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Array]:
    """The result and its log-sum-exps, which the backward pass needs."""
    rows = tuple(q.shape[axis] for axis in AXES[options.layout])
    shapes = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype), jax.ShapeDtypeStruct(rows, f32.numpy)
    return _on_host(partial(eager.attention, **_keywords(options), return_lse=True), shapes, (q, k, v), sinks=sinks)


def _forward(options: Options, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    found: Any = _attention(options, q, k, v, sinks)
    return found, (q, k, v, sinks, *found)


def _backward(options: Options, saved: Any, gradients: tuple[Array, Array]) -> Any:
    q, k, v, sinks, out, lse = saved
    dout, dlse = gradients
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    if sinks is not None:
        shapes.append(jax.ShapeDtypeStruct(sinks.shape, f32.numpy))
    call = partial(attention_backward, **_keywords(options))
    found = _on_host(call, tuple(shapes), (dout, q, k, v, out, lse), dlse=dlse, sinks=sinks)
    return (*found[:3], None if sinks is None else found[3].astype(sinks.dtype))


_attention.defvjp(_forward, _backward)  # pyright: ignore[reportFunctionMemberAccess]  (where JAX is absent)


def _keywords(options: Options) -> dict[str, Any]:
    return {
        "causal": options.causal,
        "scale": options.scale,
        "window": options.window,
        "softcap": options.softcap,
        "layout": options.layout,
    }


def _on_host(call: Callable[..., Any], shapes: Any, arrays: tuple[Array, ...], **named: Array | None) -> Any:
    """The results of ``call`` on NumPy's arrays, when the program runs."""

    def run(*given: Any) -> Any:
        hosts = [np.asarray(x) for x in given]
        return call(*hosts[: len(arrays)], **dict(zip(names, hosts[len(arrays) :], strict=True)))

    names = [name for name, x in named.items() if x is not None]
    return jax.pure_callback(
        run, shapes, *map(jnp.asarray, arrays), *[named[name] for name in names], vmap_method="sequential"
    )
