# pyright: reportInvalidTypeForm=false
"""The matmul ladder's ``mma.sync`` kernels, up to the seeds' last: one generator, whose flags are the rungs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from warploom.core.dtypes import f16, f32, u16, u32
from warploom.kernels.matmul.features import PLAIN, MatmulFeatures
from warploom.kernels.matmul.values import Result, along, stored_rows
from warploom.lang import Fragment, Kernel, SharedTile, Strided, Traced, kernel
from warploom.layout.wmma import wmma_fragment
from warploom.tile.copies import CopyCursor, CopyRing, Place, accumulate
from warploom.tile.epilogue import OutputMatrix, Staging, Sums, store_registers
from warploom.tile.planning import CopyPlan
from warploom.tile.product import Registers, read, zero
from warploom.tile.scheduler import GroupedTiles
from warploom_lab.kernels.matmul.ladder_config import RungGemm
from warploom_lab.kernels.matmul.ladder_operand import SHAPE, WMMA_SHAPE, C, Operand
from warploom_lab.kernels.matmul.ladder_rolling import FragmentLoad, Mark, Multiply, RollingOrder

Places = Callable[[Traced], Sequence[Place]]
"""Where A's and B's k-tile of a number begin."""


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def gemm(
    k: Kernel,
    a: Strided[u16, 2],
    b: Strided[u16, 2],
    result: Result,
    depth: u32,
    k_tiles: u32,
    *,
    config: RungGemm,
    features: MatmulFeatures = PLAIN,
) -> None:
    """C = A·B: one CTA per tile of C; ``k_tiles`` = ⌈depth / tile_k⌉.

    The grid is (tiles along N, tiles along M); with block_stride they are numbered along x.
    """
    c, f, m, n = config, features, result.m, result.n
    work = RungProduct(k, c, f)
    tiles = GroupedTiles(k, (m + (c.tile_m - 1)) // c.tile_m, (n + (c.tile_n - 1)) // c.tile_n, c.block_stride)
    row, col = tiles.tile(k.cta_x) if c.block_stride else (k.cta_y, k.cta_x)
    first = row * c.tile_m, col * c.tile_n

    def places(tile: Traced) -> Sequence[Place]:
        depth = k.value(tile * c.tile_k, u32)
        return [along(own, outer, depth) for outer, own in zip(first, (f.a, f.b), strict=True)]

    ring = CopyRing(
        k,
        (work.a.tile, stored_rows(a, f.a, (m, depth))),
        (work.b.tile, stored_rows(b, f.b, (n, depth))),
        threads=c.threads,
        addressing=c.addressing,
    )
    ring.begin(k_tiles, places, [along(own, 0, c.tile_k) for own in (f.a, f.b)])
    Loops(k, work, ring, k_tiles, places).run()
    rows, cols = m if f.ragged_m else None, n if f.ragged_n else None
    out = result.out_f32 if f.out_dtype is f32 else result.out
    work.store(OutputMatrix(k, out, out.strides[1], f.out_dtype, rows, cols, f.out_chunk, f.pairs), first)


class RungProduct:
    """The product of a CTA: fragments of its tiles, and the sums of a warp."""

    def __init__(self, k: Kernel, config: RungGemm, features: MatmulFeatures) -> None:
        self._k, self.config, self._features = k, config, features
        self.a, self.b = Operand(k, "A", config, features.a), Operand(k, "B", config, features.b)
        layout = C if config.accumulate is f32 else replace(C, element_bits=16)
        if config.wmma:
            layout = wmma_fragment(WMMA_SHAPE, "C", config.accumulate)
        self.sums: Fragment = k.accumulator(layout.tile(config.mma_rows, config.mma_cols), None, "c")
        self.depth = config.tile_k

    def fragments(self, a: SharedTile, b: SharedTile, depth: int) -> list[Registers]:
        """The operands of a k-step, A's before B's."""
        step = depth // 16
        return self.a.fragments(a, step) + self.b.fragments(b, step)

    def multiply_loaded(self, fragments: Sequence[Registers]) -> None:
        """The outer product of one k-step's operands."""
        rows = self.config.mma_rows
        for i, left in enumerate(fragments[:rows]):
            for j, right in enumerate(fragments[rows:]):
                self.add(left, right, i, j)

    def add(self, a: Registers, b: Registers, row: int, col: int) -> None:
        """One mma, into atom (row, col) of the sums."""
        k, c, target = self._k, self.config, self.sums.mutable_atom(row, col)
        if c.wmma:
            k.wmma_mma(
                a,
                b,
                target,
                shape=WMMA_SHAPE,
                inputs=c.dtype,
                accumulate=c.accumulate,
                orders=(self.a.order, self.b.order),
                into=target,
            )
        else:
            k.mma(a, b, target, inputs=c.dtype, accumulate=c.accumulate, shape=SHAPE, into=target)

    # -- the way out
    def store(self, target: OutputMatrix, first: tuple[Traced, Traced]) -> None:
        """The sums as the tile of C whose first element is ``first``; no warp reads the stages any more."""
        k, c = self._k, self.config
        row, col = k.warp // c.warps_n * c.warp_m, k.warp % c.warps_n * c.warp_n
        if target.dtype is f32 and not c.wmma:
            store_registers(Sums(k, self.sums, row + first[0], col + first[1]), target)
            return
        staged = k.shared(
            c.accumulate if c.wmma else target.dtype,
            (c.tile_m, c.tile_n),
            name="C",
            swizzle="auto" if c.swizzle else None,
            padding=c.padding,
            alias=self.a.tile,
        )
        staging = Staging(k, staged, (c.warps_m, c.warps_n), c.addressing)
        if not c.wmma:
            staging.store(Sums(k, self.sums, row + first[0], col + first[1]), target, first)
            return
        self._store_opaque(staged, row, col)
        if c.accumulate is target.dtype is f16:
            staging.copy_out(target, first)
        else:
            self._finish_out(staged, target, first)

    def _store_opaque(self, staged: SharedTile, row: Traced, col: Traced) -> None:
        """Store the sums of ``wmma``, whose places in the matrix are known only in shared memory."""
        k, c, (rows, cols) = self._k, self.config, self.sums.layout.atom_shape
        leading = staged.layout.row_bytes // staged.layout.element_bytes
        for i in range(c.mma_rows):
            for j in range(c.mma_cols):
                words = [read(r) for r in self.sums.atom(i, j)]
                to = staged.address(row + rows * i, col + cols * j)
                k.wmma_store(to, leading, words, shape=WMMA_SHAPE, dtype=c.accumulate)
        k.syncthreads()  # the rows that leave were written by other warps

    def _finish_out(self, staged: SharedTile, target: OutputMatrix, first: tuple[Traced, Traced]) -> None:
        """The sums in pairs, converted on their way from the staging tile to C."""
        k, c = self._k, self.config
        plan = CopyPlan(c.tile_m, c.tile_n, c.num_warps, True, 2)
        at: dict[str, Traced] = plan.threads().apply(lane=k.thread)
        for row, col in plan.steps:
            if c.accumulate is f16:
                low, high = k.unpack(staged.load(at["row"] + row, at["col"] + col, dtype=u32), f16)
            else:
                low, high = staged.load(at["row"] + row, at["col"] + col, 2)
            target.store_pair(at["row"] + row + first[0], at["col"] + col + first[1], (low, high))


class Loops:
    """The loops over k, from one stage to fragments that roll; the ring's first copies have begun."""

    def __init__(self, k: Kernel, work: RungProduct, ring: CopyRing, count: Traced, places: Places) -> None:
        self._k, self._work, self._ring, self._count, self._places = k, work, ring, count, places

    def run(self) -> None:
        """The sums; no warp reads a stage any more."""
        c = self._work.config
        if c.pipelined and not c.lead:
            accumulate(self._k, self._ring, self._work, self._count, self._places)
            return
        zero(self._work.sums)
        if c.lead:
            self._rolling()
        elif c.stages > 1:
            self._staged()
        else:
            self._plain()

    def _multiply(self, tiles: Sequence[SharedTile]) -> None:
        a, b = tiles
        for depth in range(0, self._work.depth, 16):
            self._work.multiply_loaded(self._work.fragments(a, b, depth))

    def _plain(self) -> None:
        """One stage: copy, wait, multiply."""
        k, ring = self._k, self._ring
        with k.loop(self._count) as tile:
            ring.put(0, self._places(tile))
            ring.wait(0)
            self._multiply(ring.at(0))
            k.syncthreads()  # every warp is done with it: the next copy may overwrite it

    def _put_ahead(self, tile: Traced, write: CopyCursor) -> None:
        """Start the copy of the tile that is stages - 1 ahead, into the stage that was read last."""
        later = tile + (self._ring.stages - 1)
        write.put(*self._places(later), when=later < self._count)

    def _staged(self) -> None:
        """Copies run stages - 1 tiles ahead of the multiplication."""
        k, ring = self._k, self._ring
        read, write = ring.consumer(put_first=True), ring.producer()
        with k.loop(self._count) as tile:
            self._put_ahead(tile, write)
            self._multiply(read.wait())
            k.syncthreads()  # every warp is done with it: the next step copies over it
            read.release()

    def _rolling(self) -> None:
        """Run the pipelined loop with fewer registers: each fragment loads ``lead`` mma before the first that reads it.

        Past the last tile its own first fragments load once more, and nothing reads them: no branch among the mma.
        """
        k, ring, work = self._k, self._ring, self._work
        order = RollingOrder.of(work.config)
        ring.wait(ring.stages - 2)
        ahead = {x: [k.register(u32, r, "ahead") for r in self._loaded(x, ring.at(0))] for x in order.carried}
        read, write = ring.consumer(), ring.producer()
        with k.loop(self._count) as tile:
            held: dict[FragmentLoad, Registers] = {x: [r.get() for r in registers] for x, registers in ahead.items()}
            crossed = False
            for event in order.events():
                if isinstance(event, Multiply):
                    work.add(held[event.a], held[event.b], event.row, event.col)
                elif event is Mark.MIDDLE:
                    self._put_ahead(tile, write)  # over the tile before this one, as in the pipelined loop
                elif event is Mark.BORDER:
                    crossed = True
                    read.wait()  # the next tile is here, and every warp has read all of this one
                    read.release(when=tile + 1 < self._count)
                elif crossed:
                    for register, value in zip(ahead[event], self._loaded(event, read.tiles), strict=True):
                        register.set(value)
                else:
                    held[event] = self._loaded(event, read.tiles)
        k.syncthreads()  # every warp has loaded what lay past the last tile

    def _loaded(self, load: FragmentLoad, tiles: Sequence[SharedTile]) -> Registers:
        """Load a fragment from a stage."""
        operand, tile = (self._work.a, tiles[0]) if load.operand == "A" else (self._work.b, tiles[1])
        return operand.load(tile, load.index, load.step)
