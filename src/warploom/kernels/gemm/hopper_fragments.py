"""Consumers that multiply by ``mma.sync`` what the TMA has brought: each warp loads its own fragments.

The fragments of a k-step load while the one before is multiplied, across stages too, so that no warp waits for another:
only the producer's full stages, and the producer for stages that every warp has given back.
"""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import f32, u32
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.hopper_consumer import Turns
from warploom.kernels.gemm.hopper_parts import Extents, Parts, Place, SharedOperandTile
from warploom.kernels.mapped import PANEL_COLS
from warploom.lang import Fragment, Kernel, Mutable, Traced
from warploom.lang.fragments import TileAddresses, TileReader
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import ldmatrix_plan

SHAPE = "m16n8k16"
STEP = 16
"""Depth of a k-step, and rows of A or columns of B in one ``ldmatrix.x4``."""
_A, _C = mma_fragment(SHAPE, "A"), mma_fragment(SHAPE, "C")
_B = mma_fragment(SHAPE, "B").tile(1, 2)

Registers = tuple[Traced, ...]


class WarpOperand:
    """The fragments of A or B for one of ``warps`` warps along its outer dimension, ``extent`` of it for each."""

    def __init__(
        self, k: Kernel, tile: SharedOperandTile, fragment: FragmentLayout, extent: int, index: Traced, depth: int
    ) -> None:
        """``fragment``: with K along the columns of the tile as it is stored, if its rows run along K."""
        self._tile, self._extent = tile, extent
        whole = fragment if tile.k_contiguous else fragment.transposed()
        plan = ldmatrix_plan(whole, not tile.k_contiguous)
        # Rows along K: a warp's first row is a number. Panels across: whole panels are one (a panel is as large as so
        # many rows), and what of a panel a warp begins at are further bits of the lanes' map.
        lanes, who, first = plan.address, k.lane, index * extent
        if not tile.k_contiguous and extent < PANEL_COLS:
            bits = (PANEL_COLS // extent - 1).bit_length()
            moved = [*lanes.bases("lane"), *((0, extent << bit) for bit in range(bits))]
            lanes = LinearMap({"lane": moved}, {"row": lanes.out_size("row"), "col": PANEL_COLS})
            within = index & ((1 << bits) - 1)
            who, first = k.lane + within * 32, (index >> bits) * PANEL_COLS
        rows = first if tile.k_contiguous else first * tile.depth // PANEL_COLS
        self._reader = TileReader(k, plan, TileAddresses(k, tile.tile, lanes, who, rows, "strided"))
        self._reader.prepare(self._at(outer, d) for outer in range(0, extent, STEP) for d in range(0, depth, STEP))

    def _at(self, outer: int, depth: int) -> tuple[int, int]:
        return (outer, depth) if self._tile.k_contiguous else (depth, outer)

    def load(self, depth: int, stage: Number) -> list[Registers]:
        """What each ``ldmatrix`` of the k-step at ``depth`` of a stage brings."""
        reader = self._reader.staged(stage)
        return [reader.load(*self._at(outer, depth)) for outer in range(0, self._extent, STEP)]


class WarpConsumer(Turns):
    """One warpgroup whose warps multiply a block of the tile each; as :class:`Consumer` from outside."""

    def __init__(self, k: Kernel, config: HopperGemmConfig, parts: Parts, extents: Extents) -> None:
        super().__init__(k, config)
        self._parts = parts
        self._never = extents.m >> 31
        """0, as no extent reaches 2³¹; nobody who compiles the kernel knows."""
        (rows, cols), (height, width) = config.warps, config.warp_tile
        warp = k.warp & 3
        along_m, along_n = warp // cols, warp % cols
        if not config.pingpong:
            along_m = along_m + self.number * rows
        self.first_row: Traced = along_m * height
        self.first_col: Traced = along_n * width
        """Where this warp's block begins in the tile."""
        whole = _C if config.accumulate is f32 else replace(_C, element_bits=16)
        self._sum: Fragment = k.accumulator(whole.tile(height // 16, width // 8), None, "c")
        self.blocks: list[Fragment] = [self._sum]
        # Drawn with K along the columns: A as it is, B transposed.
        self._a = WarpOperand(k, parts.a, _A, height, along_m, config.tile_k)
        self._b = WarpOperand(k, parts.b, _B.transposed(), width, along_n, config.tile_k)
        count = 4 * (height + width) // STEP
        self._first: list[Mutable] = k.registers(u32, count, None, "first")
        """Fragments of a stage's first k-step, loaded during the last of the stage before."""

    def multiply(self, place: Place) -> None:
        """The tile's sums in :attr:`blocks`; its stages are given back. A tile has at least one k-tile."""
        k = self._k
        self._take_turn()
        for register in self._sum.registers:
            if isinstance(register, Mutable):
                register.set(0.0 if register.dtype is f32 else 0)
        self._begin_stage()
        with k.loop(place.count, 1) as _:
            self._stage(last=False)
        self._stage(last=True)
        self._pass_turn()

    def _begin_stage(self) -> None:
        """Wait for the ring's next stage, and load its first fragments."""
        ring = self._ring
        self._parts.full.wait(ring.phase, ring.stage)
        for register, value in zip(self._first, self._load(0), strict=True):
            register.set(value)

    def _load(self, depth: int) -> list[Traced]:
        """The fragments of a k-step, A's before B's."""
        stage = self._ring.stage.get()
        return [r for operand in (self._a, self._b) for loaded in operand.load(depth, stage) for r in loaded]

    def _stage(self, *, last: bool) -> None:
        """One k-tile's products; the first fragments of the next load during its last k-step, unless this is the last.

        The stage is given back when the first products of the last k-step have taken what was loaded last.
        """
        ring, tile_k = self._ring, self._config.tile_k
        current: list[Traced] = [r.get() for r in self._first]
        for depth in range(STEP, tile_k, STEP):
            following = self._load(depth)
            self._multiply(current)
            current = following
        stage = ring.stage.get()
        ring.advance()
        if not last:
            self._begin_stage()
        self._multiply(current, stage)

    def _multiply(self, fragments: list[Traced], release: Traced | None = None) -> None:
        """The products of one k-step; after a first row of them ``release`` is given back."""
        k, c = self._k, self._config
        rows, cols = (x // STEP for x in c.warp_tile)
        groups = [fragments[i : i + 4] for i in range(0, len(fragments), 4)]
        b = [half for g in groups[rows:] for half in (g[:2], g[2:])]
        for i, a in enumerate(groups[:rows]):
            for j in range(2 * cols):
                target = self._sum.mutable_atom(i, j)
                k.mma(a, b[j], target, inputs=c.dtype, accumulate=c.accumulate, shape=SHAPE, into=target)
            if i == 0 and release is not None:
                k.syncwarp()  # what every lane has read
                self._parts.release(release, when=self._arrived(groups))

    def _arrived(self, groups: list[list[Traced]]) -> Traced:
        """A condition that always holds, and that ptxas cannot know before every ``ldmatrix`` has arrived.

        An mbarrier's arrival is issued behind the ``ldmatrix`` before it and waits for none of them. ptxas moves it
        ahead of products that do not feed it, though they would wait. While the other consumer's stores hold the
        ``ldmatrix`` up, the TMA may then overwrite what is still to be read: products with f32 parts were wrong on an
        H200.
        """
        every = groups[0][0]
        for group in groups[1:]:
            every = every | group[0]
        return (every & self._never) == 0
