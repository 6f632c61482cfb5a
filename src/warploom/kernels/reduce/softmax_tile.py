# pyright: reportInvalidTypeForm=false
"""Algorithm 4: the softmax of a 16×16 tile with running statistics, on the accumulator fragment alone.

A warp walks over blocks of 16 keys: S = Q·Kᵀ, row maxima and sums by in-register reductions, P as the operand of P·V
without moving data between lanes. Head dimension 16, so that everything else is as small as it can be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from warploom.core.dtypes import DType, bf16, f16, f32, u16, u32
from warploom.core.errors import ConfigError
from warploom.kernels.reduce.tile import PRODUCT, TILE, A, B, load_operand
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Mutable, Traced, kernel
from warploom.lang.values import Number
from warploom.layout.catalogue import movmatrix_fragment
from warploom.layout.reduction import FULL_MASK, reduction_plan

LOG2_E = math.log2(math.e)
SCALE = 1.0 / math.sqrt(TILE)


@dataclass(frozen=True)
class SoftmaxTileConfig:
    """``normalise``: "tile" divides P by the running sum in every tile, as the paper has it; "end" divides O once.

    ``member_mask``: lanes that a shuffle names, the whole warp or the quad that holds a row.
    """

    normalise: Literal["tile", "end"] = "end"
    member_mask: Literal["full", "quad"] = "full"
    dtype: DType = bf16

    def require(self) -> None:
        """Raise ConfigError for what is no kernel."""
        wrong = self.normalise not in ("tile", "end") or self.member_mask not in ("full", "quad")
        if wrong or self.dtype not in (bf16, f16):
            raise ConfigError(f"{self}: normalise is tile or end, member_mask full or quad, dtype bf16 or f16")


@kernel(threads=32)
def softmax_tile(
    k: Kernel,
    q: Global[u16],
    keys: Global[u16],
    values: Global[u16],
    out: Global[f32],
    maxima: Global[f32],
    sums: Global[f32],
    blocks: u32,
    *,
    config: SoftmaxTileConfig,
) -> None:
    """O = softmax(Q·Kᵀ/4)·V of one 16×16 query tile and ``blocks`` blocks of 16 keys; one warp.

    ``q`` (16, 16), ``keys`` and ``values`` (16·blocks, 16) of 16 bits, row-major; ``out`` f32 (16, 16), ``maxima`` and
    ``sums`` f32 (16): of each row, the largest scaled score and Σ exp(score - maximum).
    """
    config.require()
    state = RunningSoftmax(k, config)
    query = load_operand(k, q, A)
    with k.loop(blocks) as block:
        start = block * (TILE * TILE)
        scores = _scores(k, config, query, keys + start)
        p = state.probabilities(scores).as_operand(A, config.dtype)
        for n in range(2):
            right = _values(k, values + start, 8 * n)
            k.mma(
                p.registers, right, state.output.atom(0, n), inputs=config.dtype, into=state.output.mutable_atom(0, n)
            )
    state.finish(out, maxima, sums)


def _scores(k: Kernel, config: SoftmaxTileConfig, query: list[Traced], keys: GlobalPointer) -> Fragment:
    """S = Q·Kᵀ, scaled."""
    registers: list[Traced] = []
    for n in range(2):
        right = load_operand(k, keys + 128 * n, B.transposed())
        registers += k.mma(query, right, [0.0] * 4, inputs=config.dtype)
    return k.fragment(PRODUCT, f32, registers).map(lambda x: x * SCALE)


def _values(k: Kernel, values: GlobalPointer, col: int) -> list[Traced]:
    """Eight columns of V as a B operand: two 8×8 blocks as they lie in memory, transposed across the warp."""
    row, first = movmatrix_fragment().coordinates(k.lane, 0)
    found: list[Traced] = []
    for half in range(2):
        pair = (values + ((row + 8 * half) * TILE + first + col)).load(0, dtype=u32)
        found.append(k.movmatrix(pair))
    return found


class RunningSoftmax:
    """Row maxima m, sums l and the output O, all in registers; every lane of a quad has its rows' m and l."""

    def __init__(self, k: Kernel, config: SoftmaxTileConfig) -> None:
        self._k, self._config = k, config
        self._plan = reduction_plan(PRODUCT, "col")
        self._max = k.registers(f32, 2, -math.inf, "row_max")
        self._sum = k.registers(f32, 2, 0.0, "row_sum")
        self.output = k.accumulator(PRODUCT, 0.0, "o")

    @property
    def _mask(self) -> Number:
        if self._config.member_mask == "full":
            return FULL_MASK
        return self._k.value(self._plan.member_pattern, u32) << (self._k.lane & 28)

    def probabilities(self, scores: Fragment) -> Fragment:
        """P of one block of scaled scores, with m, l and O brought up to date (steps 2 to 6 of Algorithm 4)."""
        k = self._k
        tops = [k.maximum(old, top) for old, top in zip(self._max, self._reduced("max", scores), strict=True)]
        decay = [k.exp2((old - top) * LOG2_E) for old, top in zip(self._max, tops, strict=True)]
        values: list[Traced] = list(scores.registers)
        for row, elements in enumerate(self._plan.groups):
            for element in elements:
                values[element] = k.exp2((values[element] - tops[row]) * LOG2_E)
        p = k.fragment(PRODUCT, f32, values)
        totals = self._reduced("add", p)
        for row, (elements, total) in enumerate(zip(self._plan.groups, totals, strict=True)):
            kept = self._sum[row] * decay[row]
            self._max[row].set(tops[row])
            self._sum[row].set(kept + total)
            factor = decay[row]
            if self._config.normalise == "tile":
                inverse = k.reciprocal(self._sum[row].get())
                factor = kept * inverse  # O was divided by the old sum
                for element in elements:
                    values[element] = values[element] * inverse
            for element in elements:
                self.output.scale(element, factor)
        return k.fragment(PRODUCT, f32, values)

    def _reduced(self, op: Literal["max", "add"], fragment: Fragment) -> list[Traced]:
        return fragment.reduce(op, "col", member_mask=self._mask)

    def finish(self, out: GlobalPointer, maxima: GlobalPointer, sums: GlobalPointer) -> None:
        """O, divided if it was not yet, through the forward map (Algorithm 2), and the statistics."""
        k = self._k
        if self._config.normalise == "end":
            for row, elements in enumerate(self._plan.groups):
                inverse = k.reciprocal(self._sum[row].get())
                for element in elements:
                    self.output.scale(element, inverse)
        self.output.store_global(out, TILE)
        with k.when((k.lane & 3) == 0):
            for row in range(2):
                at = self._plan.result_coordinate(row, k.lane)
                maxima.store(_now(self._max[row]), at)
                sums.store(_now(self._sum[row]), at)


def _now(register: Mutable) -> Traced:
    return register.get()
