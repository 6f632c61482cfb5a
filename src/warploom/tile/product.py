"""A product of tiles on accumulators: ``wgmma`` of a warpgroup or ``mma.sync`` of each warp, started and waited for.

Both take operands in shared memory as :func:`~warploom.tile.pipeline.operand_tile` lays them out, or A in registers. An
accumulator of ``wgmma`` is one of ``mma.sync`` in each of its warps, so :class:`MmaSync` can work on what
:class:`Wgmma` made. :class:`WarpOperand` is how a warp loads the fragments of ``mma.sync`` by ``ldmatrix``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from warploom.core.dtypes import DType, f32, u32
from warploom.core.errors import TraceError
from warploom.lang import Fragment, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import TileAddresses, TileReader
from warploom.lang.values import Number, TileAddress
from warploom.layout.catalogue import mma_fragment, wgmma_operand
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import ldmatrix_plan
from warploom.tile.roles import WARPGROUP_ROWS

DEPTH = 16
"""K of one instruction, in 16-bit elements."""
A, B, C = (mma_fragment("m16n8k16", operand) for operand in "ABC")
B_PAIR = B.tile(1, 2)
"""Two B operands side by side: what one ``ldmatrix.x4`` fills."""

Registers = Sequence[Traced]


def of_warps(lanes: LinearMap, warps: tuple[int, int], axis: int, step: int) -> LinearMap:
    """A map of a warp's lanes as one of all threads of ``warps`` along rows and columns, powers of two, row by row.

    The next warp along ``axis`` (0: along the rows) begins ``step`` columns further on.
    """
    bits = [(count - 1).bit_length() for count in warps[::-1]]  # neighbours differ in columns
    moved = [(0, step << i if own == 1 - axis else 0) for own, count in enumerate(bits) for i in range(count)]
    sizes = {"row": lanes.out_size("row"), "col": max(lanes.out_size("col"), step * warps[axis])}
    return LinearMap({"lane": [*lanes.bases("lane"), *moved]}, sizes)


@dataclass(frozen=True)
class Part:
    """The columns of a tile that a warp has: ``lanes`` of thread ``who``, from ``row`` on, find the first of them."""

    lanes: LinearMap
    who: Traced
    row: Number
    period: int
    within: int

    @classmethod
    def of(cls, k: Kernel, tile: SharedTile, lanes: LinearMap, extent: int, index: Number) -> Part:
        """Part ``index`` of those ``extent`` columns wide: a piece of a panel, whole panels, or pieces of 16 in turn.

        The constant 0 is the only part: it begins where the tile does, which may be wider.

        Whole panels are rows (a panel is as large as so many rows); which piece of a panel it is are further bits of
        the lanes' map, and of ``who``.
        """
        panel = tile.layout.panels[0].cols
        only = isinstance(index, int) and index == 0
        if only or extent % panel == 0 or tile.layout.cols < 2 * extent:
            return cls(lanes, k.lane, index * (extent // panel * tile.layout.rows), panel, panel)
        within, period = (extent, panel) if panel % extent == 0 else (16, 16 * (tile.layout.cols // extent))
        bits = (period // within).bit_length() - 1
        moved = [*lanes.bases("lane"), *((0, within << bit) for bit in range(bits))]
        number = k.value(index, u32)
        piece = k.lane + (number & ((1 << bits) - 1)) * 32
        spread = LinearMap({"lane": moved}, {"row": lanes.out_size("row"), "col": panel})
        return cls(spread, piece, (number >> bits) * tile.layout.rows, period, within)

    def col(self, outer: int) -> int:
        """The column of the tile that holds column ``outer`` of the part, counted from the first."""
        return outer // self.within * self.period + outer % self.within


class WarpOperand:
    """The fragments of one operand of a warp in a shared tile: ``extent`` of its outer dimension, number ``index``.

    ``fragment`` is what one load fills, drawn as the operand (A as m×k, B as k×n). ``flipped``: the tile stores its
    transpose. ``first``: of the rows, where they run along K, the one that K begins at.
    """

    def __init__(
        self,
        k: Kernel,
        tile: SharedTile,
        fragment: FragmentLayout,
        extent: int,
        index: Number,
        flipped: bool,
        first: Number = 0,
    ) -> None:
        self._extent, self._along_k = extent, (fragment is A) != flipped  # rows of the tile run along K
        whole = fragment.transposed() if flipped else fragment
        self.width = fragment.shape[1] if fragment is B else DEPTH
        """Outer positions that one load brings."""
        plan = ldmatrix_plan(whole, not self._along_k)
        self._part = None if self._along_k else Part.of(k, tile, plan.address, extent, index)
        lanes, who, row = plan.address, k.lane, index * extent
        if self._part is not None:
            lanes, who, row = self._part.lanes, self._part.who, self._part.row + first
        self._reader = TileReader(k, plan, TileAddresses(k, tile, lanes, who, row, "strided"))

    def prepare(self, depth: int) -> None:
        """Form the addresses of all loads of a tile of that depth here, before a loop."""
        self._reader.prepare(self._at(o, d) for o in range(0, self._extent, self.width) for d in range(0, depth, DEPTH))

    def _at(self, outer: int, depth: int) -> tuple[int, int]:
        return (outer, depth) if self._part is None else (depth, self._part.col(outer))

    def on(self, tile: SharedTile) -> WarpOperand:
        """The operand in another stage of the tile, with the addresses of this one."""
        other = copy(self)
        other._reader = self._reader.on(tile)
        return other

    def load(self, outer: int, depth: int) -> Registers:
        """The registers that one ``ldmatrix`` loads from (``outer``, ``depth``) on."""
        return self._reader.load(*self._at(outer, depth))

    def step(self, depth: int) -> list[Registers]:
        """The registers that every ``ldmatrix`` of a k-step loads."""
        return [self.load(outer, depth) for outer in range(0, self._extent, self.width)]


Left = SharedTile | Registers
"""Operand A: a shared tile, or registers that hold it."""


def zero(accumulator: Fragment) -> None:
    """Set every element to 0."""
    for register in accumulator.mutable:
        register.set(0.0 if register.dtype is f32 else 0)


def scale(accumulator: Fragment, factor: Number) -> None:
    """Multiply all sums."""
    for element in range(accumulator.layout.elements_per_thread):
        accumulator.scale(element, factor)


@dataclass(frozen=True)
class StartedProduct:
    """A product under way; its operands must stay where they are until it has been waited for."""

    wait_for: Callable[[tuple[Fragment, ...]], None]

    def wait(self, *others: Fragment) -> None:
        """Wait until this product and all that were started before it are done.

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
        col: Number = 0,
        depth: int | None = None,
        transposed_a: bool = False,
        transposed_b: bool = False,
    ) -> WgmmaProduct:
        """``sums`` (+)= A·B, one accumulator for each 64 rows of A from ``row`` on, of B's columns from ``col`` on.

        Tiles have rows of A, or columns of B, and run along K; ``transposed_…``: rows of K. ``depth``: K, by default
        all of B's tile; it is rounded up to steps of 16, where a tile that runs along K holds zeros.
        """
        blocks = (sums,) if isinstance(sums, Fragment) else tuple(sums)
        whole = _whole_depth(self._k, (a, b), self._dtype, depth, transposed_a, transposed_b)
        return WgmmaProduct(self, blocks, (row, col), whole, transposed_a, transposed_b)

    def wait(self, pending: int, *ready: Fragment) -> None:
        """Wait until all products but the ``pending`` newest are done; ``ready`` may be read from here on."""
        self._k.wgmma_wait(pending, *ready)

    def started(self, sums: tuple[Fragment, ...]) -> StartedProduct:
        """One more group of instructions, which has been closed."""
        self._started += 1
        number = self._started
        return StartedProduct(lambda others: self.wait(self._started - number, *sums, *others))

    @property
    def k(self) -> Kernel:
        """The kernel that is traced."""
        return self._k

    @property
    def dtype(self) -> DType:
        """The type of the operands."""
        return self._dtype


class WgmmaProduct:
    """One product of :class:`Wgmma`: :meth:`start` runs it on the tiles of a stage."""

    def __init__(
        self,
        cores: Wgmma,
        sums: tuple[Fragment, ...],
        first: tuple[Number, Number],
        depth: int,
        transposed_a: bool,
        transposed_b: bool,
    ) -> None:
        self._cores, self._sums, self._depth = cores, sums, depth
        self._row, self._col = first
        self._transposed_a, self._transposed_b = transposed_a, transposed_b

    def at(self, row: Number = 0, col: Number = 0) -> WgmmaProduct:
        """The product from another row of A and column of B on."""
        other = copy(self)
        other._row, other._col = row, col
        return other

    def start(
        self,
        a: Left,
        b: SharedTile,
        *,
        zero: bool | Traced = False,
        held: Registers = (),
        until: tuple[Traced, int] | None = None,
    ) -> StartedProduct:
        """Start it on a stage's tiles; ``zero``, of the whole warpgroup: sums begin anew.

        ``held``: registers with the first steps of a tile A, which is not read for them. ``until``: a depth, s32 and of
        the whole warpgroup, from which on steps are left out, and how much of K at a time; some are always done.
        """
        cores, k = self._cores, self._cores.k
        right = _Operand(k, b, self._transposed_b, self._col)
        left = _Operand(k, a, self._transposed_a, self._row) if isinstance(a, SharedTile) else None
        adds = ~zero if isinstance(zero, Traced) else not zero

        def issue(end: int) -> None:
            k.wgmma_fence()
            for depth in range(0, end, DEPTH):
                column = right.at(0, depth)
                for i, block in enumerate(self._sums):
                    registers = _as_registers(a) if left is None else held
                    of_step = registers[depth // 4 : depth // 4 + 4]
                    rows = left.at(i * WARPGROUP_ROWS, depth) if left and not of_step else [read(r) for r in of_step]
                    k.wgmma(
                        block,
                        rows,
                        column,
                        inputs=cores.dtype,
                        accumulate=adds if depth == 0 else True,
                        transposed_a=self._transposed_a and not of_step,
                        transposed_b=self._transposed_b,
                    )
            k.wgmma_commit()

        def up_to(end: int) -> None:
            """Each length is a branch of its own, from fence to commit: ptxas serialises what is shared between two."""
            depth, some = until or (None, end)
            if depth is None or end <= some:
                issue(end)
                return
            with k.when(depth > end - some, uniform=True):
                issue(end)
            with k.otherwise():
                up_to(end - some)

        up_to(self._depth)
        return cores.started(self._sums)


class _Operand:
    """Descriptors of a shared tile: one address, then additions of constants in units of 16 bytes."""

    def __init__(self, k: Kernel, tile: SharedTile, transposed: bool, first: Number = 0) -> None:
        self._k, self._layout, self._extent, self._transposed = k, tile.layout, tile.extent, transposed
        self._shape = tile.layout.matrix_descriptor(transposed=transposed)
        self._low: Traced = self._shape.low_word(tile.at(tile.layout.matrix_start(first, transposed=transposed)))

    def at(self, outer: int, depth: int) -> Traced:
        """The descriptor of the operand from an outer position and a depth on."""
        row, col = (depth, outer) if self._transposed else (outer, depth)
        offset = self._layout.matrix_offset(row, col, transposed=self._transposed)
        return TileAddress(self._k.descriptor_of(self._low + (offset >> 4), self._shape), self._extent)


class MmaSync:
    """The products of each warp by ``mma.sync``; they are done when they have been started.

    ``ahead``: the fragments of a step load while the one before multiplies.
    """

    def __init__(self, k: Kernel, dtype: DType, *, sums: DType = f32, ahead: bool = False) -> None:
        self._k, self._dtype, self._sums, self._ahead = k, dtype, sums, ahead

    def accumulator(self, rows: int, cols: int, name: str) -> Fragment:
        """Registers for a warp's ``rows`` × ``cols`` sums, multiples of 16 and 8; with nothing in them yet."""
        if rows % 16 or cols % 8 or rows < 1 or cols < 1:
            raise TraceError(f"a warp's sums are multiples of 16 rows and 8 columns, not {rows}×{cols}")
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
        warp: tuple[Number, Number] = (0, 0),
        depth: int | None = None,
        transposed_a: bool = False,
        transposed_b: bool = False,
        first: Number = 0,
    ) -> MmaSyncProduct:
        """``sums`` (+)= A·B of one warp, number ``warp`` of those along A's rows and B's columns.

        Tiles and ``depth`` as for :meth:`Wgmma.product`. ``first``: where K begins among the rows of a
        ``transposed_b``, a multiple of 16: the warps share K.
        """
        whole = _whole_depth(self._k, (a, b), self._dtype, depth, transposed_a, transposed_b)
        rows, cols = sums.layout.shape[0] // sums.layout.warps, sums.layout.shape[1]
        left = WarpOperand(self._k, a, A, rows, warp[0], transposed_a) if isinstance(a, SharedTile) else None
        right = WarpOperand(self._k, b, B_PAIR if cols % DEPTH == 0 else B, cols, warp[1], not transposed_b, first)
        return MmaSyncProduct(self, sums, left, right, whole)

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

    def __init__(self, cores: MmaSync, sums: Fragment, a: WarpOperand | None, b: WarpOperand, depth: int) -> None:
        self._cores, self.sums, self._a, self._b, self.depth = cores, sums, a, b, depth
        self._rows, self._cols = sums.layout.tiles
        self._held: dict[int, list[Registers]] = {}
        for operand in (a, b):
            if operand is not None:
                operand.prepare(depth)

    def hold(self, a: SharedTile, steps: int) -> None:
        """Load so many of A's first k-steps here, before a loop: :meth:`start` does not read them again."""
        left = self._left(a)
        held = range(0, min(steps * DEPTH, self.depth), DEPTH)
        self._held = {d: [left(i, d) for i in range(self._rows)] for d in held}

    def start(self, a: SharedTile | Fragment | Registers, b: SharedTile, *, zero: bool = False) -> StartedProduct:
        """Run it on a stage's tiles; ``zero``: sums begin anew."""
        left, right = self._left(a), self._b.on(b)
        if not self._cores.ahead:
            for d in range(0, self.depth, DEPTH):
                rows = [left(i, d) for i in range(self._rows)]
                for col in range(0, 8 * self._cols, right.width):  # each load when it is needed: the fewest registers
                    self.multiply(rows, _columns([right.load(col, d)]), zero=zero and d == 0, first=col // 8)
            return _DONE
        following = right.step(0), [left(i, 0) for i in range(self._rows)]
        for d in range(0, self.depth, DEPTH):
            cols, rows = following
            if d + DEPTH < self.depth:
                following = right.step(d + DEPTH), [left(i, d + DEPTH) for i in range(self._rows)]
            self.multiply(rows, _columns(cols), zero=zero and d == 0)
        return _DONE

    def fragments(self, a: SharedTile, b: SharedTile, depth: int) -> list[Registers]:
        """Load the operands of a k-step, A's before B's, for :meth:`multiply_loaded`."""
        if self._a is None:
            raise TraceError("this product was made for A in registers")
        return self._a.on(a).step(depth) + self._b.on(b).step(depth)

    def multiply_loaded(self, fragments: Sequence[Registers]) -> None:
        """Add the products of one k-step."""
        self.multiply(fragments[: self._rows], _columns(fragments[self._rows :]), zero=False)

    def multiply(self, rows: Sequence[Registers], cols: Sequence[Registers], *, zero: bool, first: int = 0) -> None:
        """One instruction for each row and column, these from number ``first`` on."""
        for i, row in enumerate(rows):
            for j, col in enumerate(cols):
                self._cores.multiply(self.sums, (i, first + j), row, col, zero)

    def _left(self, a: SharedTile | Fragment | Registers) -> Callable[[int, int], Registers]:
        if isinstance(a, Fragment):
            return lambda i, d: a.atom(i, d // DEPTH)
        if not isinstance(a, SharedTile):
            return lambda _, d: [read(r) for r in a[d // 4 : d // 4 + 4]]
        if self._a is None:
            raise TraceError(f"this product was made for A in registers, not for {a.name}")
        operand, held = self._a.on(a), self._held
        return lambda i, d: held[d][i] if d in held else operand.load(16 * i, d)


def _columns(loaded: Sequence[Registers]) -> list[Registers]:
    """B's operands of 8 columns in what was loaded, one or two at a time."""
    return [half for x in loaded for half in (x[:2], x[2:]) if half]


_DONE = StartedProduct(lambda _: None)


def _whole_depth(
    k: Kernel,
    operands: tuple[object, SharedTile],
    dtype: DType,
    depth: int | None,
    transposed_a: bool,
    transposed_b: bool,
) -> int:
    """K in whole steps. Raises TraceError for a tile of other elements than the product's."""
    for tile in operands:
        if isinstance(tile, SharedTile) and tile.dtype is not dtype:
            raise TraceError(f"{tile.name} holds {tile.dtype}: this product reads {dtype}")
    b = operands[1]
    depth = depth or (b.layout.rows if transposed_b else b.layout.cols)
    if depth % DEPTH and (transposed_a or transposed_b):
        raise TraceError(f"tiles whose rows run along K have multiples of {DEPTH} rows, not {depth}")
    return -(-depth // DEPTH) * DEPTH


def load_left(k: Kernel, into: Sequence[Mutable], tile: SharedTile, row: Number) -> None:
    """A warp's 16 rows of a tile, from ``row`` on, into registers as operand A."""
    reader = k.reader(tile, A, row=row)
    for d in range(0, 4 * len(into), DEPTH):
        for register, value in zip(into[d // 4 : d // 4 + 4], reader.load(0, d), strict=True):
            register.set(value)


def _as_registers(a: Left) -> Registers:
    if isinstance(a, SharedTile):
        raise TraceError(f"this product was made for A in registers, not for {a.name}")
    return a


def read(register: Traced) -> Traced:
    """A register's value now."""
    return register.get() if isinstance(register, Mutable) else register
