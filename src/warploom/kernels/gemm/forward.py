# pyright: reportInvalidTypeForm=false
"""The GEMM kernel for ``mma.sync``: one generator, whose flags are the rungs of the ladder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.core.dtypes import f16, f32, u16, u32
from warploom.core.errors import ConfigError
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.epilogue import Finish, Output, staging_tile
from warploom.kernels.gemm.features import PLAIN, GemmFeatures
from warploom.kernels.gemm.operand import SHAPE, WMMA_SHAPE, C, Operand, Registers, Side, Source, carried
from warploom.kernels.gemm.rolling import Load, Mark, Multiply, Order
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Mutable, Traced, kernel
from warploom.lang.values import Number
from warploom.layout.wmma import wmma_fragment


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def gemm(
    k: Kernel,
    a: Global[u16],
    b: Global[u16],
    out: Global[u16],
    out_f32: Global[f32],
    bias: Global[u16],
    extra0: Global[u16],
    extra1: Global[u16],
    m: u32, n: u32, depth: u32,
    a_stride: u32, b_stride: u32, c_stride: u32, extra_stride: u32,
    a_batch: u32, b_batch: u32, c_batch: u32, extra_batch: u32,
    k_tiles: u32, tiles_per_split: u32, alpha: u32,
    *,
    config: GemmConfig,
    features: GemmFeatures = PLAIN,
) -> None:  # fmt: skip
    """C = epilogue(A·B): one CTA per tile of C; grid (tiles along N, tiles along M, batches · splits).

    With block_stride the tiles are numbered along x. Strides and extents in elements; ``k_tiles`` = ⌈depth / tile_k⌉,
    ``tiles_per_split`` of them per part of a split K, whose f32 sums go out as (batch · splits, m, n). A 16-bit C goes
    to ``out``, an f32 one to ``out_f32``. ``alpha`` is the bits of an f32. Parameters that a configuration
    does not use are left out.
    """
    work = Gemm(k, config, features)
    work.locate(m, n, k_tiles, tiles_per_split)
    strides = work.strides(a_stride, b_stride)
    work.prepare()
    work.aim((work.batched(a, a_batch), work.batched(b, b_batch)), strides, (m, n, depth))
    accumulator = work.multiply()
    extras = tuple(work.batched(x, extra_batch) for x in (extra0, extra1)[: features.epilogue.extras])
    target = out_f32 if features.out_dtype is f32 else out
    output = Output(work.of_result(target, c_batch), c_stride, m, n, alpha, bias, extras, extra_stride)
    staging = staging_tile(k, config, features, work.a.tile)
    Finish(k, config, features, output, work.first).store(accumulator, staging)


@dataclass(frozen=True)
class Place:
    """Where a tile of C lies: its first row and column, and the number of its matrix among the batches."""

    row: Traced
    col: Traced
    batch: Traced


class Gemm:
    """The kernel's parts for one configuration; :meth:`multiply` reads like the algorithm."""

    def __init__(self, k: Kernel, config: GemmConfig, features: GemmFeatures) -> None:
        config.require(a_k_contiguous=features.a.k_contiguous, b_k_contiguous=features.b.k_contiguous)
        if config.static_strides and None in (features.a.stride, features.b.stride):
            raise ConfigError("static_strides needs the leading strides of A and B while tracing")
        self._k, self._config, self._features = k, config, features
        self.a = Operand(k, Side("A", config), features.a)
        self.b = Operand(k, Side("B", config), features.b)

    # -- which tile
    def locate(self, m: Traced, n: Traced, k_tiles: Traced, tiles_per_split: Traced) -> None:
        """Take the tile of C that the grid gives this CTA, and of a split K its part."""
        k, c = self._k, self._config
        row, col = (k.cta_y, k.cta_x) if c.block_stride == 0 else self._walk(k.cta_x, m, n)
        first: Number = 0
        count = k_tiles
        if c.split_k > 1:
            first = (k.cta_z % c.split_k) * tiles_per_split
            count = k.minimum(tiles_per_split, k_tiles - first)
        self.take(Place(row * c.tile_m, col * c.tile_n, k.cta_z // c.split_k), first, count)

    def place(self, tile: Traced, m: Traced, n: Traced) -> Place:
        """Where tile number ``tile`` of all batches lies."""
        k, c = self._k, self._config
        batch = k.value(0, u32)
        rows, cols = self._tiles(m, n)
        if self._features.batched:
            batch, tile = tile // (rows * cols), tile % (rows * cols)
        row, col = (tile // cols, tile % cols) if c.block_stride == 0 else self._walk(tile, m, n)
        return Place(row * c.tile_m, col * c.tile_n, batch)

    def take(self, place: Place, first_tile: Number, count: Traced) -> None:
        """What is to be summed next: ``count`` k-tiles of a tile of C, from ``first_tile`` on."""
        self.first = place.row, place.col
        self._place, self._first_tile, self._count = place, first_tile, count

    def _tiles(self, m: Traced, n: Traced) -> tuple[Traced, Traced]:
        c = self._config
        return (m + (c.tile_m - 1)) // c.tile_m, (n + (c.tile_n - 1)) // c.tile_n

    def _walk(self, tile: Traced, m: Traced, n: Traced) -> tuple[Traced, Traced]:
        """(row, col) of a tile by its number: ``block_stride`` rows walk along N together and share B in the L2."""
        k, c = self._k, self._config
        rows, cols = self._tiles(m, n)
        group_tiles = cols * c.block_stride
        group, within = tile // group_tiles, tile % group_tiles
        first_row = group * c.block_stride
        group_rows = k.minimum(rows - first_row, c.block_stride)  # the last group may be lower
        return first_row + within % group_rows, within // group_rows

    def strides(self, a_stride: Traced, b_stride: Traced) -> tuple[Number, Number]:
        """The leading strides of A and B: those known while tracing, or as given."""
        a, b = self._features.a.stride, self._features.b.stride
        if not self._config.static_strides or a is None or b is None:
            return a_stride, b_stride
        return a, b

    def batched(self, pointer: GlobalPointer, stride: Traced, place: Place | None = None) -> GlobalPointer:
        """A matrix of the batch of a tile (by default, of the tile taken); stride 0: one matrix for all."""
        batch = (place or self._place).batch
        return pointer + self._k.mul_wide(batch, stride) if self._features.batched else pointer

    def of_result(self, pointer: GlobalPointer, stride: Traced) -> GlobalPointer:
        """C of this CTA's batch, or its own part of the workspace when K is split."""
        if self._features.batched or self._config.split_k > 1:
            return pointer + self._k.mul_wide(self._k.cta_z, stride)
        return pointer

    def prepare(self) -> None:
        """Form the addresses of copies and fragments that are the same for every tile."""
        for side in (self.a, self.b):
            side.make_writer()
            side.make_reader()

    def aim(
        self, matrices: tuple[GlobalPointer, GlobalPointer], strides: tuple[Number, ...], sizes: tuple[Traced, ...]
    ) -> None:
        """Point the copies at A and B."""
        m, n, depth = sizes
        self.a.aim(Source(matrices[0], strides[0], self.first[0], m, depth), self._first_tile)
        self.b.aim(Source(matrices[1], strides[1], self.first[1], n, depth), self._first_tile)

    # -- the sum
    def accumulators(self) -> Fragment:
        """Registers for the sum, with nothing in them yet."""
        c = self._config
        layout = C if c.accumulate is not f16 else replace(C, element_bits=16)
        if c.wmma:
            layout = wmma_fragment(WMMA_SHAPE, "C", c.accumulate)
        return self._k.accumulator(layout.tile(c.mma_rows, c.mma_cols), None, "c")

    def start(self) -> None:
        """Start the copies of the first k-tiles; no warp may read the stages any more."""
        if self._config.stages > 1:
            self._prologue()

    def multiply(self) -> Fragment:
        """The accumulators after the last k-tile; no warp reads the stages any more."""
        self.start()
        return self.finish(self.accumulators())

    def finish(self, accumulators: Fragment) -> Fragment:
        """What :meth:`start` began: the sum, in ``accumulators``; no warp reads the stages any more."""
        c = self._config
        self._sum = accumulators
        for register in accumulators.registers:
            if isinstance(register, Mutable):
                register.set(0)
        if c.lead:
            self._rolling_loop()
        elif c.pipelined:
            self._pipelined_loop()
        elif c.stages > 1:
            self._staged_loop()
        else:
            self._plain_loop()
        return self._sum

    def _load(self, tile: Number, stage: Number) -> None:
        """Issue the copies of A's and B's k-tile ``tile`` (of this CTA's)."""
        index = self._k.value(tile + self._first_tile, u32)
        self.a.load(index, stage)
        self.b.load(index, stage)

    def _fragments(self, step: int, stage: Number) -> tuple[list[Registers], list[Registers]]:
        return self.a.fragments(step, stage), self.b.fragments(step, stage)

    def _mma(self, a: list[Registers], b: list[Registers]) -> None:
        """The outer product of one k-step's operands."""
        for i, rows in enumerate(a):
            for j, cols in enumerate(b):
                self._add(rows, cols, i, j)

    def _add(self, a: Registers, b: Registers, row: int, col: int) -> None:
        """One mma, into atom (row, col) of the sums."""
        c, target = self._config, self._sum.mutable_atom(row, col)
        if c.wmma:
            self._k.wmma_mma(a, b, target, shape=WMMA_SHAPE, inputs=c.dtype, accumulate=c.accumulate,
                             orders=(self.a.order, self.b.order), into=target)  # fmt: skip
        else:
            self._k.mma(a, b, target, inputs=c.dtype, accumulate=c.accumulate, shape=SHAPE, into=target)

    def _compute(self, stage: Number) -> None:
        for step in range(self._config.k_steps):
            self._mma(*self._fragments(step, stage))

    def _plain_loop(self) -> None:
        """One stage: copy, wait, multiply."""
        k = self._k
        with k.loop(self._count) as tile:
            self._load(tile, 0)
            k.commit_group()
            k.wait_group(0)
            k.syncthreads()  # the tile is here for every warp
            self._compute(0)
            k.syncthreads()  # every warp is done with it: the next copy may overwrite it

    def _prologue(self) -> None:
        """Start the copies of the first stages - 1 tiles."""
        k = self._k
        for stage in range(self._config.stages - 1):
            with k.when(self._count > stage, uniform=True):
                self._load(k.value(stage, u32), stage)
            k.commit_group()

    def _load_ahead(self, tile: Traced, stage: Mutable) -> None:
        """Start the copy of the tile that is stages - 1 ahead, into the stage that was read last.

        A group is committed even when nothing is left to copy, so that the waits count the same to the end.
        """
        k, c = self._k, self._config
        ahead = tile + (c.stages - 1)
        with k.when(ahead < self._count, uniform=True):
            self._load(ahead, stage.get())
        k.commit_group()
        self._advance(stage)

    def _advance(self, stage: Mutable) -> None:
        """The next stage of the ring."""
        following = stage.get() + 1
        stage.set(self._k.select(following == self._config.stages, self._k.value(0, u32), following))

    def _staged_loop(self) -> None:
        """Copies run stages - 1 tiles ahead of the multiplication."""
        k, c = self._k, self._config
        read = k.register(u32, 0, "read_stage")
        write = k.register(u32, c.stages - 1, "write_stage")
        with k.loop(self._count) as tile:
            self._load_ahead(tile, write)
            k.wait_group(c.stages - 1)
            k.syncthreads()  # this tile is here for every warp
            self._compute(read.get())
            k.syncthreads()  # every warp is done with it: the next step copies over it
            self._advance(read)

    def _pipelined_loop(self) -> None:
        """Fragments load one k-step ahead, across tiles; copies start at the middle of a tile; one barrier per tile."""
        k, c = self._k, self._config
        k.wait_group(c.stages - 2)
        k.syncthreads()  # the first tile is here for every warp
        a_first, b_first = self._fragments(0, 0)
        a_next, b_next = carried(k, a_first, "a"), carried(k, b_first, "b")
        read = k.register(u32, 0, "read_stage")
        write = k.register(u32, c.stages - 1, "write_stage")
        with k.loop(self._count) as tile:
            a, b = _values(a_next), _values(b_next)
            for step in range(1, c.k_steps):
                following = self._fragments(step, read.get())
                self._mma(a, b)
                if step == c.k_steps // 2:
                    self._load_ahead(
                        tile, write
                    )  # over the tile before this one, which no warp reads since the barrier
                a, b = following
            self._advance(read)
            k.wait_group(c.stages - 2)
            k.syncthreads()  # the next tile is here for every warp, and every warp has read the last of this one
            with k.when(tile + 1 < self._count, uniform=True):
                for registers, group in zip((a_next, b_next), self._fragments(0, read.get()), strict=True):
                    _set(registers, group)
            self._mma(a, b)

    def _rolling_loop(self) -> None:
        """As the pipelined loop with fewer registers: each fragment loads ``lead`` mma before the first that reads it.

        Past the last tile its own first fragments load once more, and nothing reads them: no branch among the mma.
        """
        k, c = self._k, self._config
        order = Order.of(c)
        k.wait_group(c.stages - 2)
        k.syncthreads()  # the first tile is here for every warp
        first = {x: carried(k, self._loaded(x, 0), f"{x.operand.lower()}{x.index}_") for x in order.carried}
        read = k.register(u32, 0, "read_stage")
        write = k.register(u32, c.stages - 1, "write_stage")
        with k.loop(self._count) as tile:
            held = {load: _values(registers) for load, registers in first.items()}
            crossed = False
            for event in order.events():
                if isinstance(event, Multiply):
                    per_load = len(held[event.b])
                    self._add(held[event.a][0], held[event.b][event.col % per_load], event.row, event.col)
                elif event is Mark.MIDDLE:
                    self._load_ahead(tile, write)  # over the tile before this one, as in the pipelined loop
                elif event is Mark.BORDER:
                    crossed = True
                    k.wait_group(c.stages - 2)
                    k.syncthreads()  # the next tile is here for every warp, and every warp has read all of this one
                    current = read.get()
                    self._advance(read)
                    read.set(k.select(tile + 1 < self._count, read.get(), current))
                elif crossed:
                    _set(first[event], self._loaded(event, read.get()))
                else:
                    held[event] = self._loaded(event, read.get())
        k.syncthreads()  # every warp has loaded what lay past the last tile

    def _loaded(self, load: Load, stage: Number) -> list[Registers]:
        """What a load brings from a stage."""
        return (self.a if load.operand == "A" else self.b).loaded(load.index, load.step, stage)


def _values(registers: list[list[Mutable]]) -> list[Registers]:
    return [tuple(r.get() for r in group) for group in registers]


def _set(registers: list[list[Mutable]], values: list[Registers]) -> None:
    for group, loaded in zip(registers, values, strict=True):
        for register, value in zip(group, loaded, strict=True):
            register.set(value)
