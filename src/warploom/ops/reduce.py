"""``matmul_reduce`` and ``linear_cross_entropy``: row reductions of products that are never written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, s32, s64, u8
from warploom.core.errors import ConfigError, ProblemError
from warploom.interop import tracing
from warploom.interop.arrays import (
    ArrayView,
    address,
    as_numpy,
    describe,
    describe_new,
    empty,
    require_dtype,
    same_device,
)
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import is_tracing
from warploom.kernels.gemm.choice import choose_for_rows, uncut
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem
from warploom.kernels.mapped import MappedArray
from warploom.kernels.reduce.states import OPS, ReduceOp
from warploom.ops.backends import GpuCall, Grid, run_on_emulator
from warploom.ops.matmul_arrays import Inputs, gemm_config, read_inputs
from warploom.ops.options import flag, number, refuse_unhashable
from warploom.ops.places import EMULATOR, Place
from warploom.ops.recipes import Recipe
from warploom.ops.reduce_steps import ReducePlan, Step, blocks_of, transposed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, ReduceOptions

Op = Literal["max", "sum", "logsumexp"]


@overload
def matmul_reduce(
    a: Array, b: Any, op: Op = "max", *, return_index: Literal[False] = False, **options: Unpack[ReduceOptions]
) -> Array: ...


@overload
def matmul_reduce(
    a: Array, b: Any, op: Op = "max", *, return_index: Literal[True], **options: Unpack[ReduceOptions]
) -> tuple[Array, Array]: ...


@overload
def matmul_reduce(
    a: np.ndarray[Any, Any], b: Any, op: Op = "max", *, return_index: Literal[False] = False,
    **options: Unpack[ReduceOptions],
) -> NDArray[np.float32]: ...  # fmt: skip


@overload
def matmul_reduce(
    a: np.ndarray[Any, Any], b: Any, op: Op = "max", *, return_index: Literal[True], **options: Unpack[ReduceOptions]
) -> tuple[NDArray[np.float32], NDArray[np.int32]]: ...


def matmul_reduce(
    a: Any,
    b: Any,
    op: Op = "max",
    *,
    scale: float = 1.0,
    bias: Any = None,
    return_index: bool = False,
    config: AnyGemmConfig | str | None = None,
) -> Any:
    """A reduction over the columns of ``scale · a·b + bias`` for every row, without writing the product.

    Shapes: a (m, k), b (k, n), bias (n,); result float32 (m,). dtypes: float16 or bfloat16, all the same. Any sizes
    with n ≥ 1, and any strides with one contiguous dimension (``matmul_reduce(queries, vectors.T)`` reads vectors as
    they lie). ``op``: "max", "sum", or "logsumexp" (natural). ``return_index`` (with "max") also returns the column of
    each row's maximum, int32 (m,), the first of equal ones: the nearest neighbour by inner product.

    NaN is no maximum: a row of nothing else has -inf, at column 0. "sum" and "logsumexp" propagate it. The log-sum-exp
    of a row with +inf is +inf, of -inf alone -inf, as in PyTorch.

    Equal calls give equal bits: column blocks are merged in order, without atomics. Beyond inputs and result it takes 4
    or 8 bytes for each row and column block, and at most 32 MiB: more rows are taken in blocks of at least 256.
    Arrays and devices as for :func:`warploom.matmul`.

    Under ``torch.compile`` a call is one operator, ``warploom::matmul_reduce`` (``matmul_argmax`` with the index).

    Raises ProblemError for arrays or an ``op`` it does not take, ConfigError for a ``config`` that does not fit.
    """
    if is_tracing():
        return tracing.operator_of("matmul_reduce")(
            a, b, op, scale=scale, bias=bias, return_index=return_index, config=config
        )
    values, index = _reduced(a, b, reduction_named(op, return_index), scale, bias, config, None)
    return (values, index) if return_index else values


def reduction_named(op: Op, return_index: bool) -> ReduceOp:
    """The reduction that the arguments of :func:`matmul_reduce` ask for. Raises ProblemError if there is none."""
    if op not in ("max", "sum", "logsumexp"):
        raise ProblemError(f"op is 'max', 'sum' or 'logsumexp', not {op!r}")
    with_index = return_index if return_index.__class__ is bool else flag("return_index", return_index)
    if with_index and op != "max":
        raise ProblemError(f"return_index goes with op='max': {op} has no column")
    return "argmax" if with_index else op


@overload
def linear_cross_entropy(x: Array, w: Any, target: Any, *, config: AnyGemmConfig | str | None = None) -> Array: ...


@overload
def linear_cross_entropy(
    x: np.ndarray[Any, Any], w: Any, target: Any, *, config: AnyGemmConfig | str | None = None
) -> NDArray[np.float32]: ...


def linear_cross_entropy(x: Any, w: Any, target: Any, *, config: AnyGemmConfig | str | None = None) -> Any:
    """The loss of a language model's output layer for each row: logsumexp(x·wᵀ) - (x·wᵀ)[target], float32 (m,).

    Shapes: x (m, k) hidden states, w (n, k) the vocabulary's embeddings, target (m,) int32 or int64 in 0 … n-1 (others
    give NaN). dtypes of x and w: float16 or bfloat16. The m×n logits are never written. Take the mean for the usual
    loss. Infinite logits enter as they are: the loss is +inf where another logit than the target's is +inf, or the
    target's alone is -inf; NaN where the target's is +inf, or any logit is NaN.

    Under ``torch.compile`` a call is one operator, ``warploom::linear_cross_entropy``. There is no backward pass.
    Raises ProblemError as :func:`matmul_reduce` does.
    """
    if is_tracing():
        return tracing.operator_of("linear_cross_entropy")(x, w, target, config=config)
    rows, words, chosen = (settled(describe(array)) for array in (x, w, target))
    check_loss(rows, words, chosen)
    return _reduced(rows, transposed(words), "logsumexp", 1.0, None, config, chosen)[0]


def check_loss(rows: ArrayView, words: ArrayView, chosen: ArrayView) -> None:
    """Raises ProblemError where shapes, types or devices of :func:`linear_cross_entropy` are wrong."""
    if len(rows.shape) != 2 or len(words.shape) != 2 or tuple(chosen.shape) != (rows.shape[0],):
        raise ProblemError(
            f"x is (m, k), w (n, k) and target (m,); got {tuple(rows.shape)}, {tuple(words.shape)} and "
            f"{tuple(chosen.shape)}"
        )
    if chosen.dtype not in (s32, s64):
        raise ProblemError(f"target is {chosen.dtype}: convert it to int32 or int64")
    if rows.shape[1] != words.shape[1]:
        raise ProblemError(
            f"x has {rows.shape[1]} columns and w {words.shape[1]}: x is (m, k) and w (n, k), one row a word"
        )
    for name, view in (("x", rows), ("w", words)):
        require_dtype(view, name, (f16, bf16))
    if words.shape[0] == 0:
        raise ProblemError(f"w has shape {tuple(words.shape)}: a vocabulary has at least one word")
    if rows.dtype is not words.dtype:
        raise ProblemError(f"x is {rows.dtype} and w is {words.dtype}: convert them to one type")
    same_device((rows, words, chosen), ("x", "w", "target"))


def plan_matmul_reduce(
    a: Any,
    b: Any,
    op: ReduceOp = "max",
    *,
    scale: float = 1.0,
    bias: Any = None,
    config: AnyGemmConfig | str | None = None,
) -> ReducePlan:
    """What :func:`matmul_reduce` would run ("argmax" is "max" with its index), and why. Runs nothing."""
    if is_tracing():
        return tracing.operator_of("plan_matmul_reduce")(a, b, op, scale=scale, bias=bias, config=config)
    inputs = _read(_view(a), _view(b), op, number("scale", scale), bias, as_if_compact)
    return _plan(inputs, op, gemm_config(config, inputs.problem.dtype), False)


def _view(x: Any) -> ArrayView:
    return x if isinstance(x, ArrayView) else describe(x)


def _read(
    a: ArrayView,
    b: ArrayView,
    op: str,
    scale: float,
    bias: Any,
    copy: Callable[[ArrayView], ArrayView] = compact,
) -> Inputs:
    check_matrices(a, b, op)
    views = [a, b] if bias is None else [a, b, _view(bias)]
    return read_inputs(views, None, bias is not None, None, f32, "f32", scale, copy)


def check_matrices(a: ArrayView, b: ArrayView, op: str) -> None:
    """Raises ProblemError for what a reduction takes less than a product does."""
    if op not in OPS:
        raise ProblemError(f"op is one of {', '.join(OPS)}, not {op!r}")
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ProblemError(f"a and b are matrices, not of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if b.shape[1] == 0:
        raise ProblemError("b has no columns: there is nothing to reduce over")


def _plan(inputs: Inputs, op: ReduceOp, config: AnyGemmConfig | None, subtract: bool) -> ReducePlan:
    problem: GemmProblem = inputs.problem
    place = Place.of(inputs.views[0].device, wgmma=isinstance(config, HopperGemmConfig))
    goal = place.goal
    reason = "asked for by the caller"
    if config is None:
        config, reason = choose_for_rows(problem, goal)
    else:
        operands = {"a_k_contiguous": problem.a.k_contiguous, "b_k_contiguous": problem.b.k_contiguous}
        problems = list(dict.fromkeys(config.check(goal, **operands) + problem.misfits(config)))
        if uncut(config) != config:
            problems.append("split_k and stream_k cut sums that the reduction needs whole")
        if isinstance(config, GemmConfig) and config.wmma:
            problems.append("wmma does not say whose row a sum belongs to, which a reduction of rows asks for")
        if isinstance(config, HopperGemmConfig) and config.mma_sync:
            problems.append(
                "its warps share the rows of a tile: reductions of rows take wgmma, or mma.sync without TMA"
            )
        if problems:
            raise ConfigError(f"{config} does not fit: " + "; ".join(problems))
    return ReducePlan(problem, config, op, reason, goal.name, str(place), subtract, place.multiprocessors)


def _reduced(
    a: Any, b: Any, op: ReduceOp, scale: float, bias: Any, config: Any, target: ArrayView | None
) -> tuple[Any, Any]:
    """(values, indices or None) as arrays of a's kind."""
    if scale.__class__ is not float:
        scale = number("scale", scale)
    view = _view(a)
    if config is not None:
        config = gemm_config(config, view.dtype)
    given = {"a": view, "b": _view(b)}
    if bias is not None:
        given["bias"] = _view(bias)
    if target is not None:
        given["target"] = target
    key = (op, scale, config, *[(name, x[1:5], x.pointer & 15) for name, x in given.items()])
    try:
        ready = _ready.get(key)
    except TypeError:
        refuse_unhashable({"config": config})
        raise
    if ready is not None:
        return ready.run(given)
    inputs = _read(view, given["b"], op, scale, given.get("bias"))
    m = inputs.problem.m
    kind, device = view.kind, view.device
    out = empty(kind, (m,), f32, device)
    index = empty(kind, (m,), s32, device) if op == "argmax" else None
    if m == 0 and config is None:
        return out, index
    plan = _plan(inputs, op, config, target is not None)
    if m == 0:
        return out, index
    copied = device[0] != "cuda" and plan.device != EMULATOR
    if copied:  # CPU arrays on a GPU travel as contiguous ones
        hosts = [describe(np.ascontiguousarray(as_numpy(x))) for x in inputs.views]
        inputs = _read(hosts[0], hosts[1], op, scale, hosts[2] if bias is not None else None)
        plan = _plan(inputs, op, config, target is not None)
    results = [describe_new(x) for x in (out, index) if x is not None]
    steps = [step for block in blocks_of(plan, inputs, results, target) for step in block]
    if copied:
        _run_copied(steps, results)
    elif device[0] == "cuda":
        calls = [_loaded(step, device[1]) for step in steps]
        for call, step in zip(calls, steps, strict=True):
            call.launch_again(tuple(x.pointer for x in step.taken(call)), kind)
        _remember(key, given, results, calls, steps)
    else:
        for step in steps:
            run_on_emulator(step.recipe.program, step.grid, step.arrays, step.scalars, step.flops, mapped=step.mapped)
    return out, index


@dataclass(frozen=True)
class _Ready:
    """What a repeated call on a GPU needs: kernels, and the number of the array that each of their pointers is.

    Arrays are counted: the caller's, the ``results`` and the parts of one workspace, which start at ``offsets``.
    """

    calls: tuple[tuple[GpuCall, tuple[int, ...]], ...]
    results: tuple[tuple[tuple[int, ...], DType], ...]
    offsets: tuple[int, ...]
    workspace_bytes: int

    def run(self, given: dict[str, ArrayView]) -> tuple[Any, Any]:
        """Queue the kernels; (values, indices or None)."""
        first = given["a"]
        results = [empty(first.kind, shape, dtype, first.device) for shape, dtype in self.results]
        workspace = empty(first.kind, (self.workspace_bytes,), u8, first.device)
        start = address(workspace)
        pointers = [x.pointer for x in given.values()]
        pointers += map(address, results)
        pointers += [start + offset for offset in self.offsets]
        for call, numbers in self.calls:
            call.launch_again(tuple([pointers[i] for i in numbers]), first.kind)
        return results[0], results[1] if len(results) > 1 else None


_ready: dict[tuple[Any, ...], _Ready] = {}
_READY_KEPT = 1024
_PART_ALIGNMENT = 256  # bytes: as an allocation of its own would have


def _remember(
    key: tuple[Any, ...],
    given: dict[str, ArrayView],
    results: list[ArrayView],
    calls: list[GpuCall],
    steps: list[Step],
) -> None:
    """Keep the call for arrays like these, unless one had to be copied first or two are the same array."""
    known = {x.pointer for x in given.values()}
    if len(known) < len(given):
        return
    parts: dict[int, ArrayView] = {}
    for step in steps:
        for name, x in step.arrays.items():
            if x.pointer not in known and name in ("first", "second", "subtracted"):
                parts.setdefault(x.pointer, x)
    everything = [*(x.pointer for x in given.values()), *(x.pointer for x in results), *parts]
    numbers = {pointer: i for i, pointer in enumerate(everything)}
    taken = [step.taken(call) for call, step in zip(calls, steps, strict=True)]
    if any(x.pointer not in numbers for arrays in taken for x in arrays):
        return
    if len(_ready) >= _READY_KEPT:
        _ready.clear()
    listed = [(call, tuple(numbers[x.pointer] for x in arrays)) for call, arrays in zip(calls, taken, strict=True)]
    sizes = [-(-math.prod(x.shape) * x.dtype.bytes // _PART_ALIGNMENT) * _PART_ALIGNMENT for x in parts.values()]
    *offsets, total = accumulate(sizes, initial=0)
    shapes = tuple((tuple(x.shape), x.dtype) for x in results)
    _ready[key] = _Ready(tuple(listed), shapes, tuple(offsets), total)


def _run_copied(steps: list[Step], results: list[ArrayView]) -> None:
    """Run on GPU 0 with copies of CPU arrays, each made once; the results come back."""
    from warploom.cuda.buffers import DeviceCopy

    copies: dict[int, DeviceCopy] = {}
    for step in steps:
        call = _loaded(step, 0)
        for x in step.taken(call):
            if x.pointer not in copies:
                copies[x.pointer] = DeviceCopy(as_numpy(x), 0)
        call.launch_again(tuple(copies[x.pointer].pointer for x in step.taken(call)), "numpy")
    for result in results:
        copies[result.pointer].download()


def _loaded(step: Step, device: int) -> GpuCall:
    """The kernel of a step, loaded once per process."""
    return _prepared(step.recipe, step.grid, tuple(step.scalars.items()), device, step.mapped)


@lru_cache(maxsize=1024)
def _prepared(
    recipe: Recipe, grid: Grid, scalars: tuple[tuple[str, int], ...], device: int, mapped: tuple[MappedArray, ...]
) -> GpuCall:
    return GpuCall.prepare(recipe, grid, dict(scalars), device, mapped=mapped)
