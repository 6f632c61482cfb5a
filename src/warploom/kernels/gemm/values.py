"""The value of a product's epilogue: scale, bias, extra matrices and the user's function on a pair of sums."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.gemm.features import Epilogue
from warploom.lang import GlobalPointer, Kernel, Traced
from warploom.tile.epilogue import Pair, Target


@dataclass(frozen=True)
class EpilogueValue:
    """``function(alpha · sum + bias[col], extra[0][row, col], …)`` for two neighbouring sums.

    ``alpha`` is the bits of an f32, ``half`` the type of the bias and the extra matrices, which point to this batch's
    first elements; the latter's lines are ``extra_stride`` elements apart.
    """

    k: Kernel
    epilogue: Epilogue
    target: Target
    half: DType
    alpha: Traced
    bias: GlobalPointer
    extras: tuple[GlobalPointer, ...]
    extra_stride: Traced

    def __call__(self, sums: Pair, row: Traced, col: Traced) -> Pair:
        """The values to store at (row, col) and (row, col + 1)."""
        k, e = self.k, self.epilogue
        first, second = sums
        if e.scaled:
            alpha = k.bitcast(self.alpha, f32)
            first, second = first * alpha, second * alpha
        if e.bias:
            added = self._load_pair(self.bias + col, row, col)
            first, second = first + added[0], second + added[1]
        if self.extras:
            at = k.mul_wide(row, self.extra_stride) + k.mul_wide(col, 1)
            others = [self._load_pair(pointer + at, row, col) for pointer in self.extras]
            return e.call(first, [pair[0] for pair in others]), e.call(second, [pair[1] for pair in others])
        return e.call(first, []), e.call(second, [])

    def _load_pair(self, source: GlobalPointer, row: Traced, col: Traced) -> Pair:
        """Two neighbouring 16-bit elements as f32; those beyond the target's edge are 0."""
        k, exists = self.k, self.target.exists
        if self.target.pairs:
            return k.unpack(self._guarded(source, exists(row, col), u32), self.half)
        bits = [self._guarded(source + i, exists(row, col + i), u16) for i in range(2)]
        return k.unpack(bits[0], self.half)[0], k.unpack(bits[1], self.half)[0]

    def _guarded(self, source: GlobalPointer, exists: Traced | None, dtype: DType) -> Traced:
        if exists is None:
            return source.load(dtype=dtype)[0]
        value = self.k.register(u32, 0)
        with self.k.when(exists):
            value.set(source.load(dtype=dtype)[0])
        return value.get()
