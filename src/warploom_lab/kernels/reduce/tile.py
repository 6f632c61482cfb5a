# pyright: reportInvalidTypeForm=false
"""Row maxima of 16×16 products: one generator for the paper's baseline, a fair one, and its proposal."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.core.dtypes import f32, u16, u32, u64
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Mutable, SharedTile, Traced, kernel
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment, wmma_accumulator
from warploom.layout.fragments import FragmentLayout
from warploom.layout.reduction import FULL_MASK, reduction_plan
from warploom.layout.swizzle import Swizzle
from warploom_lab.kernels.reduce.config import ReduceConfig

A, B = (mma_fragment("m16n8k16", operand) for operand in "AB")
PRODUCT = wmma_accumulator()
TILE = 16
SWIZZLE = Swizzle(1, 5, 2)
"""Rows of 64 bytes: every other pair of rows has its halves exchanged, so that 8-byte stores through the accumulator's
map and 16-byte reads of two lanes a row are both free of conflicts."""

Registers = list[Traced]


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def matmul_row_max(
    k: Kernel,
    a: Global[u16],
    b: Global[u16],
    out: Global[f32],
    cycles: Global[u64],
    zero: u32,
    *,
    config: ReduceConfig,
) -> None:
    """out[t, i] = max over j of (A[t] · B[t]ᵀ)[i, j] for tile t of each warp; all tiles 16×16.

    ``a`` and ``b`` are (tiles, 16, 16) of 16 bits with k contiguous in both, ``out`` f32 (tiles, 16). With repeats,
    ``zero`` (0, which the compiler cannot know) makes each product depend on the maxima before it, and ``cycles``
    (tiles) receives the SM's clock ticks of all repeats of a warp.
    """
    config.require()
    tile = k.cta_x * config.num_warps + k.warp
    left = load_operand(k, a + tile * 256, A)
    right = [load_operand(k, b + (tile * 256 + 128 * n), B.transposed()) for n in range(2)]
    reducer = RowMax(k, config, left, right)
    if config.repeats == 1:
        reducer.run(0)
    else:
        start = k.clock()
        with k.loop(config.repeats // 2):
            for stage in range(2):
                reducer.run(stage)
                reducer.chain(zero)
        reducer.finish(out, tile)
        ticks = k.clock() - start
        with k.when(k.lane == 0):
            cycles.store(ticks, tile)
        return
    reducer.finish(out, tile)


def load_operand(k: Kernel, matrix: GlobalPointer, layout: FragmentLayout) -> Registers:
    """An ``mma`` operand straight from a row-major matrix of 16 columns, two neighbouring elements at a time."""
    registers: Registers = []
    for pair in range(layout.registers):
        row, col = layout.coordinates(k.lane, 2 * pair)
        registers.append((matrix + (row * TILE + col)).load(0, dtype=u32))
    return registers


class RowMax:
    """The operation under test: a product, then its row maxima; :meth:`run` computes, :meth:`finish` stores."""

    def __init__(self, k: Kernel, config: ReduceConfig, left: Registers, right: Sequence[Registers]) -> None:
        self._k, self._config, self._right = k, config, right
        self._left: list[Traced] = list(left)
        if config.repeats > 1:
            self._left = [k.register(u32, x, f"a{i}") for i, x in enumerate(left)]
        plan = reduction_plan(PRODUCT, "col")
        self._plan = plan.spread() if config.spread else plan
        self._maxima = k.registers(f32, self._plan.results if config.method == "registers" else 1, 0.0, "row_max")
        self._tile: SharedTile | None = None
        if config.method != "registers":
            # Repeats take turns on two tiles, so that one barrier each orders both its writes and its reads.
            stages = config.num_warps * (1 if config.repeats == 1 else 2)
            swizzle = SWIZZLE if config.method == "parallel" else None
            self._tile = k.shared(f32, (TILE, TILE), name="product", swizzle=swizzle, stages=stages)

    def run(self, stage: int) -> None:
        """One product and its row maxima, into the registers that :meth:`finish` stores."""
        product = self._product()
        if self._tile is None:
            for kept, top in zip(self._maxima, self._in_registers(product), strict=True):
                kept.set(top)
            return
        k, c = self._k, self._config
        tile = self._tile.stage(k.warp + stage * c.num_warps) if c.num_warps > 1 else self._tile.stage(stage)
        self._store(product, tile)
        if c.method == "serial":
            k.syncthreads()  # the maxima are read by other lanes than those that stored the product
            self._read_serially(tile)
        else:
            k.syncwarp()  # a warp reads its own product only
            self._read_in_parallel(tile)

    def chain(self, zero: Traced) -> None:
        """Make the next product depend on these maxima, at the cost of one logic instruction for each."""
        for a, top in zip(self._left, self._maxima, strict=False):
            assert isinstance(a, Mutable)
            a.set(a ^ (self._k.bitcast(top, u32) & zero))

    def finish(self, out: GlobalPointer, tile: Traced) -> None:
        """The maxima to global memory, each by one lane."""
        k, rows = self._k, out + tile * TILE
        if self._config.method == "serial":
            with k.when(k.lane < TILE):
                rows.store(self._maxima[0], k.lane)
        elif self._config.method == "parallel":
            with k.when((k.lane & 1) == 0):
                rows.store(self._maxima[0], k.lane >> 1)
        else:
            with k.when((k.lane & self._plan.replicated) == 0):
                for group, top in enumerate(self._maxima):
                    rows.store(top, self._plan.result_coordinate(group, k.lane))

    def _product(self) -> Fragment:
        k, c = self._k, self._config
        left = [x.get() if isinstance(x, Mutable) else x for x in self._left]
        registers: list[Traced] = []
        for right in self._right:
            registers += k.mma(left, right, [0.0] * 4, inputs=c.dtype)
        return k.fragment(PRODUCT, f32, registers)

    def _in_registers(self, product: Fragment) -> list[Traced]:
        """Algorithm 3: four registers per row, then two exchanges within the quad."""
        mask: Number = FULL_MASK
        if self._config.member_mask == "quad":
            mask = self._quad_mask()
        return product.reduce("max", "col", member_mask=mask, spread=self._config.spread)

    def _quad_mask(self) -> Traced:
        """``0xF << (lane & 28)``: the lanes that hold one row."""
        k = self._k
        return k.value(self._plan.member_pattern, u32) << (k.lane & 28)

    def _store(self, product: Fragment, tile: SharedTile) -> None:
        """Algorithm 2 into shared memory, two neighbouring elements at a time."""
        for element in range(0, PRODUCT.elements_per_thread, 2):
            row, col = PRODUCT.coordinates(self._k.lane, element)
            tile.store(product.registers[element : element + 2], row, col)

    def _read_serially(self, tile: SharedTile) -> None:
        k = self._k
        with k.when(k.lane < TILE):
            if self._config.wide:
                values = [x for col in range(0, TILE, 4) for x in tile.load(k.lane, col, 4)]
            else:  # volatile, or ptxas joins four reads into one of 16 bytes
                values = [tile.load(k.lane, col, volatile=True) for col in range(TILE)]
            self._maxima[0].set(k.reduce_values("max", values))

    def _read_in_parallel(self, tile: SharedTile) -> None:
        """Two lanes a row, eight elements each: every other 16-byte chunk, so that a phase reaches all banks."""
        k = self._k
        row, first = k.lane >> 1, (k.lane & 1) * 4
        values = [*tile.load(row, first, 4), *tile.load(row, first + 8, 4)]
        total = k.reduce_values("max", values)
        mask: Number = FULL_MASK if self._config.member_mask == "full" else k.value(3, u32) << (k.lane & 30)
        self._maxima[0].set(k.maximum(total, k.shfl_xor(total, 1, mask)))
