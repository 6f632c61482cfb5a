"""``linear_cross_entropy``: the loss of a language model's output layer, forward and backward without logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import DType, f32, s32
from warploom.interop.arrays import ArrayView, Device, arrays_of, as_numpy, describe, describe_all, empty
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import recorded, traced
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.matmul_reduce.loss import Loss
from warploom.ops.loss_options import (
    Reduction,
    check_loss,
    check_reduction,
    check_row_values,
    check_targets,
    loss_of,
    reduced,
)
from warploom.ops.loss_plan import GradientPlan, LossPlan, forward_product
from warploom.ops.matmul_arrays import Inputs, matmul_config, read_inputs, readable
from warploom.ops.options import flag, refuse_unhashable
from warploom.ops.processors import Processor
from warploom.ops.reduce import reduce_plan
from warploom.ops.repeated import Kept, run_and_keep
from warploom.ops.steps import Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, LossOptions

Arrays = dict[str, ArrayView]


@overload
def linear_cross_entropy(
    x: Array, w: Any, target: Any, *, return_lse: Literal[False] = False, **options: Unpack[LossOptions]
) -> Array: ...


@overload
def linear_cross_entropy(
    x: Array, w: Any, target: Any, *, return_lse: Literal[True], **options: Unpack[LossOptions]
) -> tuple[Array, Array]: ...


@overload
def linear_cross_entropy(
    x: np.ndarray[Any, Any], w: Any, target: Any, *, return_lse: Literal[False] = False, **options: Unpack[LossOptions]
) -> NDArray[np.float32]: ...


@overload
def linear_cross_entropy(
    x: np.ndarray[Any, Any], w: Any, target: Any, *, return_lse: Literal[True], **options: Unpack[LossOptions]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...


@recorded
def linear_cross_entropy(
    x: Any,
    w: Any,
    target: Any,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_lse: bool = False,
    config: MatmulConfig | str | None = None,
) -> Any:
    """The cross-entropy of a language model's output layer: logsumexp(s) - s[target] for each row of s = x·wᵀ + bias.

    Shapes: x (m, k) hidden states, w (n, k) the vocabulary's embeddings, target (m,) int32 or int64, bias (n,) or none;
    losses float32 (m,). dtypes of x, w and bias: float16 or bfloat16. The m×n logits are never written, forward or
    backward.

    A row with target ``ignore_index`` has loss 0 and no gradient; other targets outside 0 … n-1 raise a ProblemError
    where they lie on the CPU, and give NaN on a GPU, where looking at them would wait for it. ``reduction``: "none",
    "sum", or "mean" of the rows that are not ignored (NaN if there are none). ``label_smoothing`` ε takes
    (1 - ε)·s[target] + ε·mean(s) for s[target] (a second pass over the product); ``z_loss`` adds z·logsumexp(s)² to
    each row; ``softcap`` c replaces s by c·tanh(s/c). ``return_lse`` also returns logsumexp(s), float32 (m,).

    Infinite logits enter as they are: the loss is +inf where another logit than the target's is +inf, or the target's
    alone is -inf; NaN where the target's is +inf, or any logit is NaN.

    torch tensors that require gradients get them: the logits are multiplied again in chunks, whose derivatives are
    rounded to x's type. Beyond the gradients that takes at most 64 MiB (``plan_linear_cross_entropy``). Sums are in
    f32; w's gradient is rounded once for each block of rows. Of float16 scale the loss, as for any of its gradients.

    Under ``torch.compile`` a call is one operator, ``warploom::linear_cross_entropy``.
    Raises ProblemError as :func:`matmul_reduce` does.
    """
    loss, with_lse = loss_of(ignore_index, label_smoothing, z_loss, softcap), flag("return_lse", return_lse)
    check_reduction(reduction)
    rows, lse = losses(x, w, target, loss, config, bias)
    result = reduced(rows, target, loss.ignore_index, reduction)
    return (result, lse) if with_lse else result


@traced
def plan_linear_cross_entropy(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    config: MatmulConfig | str | None = None,
) -> tuple[LossPlan, GradientPlan]:
    """What :func:`linear_cross_entropy` would run, forward and for the gradients of x, w and bias. Runs nothing."""
    loss, views = loss_of(-100, label_smoothing, z_loss, softcap), _views(arrays_of({"x": x, "w": w}, bias=bias))
    inputs = _inputs(views["x"], views["w"], views.get("bias"), 1.0, as_if_compact)
    chosen = matmul_config(config, inputs.problem.dtype)
    wanted, device = (True, True, bias is not None), views["x"].device
    return _forward(inputs, loss, chosen, device), _backward(inputs, loss, 2, (True, False), wanted, chosen, device)


# -- forward
def losses(x: Any, w: Any, target: Any, loss: Loss, config: Any, bias: Any = None) -> tuple[Any, Any]:
    """(losses, log-sum-exps) of the rows, float32 (m,) each."""
    arrays, asked = arrays_of({"x": x, "w": w, "target": target}, bias=bias), ("forward", loss, "lse", "loss")
    lse, found = _prepared.again(asked, config, arrays) or _first_losses(arrays, loss, (asked, config))
    return found, lse


def _first_losses(arrays: Mapping[str, Any], loss: Loss, key: tuple[tuple[Any, ...], Any]) -> list[Any]:
    """Everything that :func:`losses` need not repeat for tensors of the same shapes, strides and device."""
    rows, words, chosen, *more = _views(arrays).values()
    check_loss(rows, words, chosen, *more)
    check_targets(chosen, words.shape[0], loss.ignore_index)
    config = matmul_config(key[1], rows.dtype)
    x, w = (view if view.strides[1] == 1 else compact(view) for view in (rows, words))  # their elements are read too
    given = {"x": readable(x), "w": readable(w), "target": _row_major(chosen)}
    if more:
        given["bias"] = _row_major(more[0])

    def plan(arrays: Arrays) -> Steps:
        inputs = _inputs(arrays["x"], arrays["w"], arrays.get("bias"), 1.0)
        return _forward(inputs, loss, config, arrays["x"].device).steps(arrays, chosen.dtype.bits // 32)

    shape, taken = (rows.shape[0],), given | {"target": as_words(given["target"])}
    return _run(key, given, taken, {"lse": (shape, f32), "loss": (shape, f32)}, plan)


def _inputs(
    rows: ArrayView,
    words: ArrayView,
    bias: ArrayView | None,
    scale: float,
    copy: Callable[[ArrayView], ArrayView] = compact,
) -> Inputs:
    """x·wᵀ as a product."""
    views = [rows, transposed(words), *([] if bias is None else [bias])]
    return read_inputs(views, None, bias is not None, None, f32, "f32", scale, copy)


def _views(arrays: Mapping[str, Any]) -> Arrays:
    """The arrays of a call, described."""
    return {name: settled(view) for name, view in describe_all(arrays).items()}


def _row_major(view: ArrayView) -> ArrayView:
    return view if view.contiguous else compact(view)


def _forward(inputs: Inputs, loss: Loss, config: MatmulConfig | None, device: Device) -> LossPlan:
    return LossPlan(reduce_plan(forward_product(inputs.problem, loss), "logsumexp", config, device), loss)


# -- backward
@dataclass(frozen=True)
class RowGradients:
    """What is known of the rows in a backward pass: their log-sum-exps, and gradients by these and by the losses.

    ``loss`` is that of the targets, None for a log-sum-exp alone.
    """

    lse: Any
    by_loss: Any = None
    by_lse: Any = None
    target: Any = None
    loss: Loss | None = None


def gradients(
    x: Any,
    w: Any,
    rows: RowGradients,
    wanted: tuple[bool, bool, bool],
    *,
    bias: Any = None,
    scale: float = 1.0,
    config: Any = None,
    blocks: tuple[int, int] | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients by x (m, k), w (n, k) and bias (n,), or None where not ``wanted``, of losses of scale·x·wᵀ + bias.

    float32 (m,): ``rows.lse`` and its gradients. ``blocks``: rows and columns to take at a time.
    """
    arrays = arrays_of(
        {"x": x, "w": w},
        bias=bias,
        target=rows.target,
        lse=rows.lse,
        loss_gradient=rows.by_loss,
        lse_gradient=rows.by_lse,
    )
    names = tuple([name for name, is_wanted in zip(("dx", "dw", "dbias"), wanted, strict=True) if is_wanted])
    key = ("backward", rows.loss, scale, blocks, *names), config
    made = _prepared.again(*key, arrays) or _first_gradients(arrays, rows.loss, names, scale, blocks, key)
    found = dict(zip(names, made, strict=True))
    return found.get("dx"), found.get("dw"), found.get("dbias")


def _first_gradients(
    arrays: Mapping[str, Any],
    loss: Loss | None,
    names: tuple[str, ...],
    scale: float,
    blocks: tuple[int, int] | None,
    key: tuple[tuple[Any, ...], Any],
) -> list[Any]:
    """Everything that :func:`gradients` need not repeat for tensors of the same shapes, strides and device."""
    given = _views(arrays)
    check_row_values(given)
    given = {name: (readable if name in "xw" else _row_major)(view) for name, view in given.items()}
    config, (m, k), n = matmul_config(key[1], given["x"].dtype), given["x"].shape, given["w"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {"dx": (m, k), "dw": (n, k), "dbias": (n,)}
    results = {name: (shapes[name], given["x"].dtype) for name in names}
    known = "loss_gradient" in given, "lse_gradient" in given
    wanted = "dx" in names, "dw" in names, "dbias" in names
    taken, words = {name: view for name, view in given.items() if name != "target"}, 0
    if "target" in given and known[0]:
        taken["target"], words = as_words(given["target"]), given["target"].dtype.bits // 32

    def plan(arrays: Arrays) -> Steps:
        inputs, device = _inputs(arrays["x"], arrays["w"], arrays.get("bias"), scale), arrays["x"].device
        return replace(_backward(inputs, loss, words, known, wanted, config, device), blocks=blocks).steps()

    return _run(key, given, taken, results, plan)


def _backward(
    inputs: Inputs,
    loss: Loss | None,
    target_words: int,
    given: tuple[bool, bool],
    wanted: tuple[bool, bool, bool],
    config: MatmulConfig | None,
    device: Device,
) -> GradientPlan:
    on = Processor.of(device, requires=None if config is None else config.requires)
    return GradientPlan(inputs.problem, loss, target_words, given, wanted, on.target, on.multiprocessors, config)


# -- both
def transposed(view: ArrayView) -> ArrayView:
    """The transpose of a matrix, without a copy."""
    if view.kind in ("numpy", "torch", "cupy") and not isinstance(view.owner, tuple):
        return settled(describe(view.owner.T))
    return view._replace(shape=tuple(view.shape)[::-1], strides=tuple(view.strides)[::-1])


def as_words(target: ArrayView) -> ArrayView:
    """Contiguous integers as the 32-bit words that the kernels read."""
    if target.dtype is s32:
        return target
    if target.device[0] == "cpu":
        return describe(as_numpy(target).view(np.int32))
    return target._replace(dtype=s32, shape=(2 * target.shape[0],), strides=(1,))


_prepared = Kept()


def _run(
    key: tuple[tuple[Any, ...], Any],
    given: Arrays,
    taken: Arrays,
    results: Mapping[str, tuple[tuple[int, ...], DType]],
    plan: Callable[[Arrays], Steps],
) -> list[Any]:
    """New arrays for the ``results``, by the launches of ``plan``, which take arrays by the kernels' names.

    ``given`` lie so that kernels read them: whatever no kernel reads in place is copied before. ``key``: what is asked,
    and the configuration; calls that ask for the same with arrays of the same shapes, strides and alignment are planned
    once.
    """
    first = given["x"]
    refuse_unhashable({"config": key[1]})
    ready = _prepared.find(*key, given)
    if ready is not None:
        return ready.run(given)
    made = [empty(first.kind, shape, dtype, first.device) for shape, dtype in results.values()]
    if 0 not in (first.shape[0], *[shape[-1] for shape, _ in results.values()]):
        run_and_keep(_prepared, key, plan, (given, taken, dict(zip(results, made, strict=True))))
    return made
