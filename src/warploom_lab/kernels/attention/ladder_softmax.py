"""The softmax of the ladder's kernels: in registers, or by a round trip through shared memory (rung 0).

The production kernels' is :mod:`warploom.tile.softmax`; this one has the rungs' flags, and rescales O in every block.
"""

from __future__ import annotations

from warploom.core.dtypes import f32
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Fragment, Kernel, Traced
from warploom.layout.fragments import FragmentLayout
from warploom.layout.reduction import reduction_plan
from warploom.tile.softmax import LOG2_E, Exponents, inverse_or_zero
from warploom_lab.kernels.attention.ladder_config import RungSm80


class RungSoftmax:
    """Row statistics of one warp's query rows: the maximum m (in units of S) and each lane's part of the sum l."""

    def __init__(
        self, k: Kernel, config: RungSm80, features: AttentionFeatures, scores: FragmentLayout, output: Fragment
    ) -> None:
        self._k, self._config, self._output = k, config, output
        self._plan = reduction_plan(scores, "col")
        self._output_rows = reduction_plan(output.layout, "col").groups
        self._scale = features.softmax_scale(config.head_dim)
        self._exponents = Exponents(self._scale * LOG2_E if self._folds else LOG2_E, config.dtype)
        rows = len(self._plan.groups)
        self._max = k.registers(f32, rows, None if config.peel else self._exponents.lowest, "row_max")
        self._sum = k.registers(f32, rows, None if config.peel else 0.0, "row_sum")

    @property
    def _folds(self) -> bool:
        """Whether the maxima are those of unscaled scores."""
        return self._config.folded_scale and self._scale > 0

    def scaled(self, scores: Fragment) -> Fragment:
        """Scores as the softmax takes them: scaled, unless the scale is folded into the exponential."""
        return scores if self._folds else scores.map(lambda x: x * self._scale)

    def probabilities(self, scores: Fragment, first: bool) -> Fragment:
        """P = exp(S - m) of one block of scaled scores, with m, l and O updated. ``first``: nothing to rescale."""
        for row, top in enumerate(scores.reduce("max", "col")):
            if first:
                self._max[row].set(self._k.maximum(top, self._exponents.lowest))
            else:
                self._raise(row, self._k.maximum(self._max[row], top))
        return self._exponentials(scores, first)

    def _raise(self, row: int, top: Traced) -> None:
        """Bring a row's l and O from its old maximum to the new one."""
        factor = self._factor(self._max[row].get(), top)
        self._max[row].set(top)
        self._sum[row] *= factor
        for element in self._output_rows[row]:
            self._output.scale(element, factor)

    def _shift(self, maximum: Traced) -> Traced:
        """Return the row maximum and headroom as a term of a score's exponent: see :meth:`_exponential`."""
        if self._config.folded_scale:
            return self._exponents.shift(self._k, maximum)
        headroom = self._exponents.headroom
        return maximum + headroom / LOG2_E if headroom else maximum

    def _exponential(self, score: Traced, shift: Traced) -> Traced:
        """exp of a score with its row's shift: in one FMA, or as it is written."""
        k = self._k
        if self._config.folded_scale:
            return k.exp2(k.fma(score, self._exponents.c, shift))
        return k.exp2((score - shift) * LOG2_E)

    def _factor(self, before: Traced, after: Traced) -> Traced:
        """Return the factor of a row's l and O when its maximum changes."""
        if self._config.folded_scale:
            return self._exponents.factor(self._k, before, after)
        return self._k.exp2((before - after) * LOG2_E)

    def _exponentials(self, scores: Fragment, first: bool) -> Fragment:
        """P, and each lane's part of its row sums."""
        k = self._k
        values: list[Traced] = list(scores.registers)
        for row, elements in enumerate(self._plan.groups):
            shift = self._shift(self._max[row].get())
            total: Traced | None = None if first else self._sum[row].get()
            for element in elements:
                p = values[element] = self._exponential(values[element], shift)
                total = p if total is None else total + p
            assert total is not None
            self._sum[row].set(total)
        return k.fragment(scores.layout, f32, values)

    def normalise(self) -> None:
        """Divide O by the row sums, completed over the lanes of each row: by their reciprocals, one division a row."""
        k = self._k
        for row, elements in enumerate(self._output_rows):
            total = self._sum[row].get()
            for mask in self._plan.lane_masks:
                total = total + k.shfl_xor(total, mask)
            inverse = inverse_or_zero(k, self._exponents.judged(k, self._max[row].get(), total))
            for element in elements:
                self._output.scale(element, inverse)


class SharedSoftmax(RungSoftmax):
    """Softmax through shared memory: the baseline of the in-register paper's section 4.

    Every warp stores its scores, one lane per row walks the row for the maximum, the exponentials and their sum, and
    the warp loads the probabilities back into fragments. Row statistics live in the lane that owns the row.
    """

    def __init__(
        self, k: Kernel, config: RungSm80, features: AttentionFeatures, scores: FragmentLayout, output: Fragment
    ) -> None:
        super().__init__(k, config, features, scores, output)
        self._tile_n, self._rows = config.tile_n, config.warp_rows
        self._tile = k.shared(f32, (config.tile_m, config.tile_n), name="score_tile")
        self._per_row = k.shared(f32, config.tile_m, name="row_factors")
        self._first_row = k.warp * config.warp_rows
        self._own_max = k.register(f32, self._exponents.lowest, "own_max")
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
        values = [self._tile.load(row + self._first_row, col) for row, col in places]
        return k.fragment(scores.layout, f32, values)

    def _walk_row(self) -> None:
        """One lane, one row: maximum, exponentials in place, sum, and the factor for O."""
        k = self._k
        row = self._first_row + k.lane
        top = k.register(f32, self._own_max, "row_top")
        with k.loop(self._tile_n) as col:
            top.set(k.maximum(top, self._tile.load(row, col)))
        shift, factor = self._shift(top.get()), self._factor(self._own_max.get(), top.get())
        self._own_max.set(top)
        self._own_sum *= factor
        with k.loop(self._tile_n) as col:
            p = self._exponential(self._tile.load(row, col), shift)
            self._own_sum += p
            self._tile.store(p, row, col)
        self._per_row.store(factor, 0, row)

    def _row_value(self, group: int) -> Traced:
        """Load the value that the owner of a fragment's row has stored for it."""
        return self._per_row.load(0, self._first_row + self._plan.result_coordinate(group, self._k.lane))

    def normalise(self) -> None:
        """Divide O by the row sums, which go through shared memory as well."""
        k = self._k
        with k.when(k.lane < self._rows):
            total = self._exponents.judged(k, self._own_max.get(), self._own_sum.get())
            self._per_row.store(inverse_or_zero(k, total), 0, self._first_row + k.lane)
        k.syncthreads()
        for group, elements in enumerate(self._output_rows):
            inverse = self._row_value(group)
            for element in elements:
                self._output.scale(element, inverse)
