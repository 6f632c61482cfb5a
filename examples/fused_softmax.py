"""Algorithm 4: attention over one 16×16 tile, its softmax in registers alone. Check it: warploom check fused_softmax.py

A warp walks over blocks of 16 keys: S = Q·Kᵀ, row maxima and sums by in-register reductions, P as the operand of P·V
without moving data between lanes. The paper divides by the running sum in every tile, with the members of each quad in
the shuffles' masks; FlashAttention divides once, at the end.
"""

# pyright: reportInvalidTypeForm=false
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Launch, Traced, bf16, f32, kernel, u16, u32
from warploom.lang.values import Number
from warploom.layout.catalogue import movmatrix_fragment
from warploom.layout.reduction import FULL_MASK, reduction_plan
from warploom_lab.kernels.reduce.tile import PRODUCT, TILE, A, B, load_operand

BLOCKS = 4
LOG2_E = math.log2(math.e)
SCALE = 1.0 / math.sqrt(TILE)


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
    in_every_tile: bool = False,
    quad_masks: bool = False,
    dtype: Any = bf16,
) -> None:
    """O = softmax(Q·Kᵀ/4)·V of one 16×16 query tile and ``blocks`` blocks of 16 keys; one warp.

    ``q`` (16, 16), ``keys`` and ``values`` (16·blocks, 16) of ``dtype``, row-major; ``out`` f32 (16, 16), ``maxima``
    and ``sums`` f32 (16): of each row, the largest scaled score and Σ exp(score - maximum).
    """
    state = RunningSoftmax(k, in_every_tile, quad_masks)
    query = load_operand(k, q, A)
    with k.loop(blocks) as block:
        start = block * (TILE * TILE)
        scores: list[Traced] = []
        for n in range(2):
            right = load_operand(k, keys + start + 128 * n, B.transposed())
            scores += k.mma(query, right, [0.0] * 4, inputs=dtype)
        p = state.probabilities(k.fragment(PRODUCT, f32, [x * SCALE for x in scores])).as_operand(A, dtype)
        for n in range(2):
            right = eight_columns(k, values + start, 8 * n)
            k.mma(p.registers, right, state.output.atom(0, n), inputs=dtype, into=state.output.mutable_atom(0, n))
    state.finish(out, maxima, sums)


def eight_columns(k: Kernel, values: GlobalPointer, col: int) -> list[Traced]:
    """Eight columns of V as a B operand: two 8×8 blocks as they lie in memory, transposed across the warp."""
    row, first = movmatrix_fragment().coordinates(k.lane, 0)
    pairs = [(values + ((row + 8 * half) * TILE + first + col)).load(0, dtype=u32) for half in range(2)]
    return [k.movmatrix(pair) for pair in pairs]


class RunningSoftmax:
    """Row maxima m, sums l and the output O, all in registers; every lane of a quad has its rows' m and l."""

    def __init__(self, k: Kernel, in_every_tile: bool, quad_masks: bool) -> None:
        self._k, self._in_every_tile = k, in_every_tile
        self._plan = reduction_plan(PRODUCT, "col")
        self._mask: Number = k.value(self._plan.member_pattern, u32) << (k.lane & 28) if quad_masks else FULL_MASK
        self._max = k.registers(f32, 2, -math.inf, "row_max")
        self._sum = k.registers(f32, 2, 0.0, "row_sum")
        self.output = k.accumulator(PRODUCT, 0.0, "o")

    def probabilities(self, scores: Fragment) -> Fragment:
        """P of one block of scaled scores, with m, l and O brought up to date (steps 2 to 6 of Algorithm 4)."""
        k = self._k
        tops = [k.maximum(old, top) for old, top in zip(self._max, self._reduced("max", scores), strict=True)]
        decay = [k.exp2((old - top) * LOG2_E) for old, top in zip(self._max, tops, strict=True)]
        values: list[Traced] = list(scores.registers)
        for row, elements in enumerate(self._plan.groups):
            for element in elements:
                values[element] = k.exp2((values[element] - tops[row]) * LOG2_E)
        totals = self._reduced("add", k.fragment(PRODUCT, f32, values))
        for row, (elements, total) in enumerate(zip(self._plan.groups, totals, strict=True)):
            kept = self._sum[row] * decay[row]
            self._max[row].set(tops[row])
            self._sum[row].set(kept + total)
            factor = decay[row]
            if self._in_every_tile:
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
        for row, elements in enumerate(() if self._in_every_tile else self._plan.groups):
            inverse = k.reciprocal(self._sum[row].get())
            for element in elements:
                self.output.scale(element, inverse)
        self.output.store_global(out, TILE)
        with k.when((k.lane & 3) == 0):
            for row in range(2):
                at = self._plan.result_coordinate(row, k.lane)
                maxima.store(self._max[row].get(), at)
                sums.store(self._sum[row].get(), at)


@kernel(threads=32)
def as_the_paper_has_it(
    k: Kernel,
    q: Global[u16],
    keys: Global[u16],
    values: Global[u16],
    out: Global[f32],
    maxima: Global[f32],
    sums: Global[f32],
    blocks: u32,
) -> None:
    softmax_tile.function(k, q, keys, values, out, maxima, sums, blocks, in_every_tile=True, quad_masks=True)


@dataclass(frozen=True)
class Expected:
    """What a kernel must give, in float64: row maxima and sums of the scores, and the output."""

    maxima: Any
    sums: Any
    out: Any

    @classmethod
    def of(cls, q: Any, keys: Any, values: Any) -> "Expected":
        q64, k64, v64 = (np.asarray(x).astype(np.float64) for x in (q, keys, values))
        scores = q64 @ k64.T * SCALE
        top = scores.max(axis=-1)
        p = np.exp(scores - top[:, None])
        return cls(top, p.sum(axis=-1), p @ v64 / p.sum(axis=-1, keepdims=True))


@softmax_tile.example
@as_the_paper_has_it.example
def random_tiles(rng: np.random.Generator) -> Launch:
    q, keys, values = (rng.standard_normal((n, 16)).astype(bf16.numpy) for n in (16, 16 * BLOCKS, 16 * BLOCKS))
    results = [np.full(shape, np.nan, np.float32) for shape in ((16, 16), (16,), (16,))]
    right = Expected.of(q, keys, values)
    rounding = 1.25 * 2.0**-9 * float(np.abs(values.astype(np.float64)).max())  # of P to bf16, then sums in f32
    expect = {"out": (right.out, rounding), "maxima": (right.maxima, 1e-5), "sums": (right.sums, 1e-4)}
    return Launch(1, [*(x.view(np.uint16) for x in (q, keys, values)), *results, BLOCKS], expect)
