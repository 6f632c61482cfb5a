"""``linear_cross_entropy``: the loss of a language model's output layer, forward and backward without logits.

The backward pass walks blocks of rows and, of each, chunks of the columns. A chunk's logits are multiplied again and
leave the kernel as the loss's derivatives by them, in the inputs' type; two products make of these the chunk's part of
w's gradient and of x's. x's gradient is summed over the chunks in f32 and rounded once; w's is summed over the blocks
of rows in its own type, so it is rounded once for each block. Everything between the kernels fits
:data:`WORKSPACE_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np

from warploom.core.dtypes import F32_MAX, DType, f32, s32, s64
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.interop.arrays import ArrayView, as_if_compact, as_numpy, describe_all
from warploom.interop.tracing import traced
from warploom.kernels.matmul.choice import choose
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.features import Epilogue, Extra
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, Matrix, aligned_elements
from warploom.kernels.matmul_reduce.loss import (
    LogitGradient,
    Loss,
    Reduction,
    SoftCap,
    columns_call,
    gradient_call,
    losses_call,
    table_words,
    total_call,
)
from warploom.kernels.source import KernelCall
from warploom.ops.arrays import FEW, LINES, MATRIX, ArrayArgument, ResultArray, as_elements
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Array, Views
from warploom.ops.matmul import Bias, checked_config, multiplication
from warploom.ops.reduce import ReducePlan, reduce_plan
from warploom.ops.steps import Launches, Step, Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ROWS = "one number for each row of x"
_WORDS = "x is (m, k) and w (n, k), one row a word"
Hidden = Annotated[Any, ArrayArgument("m k", memory=LINES, kernel="a")]
Vocabulary = Annotated[Any, ArrayArgument("n k", memory=LINES, kernel="b", hint=_WORDS)]
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
WORKSPACE_BYTES = 60 << 20
"""The most memory between the kernels of a backward pass, as long as a block of rows and a chunk fit at all."""
BLOCK = 128
"""Blocks of rows and chunks of columns are multiples of it."""
LEAST_ROWS = 2048
"""Rows below which blocks are not worth a look, where larger ones fit: each block rounds w's gradient once more."""
LEAST_CHUNK = 1024
"""Columns below which a chunk's products are too small; more blocks of rows come first."""
_FLOPS_PER_ROW = 100


def summed(x: Any, before: Any) -> Any:
    """The epilogue that adds a product to what was there."""
    return x + before


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
    def steps(self) -> Steps:
        """The launches."""
        p = self.lse.problem.product
        found = [step for plan in (self.lse, self.sums) if plan is not None for step in plan.steps.steps]
        size, strides = (p.m, p.n, p.k), (p.a.stride, p.b.stride)
        losses = losses_call(size, strides, p.dtype, self.target_words, self.loss, bias=p.epilogue.bias)
        own = {name: p.m for name in ("loss", "lse") if name not in self.results}
        found.append(Step(replace(losses, workspace={**losses.workspace, **own}), 2 * p.m * p.k))
        if "total" in self.results:
            total = total_call(p.m, self.target_words, self.loss.ignore_index, mean="count" in self.results)
            found.append(Step(total, p.m))
        return Steps(tuple(found))


@dataclass(frozen=True)
class GradientPlan(Launches):
    """A backward pass: of x, w and the bias the gradients ``wanted``, by a loss or log-sum-exp of a product's rows.

    ``product`` is alpha · x·wᵀ + bias, ``loss`` None for a log-sum-exp alone; of the gradients by the losses, or by
    their ``reduction``, and by the log-sum-exps some are ``given``. ``blocks``: rows and columns that are taken at a
    time, by default as many as fit.
    """

    product: MatmulProblem
    loss: Loss | None
    target_words: int
    given: tuple[bool, bool]
    wanted: tuple[bool, bool, bool]
    target: Target
    multiprocessors: int
    config: MatmulConfig | None = None
    blocks: tuple[int, int] | None = None
    reduction: Reduction = "none"

    # -- what is taken at a time
    @cached_property
    def taken(self) -> tuple[int, int]:
        """(rows of a block, columns of a chunk), the quickest by the cost model of those that fit."""
        if self.blocks is not None:
            return self.blocks
        p, found = self.product, list[tuple[int, int]]()
        sizes = dict.fromkeys(min(p.m, _multiple(-(-p.m // count))) for count in range(1, -(-p.m // BLOCK) + 1))
        for rows in sizes:
            if found and rows < LEAST_ROWS:
                break
            most = self._most_columns(rows)
            found += [(rows, cols) for cols in _chunks(p.n, most) if cols >= min(p.n, LEAST_CHUNK)]
        return min(found, key=self._seconds) if found else (min(p.m, BLOCK), min(p.n, BLOCK))

    def _most_columns(self, rows: int) -> int:
        p = self.product
        if self.bytes_of(rows, p.n) <= WORKSPACE_BYTES:
            return p.n
        most = WORKSPACE_BYTES // (p.dtype.bytes * rows) // BLOCK * BLOCK
        while most > 0 and self.bytes_of(rows, most) > WORKSPACE_BYTES:
            most -= BLOCK
        return most

    def bytes_of(self, rows: int, cols: int) -> int:
        """Memory for blocks of such a size."""
        p, chunks = self.product, -(-self.product.n // max(cols, 1))
        sums = 4 * rows * p.k if self.wanted[0] and chunks > 1 else 0
        sums += 4 * p.n if self.wanted[2] and rows < p.m else 0
        return rows * _line(cols) * p.dtype.bytes + sums + 4 * table_words(rows, chunks)

    def _seconds(self, taken: tuple[int, int]) -> float:
        p, (rows, cols) = self.product, taken
        problems = [self._logits(rows, cols, cols)]
        if self.wanted[1]:
            problems.append(self._of_w(rows, cols, cols, add=rows < p.m))
        if self.wanted[0]:
            problems.append(self._of_x(rows, cols, cols, add=cols < p.n, last=cols == p.n))
        one = sum(seconds(problem, self._configured(problem), self.target) for problem in problems)  # type: ignore[arg-type]
        return one * (p.m / rows) * (p.n / cols)

    # -- the products
    def _configured(self, problem: MatmulProblem) -> MatmulConfig:
        return self.config or choose(problem, self.target, whole=True)[0]

    def _product(
        self, size: tuple[int, int, int], a: Matrix, b: Matrix, line: int, out_dtype: DType, epilogue: Epilogue
    ) -> MatmulProblem:
        p, (m, n, k) = self.product, size
        out = Matrix(True, line, 0, aligned_elements(line, n % 8))
        scaled = replace(epilogue, scaled=p.alpha != 1.0)
        return MatmulProblem(m, n, k, p.dtype, f32, out_dtype, a, b, out, 1, scaled, not (n | line) & 1, p.alpha)

    def _logits(self, rows: int, cols: int, chunk: int) -> MatmulProblem:
        """A chunk's logits, as the derivatives by them."""
        p, loss = self.product, self.loss or Loss()
        smooth = loss.label_smoothing if self.given[0] else 0.0
        hot = 1.0 - smooth if self.given[0] else 0.0
        function = LogitGradient(loss.softcap, hot, smooth / p.n)
        epilogue = Epilogue(bias=p.epilogue.bias, function=function, key=function, row_values=True)
        return self._product((rows, cols, p.k), p.a, p.b, _line(chunk), p.dtype, epilogue)

    def _of_w(self, rows: int, cols: int, chunk: int, *, add: bool) -> MatmulProblem:
        """A chunk's part of w's gradient: the derivatives transposed, times x; ``add`` to what is there."""
        p = self.product
        derivatives = Matrix(False, _line(chunk), 0, 8)
        x = replace(p.a, k_contiguous=not p.a.k_contiguous)
        epilogue = Epilogue(extras=(Extra(),), function=summed, key=summed) if add else Epilogue()
        return self._product((cols, p.k, rows), derivatives, x, p.k, p.dtype, epilogue)

    def _of_x(self, rows: int, cols: int, chunk: int, *, add: bool, last: bool) -> MatmulProblem:
        """A chunk's part of x's gradient: the derivatives times w, in f32 until the ``last`` one."""
        p = self.product
        w = replace(p.b, k_contiguous=not p.b.k_contiguous)
        epilogue = Epilogue(extras=(Extra(wide=True),), function=summed, key=summed) if add else Epilogue()
        derivatives = Matrix(True, _line(chunk), 0, 8)
        return self._product((rows, p.k, cols), derivatives, w, p.k, p.dtype if last else f32, epilogue)

    # -- the launches
    @cached_property
    def steps(self) -> Steps:
        """The launches, of arrays x, w, bias, target, lse, loss_gradient, lse_gradient, dx, dw and dbias."""
        return Steps(tuple(self._steps()))

    def _steps(self) -> Iterator[Step]:
        p, (block, chunk) = self.product, self.taken
        x_step, w_step = (p.dtype.bytes * (x.stride if x.k_contiguous else 1) for x in (p.a, p.b))
        known: dict[Hashable, KernelCall] = {}

        def step(problem: MatmulProblem, offsets: Mapping[str, int], **names: str) -> Step:
            key = problem, tuple(names.values())
            if key not in known:
                known[key] = self._call(problem, names)
            return Step(known[key], problem.flops, offsets)

        for first_row in range(0, p.m, block):
            rows = min(block, p.m - first_row)
            of_rows = ("lse", "loss_gradient", "lse_gradient") if self.reduction == "none" else ("lse", "lse_gradient")
            at_rows = dict.fromkeys(of_rows, 4 * first_row)
            at_rows |= {"x": x_step * first_row, "dx": p.dtype.bytes * p.k * first_row}
            at_rows["target"] = 4 * self.target_words * first_row
            table = gradient_call(
                rows,
                p.n,
                chunk,
                target_words=self.target_words,
                loss=self.loss or Loss(),
                given=self.given,
                reduction=self.reduction,
            )
            yield Step(table, _FLOPS_PER_ROW * rows, at_rows)
            for first in range(0, p.n, chunk):
                cols, last = min(chunk, p.n - first), first + chunk >= p.n
                at = at_rows | {"w": w_step * first, "dw": p.dtype.bytes * p.k * first, "bias": p.dtype.bytes * first}
                at |= {"table": 4 * table_words(rows, first // chunk), "dbias": at["bias"], "bias_sums": 4 * first}
                logits = self._logits(rows, cols, chunk)
                yield step(logits, at, a="x", b="w", out="derivatives", row_values="table")
                if self.wanted[2]:
                    sums = self._columns(rows, cols, chunk, first=first_row == 0, last=first_row + rows >= p.m)
                    yield Step(sums, rows * cols, at)
                if self.wanted[1]:
                    of_w = self._of_w(rows, cols, chunk, add=first_row > 0)
                    yield step(of_w, at, a="derivatives", b="x", out="dw", extra0="dw")
                if self.wanted[0]:
                    of_x = self._of_x(rows, cols, chunk, add=first > 0, last=last)
                    yield step(of_x, at, a="derivatives", b="w", out="dx" if last else "sums", extra0="sums")

    def _columns(self, rows: int, cols: int, chunk: int, *, first: bool, last: bool) -> KernelCall:
        """A block's part of the bias's gradient."""
        call = columns_call(rows, cols, _line(chunk), self.product.dtype, first=first, last=last)
        return replace(call, workspace={"bias_sums": self.product.n}) if "bias_sums" in call.arrays else call

    def _call(self, problem: MatmulProblem, names: Mapping[str, str]) -> KernelCall:
        """The one kernel of a product, its arrays renamed."""
        (call,) = self._configured(problem).calls(problem, self.multiprocessors)
        arrays = tuple(names.get(name, name) for name in call.arrays)
        workspace = {name: words for name, words in self._workspace.items() if name in arrays}
        return replace(call, arrays=arrays, workspace=workspace)

    @cached_property
    def _workspace(self) -> dict[str, int]:
        """Words of the memory between the kernels, the row values aside."""
        p, (rows, cols) = self.product, self.taken
        derivatives = -(-rows * _line(cols) * p.dtype.bytes // 4)
        return {"derivatives": derivatives, "sums": rows * p.k} if cols < p.n else {"derivatives": derivatives}


def _multiple(extent: int) -> int:
    return -(-extent // BLOCK) * BLOCK


def _line(cols: int) -> int:
    """Elements between rows of a chunk's derivatives: aligned to 16 bytes."""
    return -(-cols // 8) * 8


def _chunks(n: int, most: int) -> list[int]:
    """Sizes of chunks worth a look: all columns, or multiples of :data:`BLOCK` from ``most`` down to two thirds."""
    if most >= n:
        return [n]
    least = 2 * most // 3
    return [x for x in range(most, least, -max(BLOCK, (most - least) // 16 // BLOCK * BLOCK)) if x > 0]


# -- options
def _loss(options: Mapping[str, Any]) -> Loss:
    """The loss that the options of a call ask for. Raises ProblemError for those that make no sense."""
    found = Loss(*[options[name] for name in ("ignore_index", "label_smoothing", "z_loss", "softcap")])
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
    return_lse: bool = False,
    config: MatmulConfig | str | None = None,
    **unknown: Never,
) -> Losses:
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
    options = ignore_index, reduction, label_smoothing, z_loss, softcap, return_lse
    found = loss_call((x, w, target, bias), options, config, False, unknown)
    if found.__class__ is not tuple:
        return found
    return found[:2] if return_lse else found[0]


def check_words(given: Arguments) -> Loss:
    """The loss asked for. Raises ProblemError for options that make no sense, and for a vocabulary without a word."""
    if given.sizes["n"] == 0:
        raise ProblemError(f"w has shape {tuple(given.views['b'].shape)}: a vocabulary has at least one word")
    return _loss(given.options)


def _work(given: Arguments, config: Any) -> Computation:
    loss, views = check_words(given), given.views
    target = views["target"]
    check_targets(target, given.sizes["n"], loss.ignore_index)

    def plan(arrays: Views) -> LossPlan:
        product = _product(arrays["a"], arrays["b"], arrays.get("bias"))
        if loss.softcap is not None:
            function = SoftCap(loss.softcap)
            product = replace(product, epilogue=replace(product.epilogue, function=function, key=function))
        lse = reduce_plan(product, "logsumexp", config, target.device, result="lse")
        return LossPlan(lse, loss, target.dtype.bits // 32, tuple(given.results))

    def empty() -> dict[str, Any]:
        return given.made(total=math.nan if "count" in given.results else 0.0, count=0.0)

    taken = {**views, "target": as_elements(target, s32)}
    return Computation(given, plan, taken, nothing=given.sizes["m"] == 0, empty=empty)


loss_call = Caller(linear_cross_entropy, _work, recorded=True)


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
    blocks: tuple[int, int] | None = None,
    count: Count = None,
    config: MatmulConfig | str | None = None,
) -> RowGradients:
    """The gradients by x (m, k), w (n, k) and bias (n,), those that are wanted, of losses of scale·x·wᵀ + bias.

    ``lse`` and its gradient ``by_lse``, and that of the losses, ``by_loss``, are float32 (m,); that by their sum is
    float32 (), and so is that by their mean, beside the ``count`` of rows in it. Without a ``target`` there is a
    log-sum-exp alone. ``blocks``: rows and columns to take at a time.
    """
    options = scale, wants_x, wants_w, wants_bias, ignore_index, label_smoothing, z_loss, softcap, blocks
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
        to = on.target, on.multiprocessors
        return GradientPlan(product, loss, words, known, wanted, *to, asked, options["blocks"], reduction)

    return Computation(given, plan, taken, nothing=given.sizes["m"] == 0 or not any(wanted))


row_gradients_call = Caller(row_gradients, _gradients)


# -- both
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
    """Plan :func:`linear_cross_entropy`, forward and for the gradients of x, w and bias. Runs nothing."""
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "config": config}
    like = describe_all({"x": x})["x"]

    def rows(dtype: DType) -> ArrayView:
        return as_if_compact(like._replace(shape=tuple(like.shape[:1]), dtype=dtype))

    given = {"x": x, "w": w, "target": rows(s64), "bias": bias, **options}
    passed = {"lse": rows(f32), "by_loss": rows(f32), "wants_bias": bias is not None}
    return loss_call.computation({**given, "return_lse": True}).planned(), row_gradients_call.computation(
        {**given, **passed}
    ).planned()
