"""Whether arrays share memory, told from addresses, shapes and strides alone: also for memory of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.interop.arrays import CPU, ArrayView, as_numpy, memory_span

_MOST_WORK = 1_000_000
"""Steps of the exact search, some milliseconds. Views made by slicing and transposing take a handful."""


def share_memory(x: ArrayView, y: ArrayView) -> bool:
    """Whether some element of ``x`` lies in the memory of one of ``y``.

    Exact: interleaved slices of one buffer, such as its left and right columns, are apart. Strides that no slicing
    makes may be beyond :data:`_MOST_WORK`; they count as apart.
    """
    (first, size), (other, other_size) = memory_span(x), memory_span(y)
    if size == 0 or other_size == 0 or first >= other + other_size or other >= first + size:
        return False
    if x.contiguous and y.contiguous:
        return True
    try:
        one, two = (as_numpy(view._replace(device=CPU)) for view in (x, y))  # no element is read
        return np.shares_memory(one, two, _MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def same_elements(x: ArrayView, y: ArrayView) -> bool:
    """Whether two arrays are one: each index is the same element of both."""
    ways = [[s for s, n in zip(v.strides, v.shape, strict=True) if n > 1] for v in (x, y)]
    return x.pointer == y.pointer and tuple(x.shape) == tuple(y.shape) and x.dtype is y.dtype and ways[0] == ways[1]


def overlaps_itself(view: ArrayView) -> bool:
    """Whether two indices of an array may be one element: never so of what slicing and transposing make of arrays."""
    if 0 in view.shape:
        return False
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def near(view: ArrayView, out: ArrayView) -> tuple[int, int]:
    """Between which distances from ``out`` an array like ``view`` reaches into the memory of ``out``, gaps included."""
    (first, size), (first_out, size_out) = memory_span(view), memory_span(out)
    below, below_out = first - view.pointer, first_out - out.pointer
    return below_out - below - size, below_out + size_out - below


def count_write(array: Any) -> None:
    """Have PyTorch count a write to a tensor, so that it refuses a backward pass that needs what stood there before."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        torch.autograd.graph.increment_version(array)


@dataclass(frozen=True)
class Written:
    """Arrays that calls again and again write to: what memory they share with others is told by each call's addresses.

    For arrays that lie as those of the first call, which :meth:`of` is made of.
    """

    places: tuple[int, ...]
    """Their numbers among the arrays."""
    refuse: Callable[[Mapping[str, ArrayView]], None]
    """Raises ProblemError where one of them cannot be written to, or shares memory with what it must not."""
    pairs: tuple[tuple[int, int, int, int], ...]
    """(one that is written, another, between which distances from one to the other they are :func:`near`)."""

    @classmethod
    def of(
        cls, views: Mapping[str, ArrayView], names: Sequence[str], refuse: Callable[[Mapping[str, ArrayView]], None]
    ) -> Written:
        """For ``names`` among the arrays of a call."""
        numbers, pairs = {name: i for i, name in enumerate(views)}, list[tuple[int, int, int, int]]()
        for one in names:
            pairs += [(numbers[one], numbers[other], *near(views[other], views[one])) for other in views.keys() - {one}]
        return cls(tuple([numbers[name] for name in names]), refuse, tuple(pairs))

    def apart(self, pointers: Sequence[int]) -> bool:
        """Whether arrays at these addresses are certainly not in each other's memory."""
        return not any(least < pointers[other] - pointers[one] < most for one, other, least, most in self.pairs)

    def check(self, views: Mapping[str, ArrayView], *, known: bool) -> None:
        """Look at the arrays of another call, of which only addresses are new, if they are not ``known``."""
        lying = list(views.values())
        readonly = any(lying[i].readonly for i in self.places)
        if readonly or not (known or self.apart([x.pointer for x in lying])):
            self.refuse(views)
