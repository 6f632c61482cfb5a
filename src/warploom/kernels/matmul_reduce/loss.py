"""The cross-entropy of a product's rows: what is asked of it, its functions of a logit, and the kernels' launches.

With s = softcap(alpha · x·wᵀ + bias), L = logsumexp(s) of a row, t its target among n columns and ε the label
smoothing, the row's loss is L - (1 - ε)·s[t] - ε·mean(s) + z_loss·L². Its derivative by the product is

    (A · exp(s - L) - g · ((1 - ε)·[j = t] + ε/n)) · softcap'    with A = g·(1 + 2·z_loss·L) + dL

for a gradient g of the loss and one dL of the log-sum-exp itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from warploom.core.arguments import fields, strides
from warploom.core.dtypes import DType
from warploom.kernels.matmul_reduce.states import (
    COLUMNS,
    DOT_WARPS,
    LOGIT_CHUNKS,
    LOGIT_THREADS,
    ROW_THREADS,
    SCALE_THREADS,
    STATES,
)
from warploom.kernels.source import KernelCall, KernelSource

if TYPE_CHECKING:
    from warploom.lang.values import Traced

Reduction = Literal["none", "mean", "sum"]


@dataclass(frozen=True)
class Loss:
    """A cross-entropy by its options, those of :func:`warploom.linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


@dataclass(frozen=True)
class SoftCap:
    """cap · tanh(x / cap), as an epilogue."""

    cap: float

    def __call__(self, x: Traced) -> Traced:
        """The capped value."""
        from warploom.tile.softmax import capped

        return capped(x.builder, x, self.cap)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LogitGradient:
    """The derivative of a loss by an element of the product, as an epilogue with row values (:func:`gradient_call`).

    ``hot``: what the target's column has more than others, 1 - ε; ``share``: what every column has, ε/n. Both are 0
    where there is no target: the derivative of a log-sum-exp alone.
    """

    cap: float | None = None
    hot: float = 0.0
    share: float = 0.0

    def __call__(self, x: Traced, top: Traced, factor: Traced, own: Traced, target: Traced, col: Traced) -> Traced:
        """``top``: L · log2(e); ``factor``: A; ``own``: g; ``target``: the bits of the target's column."""
        from warploom.lang.functions import LOG2_E, exp2, fma, select

        s = x if self.cap is None else SoftCap(self.cap)(x)
        found = factor * exp2(fma(s, LOG2_E, -top))
        if self.hot or self.share:
            hot = x.builder.bitcast(target, col.dtype) == col  # type: ignore[attr-defined]
            found = fma(select(hot, self.hot + self.share, self.share), -own, found)
        if self.cap is None:
            return found
        tanh = s * (1.0 / self.cap)
        return found * fma(-tanh, tanh, 1.0)


def losses_call(
    size: tuple[int, int, int], rows: tuple[int, int], dtype: DType, target_words: int, loss: Loss, *, bias: bool
) -> KernelCall:
    """The losses of rows from their log-sum-exps, of arrays a (m, depth), b (n, depth), target, lse, sums, bias, loss.

    ``size`` = (m, n, depth); ``rows`` are the strides between rows of a and b in elements; a target has so many 32-bit
    words. ``sums``, those of the rows' logits, is left out without label smoothing, and the bias where there is none.
    """
    source = KernelSource.of(
        "warploom.kernels.matmul_reduce.loss_kernel:row_losses",
        "row_losses",
        dtype=dtype,
        target_words=target_words,
        loss=loss,
        with_bias=bias,
    )
    scalars = fields("logits", **dict(zip(("m", "n", "depth"), size, strict=True)), **strides(x=rows[:1], w=rows[1:]))
    sums, biases = ["sums"] if loss.label_smoothing else [], ["bias"] if bias else []
    grid = -(-size[0] // DOT_WARPS), 1, 1
    arrays = ("a", "b", *biases, "target", "lse", *sums, "loss")
    return KernelCall(source, grid, scalars, (), arrays, dict.fromkeys(sums, size[0]))


def total_call(m: int, target_words: int, ignore_index: int, *, mean: bool) -> KernelCall:
    """The sum of the losses of m rows, in ``total``; or their ``mean``, and in ``count`` how many are not ignored."""
    source = KernelSource.of(
        "warploom.kernels.matmul_reduce.loss_kernel:total_losses",
        "mean_of_losses" if mean else "sum_of_losses",
        target_words=target_words,
        ignore_index=ignore_index,
        mean=mean,
    )
    arrays = ("loss", "target", "total", "count") if mean else ("loss", "total")
    return KernelCall(source, (1, 1, 1), {"m": m}, (), arrays)


def count_call(m: int, target_words: int, ignore_index: int) -> KernelCall:
    """Return the launch that writes to ``count`` how many of ``m`` rows are not ignored."""
    source = KernelSource.of(
        "warploom.kernels.matmul_reduce.loss_kernel:count_rows",
        "count_rows",
        target_words=target_words,
        ignore_index=ignore_index,
    )
    return KernelCall(source, (1, 1, 1), {"m": m}, (), ("target", "count"))


def logits_call(
    m: int, n: int, line: int, part: int, *, dtype: DType, target_words: int, loss: Loss, mean: bool
) -> KernelCall:
    """The derivatives of the sum of losses, or their ``mean``, by logits, in the place of ``derivatives`` (m, n).

    There, in lines of ``line`` elements, were the exponentials of parts of ``part`` columns, whose largest logits are
    in ``first`` (parts, m); of arrays target, lse, count, first and derivatives.
    """
    source = KernelSource.of(
        "warploom.kernels.matmul_reduce.loss_kernel:logit_gradients",
        "logit_gradients",
        dtype=dtype,
        part=part,
        target_words=target_words,
        loss=loss,
        mean=mean,
    )
    arrays = ("target", "lse", *(["count"] if mean else []), STATES[0], "derivatives")
    grid = m, -(-n // (8 * LOGIT_CHUNKS * LOGIT_THREADS)), 1
    return KernelCall(source, grid, {"m": m, "n": n, "line": line}, (), arrays)


def scale_call(name: str, elements: int, dtype: DType, multiprocessors: int) -> KernelCall:
    """An array of so many elements times ``factor``, in place; nothing is read if that is 1."""
    source = KernelSource.of("warploom.kernels.matmul_reduce.loss_kernel:scale_values", "scale_values", dtype=dtype)
    grid = max(1, min(-(-elements // (8 * SCALE_THREADS)), 8 * multiprocessors)), 1, 1
    scalars = {"chunks": elements // 8, "rest": elements % 8, "step": grid[0] * SCALE_THREADS}
    return KernelCall(source, grid, scalars, (), (name, "factor"))


def gradient_call(
    m: int,
    n: int,
    chunk: int,
    *,
    target_words: int,
    loss: Loss,
    given: tuple[bool, bool],
    reduction: Reduction = "none",
) -> KernelCall:
    """The row values of :class:`LogitGradient`, for each chunk of the columns: ``table`` (chunks, m, 4).

    Of arrays target, lse and the gradients by the loss and by the log-sum-exp, of which some may be ``given``. That by
    a ``reduction`` of the losses is one number, and a mean's is divided by another array, ``count``.
    """
    source = KernelSource.of(
        "warploom.kernels.matmul_reduce.loss_kernel:gradient_rows",
        "gradient_rows",
        target_words=target_words,
        loss=loss,
        with_loss=given[0],
        with_lse=given[1],
        reduction=reduction,
    )
    chunks = -(-n // chunk)
    names: Mapping[str, bool] = {
        "target": target_words > 0,
        "lse": True,
        "loss_gradient": given[0],
        "count": reduction == "mean",
        "lse_gradient": given[1],
        "table": True,
    }
    arrays = tuple(name for name, used in names.items() if used)
    grid = -(-m // ROW_THREADS), chunks, 1
    return KernelCall(source, grid, {"m": m, "n": n, "chunk": chunk}, (), arrays, {"table": table_words(m, chunks)})


def table_words(m: int, chunks: int) -> int:
    """32-bit words of the row values of m rows and so many chunks."""
    return 4 * m * chunks


def columns_call(m: int, n: int, line: int, dtype: DType, *, first: bool, last: bool) -> KernelCall:
    """The gradients of a bias: the sums of the columns of ``derivatives`` (m, n), in lines of ``line`` elements.

    They are added to ``bias_sums`` unless these rows are the ``first``; those of the ``last`` are rounded to ``dbias``.
    """
    source = KernelSource.of(
        "warploom.kernels.matmul_reduce.loss_kernel:column_sums", "column_sums", dtype=dtype, first=first, last=last
    )
    arrays = ("derivatives", *(() if first and last else ("bias_sums",)), *(("dbias",) if last else ()))
    return KernelCall(source, (-(-n // COLUMNS), 1, 1), {"m": m, "n": n, "line": line}, (), arrays)
