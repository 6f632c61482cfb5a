"""The online softmax on accumulator fragments: running maxima, sums and the rescaling of the output."""

from __future__ import annotations

import math

from warploom.core.dtypes import f32
from warploom.kernels.attention.config import AttentionConfig
from warploom.lang import Fragment, Kernel, Traced
from warploom.layout.fragments import FragmentLayout
from warploom.layout.reduction import reduction_plan

LOG2_E = math.log2(math.e)
LAZY_GROWTH = 8.0
"""Powers of two that a row's maximum may grow before O is rescaled; exact, since P and O keep one common factor."""


class OnlineSoftmax:
    """Row statistics of one warp's query rows: the maximum m (in units of S) and each lane's part of the sum l."""

    def __init__(self, k: Kernel, config: AttentionConfig, scores: FragmentLayout, output: Fragment) -> None:
        self._k, self._config, self._output = k, config, output
        self._plan = reduction_plan(scores, "col")
        self._output_rows = reduction_plan(output.layout, "col").groups
        self._scale = 1.0 / math.sqrt(config.head_dim)
        start = None if config.peel else -math.inf
        rows = len(self._plan.groups)
        self._max = k.registers(f32, rows, start, "row_max")
        self._sum = k.registers(f32, rows, None if config.peel else 0.0, "row_sum")

    @property
    def _to_log2(self) -> float:
        """What a difference of the kept maxima is multiplied by to be an exponent of 2."""
        return self._scale * LOG2_E if self._config.folded_scale else LOG2_E

    def probabilities(self, scores: Fragment, first: bool) -> Fragment:
        """P = exp(scale · (S - m)) of one block in f32, with m, l and O updated. ``first``: nothing to rescale yet."""
        if not self._config.folded_scale:
            scores = scores.map(lambda x: x * self._scale)
        block_max = scores.reduce("max", "col")
        if first:
            for kept, top in zip(self._max, block_max, strict=True):
                kept.set(top)
        elif self._config.lazy_rescale:
            self._rescale_lazily(block_max)
        else:
            self._rescale([self._k.maximum(kept, top) for kept, top in zip(self._max, block_max, strict=True)])
        return self._exponentials(scores, first)

    def _rescale(self, new_max: list[Traced]) -> None:
        """Bring l and O from the old maxima to the new ones."""
        k = self._k
        for row, top in enumerate(new_max):
            factor = k.exp2((self._max[row] - top) * self._to_log2)
            self._max[row].set(top)
            self._sum[row] *= factor
            for element in self._output_rows[row]:
                self._output.scale(element, factor)

    def _rescale_lazily(self, block_max: list[Traced]) -> None:
        """Rescale only when some row of the warp outgrew its kept maximum; else P stays below 2^LAZY_GROWTH."""
        k = self._k
        outgrown: Traced | None = None
        for kept, top in zip(self._max, block_max, strict=True):
            grew = (top - kept) * self._to_log2 > LAZY_GROWTH
            outgrown = grew if outgrown is None else outgrown | grew
        assert outgrown is not None
        with k.when(k.vote_any(outgrown), uniform=True):
            self._rescale([k.maximum(kept, top) for kept, top in zip(self._max, block_max, strict=True)])

    def _exponentials(self, scores: Fragment, first: bool) -> Fragment:
        """P, and each lane's part of its row sums."""
        k = self._k
        values: list[Traced] = list(scores.registers)
        for row, elements in enumerate(self._plan.groups):
            shift = self._max[row] * -self._to_log2 if self._config.folded_scale else self._max[row].get()
            total: Traced | None = None if first else self._sum[row].get()
            for element in elements:
                x = values[element]
                exponent = k.fma(x, self._to_log2, shift) if self._config.folded_scale else (x - shift) * LOG2_E
                p = values[element] = k.exp2(exponent)
                total = p if total is None else total + p
            assert total is not None
            self._sum[row].set(total)
        return k.fragment(scores.layout, f32, values)

    def normalise(self) -> None:
        """O divided by the row sums, which are completed over the lanes of each row."""
        k = self._k
        for row, elements in enumerate(self._output_rows):
            total = self._sum[row].get()
            for mask in self._plan.lane_masks:
                total = total + k.shfl_xor(total, mask)
            inverse = k.reciprocal(total)
            for element in elements:
                self._output.scale(element, inverse)
