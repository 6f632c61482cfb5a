# pyright: reportInvalidTypeForm=false
"""The ladder's ``wgmma`` attention kernels: the production kernel with consumers that can leave its ideas out."""

from __future__ import annotations

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.features import PLAIN, AttentionFeatures
from warploom.kernels.attention.ladder_sm90 import RungSm90
from warploom.kernels.attention.sm90_kernel import Consumer, EvenTiles, TensorMaps, Tile, run
from warploom.lang import Global, Kernel, TensorMap, kernel
from warploom.lang.values import Number
from warploom.tile.product import zero
from warploom.tile.scheduler import Divisor, RowTiles
from warploom.tile.softmax import Action, nothing


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def attention_wgmma(
    k: Kernel,
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    o_map: TensorMap,
    lse: Global[f32],
    sinks: Global[f32],
    q_len: u32,
    kv_len: u32,
    heads: Divisor,
    rows: Divisor,
    planes: u32,
    group: Divisor,
    together: Divisor,
    last: Divisor,
    *,
    config: RungSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """As :func:`~warploom.kernels.attention.sm90_kernel.attention_sm90`."""
    maps = TensorMaps(q_map, k_map, v_map, o_map, heads_inside)
    order = RowTiles(rows, planes, group, together, last, grouped=features.window[1] is not None)
    run(k, config, maps, EvenTiles(k, config, features, lse, sinks, order, heads, (q_len, kv_len)), RungConsumer)


class RungConsumer(Consumer):
    """A consumer that looks for the maxima of every block."""

    _config: RungSm90

    def _blocks(self, tile: Tile) -> None:
        if self._config.overlap:
            super()._blocks(tile)
            return
        zero(self._o)
        with self._k.loop(tile.own.blocks, 1) as step:  # P·V of the block before, then this one's Q·Kᵀ and softmax
            self._product.start(self._p, self._values.wait()).wait()
            self._values.release()
            self._keys.wait()
            self._scores.start(self._left(tile), self._keys.tile, zero=True).wait()
            self._take_up(tile, step, first=False)()
            self._cores.pack(self._p, self._s)

    def _take_up(self, tile: Tile, step: Number, *, first: bool) -> Action:
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
