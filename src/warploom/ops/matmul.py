"""``matmul`` and ``plan_matmul``: matrix products on arrays of any framework."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from warploom.core.errors import ConfigError, ProblemError
from warploom.core.identity import function_key
from warploom.core.targets import Target
from warploom.interop import tracing
from warploom.interop.arrays import ArrayView, address, as_numpy, describe, describe_new, empty_like
from warploom.interop.copies import as_if_compact
from warploom.interop.tracing import is_tracing
from warploom.kernels.gemm.choice import choose, expected_seconds, parse_config, uncut
from warploom.kernels.gemm.features import EpilogueFunction
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem
from warploom.ops.backends import GpuCall, gpu_name, run_on_emulator
from warploom.ops.matmul_arrays import READ_ONLY, Inputs, gemm_config, read_inputs
from warploom.ops.matmul_launch import Prepared
from warploom.ops.matmul_plan import MatmulPlan, argument_names, finish_names
from warploom.ops.options import extra_matrices, number, refuse_unhashable
from warploom.ops.places import EMULATOR, Place
from warploom.winners.classes import gemm_class
from warploom.winners.store import find_winner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, MatmulOptions, Out

_Key = tuple[Hashable, ...]
_prepared: dict[_Key, Prepared] = {}
_PREPARED_KEPT = 4096


@overload
def matmul(a: Array, b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> Array: ...


@overload
def matmul(a: np.ndarray[Any, Any], b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> NDArray[Any]: ...


@overload
def matmul(a: Any, b: Any, *, out: Out, **options: Unpack[MatmulOptions]) -> Out: ...


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
    config: AnyGemmConfig | str | None = None,
) -> Any:
    """epilogue(alpha · a·b + bias), in one kernel.

    Shapes: a (…, m, k), b (…, k, n), result (…, m, n); leading dimensions broadcast as in NumPy. dtypes: float16 or
    bfloat16, both the same. Any m, n, k, zero included; each matrix row- or column-major with any leading stride (of
    both strides one is 1; others are copied first): ``matmul(x, w.T)`` reads w as it lies. On sm_90a matrices whose
    lines start at multiples of 16 bytes are multiplied by ``wgmma``; others by ``mma.sync``, which is slower, and most
    so where lines start at odd elements: pad K (or the leading stride) to a multiple of 8 where you can.
    ``plan_matmul`` says which and why; ``config`` asks for one, of either generator, as an object or in its notation.

    ``out_dtype`` is the inputs' type by default, or float16, bfloat16, float32. ``accumulate`` "f32", or "f16" (float16
    inputs; faster where the hardware is, and the sum is rounded to 11 bits at every step of 16). ``bias``, (n,), of the
    inputs' type, is added to every row. ``epilogue`` is a Python function of the f32 sum that is compiled into the
    kernel (``warploom.lang.functions`` has relu, gelu, silu, maximum …); with ``extras``, one or two matrices of the
    result's shape and the inputs' type, it takes their elements too: ``epilogue=lambda x, gate: silu(x) * gate``.
    ``out`` receives the result: of that shape, row-major with any stride between rows. It shares no memory with a, b or
    bias; an extra matrix may be ``out`` itself.

    Small m·n with large k is cut along k (``split_k``), uneven counts of tiles too (``stream_k``); parts are added in a
    fixed order, so equal calls give equal bits. Arrays of torch, CuPy and JAX on a GPU are used where they lie, on the
    caller's stream; the result is of the same kind. NumPy arrays run on the GPU if there is one, else on the emulator.

    Under ``torch.compile`` a call is one operator, ``warploom::matmul``; calls with
    ``epilogue``, ``extras`` or ``out`` break the graph instead.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit.
    """
    if is_tracing():
        return tracing.operator_of("matmul")(
            a, b, out_dtype=out_dtype, accumulate=accumulate, bias=bias, epilogue=epilogue, extras=extras, alpha=alpha,
            out=out, config=config,
        )  # fmt: skip
    if alpha.__class__ is not float:
        alpha = number("alpha", alpha)
    if extras.__class__ is not tuple:
        extras = extra_matrices(extras)
    views = [describe(a), describe(b)]
    if config is not None:
        config = gemm_config(config, views[0].dtype, accumulate)
    if bias is not None or extras:
        views += [describe(x) for x in (*(() if bias is None else (bias,)), *extras)]
    into = None if out is None else describe(out)
    asked = (
        out_dtype, accumulate, bias is None, None if epilogue is None else function_key(epilogue), alpha, config,
        None if into is None else (into[1:5], into.pointer & 15),
    )  # fmt: skip
    key = (asked, *[(view[1:5], view.pointer & 15) for view in views])
    try:
        ready = _prepared.get(key)
    except TypeError:
        refuse_unhashable({"out_dtype": out_dtype, "accumulate": accumulate, "epilogue": epilogue, "config": config})
        raise
    if ready is None:
        inputs = read_inputs(views, into, bias is not None, epilogue, out_dtype, accumulate, alpha)
        return _first_call(inputs, out, config, key)
    if into is None:
        result = ready.new_result(views[0])
        ready.run(views, address(result))
        return result
    if into.readonly:
        raise ProblemError(READ_ONLY)
    ready.check_out(views, into, bias is not None)
    ready.run(views, into.pointer)
    return out


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
    config: AnyGemmConfig | str | None = None,
) -> MatmulPlan:
    """What :func:`matmul` would run with these arguments: configuration, reason, Program, CUDA. Runs nothing."""
    if is_tracing():
        return tracing.operator_of("plan_matmul")(
            a, b, out_dtype=out_dtype, accumulate=accumulate, bias=bias, epilogue=epilogue, extras=extras, alpha=alpha,
            out=out, config=config,
        )  # fmt: skip
    others = (*(() if bias is None else (bias,)), *extra_matrices(extras))
    views = [describe(x) for x in (a, b, *others)]
    into = None if out is None else describe(out)
    factor = number("alpha", alpha)
    inputs = read_inputs(views, into, bias is not None, epilogue, out_dtype, accumulate, factor, as_if_compact)
    return _plan(inputs, gemm_config(config, inputs.problem.dtype, accumulate))


def _plan(inputs: Inputs, config: AnyGemmConfig | None) -> MatmulPlan:
    problem = inputs.problem
    place = Place.of(inputs.views[0].device, wgmma=isinstance(config, HopperGemmConfig))
    goal = place.goal
    if config is None:
        won = None if place.gpu is None else tuned(problem, goal, place.gpu)
        config, reason = won or choose(problem, goal)
    else:
        reason = "asked for by the caller"
        operands = {"a_k_contiguous": problem.a.k_contiguous, "b_k_contiguous": problem.b.k_contiguous}
        problems = list(dict.fromkeys(config.check(goal, **operands) + problem.misfits(config)))
        if problems:
            raise ConfigError(f"{config} does not fit: " + "; ".join(problems))
    return MatmulPlan(problem, config, reason, goal.name, str(place), inputs.alpha, place.multiprocessors)


NEAR_ENOUGH = 1.0
"""The distance of classes up to which a winner is still taken: one size off by a factor of 2."""
MOST_DOUBT = 1.03
"""A winner of other extents is taken where the cost model expects at most this many times its own choice's time.

By the rates in ``benchmarks/results/h200/gemm.json``: from 1.04 on a winner of 8192 columns and 16 rows is taken for
10240 columns, where it loses a fifth; from 1.02 down, winners that gain a little are turned away.
"""


def tuned(problem: GemmProblem, goal: Target, device: int) -> tuple[AnyGemmConfig, str] | None:
    """The configuration that won on this GPU for such products, and why; None where nobody has tuned for them.

    How many tiles a size makes decides much, and a class spans a factor of 2: unless it was found on this machine, for
    this class, a winner must also please the cost model.
    """
    found = find_winner(gpu_name(device), gemm_class(problem), near=NEAR_ENOUGH)
    if found is None:
        return None
    try:
        config = replace(parse_config(found.winner.config), dtype=problem.dtype)
    except ConfigError:  # flags that this version does not know
        return None
    operands = {"a_k_contiguous": problem.a.k_contiguous, "b_k_contiguous": problem.b.k_contiguous}
    if config.check(goal, **operands) or problem.misfits(config):
        return None
    if found.distance > 0 or found.shipped:
        expected = [expected_seconds(problem, c, goal) for c in (config, choose(problem, goal)[0])]
        if expected[0] > MOST_DOUBT * expected[1]:
            return None
    return config, found.reason


def _first_call(inputs: Inputs, out: Any, config: AnyGemmConfig | None, key: _Key) -> Any:
    """Everything that :func:`matmul` need not repeat for arrays of the same shapes, strides and device."""
    first = inputs.views[0]
    result = empty_like(first, inputs.shape, inputs.problem.out_dtype) if out is None else out
    if 0 in inputs.shape:
        if config is not None:
            _plan(inputs, config)  # refuses what does not fit
        return result
    view = describe_new(result) if out is None else describe(out)
    made = _plan(inputs, config)
    if first.device[0] == "cuda":
        ready = Prepared.of(made, inputs, view, first.device[1])
        if not inputs.copied:
            if len(_prepared) >= _PREPARED_KEPT:
                _prepared.clear()
            _prepared[key] = ready
        ready.run(inputs.views, view.pointer)
    elif made.device == EMULATOR:
        _run_on_emulator(made, inputs, view)
    else:
        _run_from_host(inputs, view, config)
    return result


def _run_on_emulator(made: MatmulPlan, inputs: Inputs, result: ArrayView) -> None:
    """One launch per group of batches, with the arrays of each group as views of their own."""
    problem, names = made.problem, argument_names(made.problem, made.config)
    a, b, *others = inputs.views
    split = made.config.split_k > 1
    parts = describe(np.full(made.workspace, np.nan, np.float32)) if split else None
    for of_a, of_b, of_out, of_extra in inputs.offsets:
        operands = [_moved(a, of_a), _moved(b, of_b)]
        combined = [_moved(result, of_out), *(_moved(x, of_extra if len(x.shape) > 1 else 0) for x in others)]
        first = dict(zip(names, [*operands, *(combined if parts is None else [parts])], strict=True))
        first |= made.shared_workspace()
        run_on_emulator(made.program, made.grid, first, made.scalars, problem.flops, mapped=made.mapped)
        if parts is not None and made.finish is not None:
            second = {"parts": parts, **dict(zip(finish_names(problem), combined, strict=True))}
            run_on_emulator(made.finish, problem.finish_grid(), second, made.finish_scalars, problem.batch * problem.n)


def _moved(view: ArrayView, offset: int) -> ArrayView:
    """The array from ``offset`` bytes on, flattened to what lies behind it."""
    if offset == 0:
        return view
    whole = as_numpy(view)
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + 1
    elements = offset // view.dtype.bytes
    flat = np.lib.stride_tricks.as_strided(whole, (reach,), (view.dtype.bytes,))
    return describe(flat[elements:])


def _run_from_host(inputs: Inputs, result: ArrayView, config: AnyGemmConfig | None) -> None:
    """CPU arrays on a GPU: contiguous copies there and back."""
    hosts = [np.ascontiguousarray(as_numpy(view)) for view in inputs.views]
    target_host = np.empty(inputs.shape, result.dtype.numpy)
    again = inputs.reread([describe(x) for x in hosts], describe(target_host))
    made = _plan(again, config)
    if uncut(made.config) != made.config or len(again.offsets) > 1:
        hosts[:2], again = _one_launch(hosts, again, target_host)
        made = _plan(again, uncut(made.config))
    if len(again.offsets) > 1:
        raise ProblemError(f"{inputs.shape} has more batches than one launch takes: move the arrays to the GPU first")
    call = GpuCall.prepare(made.recipe, made.grid, made.scalars, 0, mapped=made.mapped)
    call.run_from_host(hosts[:2], [target_host], hosts[2:])
    as_numpy(result)[...] = target_host


def _one_launch(
    hosts: list[np.ndarray[Any, Any]], inputs: Inputs, result: np.ndarray[Any, Any]
) -> tuple[list[np.ndarray[Any, Any]], Inputs]:
    """Batches written out in full, so that one launch takes them all."""
    batch = inputs.shape[:-2]
    full = [np.ascontiguousarray(np.broadcast_to(x, (*batch, *x.shape[-2:]))) for x in hosts[:2]]
    return full, inputs.reread([describe(x) for x in (*full, *hosts[2:])], describe(result))
