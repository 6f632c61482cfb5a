"""What a GPU was seen to do: observed tables of coordinates, fitted to linear maps, written as formulas, compared.

An observation is a table (thread, element) → (row, col). It is traced one coordinate bit per pass, so that every
element type holds what it carries exactly (a tracer of row · 100 + col is not exact in bf16 beyond 256).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.layout.formula import Term
from warploom.layout.fragments import WARP_SIZE, FragmentLayout
from warploom.layout.linear import LinearMap, log2_exact

Table = NDArray[np.int64]

SYMBOLS = {"register": "i", "lane": "lane", "warp": "warp"}
"""How formulas call the inputs: ``i`` is the index of an element among those a thread holds."""

_ORDER = ("lane", "warp", "register")  # of the summands of a formula


@dataclass(frozen=True, eq=False)
class Observation:
    """The observed place of each thread's elements in a matrix: ``rows`` and ``cols``, int64 [threads, elements]."""

    name: str
    shape: tuple[int, int]
    rows: Table
    cols: Table

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape != self.cols.shape or self.rows.shape[0] % WARP_SIZE:
            raise LayoutError(
                f"{self.name}: an observation is two tables [threads, elements] of whole warps, not "
                f"{self.rows.shape} and {self.cols.shape}"
            )

    @classmethod
    def of(cls, layout: FragmentLayout) -> Observation:
        """Return the observation that a fragment of the catalogue predicts."""
        return cls(layout.name, layout.shape, *layout.element_coordinates())

    @classmethod
    def from_bits(cls, name: str, shape: tuple[int, int], passes: NDArray[Any]) -> Observation:
        """From tracer passes [bits, threads, elements] of 0 and 1: the bits of the row, then those of the column.

        Bits come from the lowest on. Raises LayoutError that names thread and element where a pass shows anything else.
        """
        if not len(passes):
            raise LayoutError(f"{name}: a 1×1 matrix has no bits to trace")
        of_rows = (shape[0] - 1).bit_length()
        odd = np.argwhere((passes != 0) & (passes != 1))
        if len(odd):
            number, thread, element = odd[0].tolist()
            what, bit = ("row", number) if number < of_rows else ("col", number - of_rows)
            raise LayoutError(
                f"{name}: the pass of {what} bit {bit} shows {passes[number, thread, element]} in lane {thread}, "
                f"register {element}; a tracer shows 0 or 1"
            )
        parts = passes[:of_rows].astype(np.int64), passes[of_rows:].astype(np.int64)
        return cls(name, shape, *((part << np.arange(len(part))[:, None, None]).sum(axis=0) for part in parts))

    @property
    def warps(self) -> int:
        """Warps that hold it together."""
        return self.rows.shape[0] // WARP_SIZE

    @property
    def elements(self) -> int:
        """Elements per thread."""
        return self.rows.shape[1]

    def at(self, thread: int, element: int) -> tuple[int, int]:
        """(row, col) of one element."""
        return int(self.rows[thread, element]), int(self.cols[thread, element])


@dataclass(frozen=True)
class Fit:
    """The linear map of an observation, or the reason why there is none."""

    map: LinearMap | None
    reason: str = ""

    @property
    def is_linear(self) -> bool:
        """Whether there is a map."""
        return self.map is not None

    def require(self) -> LinearMap:
        """The map. Raises LayoutError with the reason if there is none."""
        if self.map is None:
            raise LayoutError(f"not linear: {self.reason}")
        return self.map


def fit(observed: Observation) -> Fit:
    """The linear map ``register, lane (, warp) → row, col`` that agrees with every entry of the table.

    The only candidate has as basis what the powers of two hold; it is then checked against all others. The reason of a
    failure names the first lane and register that disagree.
    """
    try:
        log2_exact(observed.elements, "the number of elements per thread")
        log2_exact(observed.warps, "the number of warps")
        for size, what in zip(observed.shape, ("rows", "columns"), strict=True):
            log2_exact(size, f"the number of {what}")
    except LayoutError as error:
        return Fit(None, str(error))
    if observed.at(0, 0) != (0, 0):
        return Fit(None, f"lane 0, register 0 holds {observed.at(0, 0)}; a linear map takes zero to (0, 0)")
    outside = (observed.rows >= observed.shape[0]) | (observed.cols >= observed.shape[1])
    if outside.any():
        thread, element = (int(x) for x in np.argwhere(outside)[0])
        return Fit(
            None,
            f"{_place(thread, element, observed.warps)} holds {observed.at(thread, element)}, which is "
            f"outside the {observed.shape[0]}×{observed.shape[1]} matrix",
        )
    candidate = _candidate(observed)
    layout = FragmentLayout(observed.name, candidate, 32)
    difference = compare(observed, layout)
    if difference is not None:
        return Fit(
            None,
            f"{difference.place} holds {difference.observed}, not the {difference.expected} of the only "
            "map that agrees on all powers of two",
        )
    return Fit(candidate)


def _candidate(observed: Observation) -> LinearMap:
    bases = {
        "register": [observed.at(0, 1 << bit) for bit in range(observed.elements.bit_length() - 1)],
        "lane": [observed.at(1 << bit, 0) for bit in range(WARP_SIZE.bit_length() - 1)],
    }
    if observed.warps > 1:
        bases["warp"] = [observed.at(WARP_SIZE << bit, 0) for bit in range(observed.warps.bit_length() - 1)]
    return LinearMap(bases, {"row": observed.shape[0], "col": observed.shape[1]})


# -------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Difference:
    """The first place where an observation is not what a layout, or a formula, says; ``source`` is who says it."""

    name: str
    thread: int
    register: int
    observed: tuple[int, int]
    expected: tuple[int, int]
    count: int
    warps: int = 1
    source: str = "the catalogue"

    @property
    def lane(self) -> int:
        """The lane in its warp."""
        return self.thread % WARP_SIZE

    @property
    def place(self) -> str:
        """The thread and register that hold the element, as text."""
        return _place(self.thread, self.register, self.warps)

    def __str__(self) -> str:
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        return f"{self.name}: {self.place} holds {self.observed}, {self.source} says {self.expected}{more}"


def _place(thread: int, register: int, warps: int) -> str:
    warp = f"warp {thread // WARP_SIZE}, " if warps > 1 else ""
    return f"{warp}lane {thread % WARP_SIZE}, register {register}"


def compare(observed: Observation, layout: FragmentLayout) -> Difference | None:
    """The first difference, by thread and then register, or None. Raises LayoutError if the sizes differ."""
    rows, cols = layout.element_coordinates()
    if rows.shape != observed.rows.shape:
        raise LayoutError(
            f"{observed.name}: {observed.rows.shape[0]} threads × {observed.elements} elements were seen, "
            f"{layout.name} has {rows.shape[0]} × {rows.shape[1]}"
        )
    wrong = np.argwhere((rows != observed.rows) | (cols != observed.cols))
    if not len(wrong):
        return None
    thread, element = (int(x) for x in wrong[0])
    expected = int(rows[thread, element]), int(cols[thread, element])
    return Difference(layout.name, thread, element, observed.at(thread, element), expected, len(wrong), observed.warps)


# -------------------------------------------------------------------- formulas


def formulas(layout: LinearMap, symbols: dict[str, str] | None = None) -> dict[str, str]:
    """Each output as a closed formula that both C and Python read.

    The 16×16 accumulator gives equations (1) and (2) of the paper on in-register reduction:
    ``row = (lane >> 2) + 8*((i >> 1) & 1)`` and ``col = 2*(lane & 3) + (i & 1) + 8*((i >> 2) & 1)``. ``symbols`` names
    the inputs (default :data:`SYMBOLS`; others keep their own names). Parts that share bits are joined by ``^``.
    """
    names = SYMBOLS if symbols is None else symbols
    return {out: _formula(layout.terms(out), names, layout) for out in layout.out_dims}


def _formula(terms: Sequence[Term], names: dict[str, str], layout: LinearMap) -> str:
    if not terms:
        return "0"
    rank = {dim: place for place, dim in enumerate((*_ORDER, *layout.in_dims))}
    ordered = sorted(terms, key=lambda t: (min(rank[t.dim], _ORDER.index(t.dim) if t.dim in _ORDER else 99), t.mask))
    used = 0
    overlap = False
    for term in ordered:
        overlap = overlap or bool(used & term.out_mask)
        used |= term.out_mask
    return (" ^ " if overlap else " + ").join(
        _summand(t, names.get(t.dim, t.dim), alone=len(ordered) == 1) for t in ordered
    )


def _summand(term: Term, name: str, alone: bool) -> str:
    low = (term.mask & -term.mask).bit_length() - 1
    field = term.mask >> low
    text = f"{name} >> {low}" if low else name
    simple = not low
    if field != term.full >> low or (low and term.dim == "register"):  # a single register bit reads best as such
        text = f"({text}) & {field}" if low else f"{text} & {field}"
        simple = False
    factor = 1 << (low + term.shift)
    if factor > 1:
        return f"{factor}*{text}" if simple else f"{factor}*({text})"
    return text if simple or alone else f"({text})"


def describe(layout: LinearMap) -> str:
    """The formulas of a fragment both ways, one a line: where an element is, and (if all are held) who holds it."""
    lines = [f"{out} = {text}" for out, text in formulas(layout).items()]
    if layout.is_surjective:
        lines += [f"{SYMBOLS.get(out, out)} = {text}" for out, text in formulas(layout.invert()).items()]
    return "\n".join(lines)
