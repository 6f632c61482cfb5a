"""The scores of one warp once more, by ``mma.sync``: what a block needs whose maxima were taken over and outgrown.

Every warp decides for itself, so no instruction of the whole warpgroup can serve. The accumulator of ``wgmma`` is that
of ``mma.sync`` (``wgmma_accumulator``), and both tiles still lie in shared memory: Q until the tile's output replaces
it, K until this block gives its stage back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warploom.core.dtypes import DType
from warploom.lang import Fragment, Kernel, Mutable, SharedTile, TileReader, Traced
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment

KEY_PAIR = mma_fragment("m16n8k16", "B").tile(1, 2).transposed()
"""16 keys × 16 of their elements as K is stored: what one ``ldmatrix.x4`` loads, two operands side by side."""


def scores_again(
    k: Kernel,
    into: Fragment,
    query: Callable[[int], Sequence[Traced]],
    keys: SharedTile,
    stage: Number,
    depth: int,
    dtype: DType,
) -> None:
    """S = Q·Kᵀ of this warp's 16 query rows and all keys of ``keys``' stage, into the registers of ``into``.

    ``query`` gives the A operand of the products' step d, of ``depth`` steps of 16 elements. The warp meets at the end,
    so that one lane can give back what all have read.
    """
    reader: TileReader = k.reader(keys, KEY_PAIR).staged(stage)
    registers = [r for r in into.registers if isinstance(r, Mutable)]
    for d in range(depth):
        a = query(d)
        for pair in range(len(registers) // 8):
            b = reader.load(16 * pair, 16 * d)
            for half in range(2):
                atom = registers[8 * pair + 4 * half : 8 * pair + 4 * half + 4]
                k.mma(a, b[2 * half : 2 * half + 2], (0.0,) * 4 if d == 0 else atom, inputs=dtype, into=atom)
    k.syncwarp()
