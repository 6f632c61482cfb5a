"""Attention for JAX programs: ``warploom.jax.attention`` inside ``jax.jit``, ``grad`` and ``vmap``.

A call becomes a callback to the host (``jax.pure_callback``), which runs the kernels. Outside such transformations
``warploom.attention`` takes JAX arrays where they lie and is the shorter way.

Source: JAX, "External callbacks" and "Custom derivative rules".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from warploom.core.dtypes import dtype_of
from warploom.core.errors import ProblemError
from warploom.interop.arrays import CPU, ArrayView
from warploom.interop.dlpack import row_major_strides
from warploom.ops.attention import AttentionOptions, attention_backward_call, attention_call, problem_of
from warploom.ops.calls import Caller
from warploom.ops.declare import Arguments, refuse_unknown

Arrays = tuple[Array | None, ...]
Given = tuple[Any, ...]


def attention(q: Array, k: Array, v: Array, *, return_lse: bool = False, **options: Unpack[AttentionOptions]) -> Any:
    """:func:`warploom.attention` that JAX may trace, compile and differentiate, in reverse mode and by every array.

    Shapes, dtypes and options are those of :func:`warploom.attention`, which chooses the ``config`` here; options that
    are no arrays are Python values. The kernels see the arrays in the host's memory: on a GPU they are copied there and
    back. Raises ProblemError while tracing for shapes and types that attention does not take.
    """
    if options.pop("config", None) is not None:
        raise ProblemError("config: warploom.jax.attention chooses it where the program runs: leave it out")
    if unknown := [name for name in options if name not in attention_call.parameters]:
        refuse_unknown("warploom.jax.attention", unknown, attention_call.parameters)
    arrays, plain = attention_call.positions({"q": q, "k": k, "v": v, "return_lse": True, **options})
    asked = attention_call.declaration.plain(plain)
    problem_of(_seen(attention_call, arrays, tuple(asked.values())))
    found: Any = _attention(tuple(asked.values()), arrays)
    return tuple(found) if return_lse else found[0]


def _seen(caller: Caller, arrays: Arrays, options: Given) -> Arguments:
    """The arguments of a call in a trace, without addresses. Raises ProblemError for arrays not as declared."""
    views, declaration = dict[str, ArrayView](), caller.declaration
    for name, x in declaration.named(arrays).items():
        if x is None and name not in declaration.needed:
            continue
        if not isinstance(x, jax.Array | np.ndarray):
            raise ProblemError(f"{name} is a {type(x).__name__}: pass an array of JAX")
        shape = tuple(x.shape)
        try:
            dtype = dtype_of(x.dtype)
        except ValueError:
            raise ProblemError(f"{name} is {x.dtype}: attention takes float16 and bfloat16") from None
        views[declaration.kernels(name)] = ArrayView(0, shape, row_major_strides(shape), dtype, CPU, "jax", x)
    return declaration.bind(views, dict(zip(caller.option_names, options, strict=True)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Given, arrays: Arrays) -> Any:
    """The result and its log-sum-exps, which the backward pass needs."""
    return _on_host(attention_call, arrays, options)


def _forward(options: Given, arrays: Arrays) -> Any:
    found: Any = _attention(options, arrays)
    return found, (arrays, found)


def _backward(options: Given, saved: Any, gradients: tuple[Array, Array]) -> Any:
    """The gradients, found by names: that of ``q`` is the backward operation's first result."""
    arrays, found = saved
    known: Mapping[str, Any] = {
        **dict(zip(attention_call.array_names, arrays, strict=True)),
        **dict(zip(("out", "lse", "dout", "dlse"), (*found, *gradients), strict=True)),
        **dict(zip(attention_call.option_names, options, strict=True)),
    }
    given, asked = attention_backward_call.positions(known)
    made = iter(_on_host(attention_backward_call, given, asked))
    return (tuple([None if x is None else next(made).astype(x.dtype) for x in arrays]),)


_attention.defvjp(_forward, _backward)  # pyright: ignore[reportFunctionMemberAccess]  (where JAX is absent)


def _on_host(caller: Caller, arrays: Arrays, options: Given) -> Any:
    """The results of a call on NumPy's arrays, when the program runs."""

    def run(*given: Any) -> Any:
        hosts = iter(map(np.asarray, given))
        return caller.computed(tuple([None if x is None else next(hosts) for x in arrays]), options)

    forms = _seen(caller, arrays, options).results.values()
    shapes = tuple([jax.ShapeDtypeStruct(shape, dtype.numpy) for shape, dtype in forms])
    given = [jnp.asarray(x) for x in arrays if x is not None]
    return jax.pure_callback(run, shapes, *given, vmap_method="sequential")
