# pyright: reportInvalidTypeForm=false
"""The ladder's attention kernel for ``mma.sync``: one generator, whose flags are the rungs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from warploom.core.dtypes import f32, u16, u32
from warploom.core.errors import ConfigError
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.lang import (
    Fragment,
    GlobalPointer,
    Kernel,
    SharedTile,
    Strided,
    StridedPointer,
    TileReader,
    Traced,
    kernel,
)
from warploom.lang.fragments import TileAddresses
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment
from warploom.tile.copies import TileCopy
from warploom.tile.mask import Mask
from warploom_lab.kernels.attention.ladder_config import RungSm80
from warploom_lab.kernels.attention.ladder_softmax import RungSoftmax, SharedSoftmax
from warploom_lab.kernels.attention.ladder_streams import Stream, Tensors

SHAPE = "m16n8k16"
A, B, C = (mma_fragment(SHAPE, operand) for operand in "ABC")
B_PAIR = B.tile(1, 2)
"""Two B operands side by side: what one ``ldmatrix.x4`` fills."""

Registers = tuple[Traced, ...]


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_forward(
    k: Kernel,
    q: Strided[u16, 3],
    key: Strided[u16, 3],
    value: Strided[u16, 3],
    out: Strided[u16, 3],
    q_len: u32,
    kv_len: u32,
    *,
    config: RungSm80,
    features: AttentionFeatures = PLAIN,
    same_strides: bool = True,
    row_strides: tuple[int, int, int, int] | None = None,
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V for one block of query rows; grid (query blocks, heads, batches), or heads first.

    Strides of batches, heads and positions. ``same_strides``: K, V and O have Q's, so that one set of registers serves
    all four. ``row_strides``: those of positions in Q, K, V and O, which a configuration with static_strides needs.
    Parameters that a configuration does not use are left out.
    """
    config.require()
    if config.static_strides and row_strides is None:
        raise ConfigError("static_strides needs the row_strides of Q, K, V and O while tracing")
    tensors = [q, key, value, out]
    if same_strides:
        tensors = [replace(x, strides=q.strides) for x in tensors]
    if config.static_strides and row_strides is not None:
        known = zip(tensors, row_strides, strict=True)
        tensors = [replace(x, strides=(*x.strides[:2], row)) for x, row in known]
    Forward(k, config, features, Tensors(*tensors), (q_len, kv_len)).run()


class Forward:
    """The kernel's parts for one configuration; :meth:`run` reads like the algorithm."""

    def __init__(
        self,
        k: Kernel,
        config: RungSm80,
        features: AttentionFeatures,
        tensors: Tensors,
        lengths: tuple[Traced, Traced],
    ) -> None:
        self._k, self._config, self._features, self._tensors = k, config, features, tensors
        self._q_len, self._kv_len = lengths
        self._head = k.cta_x if config.heads_first else k.cta_y
        # Under a causal mask later query blocks have more keys: start with them, so that the last wave is short.
        if config.heads_first:
            self._q_block = k.cta_y
        else:
            self._q_block = k.grid_x - 1 - k.cta_x if features.right is not None else k.cta_x
        self._q_tile = self._tile("q_tile", config.tile_m)
        self._k_tile = self._tile("k_tile", config.tile_n)
        self._v_tile = self._tile("v_tile", config.tile_n)
        self._warp_row = k.warp * config.warp_rows
        tile = config.tile_m, config.tile_n
        self._mask = Mask(k, features.mask, tile, self._q_block * config.tile_m, lengths)

    def _tile(self, name: str, rows: int) -> SharedTile:
        c = self._config
        panel = 64 if c.head_dim_panels and c.tile_cols > 64 else None
        swizzle = "auto" if c.swizzle else None
        return self._k.shared(c.dtype, (rows, c.tile_cols), name=name, swizzle=swizzle, panel_cols=panel)

    # -- sizes in instructions
    @property
    def _m(self) -> int:
        return self._config.warp_rows // 16

    @property
    def _n(self) -> int:
        return self._config.tile_n // 16

    @property
    def _d(self) -> int:
        return -(-self._config.head_dim // 16)

    def run(self) -> None:
        """Prologue, the loop over K/V blocks, epilogue."""
        k, c = self._k, self._config
        span = self._mask.begin, self._mask.blocks
        self._keys = self._stream(self._k_tile, self._tensors.key, span)
        self._values = self._stream(self._v_tile, self._tensors.value, span)
        self._load_q()
        if c.eager:
            self._start_copy(lambda: self._keys.load(0))
        self._make_readers()
        self._output = k.accumulator(C.tile(self._m, 2 * self._d), None if c.peel else 0.0, "o")
        kind = SharedSoftmax if c.softmax_in_shared else RungSoftmax
        self._softmax = kind(k, c, self._features, C.tile(self._m, 2 * self._n), self._output)
        self._whole_q = self._read_whole_q() if c.load_q == 0 else None
        blocks = self._mask.blocks
        if c.peel:
            self._step(0, True, blocks > 1)
        with k.loop(blocks, start=1 if c.peel else 0) as block:
            self._step(block, False, block + 1 < blocks)
        self._softmax.normalise()
        self._store_output()

    # -- copies
    def _stream(self, tile: SharedTile, tensor: StridedPointer, span: tuple[Number, Traced]) -> Stream:
        k = self._k
        head = self._head // self._features.group if self._features.group > 1 else self._head
        rows = self._kv_len if self._features.ragged_kv else None
        return Stream(k, self._config, tile, (tensor.at(k.cta_z, head), tensor.strides[2]), span, rows)

    def _q_rows(self) -> Traced | None:
        """The number of rows of the query tile that exist; None if all do."""
        return self._q_len - self._q_block * self._config.tile_m if self._features.ragged_q else None

    def _load_q(self) -> None:
        copy, start = self._block_copy(self._tensors.q)
        if self._config.async_copy:
            self._start_copy(lambda: copy.load_async(start, rows=self._q_rows()))
        else:
            copy.load_sync(start, self._q_rows())

    def _block_copy(self, tensor: StridedPointer) -> tuple[TileCopy, GlobalPointer]:
        """Return the copy of this CTA's block of Q or O, and the address of this thread's part."""
        k, c = self._k, self._config
        copy = TileCopy(k, self._q_tile, c.copy_plan(c.tile_m), tensor.strides[2], c.addressing, c.head_dim)
        return copy, copy.start(tensor.at(k.cta_z, self._head, self._q_block * c.tile_m))

    def _start_copy(self, load: Callable[[], None]) -> None:
        """Issue copies as one group (copies through registers need none)."""
        load()
        if self._config.async_copy:
            self._k.commit_group()

    def _arrived(self) -> None:
        """All copies have arrived, for all warps; and all warps are done with what they read before."""
        if self._config.async_copy:
            self._k.wait_group(0)
        self._k.syncthreads()

    # -- fragments
    def _make_readers(self) -> None:
        k, c = self._k, self._config
        order = None if c.k_row_major else (0, 2, 1)
        self._q_reader = k.reader(self._q_tile, A, row=self._warp_row, addressing=c.addressing)
        self._k_reader = k.reader(self._k_tile, B_PAIR.transposed(), bit_order=order, addressing=c.addressing)
        self._v_reader = k.reader(self._v_tile, B_PAIR, addressing=c.addressing)
        slices = [(0, 16 * d) for d in range(self._d)]
        for reader in (self._q_reader, self._k_reader, self._v_reader):
            reader.prepare(slices)

    def _read_whole_q(self) -> list[list[Registers]]:
        """Q in registers for the whole kernel: [k-slice][m]."""
        k, c = self._k, self._config
        if c.async_copy:
            k.wait_group(1 if c.eager else 0)
        if c.cooperative:
            k.syncthreads()
        else:
            k.syncwarp()  # a warp copied its own rows of Q
        return [self._q_slice(d) for d in range(self._d)]

    def _q_slice(self, d: int) -> list[Registers]:
        return [self._q_reader.load(16 * m, 16 * d) for m in range(self._m)]

    def _row_by_column(
        self,
        sizes: tuple[int, int, int],
        load_a: Callable[[int, int], Registers],
        load_b: Callable[[int, int], Registers],
        multiply: Callable[[int, int, Registers, Registers], None],
    ) -> None:
        """The other order of part 5: for each row of A its fragments, and for each of those every column of B anew."""
        rows, column_pairs, depth = sizes
        for m in range(rows):
            a = [load_a(m, d) for d in range(depth)]
            for n in range(column_pairs):
                b = [load_b(n, d) for d in range(depth)]
                for d in range(depth):
                    multiply(m, 2 * n, a[d], b[d][:2])
                    multiply(m, 2 * n + 1, a[d], b[d][2:])

    def _k_slice(self, reader: TileReader, d: int) -> list[Registers]:
        pairs = [reader.load(16 * n, 16 * d) for n in range(self._n)]
        return [operand for pair in pairs for operand in (pair[:2], pair[2:])]

    def _v_slice(self, reader: TileReader, n: int) -> list[Registers]:
        pairs = [reader.load(16 * n, 16 * d) for d in range(self._d)]
        return [operand for pair in pairs for operand in (pair[:2], pair[2:])]

    def _sliced(
        self,
        slices: int,
        load: Callable[[int], tuple[list[Registers], list[Registers]]],
        multiply: Callable[[int, int, Registers, Registers], None],
    ) -> None:
        """Outer products over k-slices; with double buffering the next slice loads before this one multiplies."""
        following = load(0)
        for index in range(slices):
            a, b = following
            last = index + 1 == slices
            if self._config.double_buffer and not last:
                following = load(index + 1)
            for m, a_registers in enumerate(a):
                for n, b_registers in enumerate(b):
                    multiply(m, n, a_registers, b_registers)
            if not self._config.double_buffer and not last:
                following = load(index + 1)

    # -- one block of K and V
    def _scores(self) -> Fragment:
        """S = Q·Kᵀ of this block, in f32."""
        k, c, reader = self._k, self._config, self._k_reader
        columns = 2 * self._n
        scores: list[tuple[Number, ...]] = [(0.0,) * 4] * (self._m * columns)
        whole_k = [self._k_slice(reader, d) for d in range(self._d)] if c.load_k == 0 else None

        def load(d: int) -> tuple[list[Registers], list[Registers]]:
            a = self._whole_q[d] if self._whole_q else self._q_slice(d)
            return a, whole_k[d] if whole_k else self._k_slice(reader, d)

        def multiply(m: int, n: int, a: Registers, b: Registers) -> None:
            at = m * columns + n
            scores[at] = k.mma(a, b, scores[at], inputs=c.dtype)

        if c.k_slices:
            self._sliced(self._d, load, multiply)
        else:
            sizes = self._m, self._n, self._d

            def read_q(m: int, d: int) -> Registers:
                return self._q_reader.load(16 * m, 16 * d)

            def read_k(n: int, d: int) -> Registers:
                return reader.load(16 * n, 16 * d)

            self._row_by_column(sizes, read_q, read_k, multiply)
        return k.fragment(C.tile(self._m, columns), f32, [k.value(x, f32) for atom in scores for x in atom])

    def _masked_scores(self, block: Number) -> Fragment:
        """Scores as the softmax takes them: scaled as configured, -inf where a key does not count."""
        k, scores = self._k, self._softmax.scaled(self._scores())
        if not self._features.masked:
            return scores
        kept = [k.register(f32, x) for x in scores.registers]
        self._mask.apply(k.fragment(scores.layout, f32, kept), self._keys.block(block), row=self._warp_row)
        return k.fragment(scores.layout, f32, [x.get() for x in kept])

    def _accumulate(self, probabilities: Fragment, first: bool) -> None:
        """O += P·V of this block; the first block of a peeled loop starts from zero."""
        k, c, reader = self._k, self._config, self._v_reader
        operand = probabilities.as_operand(A.tile(self._m, self._n), c.dtype)
        whole_v = [self._v_slice(reader, n) for n in range(self._n)] if c.load_v == 0 else None

        def load(n: int) -> tuple[list[Registers], list[Registers]]:
            return [operand.atom(m, n) for m in range(self._m)], whole_v[n] if whole_v else self._v_slice(reader, n)

        started: set[tuple[int, int]] = set()

        def multiply(m: int, d: int, a: Registers, b: Registers) -> None:
            target = self._output.mutable_atom(m, d)
            fresh = first and (m, d) not in started
            started.add((m, d))
            k.mma(a, b, (0.0,) * 4 if fresh else target, inputs=c.dtype, into=target)

        if c.k_slices:
            self._sliced(self._n, load, multiply)
        else:
            sizes = self._m, self._d, self._n

            def read_v(d: int, n: int) -> Registers:
                return reader.load(16 * n, 16 * d)

            self._row_by_column(sizes, operand.atom, read_v, multiply)

    def _step(self, block: Number, first: bool, more: Traced) -> None:
        """One block with one K and one V buffer; ``more``: there is another block after it."""
        k, c = self._k, self._config
        if not c.eager:
            self._start_copy(lambda: self._keys.load(block))
        self._arrived()  # K is here for every warp; every warp is done with the V of the block before
        if c.eager:
            self._start_copy(lambda: self._values.load(block))
        probabilities = self._softmax.probabilities(self._masked_scores(block), first)
        if not c.eager:
            self._start_copy(lambda: self._values.load(block))
        self._arrived()  # V is here for every warp; every warp is done with this K
        if c.eager:
            with k.when(more, uniform=True):
                self._start_copy(lambda: self._keys.load(block + 1))
        self._accumulate(probabilities, first)

    # -- epilogue
    def _store_output(self) -> None:
        """O through the warp's own rows of Q's tile, then out in 16-byte rows."""
        k, c = self._k, self._config
        packed = self._output.packed(c.dtype)
        lanes = C.atom.restrict("lane")
        addresses = TileAddresses(k, self._q_tile, lanes, k.lane, self._warp_row, c.epilogue_addressing)
        for register, pair in enumerate(packed.registers):
            row, col = packed.layout.coordinates(0, 2 * register)
            k.store("shared", addresses.address(row, col), u32, [pair], "", "weak")
        if c.cooperative:
            k.syncthreads()
        else:
            k.syncwarp()  # a warp copies its own rows of O
        copy, start = self._block_copy(self._tensors.out)
        copy.store(start, cache="no_allocate" if c.output_hint else "", rows=self._q_rows())
