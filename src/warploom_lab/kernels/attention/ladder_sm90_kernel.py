"""The consumers of the ladder's ``wgmma`` attention kernels, which can leave ideas out."""

from __future__ import annotations

from warploom.kernels.attention.device.forward_sm90 import Consumer, QueryTile
from warploom.lang.values import Number
from warploom.tile.softmax import Action, nothing
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90


class RungConsumer(Consumer):
    """A consumer that looks for the maxima of every block."""

    _config: RungSm90

    def _blocks(self, tile: QueryTile) -> None:
        if self._config.overlap:
            super()._blocks(tile)
            return
        # P·V of the block before, then this one's Q·Kᵀ and softmax
        with self._k.loop(tile.own.blocks, start=1) as step:
            self._product.start(self._p, self._values.wait(), zero=step == 1).wait()
            self._values.release()
            self._keys.wait()
            self._scores.start(self._left(tile), self._keys.tile, zero=True).wait()
            self._take_up(tile, step, first=False)()
            self._cores.pack(self._p, self._s)

    def _take_up(self, tile: QueryTile, step: Number, *, first: bool) -> Action:
        block = tile.own.block(step)
        self._keys.release()

        def mask() -> None:
            tile.own.apply(self._s, block, row=tile.own_row, warp=self._warp)

        if first:
            self._softmax.first(mask)
            return nothing
        factors = self._softmax.deferred(mask, lazy=self._config.lazy_rescale)
        if self._config.hold:
            self._values.wait()  # satisfied: it keeps the wait for the product below the exponentials
        if self._config.lazy_rescale:
            return lambda: self._softmax.rescale(factors)
        return lambda: self._softmax.scale_output(factors)
