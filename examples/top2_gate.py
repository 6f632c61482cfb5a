"""The top-2 gate of a mixture of experts, one warp a token. Check it: warploom check top2_gate.py"""

import math

import numpy as np

from warploom.lang import Global, Kernel, Launch, Traced, f32, kernel, u32

WARPS = 4


@kernel(threads=32 * WARPS, outputs=["weights", "experts"])
def top2(
    k: Kernel, logits: Global[f32], weights: Global[f32], experts: Global[u32], tokens: u32, *, count: int = 64
) -> None:
    """The two largest of ``count`` logits of each token, the first of equal ones, and their softmax."""
    token = k.cta_x * WARPS + k.warp
    with k.when(token < tokens):
        best, second = k.registers(f32, 2, -math.inf)
        at, next_at = k.registers(u32, 2, 0)

        def offer(x: Traced, i: Traced) -> None:
            first = (x > best) | ((x == best) & (i < at))
            other = (x > second) | ((x == second) & (i < next_at))
            second.set(k.select(first, best, k.select(other, x, second)))
            next_at.set(k.select(first, at, k.select(other, i, next_at)))
            best.set(k.select(first, x, best))
            at.set(k.select(first, i, at))

        for expert in range(0, count, 32):
            offer(logits.load(token * count + (k.lane + expert)), k.lane + expert)
        for step in (16, 8, 4, 2, 1):  # exchange the two with the lane that differs in this bit
            theirs, their_at, their_second, their_next = (k.shfl_xor(x, step) for x in (best, at, second, next_at))
            offer(theirs, their_at)
            offer(their_second, their_next)
        share = k.exp2((second - best) * math.log2(math.e))
        with k.when(k.lane == 0):
            weights.store([1.0 / (share + 1.0), share / (share + 1.0)], token * 2)
            experts.store([at, next_at], token * 2)


@top2.example
def random_logits(rng: np.random.Generator, count: int = 64) -> Launch:
    tokens = 7
    x = rng.standard_normal((tokens, count)).astype(np.float32)
    order = np.argsort(-x, axis=1, kind="stable")[:, :2]
    share = np.exp(np.take_along_axis(x, order, 1).astype(np.float64))
    share /= share.sum(1, keepdims=True)
    arguments = [x, np.full((tokens, 2), np.nan, np.float32), np.full((tokens, 2), count, np.uint32), tokens]
    return Launch(-(-tokens // WARPS), arguments, {"weights": (share, 1e-5), "experts": (order, 0)})
