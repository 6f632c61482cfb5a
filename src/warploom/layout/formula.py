"""How one output of a linear map is computed: as masked shifts, on integers, arrays and traced values alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a Python or NumPy integer: a constant, and neither an array nor a traced value."""
    return isinstance(value, (int, np.integer))


@dataclass(frozen=True, slots=True)
class Term:
    """One ``(x & mask) << shift`` (or ``>> -shift``) of an output's formula."""

    dim: str
    mask: int
    shift: int
    full: int  # mask of all bits the input has

    @property
    def out_mask(self) -> int:
        """The bits of the output that the term sets."""
        return self.mask << self.shift if self.shift >= 0 else self.mask >> -self.shift

    def of(self, value: Any) -> Any:
        """The term's value with as few operations as it takes."""
        if self.shift < 0:
            kept = self.full >> -self.shift << -self.shift  # the shift itself drops the bits below
            shifted: Any = (value if self.mask == kept else value & self.mask) >> -self.shift
            return shifted
        masked: Any = value if self.mask == self.full else value & self.mask
        return masked << self.shift if self.shift else masked


def evaluate(terms: tuple[Term, ...], constants: Mapping[str, int], values: Mapping[str, Any]) -> Any:
    """The XOR of ``terms`` over inputs that are ``constants`` or ``values``; inputs in neither are 0."""
    constant = used = 0
    total: Any = None
    for term in terms:
        if term.dim in constants:
            constant ^= term.of(constants[term.dim])
        elif term.dim in values:
            value = term.of(values[term.dim])
            # Disjoint bits may be added, which adders and address immediates can absorb; only overlaps need XOR.
            overlaps = used & term.out_mask
            total = value if total is None else (total ^ value if overlaps else total + value)
            used |= term.out_mask
    if total is None:
        return constant
    if constant:
        # A constant on bits nothing else sets stays an addend, which an address can carry as its immediate.
        return total ^ constant if used & constant else total + constant
    return total


def wide_array(dim: str, array: NDArray[Any]) -> NDArray[Any]:
    """``array`` in a type wide enough for shifted coordinates; raises LayoutError if it does not hold integers."""
    if array.dtype.kind not in "iu":
        raise LayoutError(f"{dim} is an array of {array.dtype}; a linear map takes integers")
    return array if array.dtype.itemsize >= 4 else array.astype(np.int64)
