"""``linear_cross_entropy``: the loss of a language model's output layer, forward and backward without logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import f32, s32
from warploom.interop.arrays import ArrayView, Device, as_numpy, describe, describe_all, empty
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import traced
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.matmul_reduce.loss import Loss
from warploom.ops.calls import Caller, Computation, Shapes, Views
from warploom.ops.declare import ArrayArgument, Few, Tensor
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
from warploom.ops.options import refuse_unhashable
from warploom.ops.processors import Processor
from warploom.ops.reduce import reduce_plan
from warploom.ops.steps import Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, LossOptions


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


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Tensor = None,
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
    check_reduction(reduction)
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, return_lse
    found = loss_call((x, w, target, bias), options, config)
    rows, lse = found if found.__class__ is tuple else (found, None)
    # autograd's node of a call has reduced the losses
    result = rows if reduction == "none" or rows.ndim == 0 else reduced(rows, target, ignore_index, reduction)
    return (result, lse) if return_lse else result


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
    given = {"x": x, "w": w} if bias is None else {"x": x, "w": w, "bias": bias}
    loss, views = loss_of(-100, label_smoothing, z_loss, softcap), describe_all(given)
    inputs = _inputs({name: settled(view) for name, view in views.items()}, 1.0, as_if_compact)
    chosen = matmul_config(config, inputs.problem.dtype)
    wanted, device = (True, True, bias is not None), views["x"].device
    return _forward(inputs, loss, chosen, device), _backward(inputs, loss, 2, (True, False), wanted, chosen, device)


# -- forward
def results(views: Views) -> Shapes:
    """The shapes and types of the losses and the log-sum-exps."""
    return dict.fromkeys(("loss", "lse"), ((views["x"].shape[0],), f32))


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    loss = loss_of(*[asked[name] for name in ("ignore_index", "label_smoothing", "z_loss", "softcap")])
    views = {name: settled(view) for name, view in views.items()}
    rows, words, target = (views[name] for name in ("x", "w", "target"))
    check_loss(rows, words, target, views.get("bias"))
    check_targets(target, words.shape[0], loss.ignore_index)
    chosen, device = matmul_config(config, rows.dtype), rows.device
    refuse_unhashable({"config": chosen})
    x, w = (view if view.strides[1] == 1 else copy(view) for view in (rows, words))  # their elements are read too
    given = {"x": readable(x, copy), "w": readable(w, copy), "target": row_major(target, copy)}
    if "bias" in views:
        given["bias"] = row_major(views["bias"], copy)

    def steps(arrays: Views) -> Steps:
        return _forward(_inputs(arrays, 1.0), loss, chosen, device).steps(arrays, target.dtype.bits // 32)

    new = results(views)
    return Computation(given, new, steps, given | {"target": as_words(given["target"])}, made=nothing(rows, new))


loss_call = Caller(linear_cross_entropy, _work, recorded=True)


def _inputs(views: Views, scale: float, copy: Callable[[ArrayView], ArrayView] = compact) -> Inputs:
    """x·wᵀ as a product."""
    bias = [views["bias"]] if "bias" in views else []
    return read_inputs([views["x"], transposed(views["w"]), *bias], None, bool(bias), None, f32, "f32", scale, copy)


def row_major(view: ArrayView, copy: Callable[[ArrayView], ArrayView] = compact) -> ArrayView:
    """The array, or a copy that is."""
    return view if view.contiguous else copy(view)


def nothing(first: ArrayView, new: Shapes) -> list[Any] | None:
    """The results where there are no elements to compute; None where there are some."""
    if 0 not in (first.shape[0], *[shape[-1] for shape, _ in new.values()]):
        return None
    return [empty(first.kind, *form, first.device) for form in new.values()]


def _forward(inputs: Inputs, loss: Loss, config: MatmulConfig | None, device: Device) -> LossPlan:
    return LossPlan(reduce_plan(forward_product(inputs.problem, loss), "logsumexp", config, device), loss)


# -- backward
def row_gradients(
    x: Tensor,
    w: Tensor,
    lse: Few,
    target: Tensor = None,
    by_loss: Annotated[Any, ArrayArgument("loss_gradient", exact=True)] = None,
    by_lse: Annotated[Any, ArrayArgument("lse_gradient", exact=True)] = None,
    *,
    bias: Tensor = None,
    scale: float = 1.0,
    wants_x: bool = True,
    wants_w: bool = True,
    wants_bias: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    blocks: tuple[int, int] | None = None,
    config: MatmulConfig | str | None = None,
) -> Any:
    """The gradients by x (m, k), w (n, k) and bias (n,), those that are wanted, of losses of scale·x·wᵀ + bias.

    ``lse`` and its gradient ``by_lse``, and that of the losses, ``by_loss``, are float32 (m,). Without a ``target``
    there is a log-sum-exp alone. ``blocks``: rows and columns to take at a time.
    """
    options = scale, wants_x, wants_w, wants_bias, ignore_index, label_smoothing, z_loss, softcap, blocks
    return row_gradients_call.computed((x, w, lse, target, by_loss, by_lse, bias), options, config)


def _gradients(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    views = {name: settled(view) for name, view in views.items()}
    check_row_values(views)
    given = {name: (readable if name in "xw" else row_major)(view, copy) for name, view in views.items()}
    x, has_target = given["x"], "target" in given
    options = [asked[name] for name in ("ignore_index", "label_smoothing", "z_loss", "softcap")]
    loss, chosen = loss_of(*options) if has_target else None, matmul_config(config, x.dtype)
    refuse_unhashable({"config": chosen})
    (m, k), n = x.shape, given["w"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {"x": (m, k), "w": (n, k), "bias": (n,)}
    new = {f"d{name}": (shape, x.dtype) for name, shape in shapes.items() if asked[f"wants_{name}"]}
    known, wanted = ("loss_gradient" in given, "lse_gradient" in given), ("dx" in new, "dw" in new, "dbias" in new)
    taken, words = {name: view for name, view in given.items() if name != "target"}, 0
    if has_target and known[0]:
        taken["target"], words = as_words(given["target"]), given["target"].dtype.bits // 32

    def steps(arrays: Views) -> Steps:
        inputs = _inputs(arrays, asked["scale"])
        plan = _backward(inputs, loss, words, known, wanted, chosen, x.device)
        return replace(plan, blocks=asked["blocks"]).steps()

    return Computation(given, new, steps, taken, made=nothing(x, new))


row_gradients_call = Caller(row_gradients, _gradients)


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
