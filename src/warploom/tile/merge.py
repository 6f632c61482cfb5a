"""Attention over parts of the keys, put together: O and the log-sum-exp of all keys from those of each part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from warploom.core.dtypes import f32
from warploom.tile.softmax import LOG2_E

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced


def anchor(k: Kernel, top: Traced) -> Traced:
    """What exponents are taken relative to: the largest log-sum-exp, but 0 where no part has a key."""
    return k.select(top == -math.inf, k.value(0.0, f32), top)


def weight(k: Kernel, log: Traced, at: Traced) -> Traced:
    """A part's share of the sum, relative to its anchor; 0 for a part without a key."""
    return k.exp2((log - at) * LOG2_E)


def inverse(k: Kernel, total: Traced) -> Traced:
    """What weighted outputs are multiplied by: 1 / ``total``, and 0 for a row without a key."""
    return k.select(total == 0.0, k.value(0.0, f32), k.reciprocal(total))


def logarithm(k: Kernel, top: Traced, total: Traced) -> Traced:
    """The log-sum-exp of all parts: -inf without a key, +inf where a part has it."""
    return k.select(top == math.inf, top, k.fma(k.log2(total), 1 / LOG2_E, anchor(k, top)))


def with_sink(k: Kernel, log: Traced, sink: Traced) -> tuple[Traced, Traced]:
    """The factor of O and the log-sum-exp where a logit without a value joins the sum: 0 beside a sink of +inf."""
    top = k.maximum(log, sink)
    at = anchor(k, top)
    both = k.select(top == math.inf, top, k.fma(k.log2(weight(k, log, at) + weight(k, sink, at)), 1 / LOG2_E, at))
    return k.select(log == -math.inf, k.value(0.0, f32), weight(k, log, both)), both


def merged(k: Kernel, logs: Sequence[Traced]) -> tuple[list[Traced], Traced, Traced]:
    """Weights for the outputs of parts with these log-sum-exps, the factor of their sum, and its log-sum-exp."""
    top = _in_pairs(k.maximum, logs)
    at = anchor(k, top)
    weights = [weight(k, log, at) for log in logs]
    total = _in_pairs(add, weights)
    return weights, inverse(k, total), logarithm(k, top, total)


def _in_pairs(join: Callable[[Traced, Traced], Traced], values: Sequence[Traced]) -> Traced:
    """All values as one, in as few steps one behind the other as there can be."""
    while len(values) > 1:
        values = [reduce(join, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]
