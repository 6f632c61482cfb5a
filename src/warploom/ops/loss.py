"""``linear_cross_entropy``: the loss of a language model's output layer, forward and backward, and its memory.

The gradients are formed by :class:`GradientPlan`, a backward pass, or by :class:`FormedPlan`, a forward pass that does
it all: for the gradient 1 of the loss, and :class:`ScalePlan` multiplies them by another one.
Everything between the kernels fits the ``workspace_mib`` of a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np

from warploom.core.dtypes import F32_MAX, DType, bf16, f32, s32, s64
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, as_if_compact, as_numpy, describe_all
from warploom.interop.tracing import traced
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.matmul_reduce.gradients import SMALL_WORKSPACE_MIB, SPARE_BYTES, FormedGradients, LossGradients
from warploom.kernels.matmul_reduce.loss import (
    Loss,
    Reduction,
    SoftCap,
    losses_call,
    scale_call,
    total_call,
)
from warploom.kernels.source import KernelCall
from warploom.ops.arrays import FEW, LINES, MATRIX, ROW_MAJOR, ArrayArgument, ResultArray, as_elements
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Array, Views
from warploom.ops.matmul import Bias, checked_config, multiplication
from warploom.ops.reduce import ReducePlan, reduce_plan
from warploom.ops.steps import Launches

if TYPE_CHECKING:
    from numpy.typing import NDArray


_FLAT = "flatten what stands before the last dimension: x.reshape(-1, x.shape[-1])"
_ROWS = "one number for each row of x"
_WORDS = "x is (m, k) and w (n, k), one row a word"
Hidden = Annotated[Any, ArrayArgument("m k", memory=LINES, kernel="a", hint=_FLAT)]
Vocabulary = Annotated[Any, ArrayArgument("n k", memory=LINES, kernel="b", hint=_WORDS)]
FormedHidden = Annotated[Any, ArrayArgument("m k", memory=LINES)]
FormedVocabulary = Annotated[Any, ArrayArgument("n k", memory=LINES, hint=_WORDS)]
AnyHidden = Annotated[Any, ArrayArgument("m k", memory=MATRIX)]
AnyVocabulary = Annotated[Any, ArrayArgument("n k", memory=MATRIX, hint=_WORDS)]
Targets = Annotated[Any, ArrayArgument("m", "s32 s64", FEW, hint=_ROWS)]
OfRows = Annotated[Any, ArrayArgument("m", "f32", FEW, hint=_ROWS)]
ByLoss = Annotated[Any, ArrayArgument("m|", "f32", FEW, "loss_gradient", hint=f"{_ROWS}, or one by their sum or mean")]
Count = Annotated[Any, ArrayArgument("", "f32", FEW)]
ByLse = Annotated[Any, ArrayArgument("m", "f32", FEW, "lse_gradient", hint=_ROWS)]
Losses = Annotated[
    Any,
    ResultArray("loss", "m", "f32", when="reduction=none"),
    ResultArray("total", "", "f32", when="reduction=mean|sum"),
    ResultArray("lse", "m", "f32", when="return_lse"),
    ResultArray("count", "", "f32", when="reduction=mean", inner=True),
]
RowGradients = Annotated[
    Any,
    ResultArray("dx", "", "x", when="wants_x", empty=0.0),
    ResultArray("dw", "", "w", when="wants_w", empty=0.0),
    ResultArray("dbias", "n", "x", when="wants_bias", empty=0.0),
]
Formed = Annotated[
    Any,
    ResultArray("total", "", "f32"),
    ResultArray("lse", "m", "f32", inner=True),
    ResultArray("count", "", "f32", when="reduction=mean", inner=True),
    ResultArray("dx", "", "x", when="wants_x", empty=0.0, inner=True),
    ResultArray("dw", "", "w", when="wants_w", empty=0.0, inner=True),
    ResultArray("dbias", "n", "x", when="wants_bias", empty=0.0, inner=True),
]
_GRADIENT = ArrayArgument(memory=ROW_MAJOR, written=True)
FormedByX = Annotated[Any, replace(_GRADIENT, dims="m k")]
FormedByW = Annotated[Any, replace(_GRADIENT, dims="n k")]
FormedByBias = Annotated[Any, replace(_GRADIENT, dims="n")]
WORKSPACE_MIB = 512
"""The most memory between the kernels of a loss with gradients, unless the caller says otherwise."""
LEAST_FORMED_ROWS = 768
"""Rows with all of their columns that fit the workspace where gradients are formed in the forward pass."""
_FORMED_BYTES = 2.5
"""Memory for each row and column then, at most: an exponential, and a share of the states."""


@dataclass(frozen=True)
class LossPlan(Launches):
    """A forward pass: the rows' log-sum-exps, with label smoothing the sums of their logits, the losses, and a total.

    A target has so many 32-bit words. Of the arrays that kernels make, ``results`` are the caller's.
    """

    lse: ReducePlan
    loss: Loss
    target_words: int
    results: tuple[str, ...]

    @cached_property
    def sums(self) -> ReducePlan | None:
        """The second pass over the logits that label smoothing takes."""
        problem = replace(self.lse.problem, op="sum")
        return replace(self.lse, problem=problem, result="sums") if self.loss.label_smoothing else None

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The launches."""
        return *self.lse.steps.calls, *self.after

    @cached_property
    def after(self) -> tuple[KernelCall, ...]:
        """The launches once the log-sum-exps are known."""
        p = self.lse.problem.product
        found = [] if self.sums is None else [*self.sums.steps.calls]
        size, strides = (p.m, p.n, p.k), (p.a.stride, p.b.stride)
        losses = losses_call(size, strides, p.dtype, self.target_words, self.loss, bias=p.epilogue.bias)
        own = {name: p.m for name in ("loss", "lse") if name not in self.results}
        found.append(replace(losses, workspace={**losses.workspace, **own}, flops=2 * p.m * p.k))
        if "total" in self.results:
            total = total_call(p.m, self.target_words, self.loss.ignore_index, mean="count" in self.results)
            found.append(replace(total, flops=p.m))
        return tuple(found)


@dataclass(frozen=True)
class GradientPlan(LossGradients, Launches):
    """A backward pass."""


@dataclass(frozen=True)
class FormedPlan(FormedGradients, Launches):
    """A loss and its gradients in one pass."""


@dataclass(frozen=True)
class ScalePlan(Launches):
    """Gradients, elements by the arrays' names, times ``factor``, in place."""

    elements: tuple[tuple[str, int], ...]
    dtype: DType
    multiprocessors: int

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The launches, one an array."""
        return tuple([replace(scale_call(x, n, self.dtype, self.multiprocessors), flops=n) for x, n in self.elements])


# -- options
def _loss(options: Mapping[str, Any]) -> Loss:
    """The loss that the options of a call ask for. Raises ProblemError for those that make no sense."""
    names = "ignore_index", "label_smoothing", "z_loss", "softcap"
    found = Loss(**{name: options[name] for name in names if name in options})
    if not 0.0 <= found.label_smoothing <= 1.0:
        raise ProblemError(f"label_smoothing is between 0 and 1, not {found.label_smoothing}")
    if not 0.0 <= found.z_loss <= F32_MAX:
        raise ProblemError(f"z_loss is a finite number from 0 on, not {found.z_loss}")
    if found.softcap is not None and not 2.0**-100 < found.softcap < 2.0**100:
        raise ProblemError(f"softcap is a positive finite number or None, not {found.softcap}")
    return found


def check_targets(chosen: ArrayView, n: int, ignore_index: int) -> None:
    """Raises ProblemError for targets on the CPU that name no column."""
    if chosen.device[0] != "cpu" or not chosen.pointer:  # of a plan alone
        return
    values = as_numpy(chosen)
    wrong = np.flatnonzero(((values < 0) | (values >= n)) & (values != ignore_index))
    if wrong.size:
        raise ProblemError(
            f"target[{wrong[0]}] is {values[wrong[0]]}, and w has {n} rows: targets are 0 … {n - 1}, or "
            f"ignore_index, {ignore_index}"
        )


# -- forward
class LossOptions(TypedDict, total=False):
    """The options of :func:`linear_cross_entropy` beside ``return_lse``, and its bias."""

    bias: Any
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    softcap: float | None
    workspace_mib: int
    config: MatmulConfig | str | None


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
    x: Hidden,
    w: Vocabulary,
    target: Targets,
    *,
    bias: Bias = None,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    workspace_mib: int = WORKSPACE_MIB,
    return_lse: bool = False,
    config: MatmulConfig | str | None = None,
    **unknown: Never,
) -> Losses:
    """The cross-entropy of a language model's output layer: logsumexp(s) - s[target] for each row of s = x·wᵀ + bias.

    Shapes: x (m, k) hidden states, w (n, k) the vocabulary's embeddings, target (m,) int32 or int64, bias (n,) or none;
    losses float32 (m,). dtypes of x, w and bias: float16 or bfloat16. The m×n logits are never in memory at once.

    A row with target ``ignore_index`` has loss 0 and no gradient; other targets outside 0 … n-1 raise a ProblemError
    where they lie on the CPU, and give NaN on a GPU, where looking at them would wait for it. ``reduction``: "none",
    "sum", or "mean" of the rows that are not ignored (NaN if there are none). ``label_smoothing`` ε takes
    (1 - ε)·s[target] + ε·mean(s) for s[target] (a second pass over the product); ``z_loss`` adds z·logsumexp(s)² to
    each row; ``softcap`` c replaces s by c·tanh(s/c). ``return_lse`` also returns logsumexp(s), float32 (m,).

    Infinite logits enter as they are: the loss is +inf where another logit than the target's is +inf, or the target's
    alone is -inf; NaN where the target's is +inf, or any logit is NaN.

    torch tensors that require gradients get them. ``workspace_mib`` is the most memory, in MiB, that this takes beyond
    the gradients. Of bfloat16 with a ``reduction`` the forward pass forms the gradients, while a block of rows is at
    hand: three products instead of four. That takes as much as 768 rows of n columns, about 1.9 KiB a column; the
    derivatives by the logits are rounded twice to x's type. In all other cases (less memory, float16, ``softcap``,
    ``return_lse``, no reduction, ``torch.func``, gradients of gradients) the backward pass multiplies the logits again,
    in chunks whose derivatives are rounded once, and 64 MiB do. Sums are in f32; w's gradient is rounded once for each
    block of rows. Of float16 scale the loss, as for any of its gradients.

    Under ``torch.compile`` a call is one operator, ``warploom::linear_cross_entropy``, or ``loss_with_gradients`` where
    it forms them. Raises ProblemError as :func:`matmul_reduce` does.
    """
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, workspace_mib, return_lse
    found = loss_call((x, w, target, bias), options, config, False, unknown)
    if found.__class__ is not tuple:
        return found
    return found[:2] if return_lse else found[0]


def check_words(given: Arguments) -> Loss:
    """The loss asked for. Raises ProblemError for options that make no sense, and for a vocabulary without a word."""
    if given.sizes["n"] == 0:
        raise ProblemError(f"w has shape {(0, given.sizes['k'])}: a vocabulary has at least one word")
    _most_bytes(given.options)
    return _loss(given.options)


def _most_bytes(options: Mapping[str, Any]) -> int:
    """The workspace in bytes. Raises ProblemError for one without a byte."""
    if options["workspace_mib"] < 1:
        raise ProblemError(f"workspace_mib is a positive number of MiB, not {options['workspace_mib']}")
    return options["workspace_mib"] << 20


def _work(given: Arguments, config: Any) -> Computation:
    loss, views = check_words(given), given.views
    target = views["target"]
    check_targets(target, given.sizes["n"], loss.ignore_index)

    def plan(arrays: Views) -> LossPlan:
        product = _product(arrays["a"], arrays["b"], arrays.get("bias"))
        return _loss_plan(product, loss, target, config, tuple(given.results))

    def empty() -> dict[str, Any]:
        return given.made(total=math.nan if "count" in given.results else 0.0, count=0.0)

    taken = {**views, "target": as_elements(target, s32)}
    return Computation(given, plan, taken, nothing=given.sizes["m"] == 0, empty=empty)


loss_call = Caller(linear_cross_entropy, _work, recorded=True)


def _loss_plan(
    product: MatmulProblem, loss: Loss, target: ArrayView, config: Any, results: tuple[str, ...]
) -> LossPlan:
    if loss.softcap is not None:
        function = SoftCap(loss.softcap)
        product = replace(product, epilogue=replace(product.epilogue, function=function, key=function))
    lse = reduce_plan(product, "logsumexp", config, target.device, result="lse")
    return LossPlan(lse, loss, target.dtype.bits // 32, results)


def _product(x: ArrayView, w: ArrayView, bias: ArrayView | None, scale: float = 1.0) -> MatmulProblem:
    """The problem of scale · x·wᵀ + bias."""
    turned = w._replace(shape=tuple(w.shape)[::-1], strides=tuple(w.strides)[::-1])
    arrays = {"a": x, "b": turned} | ({} if bias is None else {"bias": bias})
    return multiplication(arrays, f32, f32, scale).problem


# -- backward
def row_gradients(
    x: AnyHidden,
    w: AnyVocabulary,
    lse: OfRows,
    target: Targets = None,
    by_loss: ByLoss = None,
    by_lse: ByLse = None,
    *,
    bias: Bias = None,
    scale: float = 1.0,
    wants_x: bool = True,
    wants_w: bool = True,
    wants_bias: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    workspace_mib: int = SMALL_WORKSPACE_MIB,
    blocks: tuple[int, int] | None = None,
    count: Count = None,
    config: MatmulConfig | str | None = None,
) -> RowGradients:
    """The gradients by x (m, k), w (n, k) and bias (n,), those that are wanted, of losses of scale·x·wᵀ + bias.

    ``lse`` and its gradient ``by_lse``, and that of the losses, ``by_loss``, are float32 (m,); that by their sum is
    float32 (), and so is that by their mean, beside the ``count`` of rows in it. Without a ``target`` there is a
    log-sum-exp alone. ``blocks``: rows and columns to take at a time, by default as many as ``workspace_mib`` hold.
    """
    wants = wants_x, wants_w, wants_bias
    options = scale, *wants, ignore_index, label_smoothing, z_loss, softcap, workspace_mib, blocks
    return row_gradients_call.computed((x, w, lse, target, by_loss, by_lse, bias, count), options, config)


def _gradients(given: Arguments, config: Any) -> Computation:
    views, options, new = given.views, given.options, given.results
    x, has_target = views["x"], "target" in views
    loss = _loss(options) if has_target else None
    products = given.sizes["k"] > 0
    known = "loss_gradient" in views, "lse_gradient" in views
    wanted = "dx" in new and products, "dw" in new and products, "dbias" in new
    taken, words = {name: view for name, view in views.items() if name != "target"}, 0
    reduction: Reduction = "none"
    if has_target and known[0]:
        taken["target"], words = as_elements(views["target"], s32), views["target"].dtype.bits // 32
        if not views["loss_gradient"].shape:
            reduction = "mean" if "count" in views else "sum"

    def plan(arrays: Views) -> GradientPlan:
        product = _product(arrays["x"], arrays["w"], arrays.get("bias"), options["scale"])
        asked = checked_config(config, product.dtype)
        on = Processor.of(x.device, requires=None if asked is None else asked.requires)
        to, most = (on.target, on.multiprocessors), _most_bytes(options) - SPARE_BYTES
        return GradientPlan(product, loss, words, known, wanted, *to, asked, options["blocks"], reduction, most)

    return Computation(given, plan, taken, nothing=given.sizes["m"] == 0 or not any(wanted))


row_gradients_call = Caller(row_gradients, _gradients)


# -- both in one pass
def gradients_are_formed(
    m: int, n: int, k: int, *, reduction: str, softcap: Any, return_lse: Any, workspace_mib: Any
) -> bool:
    """Whether the forward pass of a bfloat16 loss of such a size with these options forms the gradients."""
    if reduction == "none" or softcap is not None or return_lse or not isinstance(workspace_mib, int):
        return False
    rows = min(m, LEAST_FORMED_ROWS)
    return min(m, n, k) > 0 and rows * n * _FORMED_BYTES <= workspace_mib << 20


def loss_with_gradients(
    x: FormedHidden,
    w: FormedVocabulary,
    target: Targets,
    *,
    bias: Bias = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    workspace_mib: int = WORKSPACE_MIB,
    wants_x: bool = True,
    wants_w: bool = True,
    wants_bias: bool = False,
    blocks: tuple[int, int] | None = None,
    config: MatmulConfig | str | None = None,
) -> Formed:
    """The sum or mean of :func:`linear_cross_entropy`, and its gradients by x, w and bias.

    The results are the loss, the log-sum-exps, of a mean the number of rows in it, and those gradients that are wanted.
    """
    wants = wants_x, wants_w, wants_bias
    options = ignore_index, reduction, label_smoothing, z_loss, workspace_mib, *wants, blocks
    return loss_with_gradients_call.computed((x, w, target, bias), options, config)


def _formed(given: Arguments, config: Any) -> Computation:
    loss, views, options, new = check_words(given), given.views, given.options, given.results
    target, wanted = views["target"], ("dx" in new, "dw" in new, "dbias" in new)
    check_targets(target, given.sizes["n"], loss.ignore_index)
    words = target.dtype.bits // 32

    def plan(arrays: Views) -> FormedPlan:
        product = _product(arrays["x"], arrays["w"], arrays.get("bias"))
        forward = _loss_plan(product, loss, target, config, tuple(given.results))
        asked = checked_config(config, product.dtype)
        on = Processor.of(target.device, requires=None if asked is None else asked.requires)
        to, most = (on.target, on.multiprocessors), _most_bytes(options)
        how = asked, options["blocks"], options["reduction"], most, forward.after
        return FormedPlan(product, loss, words, (True, False), wanted, *to, *how)

    def empty() -> dict[str, Any]:
        return given.made(total=math.nan if "count" in new else 0.0, count=0.0)

    taken = {**views, "target": as_elements(target, s32)}
    return Computation(given, plan, taken, nothing=given.sizes["m"] == 0, empty=empty)


loss_with_gradients_call = Caller(loss_with_gradients, _formed)


def scale_gradients(factor: Count, dx: FormedByX = None, dw: FormedByW = None, dbias: FormedByBias = None) -> None:
    """Multiply gradients by a float32 (), in place."""
    scale_gradients_call.computed((factor, dx, dw, dbias), (), None)


def _scaled(given: Arguments, config: Any) -> Computation:
    arrays = {name: view for name, view in given.views.items() if name != "factor"}

    def plan(_: Views) -> ScalePlan:
        first = next(iter(arrays.values()))
        elements = tuple((name, math.prod(view.shape)) for name, view in arrays.items())
        return ScalePlan(elements, first.dtype, Processor.of(first.device).multiprocessors)

    return Computation(given, plan)


scale_gradients_call = Caller(scale_gradients, _scaled)


# -- plans
@traced
def plan_linear_cross_entropy(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    reduction: Reduction = "none",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    workspace_mib: int = WORKSPACE_MIB,
    config: MatmulConfig | str | None = None,
) -> tuple[LossPlan, GradientPlan | FormedPlan]:
    """Plan :func:`linear_cross_entropy`, forward and for the gradients of x, w and bias. Runs nothing.

    The second plan is a :class:`FormedPlan` where one forward pass is all of it.
    """
    of_both = {"label_smoothing": label_smoothing, "z_loss": z_loss, "workspace_mib": workspace_mib, "config": config}
    options = {**of_both, "softcap": softcap}
    like = describe_all({"x": x})["x"]

    def rows(dtype: DType) -> ArrayView:
        return as_if_compact(like._replace(shape=tuple(like.shape[:1]), dtype=dtype))

    given = {"x": x, "w": w, "target": rows(s64), "bias": bias}
    forward = loss_call.computation({**given, **options, "reduction": reduction, "return_lse": True}).planned()
    asked = {"reduction": reduction, "softcap": softcap, "workspace_mib": workspace_mib, "return_lse": False}
    product: MatmulProblem = forward.lse.problem.product
    wants = {"wants_bias": bias is not None}
    if like.dtype is bf16 and gradients_are_formed(product.m, product.n, product.k, **asked):
        formed = loss_with_gradients_call.computation({**given, **of_both, **wants, "reduction": reduction})
        return forward, formed.planned()
    by_loss = rows(f32) if reduction == "none" else as_if_compact(like._replace(shape=(), dtype=f32))
    of_rows = {"lse": rows(f32), "by_loss": by_loss, "count": by_loss if reduction == "mean" else None}
    return forward, row_gradients_call.computation({**given, **options, **of_rows, **wants}).planned()
