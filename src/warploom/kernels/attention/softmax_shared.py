"""The softmax as a round trip through shared memory: the baseline of the in-register paper's section 4.

Every warp stores its scores, one lane per row walks the row for the maximum, the exponentials and their sum, and the
warp loads the probabilities back into fragments.
"""

from __future__ import annotations

import math

from warploom.core.dtypes import f32
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.features import AttentionFeatures
from warploom.kernels.attention.softmax import OnlineSoftmax
from warploom.lang import Fragment, Kernel, Traced
from warploom.layout.fragments import FragmentLayout


class SharedSoftmax(OnlineSoftmax):
    """Row statistics live in the lane that owns the row; lanes from the number of a warp's rows on own none."""

    def __init__(
        self,
        k: Kernel,
        config: AttentionConfig,
        features: AttentionFeatures,
        scores: FragmentLayout,
        output: Fragment,
    ) -> None:
        super().__init__(k, config, features, scores, output)
        self._tile_n, self._rows = config.tile_n, config.warp_rows
        self._tile = k.shared(f32, (config.tile_m, config.tile_n), name="score_tile")
        self._per_row = k.shared(f32, config.tile_m, name="row_factors")
        self._first_row = k.warp * config.warp_rows
        self._own_max = k.register(f32, self._lowest, "own_max")
        self._own_sum = k.register(f32, 0.0, "own_sum")

    def probabilities(self, scores: Fragment, first: bool) -> Fragment:
        """P = exp(S - m) of one block, by way of shared memory; O is rescaled on the way."""
        k = self._k
        places = [scores.layout.coordinates(k.lane, e) for e in range(scores.layout.elements_per_thread)]
        for (row, col), value in zip(places, scores.registers, strict=True):
            self._tile.store(value, row + self._first_row, col)
        k.syncthreads()
        with k.when(k.lane < self._rows):
            self._walk_row()
        k.syncthreads()
        for group, elements in enumerate(self._output_rows):
            factor = self._row_value(group)
            for element in elements:
                self._output.scale(element, factor)
        # The next block's scores are stored after the barrier for V, when every lane has its probabilities.
        values = [self._tile.load(row + self._first_row, col)[0] for row, col in places]
        return k.fragment(scores.layout, f32, values)

    def _walk_row(self) -> None:
        """One lane, one row: maximum, exponentials in place, sum, and the factor for O."""
        k = self._k
        row = self._first_row + k.lane
        top = k.register(f32, self._own_max, "row_top")
        with k.loop(self._tile_n) as col:
            top.set(k.maximum(top, self._tile.load(row, col)[0]))
        shift, factor = self._shift(top.get()), self._factor(self._own_max.get(), top.get())
        self._own_max.set(top)
        self._own_sum *= factor
        with k.loop(self._tile_n) as col:
            p = self._exponential(self._tile.load(row, col)[0], shift)
            self._own_sum += p
            self._tile.store(p, row, col)
        self._per_row.store(factor, 0, row)

    def _row_value(self, group: int) -> Traced:
        """What the owner of a fragment's row has left for it."""
        return self._per_row.load(0, self._first_row + self._plan.result_coordinate(group, self._k.lane))[0]

    def normalise(self, statistics: tuple[list[Traced], list[Traced]] | None = None) -> list[Traced]:
        """Divide O by the row sums, which go through shared memory as well."""
        k = self._k
        with k.when(k.lane < self._rows):
            total = k.select(self._is_far(self._own_max.get()), k.value(math.nan, f32), self._own_sum.get())
            self._per_row.store(total, 0, self._first_row + k.lane)
        k.syncthreads()
        for group, elements in enumerate(self._output_rows):
            total = self._row_value(group)
            inverse = k.select(total == 0.0, k.value(0.0, f32), k.reciprocal(total))
            for element in elements:
                self._output.scale(element, inverse)
        return []
