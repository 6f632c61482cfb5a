"""The arguments of a cross-entropy, checked: its options, shapes, types and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import F32_MAX, bf16, f16, f32, s32, s64
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, as_numpy, require_dtype, same_device
from warploom.kernels.matmul_reduce.loss import Loss
from warploom.ops.options import number, whole

Reduction = Literal["none", "mean", "sum"]


def loss_of(ignore_index: Any = -100, label_smoothing: Any = 0.0, z_loss: Any = 0.0, softcap: Any = None) -> Loss:
    """The options as a :class:`Loss`. Raises ProblemError for those that make no sense."""
    found = Loss(
        whole("ignore_index", ignore_index),
        number("label_smoothing", label_smoothing),
        number("z_loss", z_loss),
        None if softcap is None else number("softcap", softcap),
    )
    if not 0.0 <= found.label_smoothing <= 1.0:
        raise ProblemError(f"label_smoothing is between 0 and 1, not {found.label_smoothing}")
    if not 0.0 <= found.z_loss <= F32_MAX:
        raise ProblemError(f"z_loss is a finite number from 0 on, not {found.z_loss}")
    if found.softcap is not None and not 2.0**-100 < found.softcap < 2.0**100:
        raise ProblemError(f"softcap is a positive finite number or None, not {found.softcap}")
    return found


def check_reduction(reduction: Any) -> None:
    """Raises ProblemError for a ``reduction`` that is none."""
    if reduction not in ("none", "mean", "sum"):
        raise ProblemError(f"reduction is 'none', 'mean' or 'sum', not {reduction!r}")


def reduced(losses: Any, target: Any, ignore_index: int, reduction: Reduction) -> Any:
    """The losses of all rows, by the functions of their own framework."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted(target, ignore_index, losses.dtype)


def counted(target: Any, ignore_index: int, dtype: Any) -> Any:
    """How many rows are not ignored, by the functions of the targets' framework."""
    return (target != ignore_index).sum(dtype=dtype)


def check_loss(rows: ArrayView, words: ArrayView, chosen: ArrayView, bias: ArrayView | None = None) -> None:
    """Raises ProblemError where shapes, types or devices of :func:`linear_cross_entropy` are wrong."""
    if len(rows.shape) != 2 or len(words.shape) != 2 or tuple(chosen.shape) != (rows.shape[0],):
        raise ProblemError(
            f"x is (m, k), w (n, k) and target (m,); got {tuple(rows.shape)}, {tuple(words.shape)} and "
            f"{tuple(chosen.shape)}"
        )
    if chosen.dtype not in (s32, s64):
        raise ProblemError(f"target is {chosen.dtype.array_name}: convert it to int32 or int64")
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
    views = [rows, words, chosen]
    if bias is not None:
        if tuple(bias.shape) != (words.shape[0],) or bias.dtype is not rows.dtype:
            raise ProblemError(
                f"bias is {bias.dtype.array_name} of shape {tuple(bias.shape)}: it must be {rows.dtype} of shape "
                f"({words.shape[0]},), one number for each row of w"
            )
        views.append(bias)
    same_device(views, ("x", "w", "target", "bias"))


def check_row_values(views: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError where log-sum-exps or gradients by rows are not one float32 number for each row of ``x``."""
    rows = (views["x"].shape[0],)
    for name in ("lse", "loss_gradient", "lse_gradient"):
        view = views.get(name)
        if view is not None and (view.dtype is not f32 or tuple(view.shape) != rows):
            raise ProblemError(
                f"{name} is {view.dtype.array_name} of shape {tuple(view.shape)}; it must be float32 of {rows}"
            )


def check_targets(chosen: ArrayView, n: int, ignore_index: int) -> None:
    """Raises ProblemError for targets on the CPU that name no column."""
    if chosen.device[0] != "cpu":
        return
    values = as_numpy(chosen)
    wrong = np.flatnonzero(((values < 0) | (values >= n)) & (values != ignore_index))
    if wrong.size:
        raise ProblemError(
            f"target[{wrong[0]}] is {values[wrong[0]]}, and w has {n} rows: targets are 0 … {n - 1}, or "
            f"ignore_index, {ignore_index}"
        )
