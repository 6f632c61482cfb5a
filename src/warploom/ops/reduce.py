"""``matmul_reduce`` and ``linear_cross_entropy``: row reductions of products that are never written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, s32, s64
from warploom.core.errors import ProblemError
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
from warploom.kernels.matmul.choice import choose_for_rows
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.matmul_reduce.problem import ReduceProblem
from warploom.kernels.matmul_reduce.states import OPS, ReduceOp
from warploom.kernels.settings import refuse, unsuitable
from warploom.ops.matmul_arrays import Inputs, matmul_config, read_inputs
from warploom.ops.options import flag, number, refuse_unhashable
from warploom.ops.places import EMULATOR, Place
from warploom.ops.reduce_plan import ReducePlan, for_logits, transposed
from warploom.ops.steps import Prepared

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
    config: MatmulConfig | str | None = None,
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
def linear_cross_entropy(x: Array, w: Any, target: Any, *, config: MatmulConfig | str | None = None) -> Array: ...


@overload
def linear_cross_entropy(
    x: np.ndarray[Any, Any], w: Any, target: Any, *, config: MatmulConfig | str | None = None
) -> NDArray[np.float32]: ...


def linear_cross_entropy(x: Any, w: Any, target: Any, *, config: MatmulConfig | str | None = None) -> Any:
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
    config: MatmulConfig | str | None = None,
) -> ReducePlan:
    """What :func:`matmul_reduce` would run ("argmax" is "max" with its index), and why. Runs nothing."""
    if is_tracing():
        return tracing.operator_of("plan_matmul_reduce")(a, b, op, scale=scale, bias=bias, config=config)
    inputs = _read(_view(a), _view(b), op, number("scale", scale), bias, as_if_compact)
    return _plan(inputs, op, matmul_config(config, inputs.problem.dtype))


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


def _plan(inputs: Inputs, op: ReduceOp, config: MatmulConfig | None, target: ArrayView | None = None) -> ReducePlan:
    problem = ReduceProblem(inputs.problem, op, 0 if target is None else target.dtype.bits // 32)
    place = Place.of(inputs.views[0].device, requires=None if config is None else config.requires)
    goal = place.goal
    if config is None:
        chosen, reason = choose_for_rows(inputs.problem, goal)
    else:
        chosen, reason = config, "asked for by the caller"
        refuse(f"{config} does not fit", unsuitable(config, inputs.problem, goal) or problem.misfits(config))
    return ReducePlan(problem, chosen, reason, goal.name, str(place), place.multiprocessors)


def _reduced(
    a: Any, b: Any, op: ReduceOp, scale: float, bias: Any, config: Any, target: ArrayView | None
) -> tuple[Any, Any]:
    """(values, indices or None) as arrays of a's kind."""
    if scale.__class__ is not float:
        scale = number("scale", scale)
    view = _view(a)
    if config is not None:
        config = matmul_config(config, view.dtype)
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
    return _first_call(given, op, scale, config, key)


def _first_call(
    given: dict[str, ArrayView], op: ReduceOp, scale: float, config: MatmulConfig | None, key: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Everything that a call need not repeat for arrays of the same shapes, strides and device."""
    first, target = given["a"], given.get("target")
    inputs = _read(first, given["b"], op, scale, given.get("bias"))
    kinds = (f32, s32) if op == "argmax" else (f32,)
    results = [empty(first.kind, (inputs.problem.m,), kind, first.device) for kind in kinds]
    values, index = results[0], results[1] if len(results) > 1 else None
    if inputs.problem.m == 0:
        if config is not None:
            _plan(inputs, op, config, target)  # refuses what does not fit
        return values, index
    plan = _plan(inputs, op, config, target)
    if first.device[0] != "cuda" and plan.device != EMULATOR:
        _run_from_host(inputs, op, scale, config, results, target)
        return values, index
    arrays = _named(inputs, results, target)
    steps = plan.steps(arrays)
    if first.device[0] != "cuda":
        steps.emulate(arrays)
        return values, index
    prepared = steps.prepare(tuple(arrays), first.device[1])
    prepared.run([x.pointer for x in arrays.values()], first)
    mine = {name: {"x": "a", "w": "b"}.get(name, name) for name in arrays if name not in _RESULTS}
    if all(given[of].pointer == arrays[name].pointer for name, of in mine.items()):  # else one was copied first
        if len(_ready) >= _READY_KEPT:
            _ready.clear()
        _ready[key] = _Ready(prepared, tuple(mine.values()), (inputs.problem.m,), kinds)
    return values, index


_RESULTS = "out", "index"


def _named(inputs: Inputs, results: list[Any], target: ArrayView | None) -> dict[str, ArrayView]:
    """The arrays of a call by the kernels' names, the results last."""
    a, b, *bias = inputs.views
    arrays: dict[str, ArrayView] = {"a": a, "b": b, **({"bias": bias[0]} if bias else {})}
    if target is not None:
        arrays |= for_logits(a, b, target)
    arrays |= zip(_RESULTS, map(describe_new, results), strict=False)
    return arrays


def _run_from_host(
    inputs: Inputs, op: ReduceOp, scale: float, config: MatmulConfig | None, results: list[Any],
    target: ArrayView | None,
) -> None:  # fmt: skip
    """CPU arrays on a GPU travel as contiguous ones."""
    a, b, *others = (describe(np.ascontiguousarray(as_numpy(x))) for x in inputs.views)
    again = _read(a, b, op, scale, others[0] if others else None)
    arrays = _named(again, results, target)
    steps = _plan(again, op, config, target).steps(arrays)
    steps.run_from_host(
        {name: np.ascontiguousarray(as_numpy(x)) for name, x in arrays.items()}, _RESULTS[: len(results)]
    )


@dataclass(frozen=True)
class _Ready:
    """What a repeated call on a GPU needs: which of the caller's arrays the kernels take, and the results' shape."""

    prepared: Prepared
    given: tuple[str, ...]
    shape: tuple[int, ...]
    kinds: tuple[DType, ...]

    def run(self, given: dict[str, ArrayView]) -> tuple[Any, Any]:
        """Queue the kernels; (values, indices or None)."""
        first = given["a"]
        results = [empty(first.kind, self.shape, kind, first.device) for kind in self.kinds]
        self.prepared.run([given[name].pointer for name in self.given] + [address(x) for x in results], first)
        return results[0], results[1] if len(results) > 1 else None


_ready: dict[tuple[Any, ...], _Ready] = {}
_READY_KEPT = 1024
