"""What the layout tests share: random linear maps, and a stand-in for traced kernel values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from warploom.layout import LinearMap


class Traced:
    """Prints as the expression that made it; ``operations`` counts its operators."""

    def __init__(self, text: str, operations: int = 0) -> None:
        self.text = text
        self.operations = operations

    def _with(self, operator: str, other: Any) -> Traced:
        extra = other.operations if isinstance(other, Traced) else 0
        return Traced(f"({self.text} {operator} {other})", self.operations + extra + 1)

    def __and__(self, other: Any) -> Traced:
        return self._with("&", other)

    def __xor__(self, other: Any) -> Traced:
        return self._with("^", other)

    def __lshift__(self, other: Any) -> Traced:
        return self._with("<<", other)

    def __rshift__(self, other: Any) -> Traced:
        return self._with(">>", other)

    def __add__(self, other: Any) -> Traced:
        return self._with("+", other)

    def __rlshift__(self, other: Any) -> Traced:
        return Traced(f"({other} << {self.text})", self.operations + 1)

    def __str__(self) -> str:
        return self.text

    def at(self, **values: int) -> int:
        """The value of the expression for the given leaves."""
        return int(eval(self.text, {"__builtins__": {}}, values))


@st.composite
def linear_maps(
    draw: Callable[..., int], ins: tuple[str, ...] = ("register", "lane"), outs: tuple[str, ...] = ("row", "col")
) -> LinearMap:
    """Any map of up to 4 bits per input and output, of any rank."""
    sizes = {dim: 1 << draw(st.integers(0, 4)) for dim in outs}
    bases = {
        dim: [tuple(draw(st.integers(0, size - 1)) for size in sizes.values()) for _ in range(draw(st.integers(0, 4)))]
        for dim in ins
    }
    return LinearMap(bases, sizes)


@st.composite
def bijections(draw: Callable[..., int], ins: tuple[str, ...] = ("register", "lane")) -> LinearMap:
    """An invertible map: the identity with random row additions (shears), bits spread over row and col."""
    counts = {dim: draw(st.integers(1, 4)) for dim in ins}
    total = sum(counts.values())
    row_bits = draw(st.integers(0, total))
    columns = [1 << bit for bit in range(total)]
    for _ in range(12):
        source, target = draw(st.integers(0, total - 1)), draw(st.integers(0, total - 1))
        if source != target:
            columns[target] ^= columns[source]
    vectors = iter([(column & ((1 << row_bits) - 1), column >> row_bits) for column in columns])
    bases = {dim: [next(vectors) for _ in range(count)] for dim, count in counts.items()}
    return LinearMap(bases, {"row": 1 << row_bits, "col": 1 << (total - row_bits)})
