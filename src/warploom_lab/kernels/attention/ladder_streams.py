"""The tensors of an attention kernel, and the blocks of K and V on their way to shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import u32, u64
from warploom.lang import GlobalPointer, Kernel, Mutable, SharedTile, StridedPointer, Traced
from warploom.lang.values import Number
from warploom.tile.copies import TileCopy
from warploom_lab.kernels.attention.ladder_config import RungSm80


@dataclass(frozen=True)
class Tensors:
    """The tensors that the kernel reads and writes."""

    q: StridedPointer
    key: StridedPointer
    value: StridedPointer
    out: StridedPointer


class Stream:
    """The blocks of K or V on their way to shared memory, one ``load`` after another."""

    def __init__(
        self,
        k: Kernel,
        config: RungSm80,
        tile: SharedTile,
        source: tuple[GlobalPointer, Number],
        span: tuple[Number, Traced],
        rows: Traced | None,
    ) -> None:
        """``source``: this head's first row and the row stride; ``span``: (first block, count); ``rows``: if ragged."""
        pointer, stride = source
        self._k, self._config, self._rows = k, config, rows
        self._first, self._count = span
        plan = config.copy_plan(config.tile_n)
        self._copy = TileCopy(k, tile, plan, stride, config.addressing, config.head_dim)
        self._start = self._copy.start(pointer)
        self._block_bytes = k.operand(stride, u32) * (config.tile_n * 2)
        self._position: Mutable | None = None
        if not config.block_index:
            self._position = k.register(u64, self._block_address(0), f"{tile.name}_source")
        self._copy.prepare()

    def block(self, index: Number) -> Traced:
        """The block of keys that is loaded as number ``index``."""
        number = self._count - 1 - index if self._config.backward else index
        return self._k.value(number + self._first, u32)

    def _block_address(self, index: Number) -> Traced:
        """The address of this thread's part of the block that is loaded as number ``index``."""
        return self._start.address + self._k.mul_wide(self.block(index), self._block_bytes)

    def load(self, index: Number) -> None:
        """Load block number ``index``; blocks are loaded in order. With pointers, the number is not needed."""
        k = self._k
        if self._position is None:
            source = GlobalPointer(k, self._block_address(index), self._start.dtype)
        else:
            source = GlobalPointer(k, self._position.get(), self._start.dtype)
            step = k.convert(self._block_bytes, u64)
            self._position.set(self._position - step if self._config.backward else self._position + step)
        rows: Traced | None = None
        if self._rows is not None:
            rows = self._rows - self.block(index) * self._config.tile_n
        if self._config.async_copy:
            self._copy.load_async(source, rows=rows)
        else:
            self._copy.load_sync(source, rows)
