# pyright: reportInvalidTypeForm=false
"""``mma.sync`` alone, and with what feeds it: what any kernel of such warp tiles can reach."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DType, f16, f32
from warploom.lang import Fragment, Global, Kernel, Traced, kernel, u16, u32
from warploom.layout.catalogue import mma_fragment

SHAPE = "m16n8k16"
A, B, C = (mma_fragment(SHAPE, operand) for operand in "ABC")
STEPS = 8
DEPTH = 16 * STEPS
"""Columns of the tile: of the second half A is the negative of the first, so that the sums stay bounded."""
HELD = (0, STEPS // 2)
"""Steps whose fragments stay in registers where nothing is loaded."""
STAGES, STEPS_PER_STAGE = 4, 2
COPIED_COLS = 64
"""A stage holds rows of so many elements: what eight lanes copy."""
CHUNK = 8
"""Elements that one lane copies at a time, 16 bytes."""


@dataclass(frozen=True)
class Feeds:
    """What runs beside ``mma.sync``, as in a product's main loop.

    ``loads``: fragments come by ``ldmatrix`` in every step; else two steps' fragments are held. ``copies``: 16 bytes by
    ``cp.async`` so many times per thread and step, in four stages of two steps; nothing reads them. ``barriers``: the
    CTA meets after every two steps.
    """

    loads: bool = False
    copies: int = 0
    barriers: bool = False


def copied(warps: int = 8, copies: int = 0) -> int:
    """Elements of ``source`` that each CTA copies in a round."""
    return STAGES * STEPS_PER_STAGE * copies * 32 * warps * CHUNK


@kernel(threads=lambda warps=8, **_: 32 * warps)
def mma_rate(
    k: Kernel,
    words: Global[u16],
    source: Global[u16],
    out: Global[f32],
    rounds: u32,
    *,
    warps: int = 8,
    warp_m: int = 64,
    warp_n: int = 64,
    accumulate: DType = f32,
    feeds: Feeds = Feeds(),
) -> None:
    """``rounds`` times :data:`STEPS` outer products of warp_m × warp_n × 16 in every warp.

    ``words``: A (warp_m, DEPTH), then the transpose of B (warp_n, DEPTH). ``source``: :func:`copied` elements for each
    CTA. ``out``: per thread the sum of its elements of C.
    """
    rows = warp_m + warp_n
    tile = k.shared(f16, (rows, DEPTH), swizzle="auto")
    stages = _Stages(k, source, warps, feeds.copies) if feeds.copies else None
    chunks = rows * DEPTH // CHUNK
    for first in range(0, chunks, 32 * warps):
        chunk = k.thread + first
        target = tile.address(chunk // (DEPTH // CHUNK), chunk % (DEPTH // CHUNK) * CHUNK)
        k.cp_async(target, words + chunk * CHUNK, 16)
    k.commit_group()
    k.wait_group(0)
    k.syncthreads()
    readers = k.reader(tile, A), k.reader(tile, B.tile(1, 2).transposed())

    def fragments(step: int) -> tuple[list[tuple[Traced, ...]], list[tuple[Traced, ...]]]:
        pairs = [readers[1].load(warp_m + col, 16 * step) for col in range(0, warp_n, 16)]
        operands = [half for pair in pairs for half in (pair[:2], pair[2:])]
        return [readers[0].load(row, 16 * step) for row in range(0, warp_m, 16)], operands

    layout = C if accumulate is f32 else replace(C, element_bits=16)
    total = k.accumulator(layout.tile(warp_m // 16, warp_n // 8), 0.0, "c")
    held = {step: fragments(step) for step in HELD} if not feeds.loads else {}
    with k.loop(rounds):
        for step in range(STEPS):
            a, b = fragments(step) if feeds.loads else held[HELD[step % 2]]
            _outer_product(k, total, a, b, accumulate)
            if stages is not None:
                stages.copy(step)
            if feeds.barriers and step % STEPS_PER_STAGE == STEPS_PER_STAGE - 1:
                k.syncthreads()
    k.wait_group(0)
    values = [r.get() for r in total.registers]  # type: ignore[union-attr]
    if accumulate is f16:
        values = [half for word in values for half in k.unpack(word, f16)]
    whole = values[0]
    for value in values[1:]:
        whole = whole + value
    out.store(whole, k.cta_x * (32 * warps) + k.thread)


class _Stages:
    """Four stages of shared memory that each thread fills in turn, its own part of each."""

    def __init__(self, k: Kernel, source: Global, warps: int, copies: int) -> None:
        lanes, row_bytes = COPIED_COLS // CHUNK, COPIED_COLS * f16.bytes
        rows = 32 * warps // lanes  # of one copy: whole periods of the swizzle, so that others are a constant away
        tile = k.shared(f16, (STAGES * STEPS_PER_STAGE * copies * rows, COPIED_COLS), swizzle="auto")
        self._k, self._copies, self._bytes = k, copies, rows * row_bytes
        self._target = tile.address(k.thread // lanes, k.thread % lanes * CHUNK)
        self._source = source + k.cta_x * copied(warps, copies) + k.thread * CHUNK

    def copy(self, step: int) -> None:
        """This thread's part of a step; after a stage's last, two stages may still be on their way."""
        for index in range(step * self._copies, (step + 1) * self._copies):
            at = index * self._bytes
            self._k.cp_async(self._target + at, self._source.bytes(at), 16)
        if step % STEPS_PER_STAGE == STEPS_PER_STAGE - 1:
            self._k.commit_group()
            self._k.wait_group(2)


def _outer_product(k: Kernel, total: Fragment, a: list, b: list, accumulate: DType) -> None:
    for i, rows in enumerate(a):
        for j, cols in enumerate(b):
            target = total.mutable_atom(i, j)
            k.mma(rows, cols, target, inputs=f16, accumulate=accumulate, shape=SHAPE, into=target)


def inputs(rng: np.random.Generator, warp_m: int = 64, warp_n: int = 64) -> NDArray[np.float16]:
    """A and the transpose of B, one after the other: normal numbers."""
    a, b = (rng.standard_normal((rows, DEPTH // 2)).astype(np.float16) for rows in (warp_m, warp_n))
    return np.concatenate([np.hstack([a, -a]), np.hstack([b, b])])


def flops(warps: int, warp_m: int = 64, warp_n: int = 64) -> int:
    """Of one round of one CTA."""
    return 2 * warps * warp_m * warp_n * DEPTH
