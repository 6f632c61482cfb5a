"""``matmul`` and ``plan_matmul``: matrix products on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.interop.arrays import (
    ArrayView,
    Fields,
    address,
    describe,
    describe_new,
    empty_like,
    fields,
    maker,
)
from warploom.interop.copies import as_if_compact
from warploom.interop.overlap import near
from warploom.interop.tracing import recorded, traced
from warploom.kernels.matmul.choice import choose, parse_config
from warploom.kernels.matmul.features import EpilogueFunction
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.settings import refuse, unsuitable
from warploom.ops.matmul_arrays import READ_ONLY, Inputs, matmul_config, read_inputs, refuse_overlap
from warploom.ops.matmul_plan import MatmulPlan
from warploom.ops.options import extra_matrices, number, refuse_unhashable
from warploom.ops.places import Place
from warploom.ops.steps import Kept, Prepared, Steps, run_anew
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, MatmulOptions, Out


@overload
def matmul(a: Array, b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> Array: ...


@overload
def matmul(a: np.ndarray[Any, Any], b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> NDArray[Any]: ...


@overload
def matmul(a: Any, b: Any, *, out: Out, **options: Unpack[MatmulOptions]) -> Out: ...


@recorded
def matmul(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    accumulate: Any = "f32",
    bias: Any = None,
    epilogue: EpilogueFunction | None = None,
    extras: Sequence[Any] = (),
    alpha: float = 1.0,
    out: Any = None,
    config: MatmulConfig | str | None = None,
) -> Any:
    """epilogue(alpha · a·b + bias), in one kernel.

    Shapes: a (…, m, k), b (…, k, n), result (…, m, n); leading dimensions broadcast as in NumPy. dtypes: float16 or
    bfloat16, both the same. Any m, n, k, zero included; each matrix row- or column-major with any leading stride (of
    both strides one is 1; others are copied first): ``matmul(x, w.T)`` reads w as it lies. On sm_90a matrices whose
    lines start at multiples of 16 bytes are multiplied by ``wgmma``; others by ``mma.sync``, which is slower, and most
    so where lines start at odd elements: pad K (or the leading stride) to a multiple of 8 where you can.
    ``plan_matmul`` says which and why; ``config`` asks for one, as an object or in its notation.

    ``out_dtype`` is the inputs' type by default, or float16, bfloat16, float32. ``accumulate`` "f32", or "f16" (float16
    inputs; faster where the hardware is, and the sum is rounded to 11 bits at every step of 16). ``bias``, (n,), of the
    inputs' type, is added to every row. ``epilogue`` is a Python function of the f32 sum that is compiled into the
    kernel (``warploom.lang.functions`` has relu, gelu, silu, maximum …); with ``extras``, one or two matrices of the
    inputs' type or float32, it takes their elements too: ``epilogue=lambda x, gate: silu(x) * gate``. They have the
    result's shape, or a value for each row, (m, 1), or each column, (1, n).
    ``out`` receives the result: of that shape, row-major with any stride between rows. It shares no memory with a, b or
    bias; an extra matrix may be ``out`` itself.

    Small m·n with large k is cut along k (``split_k``), uneven counts of tiles too (``stream_k``); parts are added in a
    fixed order, so equal calls give equal bits. Arrays of torch, CuPy and JAX on a GPU are used where they lie, on the
    caller's stream; the result is of the same kind. NumPy arrays run on the GPU if there is one, else on the emulator.

    Under ``torch.compile`` a call is one operator, ``warploom::matmul``; calls with
    ``epilogue``, ``extras`` or ``out`` break the graph instead.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit.
    """
    if extras.__class__ is not tuple:
        extras = extra_matrices(extras)
    if alpha.__class__ is not float:
        alpha = number("alpha", alpha)
    views = [fields(a), fields(b)]
    if config is not None:
        config = matmul_config(config, views[0][3], accumulate)
    if bias is not None or extras:
        views += [fields(x) for x in (*(() if bias is None else (bias,)), *extras)]
    into = None if out is None else describe(out)
    asked = (
        out_dtype, accumulate, bias is None, None if epilogue is None else function_key(epilogue), alpha, config,
        None if into is None else (into[1:6], into.pointer & 15),
    )  # fmt: skip
    key = (asked, *[(x[1:6], x[0] & 15) for x in views])
    try:
        ready = _prepared.get(key)
    except TypeError:
        refuse_unhashable({"out_dtype": out_dtype, "accumulate": accumulate, "epilogue": epilogue, "config": config})
        raise
    if ready is None:
        inputs = read_inputs(
            [ArrayView(*x) for x in views], into, bias is not None, epilogue, out_dtype, accumulate, alpha
        )
        return _first_call(inputs, out, config, key)
    if into is None:
        result = ready.new_result(views[0][6])
        ready.run(views, address(result))
        return result
    if into.readonly:
        raise ProblemError(READ_ONLY)
    ready.check_out(views, into, bias is not None)
    ready.run(views, into.pointer)
    return out


@traced
def plan_matmul(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    accumulate: Any = "f32",
    bias: Any = None,
    epilogue: EpilogueFunction | None = None,
    extras: Sequence[Any] = (),
    alpha: float = 1.0,
    out: Any = None,
    config: MatmulConfig | str | None = None,
) -> MatmulPlan:
    """What :func:`matmul` would run with these arguments: configuration, reason, Program, CUDA. Runs nothing."""
    others = (*(() if bias is None else (bias,)), *extra_matrices(extras))
    views = [describe(x) for x in (a, b, *others)]
    into = None if out is None else describe(out)
    factor = number("alpha", alpha)
    inputs = read_inputs(views, into, bias is not None, epilogue, out_dtype, accumulate, factor, as_if_compact)
    return _plan(inputs, matmul_config(config, inputs.problem.dtype, accumulate))


def _plan(inputs: Inputs, config: MatmulConfig | None) -> MatmulPlan:
    problem = inputs.problem
    place = Place.of(inputs.views[0].device, requires=None if config is None else config.requires)
    target = place.goal
    if config is None:
        chosen, reason = tuned(problem, target, place.gpu, parse_config) or choose(problem, target)
    else:
        chosen, reason = config, "asked for by the caller"
        refuse(f"{config} does not fit", unsuitable(config, problem, target))
    return MatmulPlan(problem, chosen, reason, target.name, str(place), place.multiprocessors)


def _first_call(inputs: Inputs, out: Any, config: MatmulConfig | None, key: tuple[Hashable, ...]) -> Any:
    """Everything that :func:`matmul` need not repeat for arrays of the same shapes, strides and device."""
    first = inputs.views[0]
    result = empty_like(first, inputs.shape, inputs.problem.out_dtype) if out is None else out
    if 0 in inputs.shape:
        if config is not None:
            _plan(inputs, config)  # refuses what does not fit
        return result
    view = describe_new(result) if out is None else describe(out)
    key = (key[0], *[(x[1:6], x[0] & 15) for x in inputs.views])  # what was copied lies like the copy of another call
    ready = _prepared.get(key)
    if ready is not None:
        ready.run(inputs.views, view.pointer)
        return result
    a, b, *others = inputs.views
    arrays = dict(zip(("a", "b", "out", *inputs.problem.combined), (a, b, view, *others), strict=True))

    def steps(lying: dict[str, ArrayView]) -> Steps:
        a, b, to, *others = lying.values()
        again = inputs if lying is arrays else inputs.reread([a, b, *others], to)
        return _plan(again, config).steps(again.offsets)

    prepared = run_anew(steps, arrays, ("out",))
    if prepared is not None:
        reaches = tuple([near(x, view) for x in inputs.views])
        _prepared.keep(key, Ready(prepared, reaches, maker(first, inputs.shape, inputs.problem.out_dtype)))
    return result


@dataclass(frozen=True)
class Ready:
    """Everything that a repeated call needs.

    ``near``: between which distances in bytes from the caller's ``out`` each input reaches into its memory.
    """

    prepared: Prepared
    near: tuple[tuple[int, int], ...]
    new_result: Callable[[Any], Any]
    """Makes an array for the result, from a."""
    apart: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    """Distances of inputs from ``out`` at which they interleave, or are one, without harm."""

    def check_out(self, views: Sequence[Fields], out: ArrayView, has_bias: bool) -> None:
        """Raises ProblemError where ``out`` shares memory with an input: mostly one comparison for each tells."""
        at = out[0]
        for view, (least, most) in zip(views, self.near, strict=False):
            if least < view[0] - at < most:
                break
        else:
            return
        distances = tuple([view[0] - at for view in views])
        if distances not in self.apart:
            refuse_overlap([ArrayView(*view) for view in views], out, has_bias)
            self.apart.add(distances)

    def run(self, views: Sequence[Fields], result: int) -> None:
        """Queue the launches that write to address ``result``. ``views``: a, b, the bias (if any), the extras."""
        first, second, *others = views
        self.prepared.run((first[0], second[0], result, *[x[0] for x in others]), first[5])


_prepared: Kept[Ready] = Kept()
