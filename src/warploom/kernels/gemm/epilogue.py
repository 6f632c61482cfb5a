"""The end of a product: scale, bias and function on the accumulators, then out through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from warploom.core.dtypes import DType, f16, f32, u16, u32
from warploom.kernels.copy_plan import CopyPlan
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.operand import WMMA_SHAPE, C, Side
from warploom.lang import Fragment, GlobalPointer, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import TileAddresses
from warploom.lang.values import Number


@dataclass(frozen=True)
class Output:
    """C and what is combined with it: pointers to this batch's first element; ``alpha`` is the bits of an f32."""

    pointer: GlobalPointer
    stride: Number
    rows: Traced
    cols: Traced
    alpha: Traced
    bias: GlobalPointer
    extras: tuple[GlobalPointer, ...]
    extra_stride: Traced


class Elements:
    """What becomes of a pair of neighbouring sums: scale, bias, extra matrices, the user's function; and the edges."""

    def __init__(self, k: Kernel, half: DType, features: GemmFeatures, output: Output) -> None:
        """``half``: the type of the bias and the extra matrices."""
        self._k, self._half, self._features, self._output = k, half, features, output

    def exists(self, row: Traced, col: Traced) -> Traced | None:
        """Whether C has an element (row, col); None where it always has."""
        found: Traced | None = None
        if self._features.ragged_m:
            found = row < self._output.rows
        if self._features.ragged_n:
            inside = col < self._output.cols
            found = inside if found is None else found & inside
        return found

    def finished(self, values: tuple[Traced, Traced], row: Traced, col: Traced) -> tuple[Traced, Traced]:
        """The f32 values to store at (row, col) and (row, col + 1) for two sums."""
        k, output, epilogue = self._k, self._output, self._features.epilogue
        if epilogue.scaled:
            alpha = k.bitcast(output.alpha, f32)
            values = values[0] * alpha, values[1] * alpha
        if epilogue.bias:
            bias = self._load_pair(output.bias + col, row, col)
            values = values[0] + bias[0], values[1] + bias[1]
        at = k.mul_wide(row, output.extra_stride) + k.mul_wide(col, 1) if output.extras else None
        extras = [self._load_pair(pointer + at, row, col) for pointer in output.extras if at is not None]
        first, second = (epilogue.call(x, [pair[i] for pair in extras]) for i, x in enumerate(values))
        return first, second

    def _load_pair(self, source: GlobalPointer, row: Traced, col: Traced) -> tuple[Traced, Traced]:
        """Two neighbouring 16-bit elements as f32; those beyond C's edge are 0."""
        k = self._k
        if self._features.pairs:
            return k.unpack(self._guarded(source, self.exists(row, col), u32), self._half)
        bits = [self._guarded(source + i, self.exists(row, col + i), u16) for i in range(2)]
        return k.unpack(bits[0], self._half)[0], k.unpack(bits[1], self._half)[0]

    def _guarded(self, source: GlobalPointer, exists: Traced | None, dtype: DType) -> Traced:
        if exists is None:
            return source.load(dtype=dtype)[0]
        value = self._k.register(u32, 0)
        with self._k.when(exists):
            value.set(source.load(dtype=dtype)[0])
        return value.get()

    def store(self, target: GlobalPointer, row: Traced, col: Traced, values: tuple[Traced, Traced]) -> None:
        """Store the values of (row, col) and (row, col + 1), whose place is ``*target``, as far as C has them."""
        k, out = self._k, self._features.out_dtype
        if self._features.pairs:
            words = list(values) if out is f32 else [k.pack(*values, out)]
            self._store_where(target, self.exists(row, col), words, f32 if out is f32 else u32)
            return
        for i, value in enumerate(values):
            word = value if out is f32 else k.pack(value, 0.0, out)
            self._store_where(target + i, self.exists(row, col + i), [word], f32 if out is f32 else u16)

    def store_where(self, target: GlobalPointer, row: Traced, col: Traced, words: list[Traced], dtype: DType) -> None:
        """Store words at ``*target``, the place of (row, col) and what follows, if C has that element."""
        self._store_where(target, self.exists(row, col), words, dtype)

    def _store_where(self, target: GlobalPointer, exists: Traced | None, words: list[Traced], dtype: DType) -> None:
        if exists is None:
            target.store(words, dtype=dtype)
        else:
            with self._k.when(exists):
                target.store(words, dtype=dtype)


class Finish:
    """Stores the tile of C whose first element is (``first_row``, ``first_col``)."""

    def __init__(
        self, k: Kernel, config: GemmConfig, features: GemmFeatures, output: Output, first: tuple[Traced, Traced]
    ) -> None:
        self._k, self._config, self._features, self._output = k, config, features, output
        self._first_row, self._first_col = first
        self._warp_row = Side("A", config).warp_index(k) * config.warp_m
        self._warp_col = Side("B", config).warp_index(k) * config.warp_n
        self._elements = Elements(k, config.dtype, features, output)

    def store(self, accumulator: Fragment, staging: SharedTile | None) -> None:
        """Write the accumulators out, through the tile that :func:`staging_tile` gave.

        Every warp must be done with what lies under it before.
        """
        if staging is None:
            self._store_f32(accumulator)
        elif self._config.wmma:
            self._store_opaque(accumulator, staging)
        else:
            self._store_staged(accumulator, staging)

    # -- values
    def _place(self, accumulator: Fragment, element: int) -> tuple[Traced, Traced]:
        """(row, col) in C of an element of this thread."""
        row, col = accumulator.layout.coordinates(self._k.lane, element)
        return row + self._warp_row + self._first_row, col + self._warp_col + self._first_col

    def _pair(self, accumulator: Fragment, first: int) -> tuple[Traced, Traced]:
        """Elements ``first`` and ``first + 1`` (neighbouring columns) in f32, finished."""
        if accumulator.dtype is f16:
            values = self._k.unpack(_read(accumulator.registers[first // 2]), f16)
        else:
            values = _read(accumulator.registers[first]), _read(accumulator.registers[first + 1])
        if self._features.epilogue.plain:
            return values
        return self._elements.finished(values, *self._place(accumulator, first))

    # -- f32: four lanes fill a sector of 32 bytes, so registers go out as they are
    def _store_f32(self, accumulator: Fragment) -> None:
        k, output = self._k, self._output
        for first in range(0, accumulator.layout.elements_per_thread, 2):
            low, high = self._pair(accumulator, first)
            row, col = self._place(accumulator, first)
            target = output.pointer + (k.mul_wide(row, output.stride) + k.mul_wide(col, 1))
            self._elements.store(target, row, col, (low, high))

    # -- 16-bit: through shared memory, so that whole rows leave 16 bytes per thread
    def _store_staged(self, accumulator: Fragment, staging: SharedTile) -> None:
        k, c = self._k, self._config
        out = self._features.out_dtype
        lanes = Side("B", c).with_warps(C.atom.restrict("lane"), along_cols=True)
        addresses = TileAddresses(k, staging, lanes, k.thread, self._warp_row, c.addressing)
        as_is = accumulator.dtype is f16 and out is f16 and self._features.epilogue.plain
        for register in range(accumulator.layout.elements_per_thread // 2):
            if as_is:
                pair = _read(accumulator.registers[register])
            else:
                pair = k.pack(*self._pair(accumulator, 2 * register), out)
            row, col = accumulator.layout.coordinates(0, 2 * register)
            k.store("shared", addresses.address(row, col), u32, [pair], "", "weak")
        k.syncthreads()  # the rows that leave were written by other warps
        self._copy_out(staging)

    # -- wmma: its sums are known by their place only once they are stored
    def _store_opaque(self, accumulator: Fragment, staging: SharedTile) -> None:
        k, c, layout = self._k, self._config, staging.layout
        leading = layout.row_bytes // layout.element_bytes
        rows, cols = accumulator.layout.atom_shape
        for i in range(c.mma_rows):
            for j in range(c.mma_cols):
                target = staging.address(self._warp_row + rows * i, self._warp_col + cols * j)
                words = [_read(r) for r in accumulator.atom(i, j)]
                k.wmma_store(target, leading, words, shape=WMMA_SHAPE, dtype=c.accumulate)
        k.syncthreads()  # the rows that leave were written by other warps
        if c.accumulate is f16 and self._features.out_dtype is f16 and self._features.epilogue.plain:
            self._copy_out(staging)
        else:
            self._finish_out(staging)

    def _finish_out(self, staging: SharedTile) -> None:
        """The sums in pairs, finished and rounded on their way from the staging tile to C."""
        k, c, output = self._k, self._config, self._output
        plan = CopyPlan(c.tile_m, c.tile_n, c.num_warps, True, 2)
        at = plan.threads().apply(lane=k.thread)
        row0, col0 = cast("Traced", at["row"]), cast("Traced", at["col"])
        for row, col in plan.steps:
            if c.accumulate is f16:
                first, second = k.unpack(staging.load(row0 + row, col0 + col, dtype=u32)[0], f16)
            else:
                first, second = staging.load(row0 + row, col0 + col, 2)
            at_row, at_col = row0 + row + self._first_row, col0 + col + self._first_col
            if not self._features.epilogue.plain:
                first, second = self._elements.finished((first, second), at_row, at_col)
            target = output.pointer + (k.mul_wide(at_row, output.stride) + k.mul_wide(at_col, 1))
            self._elements.store(target, at_row, at_col, (first, second))

    def _copy_out(self, staging: SharedTile) -> None:
        k, c, output = self._k, self._config, self._output
        chunk = self._features.out_chunk
        plan = CopyPlan(c.tile_m, c.tile_n, c.num_warps, True, chunk)
        while plan.rows_per_step > c.tile_m:  # more threads than 16-byte chunks: narrower ones
            chunk //= 2
            plan = CopyPlan(c.tile_m, c.tile_n, c.num_warps, True, chunk)
        lanes = plan.threads()
        at = lanes.apply(lane=k.thread)
        row0, col0 = cast("Traced", at["row"]), cast("Traced", at["col"])
        addresses = TileAddresses(k, staging, lanes, k.thread, 0, c.copy_addressing)
        start = output.pointer + k.mul_wide(row0 + self._first_row, output.stride) + (col0 + self._first_col)
        kind, count = (u16, 1) if chunk == 1 else (u32, chunk // 2)
        for row, col in plan.steps:
            words = k.load("shared", addresses.address(row, col), kind, count, "", "weak")
            target = start.bytes(k.mul_wide(output.stride, 2 * row)) if row else start
            at_row, at_col = row0 + self._first_row + row, col0 + self._first_col + col
            self._elements.store_where(target + col, at_row, at_col, words, kind)


def staging_tile(
    k: Kernel, config: GemmConfig, features: GemmFeatures, over: SharedTile | None = None
) -> SharedTile | None:
    """Shared memory (over the tile ``over``) that a 16-bit C, or one of wmma, passes through.

    An f32 one leaves from the registers.
    """
    if features.out_dtype is f32 and not config.wmma:
        return None
    shape, swizzle = (config.tile_m, config.tile_n), "auto" if config.swizzle else None
    dtype = config.accumulate if config.wmma else features.out_dtype
    return k.shared(dtype, shape, name="c_tile", swizzle=swizzle, padding=config.padding, alias=over)


def _read(register: Traced) -> Traced:
    return register.get() if isinstance(register, Mutable) else register
