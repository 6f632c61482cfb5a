"""A product of tiles on accumulators: started, and waited for. By ``wgmma`` of a warpgroup or ``mma.sync`` of each warp.

Both take operands in shared memory as :func:`~warploom.tile.pipeline.operand_tile` lays them out, or A in registers. An
accumulator of ``wgmma`` is one of ``mma.sync`` in each of its warps, so :class:`MmaSync` can work on what :class:`Wgmma`
made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from warploom.core.dtypes import DType, f32, u32
from warploom.core.errors import TraceError
from warploom.lang import Fragment, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import TileReader
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment, wgmma_operand
from warploom.layout.fragments import FragmentLayout
from warploom.tile.roles import WARPGROUP_ROWS

DEPTH = 16
"""Of one instruction, in 16-bit elements."""
A, B, C = (mma_fragment("m16n8k16", operand) for operand in "ABC")
_B_PAIR = B.tile(1, 2)
"""Two B operands side by side: what one ``ldmatrix.x4`` fills."""

Registers = Sequence[Traced]
Left = SharedTile | Registers
"""Operand A: a shared tile, or registers that hold it."""


def zero(accumulator: Fragment) -> None:
    """Set every element to 0."""
    for register in accumulator.registers:
        if isinstance(register, Mutable):
            register.set(0.0 if register.dtype is f32 else 0)


@dataclass(frozen=True)
class Started:
    """A product under way; its operands must stay where they are until it has been waited for."""

    wait_for: Callable[[tuple[Fragment, ...]], None]

    def wait(self, *others: Fragment) -> None:
        """Until this product and all that were started before it are done.

        ``others``: fragments whose values are computed before the wait, and not sunk below it.
        """
        self.wait_for(others)


class Wgmma:
    """The products of one warpgroup by ``wgmma``, 64 rows at a time."""

    def __init__(self, k: Kernel, dtype: DType) -> None:
        self._k, self._dtype = k, dtype
        self._started = 0

    def accumulator(self, cols: int, name: str) -> Fragment:
        """Registers for 64 rows × ``cols`` sums in f32, a multiple of 8; with nothing in them yet."""
        return self._k.warpgroup_accumulator(cols, name)

    def left(self, cols: int, name: str) -> list[Mutable]:
        """Registers for 64 rows × ``cols`` as operand A."""
        return self._k.registers(u32, 4 * -(-cols // DEPTH), None, name)

    def pack(self, into: Sequence[Mutable], values: Fragment) -> None:
        """An accumulator's values, rounded, as operand A of the next product: no lane needs another's."""
        layout = wgmma_operand().tile(1, values.layout.shape[1] // DEPTH)
        for register, value in zip(into, values.as_operand(layout, self._dtype).registers, strict=True):
            register.set(value)

    def product(
        self,
        sums: Fragment | Sequence[Fragment],
        a: Left,
        b: SharedTile,
        *,
        row: Number = 0,
        depth: int | None = None,
        transposed_a: bool = False,
        transposed_b: bool = False,
    ) -> WgmmaProduct:
        """``sums`` (+)= A·B, one accumulator for each 64 rows of A from ``row`` on.

        Tiles have rows of A, or columns of B, and run along K; ``transposed_…``: rows of K. ``depth``: K, by default
        all of the tile's.
        """
        blocks = (sums,) if isinstance(sums, Fragment) else tuple(sums)
        return WgmmaProduct(self, blocks, a, b, row, depth, transposed_a, transposed_b)

    def wait(self, pending: int, *ready: Fragment) -> None:
        """Until all products but the ``pending`` newest are done; ``ready`` are what may be read from here on."""
        self._k.wgmma_wait(pending, *ready)

    def commit(self, sums: tuple[Fragment, ...]) -> Started:
        """Close the group of instructions issued since the last."""
        self._k.wgmma_commit()
        self._started += 1
        number = self._started
        return Started(lambda others: self.wait(self._started - number, *sums, *others))

    @property
    def k(self) -> Kernel:
        """The kernel that is traced."""
        return self._k

    @property
    def dtype(self) -> DType:
        """Of the operands."""
        return self._dtype


class WgmmaProduct:
    """One product of :class:`Wgmma`: :meth:`start` runs it on the tiles of a stage."""

    def __init__(
        self,
        cores: Wgmma,
        sums: tuple[Fragment, ...],
        a: Left,
        b: SharedTile,
        row: Number,
        depth: int | None,
        transposed_a: bool,
        transposed_b: bool,
    ) -> None:
        self._cores, self._sums, self._row = cores, sums, row
        self._transposed_a, self._transposed_b = transposed_a, transposed_b
        whole = b.layout.rows if transposed_b else b.layout.cols
        self._depth = depth or (4 * len(a) if not isinstance(a, SharedTile) else whole)

    def start(self, a: Left, b: SharedTile, *, zero: bool = False) -> Started:
        """Start it on a stage's tiles; ``zero``: sums begin anew."""
        cores, k = self._cores, self._cores.k
        right = _Operand(k, b, self._transposed_b)
        left = _Operand(k, a, self._transposed_a, self._row) if isinstance(a, SharedTile) else None
        k.wgmma_fence()
        for depth in range(0, -(-self._depth // DEPTH) * DEPTH, DEPTH):
            column = right.at(0, depth)
            for i, block in enumerate(self._sums):
                if left is None:
                    rows = [_read(r) for r in _as_registers(a)[depth // 4 : depth // 4 + 4]]
                else:
                    rows = left.at(i * WARPGROUP_ROWS, depth)
                k.wgmma(
                    block, rows, column, inputs=cores.dtype, accumulate=not (zero and depth == 0),
                    transposed_a=left is not None and self._transposed_a, transposed_b=self._transposed_b,
                )  # fmt: skip
        return cores.commit(self._sums)


class _Operand:
    """Descriptors of a shared tile: one address, then additions of constants in units of 16 bytes."""

    def __init__(self, k: Kernel, tile: SharedTile, transposed: bool, first: Number = 0) -> None:
        self._k, self._layout, self._transposed = k, tile.layout, transposed
        self._shape = tile.layout.matrix_descriptor(transposed=transposed)
        self._low: Traced = self._shape.low_word(tile.at(tile.layout.matrix_start(first, transposed=transposed)))

    def at(self, outer: int, depth: int) -> Traced:
        """The descriptor of the operand from an outer position and a depth on."""
        row, col = (depth, outer) if self._transposed else (outer, depth)
        offset = self._layout.matrix_offset(row, col, transposed=self._transposed)
        return self._k.descriptor_of(self._low + (offset >> 4), self._shape)


class MmaSync:
    """The products of each warp by ``mma.sync``; they are done when they have been started.

    ``ahead``: the fragments of a step load while the one before multiplies.
    """

    def __init__(self, k: Kernel, dtype: DType, *, sums: DType = f32, ahead: bool = False) -> None:
        self._k, self._dtype, self._sums, self._ahead = k, dtype, sums, ahead

    def accumulator(self, rows: int, cols: int, name: str) -> Fragment:
        """Registers for a warp's ``rows`` × ``cols`` sums, multiples of 16 and 8; with nothing in them yet."""
        layout = C if self._sums is f32 else replace(C, element_bits=16)
        return self._k.accumulator(layout.tile(rows // 16, cols // 8), None, name)

    def left(self, values: Fragment) -> Fragment:
        """An accumulator's values, rounded, as operand A of the next product: no lane needs another's."""
        rows, cols = values.layout.shape
        return values.as_operand(A.tile(rows // 16, cols // DEPTH), self._dtype)

    def product(
        self,
        sums: Fragment,
        a: SharedTile | Fragment | Registers,
        b: SharedTile,
        *,
        row: Number = 0,
        col: Number = 0,
        depth: int | None = None,
        transposed_b: bool = False,
    ) -> MmaSyncProduct:
        """``sums`` (+)= A·B of a warp whose rows begin at ``row`` of tile A, and columns at ``col`` of tile B.

        Tiles and ``depth`` as for :meth:`Wgmma.product`.
        """
        return MmaSyncProduct(self, sums, a, b, (row, col), depth, transposed_b)

    @property
    def k(self) -> Kernel:
        """The kernel that is traced."""
        return self._k

    def multiply(self, sums: Fragment, at: tuple[int, int], a: Registers, b: Registers, fresh: bool) -> None:
        """One instruction, into an atom of the sums; ``fresh``: what was there does not count."""
        target = sums.mutable_atom(*at)
        start: Sequence[Number] = (0.0,) * len(target) if fresh else target
        self._k.mma(a, b, start, inputs=self._dtype, accumulate=self._sums, into=target)

    @property
    def ahead(self) -> bool:
        """Whether fragments load a step ahead."""
        return self._ahead


class MmaSyncProduct:
    """One product of :class:`MmaSync`: :meth:`start` runs it on the tiles of a stage.

    Made before a loop, so that the lanes' addresses are formed once.
    """

    def __init__(
        self,
        cores: MmaSync,
        sums: Fragment,
        a: SharedTile | Fragment | Registers,
        b: SharedTile,
        first: tuple[Number, Number],
        depth: int | None,
        transposed_b: bool,
    ) -> None:
        self._cores, self._sums, self._transposed_b = cores, sums, transposed_b
        self._depth = -(-(depth or (b.layout.rows if transposed_b else b.layout.cols)) // DEPTH) * DEPTH
        (self._rows, self._cols) = sums.layout.tiles
        pair = _B_PAIR if transposed_b else _B_PAIR.transposed()
        self._b = _reader(cores.k, b, pair, 0 if transposed_b else first[1])
        self._a = _reader(cores.k, a, A, first[0]) if isinstance(a, SharedTile) else None
        steps = range(0, self._depth, DEPTH)
        if self._a is not None:
            self._a.prepare([(0, d) for d in steps])
        self._b.prepare([(0, c) for c in (range(0, 8 * self._cols, DEPTH) if transposed_b else steps)])

    def start(self, a: SharedTile | Fragment | Registers, b: SharedTile, *, zero: bool = False) -> Started:
        """Run it on a stage's tiles; ``zero``: sums begin anew."""
        left, right = self._left(a), self._b.on(b)
        if not self._cores.ahead:
            self._by_pairs(left, right, zero)
            return _DONE
        steps = range(0, self._depth, DEPTH)
        following = self._step(left, right, 0)
        for d in steps:
            rows, cols = following
            if d + DEPTH < self._depth:
                following = self._step(left, right, d + DEPTH)
            for i, row in enumerate(rows):
                for j, col in enumerate(cols):
                    self._cores.multiply(self._sums, (i, j), row, col, zero and d == 0)
        return _DONE

    def _by_pairs(self, left: _Load, right: TileReader, zero: bool) -> None:
        """Each pair of columns when it is needed: the fewest registers."""
        for d in range(0, self._depth, DEPTH):
            rows = [left(i, d) for i in range(self._rows)]
            for j in range(0, self._cols, 2):
                pair = self._pair(right, j, d)
                for half in range(2):
                    for i, row in enumerate(rows):
                        cols = pair[2 * half : 2 * half + 2]
                        self._cores.multiply(self._sums, (i, j + half), row, cols, zero and d == 0)

    def _step(self, left: _Load, right: TileReader, depth: int) -> tuple[list[Registers], list[Registers]]:
        """The fragments of A and B at a depth."""
        pairs = [self._pair(right, j, depth) for j in range(0, self._cols, 2)]
        return [left(i, depth) for i in range(self._rows)], [x for p in pairs for x in (p[:2], p[2:])]

    def _pair(self, right: TileReader, j: int, depth: int) -> Registers:
        return right.load(depth, 8 * j) if self._transposed_b else right.load(8 * j, depth)

    def _left(self, a: SharedTile | Fragment | Registers) -> _Load:
        if isinstance(a, Fragment):
            return lambda i, d: a.atom(i, d // DEPTH)
        if isinstance(a, SharedTile):
            if self._a is None:
                raise TraceError("this product was made for A in registers")
            reader = self._a.on(a)
            return lambda i, d: reader.load(16 * i, d)
        return lambda _, d: [_read(r) for r in a[d // 4 : d // 4 + 4]]


_Load = Callable[[int, int], Registers]
_DONE = Started(lambda _: None)


def load_left(k: Kernel, into: Sequence[Mutable], tile: SharedTile, row: Number) -> None:
    """A warp's 16 rows of a tile, from ``row`` on, into registers as operand A."""
    reader = _reader(k, tile, A, row)
    for d in range(0, 4 * len(into), DEPTH):
        for register, value in zip(into[d // 4 : d // 4 + 4], reader.load(0, d), strict=True):
            register.set(value)


def _reader(k: Kernel, tile: SharedTile, fragment: FragmentLayout, row: Number) -> TileReader:
    return k.reader(tile, fragment, row=row)


def _as_registers(a: Left) -> Registers:
    if isinstance(a, SharedTile):
        raise TraceError(f"this product was made for A in registers, not for {a.name}")
    return a


def _read(register: Traced) -> Traced:
    return register.get() if isinstance(register, Mutable) else register
