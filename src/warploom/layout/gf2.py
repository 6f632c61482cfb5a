"""Linear algebra over GF(2) on Python integers: a vector is an int whose bit *i* is its *i*-th component."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Subspace:
    """The span of the vectors added so far, able to say which of them sum (XOR) to a given vector.

    Vectors are numbered in the order of :meth:`add`; a *combination* is an int whose bit *i* selects vector *i*.
    """

    def __init__(self, vectors: Iterable[int] = ()) -> None:
        self._rows: dict[int, tuple[int, int]] = {}  # leading bit -> (vector, combination that gives it)
        self._count = 0
        for vector in vectors:
            self.add(vector)

    def reduce(self, vector: int) -> tuple[int, int]:
        """``(remainder, combination)`` with ``vector = remainder ^ XOR(combination)``; remainder 0 means inside."""
        combination = 0
        rest = vector
        remainder = 0
        while rest:
            lead = rest.bit_length() - 1
            row = self._rows.get(lead)
            if row is None:
                remainder |= 1 << lead
                rest ^= 1 << lead
            else:
                rest ^= row[0]
                combination ^= row[1]
        return remainder, combination

    def add(self, vector: int) -> int | None:
        """Add a vector. None if it is independent of the earlier ones, else the combination of them that equals it."""
        remainder, combination = self.reduce(vector)
        index = self._count
        self._count += 1
        if remainder == 0:
            return combination
        self._rows[remainder.bit_length() - 1] = (remainder, combination ^ (1 << index))
        return None

    def __contains__(self, vector: int) -> bool:
        return self.reduce(vector)[0] == 0

    @property
    def rank(self) -> int:
        """The dimension of the space."""
        return len(self._rows)


def rank(vectors: Iterable[int]) -> int:
    """The dimension of the span of ``vectors``."""
    return Subspace(vectors).rank


def kernel(vectors: Sequence[int]) -> list[int]:
    """A basis of the combinations (bit *i* selects ``vectors[i]``) whose XOR is zero, one per dependent vector."""
    span = Subspace()
    found: list[int] = []
    for index, vector in enumerate(vectors):
        combination = span.add(vector)
        if combination is not None:
            found.append(combination ^ (1 << index))
    return found


def combine(vectors: Sequence[int], combination: int) -> int:
    """The XOR of the vectors that ``combination`` selects."""
    total = 0
    for index, vector in enumerate(vectors):
        if combination >> index & 1:
            total ^= vector
    return total


def span_elements(vectors: Sequence[int]) -> list[int]:
    """All XOR combinations of ``vectors`` (2^n of them, ordered by combination; the first is 0)."""
    elements = [0]
    for vector in vectors:
        elements += [element ^ vector for element in elements]
    return elements
