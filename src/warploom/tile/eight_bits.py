"""Products of ``mma.sync`` whose operand B is fp8 (``e4m3``) in shared memory: two elements where others have one.

``ldmatrix`` moves 16 bits at a time, so a thread gets neighbouring elements where a 16-bit operand has elements of two
columns or rows. Both products take them as they come and name the positions anew: along K, where the order means
nothing as long as A has the same (:func:`position`), and along the columns of the sums (:func:`columns`). Elements
become f16 in registers (sm_90).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from warploom.core.dtypes import f16
from warploom.lang import SharedTile
from warploom.layout.linear import LinearMap
from warploom.tile.product import B_PAIR, DEPTH, A, B, C, MmaSync, Registers, WarpOperand

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Mutable, Traced
    from warploom.lang.values import Number

QUAD = 4
"""Neighbouring columns of sums that a thread has."""
LANES = LinearMap({"lane": [(row, 2 * col) for row, col in C.atom.bases("lane")]}, {"row": 8, "col": DEPTH})
"""(row, column) of a thread's first sum of each 16 columns, and of eight rows."""
_BY_PARITY = 0x3120  # prmt: the even bytes, then the odd ones


_POSITIONS = [int(B.coordinates(lane, element)[0]) for lane in range(QUAD) for element in range(QUAD)]
"""A lane has four neighbours in a register, where B has these rows."""


def position(element: int) -> int:
    """The column of A that holds an element of every 16 along K."""
    return element - element % DEPTH + _POSITIONS[element % DEPTH]


class ProductAlongRows:
    """``sums`` = A·Bᵀ of a warp: rows of B's tile run along K, as keys do; ``warp``: which of A's rows are this warp's.

    A is a tile of f16 whose columns are in the order of :func:`position`, or 16 rows of one in registers; ``depth``: K,
    a multiple of 16.
    """

    def __init__(
        self, k: Kernel, sums: Fragment, a: SharedTile | Registers, b: SharedTile, depth: int, warp: Number
    ) -> None:
        self._cores, self._sums, self._depth = MmaSync(k, f16), sums, depth
        rows, cols = sums.layout.shape
        self._rows = rows // 16
        self._a = WarpOperand(k, a, A, rows, warp, False) if isinstance(a, SharedTile) else None
        self._b = WarpOperand(k, b, B_PAIR if cols % DEPTH == 0 else B, cols, 0, True)
        if self._a is not None:
            self._a.prepare(depth)
        self._b.prepare(-(-depth // (2 * DEPTH)) * DEPTH)

    def start(self, a: SharedTile | Registers, b: SharedTile, *, zero: bool) -> None:
        """Run it on the tiles of a stage; ``zero``: sums begin anew."""
        k, left, right = self._cores.k, self._left(a), self._b.on(b)
        for first in range(0, self._depth, 2 * DEPTH):
            loaded = [word for part in right.step(first // 2) for word in part]
            for half in range(min(2, (self._depth - first) // DEPTH)):
                depth = first + half * DEPTH
                rows = [left(i, depth) for i in range(self._rows)]
                for col, word in enumerate(loaded[half::2]):
                    operand = k.unpack_fp8(word)
                    for i, row in enumerate(rows):
                        self._cores.multiply(self._sums, (i, col), row, operand, zero and depth == 0)

    def _left(self, a: SharedTile | Registers) -> Callable[[int, int], Registers]:
        if self._a is None or not isinstance(a, SharedTile):
            return lambda _, depth: cast("Registers", a)[depth // 4 : depth // 4 + 4]
        operand = self._a.on(a)
        return lambda i, depth: operand.load(16 * i, depth)


class ProductDownRows:
    """``sums`` += A·B of a warp: rows of B's tile are K's, as those of values are, ``depth`` from row ``first`` on.

    A is in registers. Of every 16 columns a thread's sums are those of :func:`columns`.
    """

    def __init__(self, k: Kernel, sums: Fragment, b: SharedTile, depth: int, first: Number) -> None:
        self._cores, self._sums, self._depth = MmaSync(k, f16), sums, depth
        cols = sums.layout.shape[1] // 2
        self._b = WarpOperand(k, b, B_PAIR if cols % DEPTH == 0 else B, cols, 0, False, first)
        self._b.prepare(depth)

    def start(self, a: Fragment, b: SharedTile) -> None:
        """Run it on a stage's tile."""
        k, right = self._cores.k, self._b.on(b)
        words: list[Traced] = []
        for depth in range(0, self._depth, DEPTH):
            rows = [a.atom(i, depth // DEPTH) for i in range(self._sums.layout.tiles[0])]
            for block in range(self._sums.layout.tiles[1] // 2):
                if block * 8 % right.width == 0:  # each load when it is needed: the fewest registers
                    words = list(right.load(8 * block, depth))
                low, high = (k.unpack_fp8(k.prmt(x, x, _BY_PARITY)) for x in (words.pop(0), words.pop(0)))
                for parity in range(2):
                    operand: Registers = (low[parity], high[parity])
                    for i, row in enumerate(rows):
                        self._cores.multiply(self._sums, (i, 2 * block + parity), row, operand, False)


def columns(sums: Fragment) -> list[tuple[int, int, list[Mutable]]]:
    """(row, column, values) of each four neighbouring columns that lane 0 has of :class:`ProductDownRows`' sums.

    Other lanes have those that :data:`LANES` adds.
    """
    found: list[tuple[int, int, list[Mutable]]] = []
    rows, cols = sums.layout.tiles
    for i in range(rows):
        for block in range(cols // 2):
            even, odd = (sums.mutable_atom(i, 2 * block + parity) for parity in range(2))
            for half in range(2):
                values = [x[2 * half + pair] for pair in range(2) for x in (even, odd)]
                found.append((16 * i + 8 * half, DEPTH * block, values))
    return found
