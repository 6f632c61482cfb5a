# pyright: reportInvalidTypeForm=false
"""The kernels beside the products of a cross-entropy: a row's loss, and what the gradients take beside products."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

from warploom.core.dtypes import DType, f32, u16, u32, u64
from warploom.kernels.matmul.features import ROW_VALUES
from warploom.kernels.matmul_reduce.loss import Loss, Reduction, SoftCap
from warploom.kernels.matmul_reduce.states import (
    COLUMN_WARPS,
    COLUMNS,
    DOT_WARPS,
    LOGIT_CHUNKS,
    LOGIT_THREADS,
    ROW_THREADS,
    SCALE_THREADS,
    TOTAL_THREADS,
)
from warploom.lang import Compound, Global, GlobalPointer, Kernel, Strided, Traced, kernel
from warploom.lang.functions import LOG2_E, exp


def _chosen(
    k: Kernel, target: GlobalPointer, row: Traced, n: Traced, words: int, ignored_index: int
) -> tuple[Traced, Traced, Traced]:
    """(column, whether there is such a column, whether the row is ignored) of a row's target of 32-bit ``words``."""
    column = target.load(row * words)
    valid, ignored = column < n, column == (ignored_index & 0xFFFFFFFF)
    if words == 2:
        high = target.load(row * words + 1)
        valid, ignored = valid & (high == 0), ignored & (high == (ignored_index >> 32 & 0xFFFFFFFF))
    return column, valid, ignored


@kernel(threads=32 * DOT_WARPS, drop_unused=True)
def row_losses(
    k: Kernel,
    logits: Logits,
    target: Global[u32],
    lse: Global[f32],
    sums: Global[f32],
    out: Global[f32],
    *,
    dtype: DType,
    target_words: int,
    loss: Loss,
    with_bias: bool,
) -> None:
    """out[i] = the loss of row i: one warp a row, grid ⌈m / 4⌉.

    ``target`` (m) has ``target_words`` 32-bit words each. ``lse`` (m) and ``sums`` (m) are those of the rows' logits.
    An ignored row's loss is 0; a target outside 0 … n-1 gives NaN.
    """
    row = k.cta_x * DOT_WARPS + k.warp
    with k.when(row < logits.m, uniform=True):
        column, valid, ignored = _chosen(k, target, row, logits.n, target_words, loss.ignore_index)
        safe = k.select(valid, column, 0)
        left, right = logits.x.at(row), logits.w.at(safe)
        total = k.register(f32, 0.0)
        with k.loop(logits.depth, start=k.lane, step=32) as i:
            pair = [k.unpack((p + i).load(), dtype)[0] for p in (left, right)]
            total.set(k.fma(pair[0], pair[1], total.get()))
        k.syncwarp()
        value = total.get()
        for mask in (1, 2, 4, 8, 16):
            value = value + k.shfl_xor(value, mask)
        with k.when(k.lane == 0):
            if with_bias:
                value = value + k.unpack((logits.bias + safe).load(), dtype)[0]
            if loss.softcap is not None:
                value = SoftCap(loss.softcap)(value)
            log_sum = lse.load(row)
            if loss.label_smoothing:
                mean = sums.load(row) / k.convert(logits.n, f32)
                value = k.fma(value, 1.0 - loss.label_smoothing, mean * loss.label_smoothing)
            found = log_sum - value
            if loss.z_loss:
                found = k.fma(log_sum * loss.z_loss, log_sum, found)
            found = k.select(valid, found, k.value(math.nan, f32))
            out.store(k.select(ignored, k.value(0.0, f32), found), row)


@kernel(threads=TOTAL_THREADS, drop_unused=True)
def total_losses(
    k: Kernel,
    losses: Global[f32],
    target: Global[u32],
    total: Global[f32],
    count: Global[f32],
    m: u32,
    *,
    target_words: int,
    ignore_index: int,
    mean: bool,
) -> None:
    """``total`` = the sum of the m losses, or their ``mean`` over the rows not ignored, of which there are ``count``.

    One CTA adds them, always in the same order.
    """
    sums = k.registers(f32, 1 + mean, 0.0)
    with k.loop(m, start=k.thread, step=TOTAL_THREADS * _ROWS_UNDER_WAY) as first:
        found = [k.registers(f32, _ROWS_UNDER_WAY, 0.0) for _ in sums]
        for i in range(_ROWS_UNDER_WAY):  # all loads before the first use
            row = first + i * TOTAL_THREADS
            with k.when(row < m):
                found[0][i].set(losses.load(row))
                if mean:
                    ignored = _chosen(k, target, row, m, target_words, ignore_index)[2]
                    found[1][i].set(k.select(ignored, k.value(0.0, f32), 1.0))
        for whole, parts in zip(sums, found, strict=True):
            for x in parts:
                whole.set(whole.get() + x.get())
    k.syncwarp()
    parts = k.shared(f32, (len(sums), TOTAL_THREADS // 32))
    for i, register in enumerate(sums):
        value = register.get()
        for mask in (1, 2, 4, 8, 16):
            value = value + k.shfl_xor(value, mask)
        with k.when(k.lane == 0):
            parts.store(value, i, k.warp)
    k.syncthreads()
    with k.when(k.thread == 0):
        value, *counted = [parts.load(i, 0) for i in range(len(sums))]
        for warp in range(1, TOTAL_THREADS // 32):
            value = value + parts.load(0, warp)
            counted = [x + parts.load(1, warp) for x in counted]
        for x in counted:
            count.store(x, 0)
            value = value / x
        total.store(value, 0)


@kernel(threads=TOTAL_THREADS)
def count_rows(
    k: Kernel, target: Global[u32], count: Global[f32], m: u32, *, target_words: int, ignore_index: int
) -> None:
    """``count`` = how many of m rows are not ignored; one CTA."""
    found = k.registers(f32, _ROWS_UNDER_WAY, 0.0)
    with k.loop(m, start=k.thread, step=TOTAL_THREADS * _ROWS_UNDER_WAY) as first:
        for i, own in enumerate(found):
            row = first + i * TOTAL_THREADS
            with k.when(row < m):
                ignored = _chosen(k, target, row, m, target_words, ignore_index)[2]
                own.set(own.get() + k.select(ignored, k.value(0.0, f32), 1.0))
    k.syncwarp()
    parts = k.shared(f32, (1, TOTAL_THREADS // 32))
    value = _sum([x.get() for x in found])
    for mask in (1, 2, 4, 8, 16):
        value = value + k.shfl_xor(value, mask)
    with k.when(k.lane == 0):
        parts.store(value, 0, k.warp)
    k.syncthreads()
    with k.when(k.thread == 0):
        count.store(_sum([parts.load(0, warp) for warp in range(TOTAL_THREADS // 32)]), 0)


def _sum(values: list[Traced]) -> Traced:
    return reduce(add, values)


class Logits(Compound):
    """A parameter: the logits x·wᵀ + bias by what they come from: x (m, depth), w (n, depth) and bias (n)."""

    x: Strided[u16, 1]
    w: Strided[u16, 1]
    bias: Global[u16]
    m: u32
    n: u32
    depth: u32


def _by_loss(gradient: GlobalPointer, count: GlobalPointer, row: Traced, reduction: Reduction) -> Traced:
    """The gradient by the loss of a row."""
    if reduction == "mean":
        return gradient.load(0) / count.load(0)
    return gradient.load(row if reduction == "none" else 0)


@kernel(threads=ROW_THREADS, drop_unused=True)
def gradient_rows(
    k: Kernel,
    target: Global[u32],
    lse: Global[f32],
    loss_gradient: Global[f32],
    count: Global[f32],
    lse_gradient: Global[f32],
    table: Global[f32],
    m: u32,
    n: u32,
    chunk: u32,
    *,
    target_words: int,
    loss: Loss,
    with_loss: bool,
    with_lse: bool,
    reduction: Reduction = "none",
) -> None:
    """Write L·log2(e), A, g and the target's column in a chunk for each row; one thread a row, grid (⌈m / 64⌉, chunks).

    ``table`` (chunks, m, 4); see :mod:`~warploom.kernels.matmul_reduce.loss`. ``loss_gradient`` has a number a row, or
    one by a ``reduction`` of the losses, for a mean of ``count`` rows. A row that is ignored has A = g = 0 and
    L = inf, so that none of its logits counts, however large; a target outside 0 … n-1 makes them NaN.
    """
    row = k.cta_x * ROW_THREADS + k.thread
    with k.when(row < m):
        log_sum = lse.load(row)
        top, factor, own, column = log_sum * LOG2_E, k.value(0.0, f32), k.value(0.0, f32), k.value(0, u32)
        if with_loss:
            column, valid, ignored = _chosen(k, target, row, n, target_words, loss.ignore_index)
            if not with_lse:
                top = k.select(ignored, k.value(math.inf, f32), top)
            own = k.select(valid, _by_loss(loss_gradient, count, row, reduction), k.value(math.nan, f32))
            own = k.select(ignored, k.value(0.0, f32), own)
            factor = own * k.fma(log_sum, 2.0 * loss.z_loss, 1.0) if loss.z_loss else own
            factor = k.select(ignored, k.value(0.0, f32), factor)
            column = column - k.cta_y * chunk
        if with_lse:
            factor = factor + lse_gradient.load(row)
        at = (k.mul_wide(k.cta_y, m) + k.mul_wide(row, 1)) * ROW_VALUES
        (table + at).store([top, factor, own, k.bitcast(column, f32)])


@kernel(threads=LOGIT_THREADS, drop_unused=True)
def logit_gradients(
    k: Kernel,
    target: Global[u32],
    lse: Global[f32],
    count: Global[f32],
    tops: Global[f32],
    values: Global[u16],
    m: u32,
    n: u32,
    line: u32,
    *,
    dtype: DType,
    part: int,
    target_words: int,
    loss: Loss,
    mean: bool,
) -> None:
    """Exponentials become the derivatives of a loss by logits, in place; grid (m, ⌈n / 8192⌉), a CTA has one row.

    ``values`` (m, n), lines ``line`` elements apart, a multiple of 8: exp(s - top), where ``tops`` (parts, m) is the
    largest logit of each ``part`` columns. The derivative is that of the sum of the losses, or of their ``mean`` over
    ``count`` rows. That of an ignored row is 0; a target outside 0 … n-1 makes it NaN.
    """
    row = k.cta_x
    log_sum = lse.load(row)
    column, valid, ignored = _chosen(k, target, row, n, target_words, loss.ignore_index)
    own = k.select(valid, 1.0 / count.load(0) if mean else k.value(1.0, f32), k.value(math.nan, f32))
    own = k.select(ignored, k.value(0.0, f32), own)
    factor = own * k.fma(log_sum, 2.0 * loss.z_loss, 1.0) if loss.z_loss else own
    factor = k.select(ignored, k.value(0.0, f32), factor)
    share = own * (loss.label_smoothing / k.convert(n, f32)) if loss.label_smoothing else None
    hot = own * (1.0 - loss.label_smoothing)
    first = k.cta_y * (8 * LOGIT_CHUNKS * LOGIT_THREADS) + k.thread * 8
    own_row = values + k.mul_wide(row, line)
    words, largest = k.registers(u32, 4 * LOGIT_CHUNKS, 0), k.registers(f32, LOGIT_CHUNKS, 0.0)
    for chunk, top in enumerate(largest):  # all loads before the first use
        place = first + chunk * (8 * LOGIT_THREADS)
        with k.when(place < n):
            for register, x in zip(words[4 * chunk :], (own_row + place).load(count=4, dtype=u32), strict=False):
                register.set(x)
            top.set(tops.load(k.mul_wide(place // part, m) + k.convert(row, u64)))
    for chunk, top in enumerate(largest):
        place = first + chunk * (8 * LOGIT_THREADS)
        scale = k.select(ignored, k.value(0.0, f32), factor * exp(top.get() - log_sum))
        found = list[Traced]()
        for i, register in enumerate(words[4 * chunk : 4 * chunk + 4]):
            low, high = k.unpack(register.get(), dtype)
            low, high = low * scale, high * scale
            if share is not None:
                low, high = low - share, high - share
            low = k.select(column == place + 2 * i, low - hot, low)
            high = k.select(column == place + (2 * i + 1), high - hot, high)
            found.append(k.pack(low, high, dtype))
        with k.when(place < n):
            (own_row + place).store(found, dtype=u32)


@kernel(threads=SCALE_THREADS, drop_unused=True)
def scale_values(
    k: Kernel,
    values: Global[u16],
    factor: Global[f32],
    chunks: u32,
    rest: u32,
    step: u32,
    *,
    dtype: DType,
) -> None:
    """``values`` times ``factor``, in place, unless that is 1: ``chunks`` of 8 elements, and the ``rest``.

    ``step`` is the number of threads of the grid.
    """
    by, me = factor.load(0), k.cta_x * SCALE_THREADS + k.thread
    with k.when(by != 1.0, uniform=True):
        with k.loop(chunks, start=me, step=step) as chunk:
            at, found = values + k.mul_wide(chunk, 8), list[Traced]()
            for word in at.load(count=4, dtype=u32):
                low, high = k.unpack(word, dtype)
                found.append(k.pack(low * by, high * by, dtype))
            at.store(found, dtype=u32)
        with k.when(me < rest):
            at = values + (k.mul_wide(chunks, 8) + k.convert(me, u64))
            at.store(k.pack(k.unpack(at.load(), dtype)[0] * by, 0.0, dtype))


@kernel(threads=32 * COLUMN_WARPS, drop_unused=True)
def column_sums(
    k: Kernel,
    values: Global[u16],
    sums: Global[f32],
    out: Global[u16],
    m: u32,
    n: u32,
    line: u32,
    *,
    dtype: DType,
    first: bool,
    last: bool,
) -> None:
    """The sums of the columns of ``values`` (m, n), lines ``line`` elements apart, an even number; grid ⌈n / 64⌉.

    ``sums`` (n) are those of the rows before, unless these are the ``first``. The sums of the ``last`` rows' calls are
    rounded to ``out`` (n), all others are added to ``sums``.
    """
    start = k.cta_x * COLUMNS
    pair, total = start + k.lane * 2, k.registers(f32, 2, 0.0)
    step = COLUMN_WARPS * _ROWS_UNDER_WAY
    with k.loop(m, start=k.warp * _ROWS_UNDER_WAY, step=step) as row:
        found = k.registers(u32, _ROWS_UNDER_WAY, 0)
        for i, word in enumerate(found):  # all loads before the first use
            with k.when((row + i < m) & (pair < n)):
                word.set(values.load(k.mul_wide(row + i, line) + k.convert(pair, u64), dtype=u32))
        for word in found:
            for part, x in zip(total, k.unpack(word.get(), dtype), strict=True):
                part.set(part.get() + x)
    parts = k.shared(f32, (COLUMN_WARPS, COLUMNS))
    parts.store([x.get() for x in total], k.warp, k.lane * 2)
    k.syncthreads()
    column = start + k.thread
    with k.when((k.thread < COLUMNS) & (column < n)):
        value = k.value(0.0, f32) if first else sums.load(column)
        for warp in range(COLUMN_WARPS):
            value = value + parts.load(warp, k.thread)
        if last:
            out.store(k.pack(value, 0.0, dtype), column)
        else:
            sums.store(value, column)


_ROWS_UNDER_WAY = 8
"""Rows that a thread has loads of under way."""
