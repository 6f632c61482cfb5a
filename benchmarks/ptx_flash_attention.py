"""FlashAttention-4's forward kernel for sm_90a, compiled by CuTe DSL without a GPU, under all checks of the emulator.

    PYTHONPATH=src:. python benchmarks/ptx_flash_attention.py [--mutants] [--out DIR]

Needs Python 3.12 or newer and ``pip install flash-attn-4`` (which brings CuTe DSL and PyTorch), but no GPU. For head
dimensions 64 and 128, full and causal, in the emulator's own order and an adversarial one: the error to attention in
float64 relative to bf16's rounding, findings, processor seconds. (The scheduler of causal tiles does not compile with
CuTe DSL 4.8; FlashAttention-4's plain one takes its place, which takes the tiles in another order.) With
``--mutants`` also every change of one line of the kernel for 64 that ``tests.ptx.mutants`` knows, after one thread
has been elected for the copy of the output; found is what the kernel itself does not show. Exit status 1 where a
result is wrong.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cute_dsl as dsl
import ml_dtypes
import numpy as np
from cute_dsl import Row

SEQUENCE, HEADS, TILE = 512, 2, 128
"""One batch."""


def compiled(head_dim: int, causal: bool = False) -> str:
    """The PTX of FlashAttention-4's kernel for (1, SEQUENCE, HEADS, head_dim)."""
    cutlass = dsl.cutlass()
    module: Any = importlib.import_module("flash_attn.cute.flash_fwd_sm90")
    module.SingleTileLPTScheduler = module.SingleTileScheduler
    forward = module.FlashAttentionForwardSm90(
        cutlass.BFloat16,
        head_dim,
        head_dim,
        1,
        is_causal=causal,
        is_local=False,
        pack_gqa=False,
        tile_m=TILE,
        tile_n=TILE,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
    )
    arrays = [dsl.fake(cutlass.BFloat16, 1, SEQUENCE, HEADS, head_dim) for _ in range(4)]
    lse = dsl.fake(cutlass.Float32, 1, HEADS, SEQUENCE)
    return dsl.compiled(forward, *arrays, lse, cutlass.Float32(head_dim**-0.5), stream=dsl.stream())


def checked(ptx: str, head_dim: int, seed: int | None, causal: bool = False) -> tuple[list[Any], Row]:
    """One run: what it found, and a row of error, findings, seconds."""
    rng = np.random.default_rng(0)
    shape = (1, SEQUENCE, HEADS, head_dim)
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(3))
    out, lse = np.full(shape, np.nan, ml_dtypes.bfloat16), np.full((HEADS, SEQUENCE), np.nan, np.float32)
    scale = head_dim**-0.5
    unused = [[np.uint8(0)], [np.uint8(0)], [np.int32(0)] * 3]  # absent windows, and divisors of absent features
    maps = [dsl.heads_map(x, TILE) for x in (q, k, v, out)]
    given = [[lse], *maps, np.float32(scale * np.log2(np.e)), *unused, HEADS]
    found, row = dsl.checked(ptx, (SEQUENCE // TILE, HEADS, 1), given, "flash_fwd_sm90.ptx", seed=seed)
    exact = [dsl.by_heads(x) for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(0, 2, 1) * scale
    if causal:
        scores = np.where(np.tri(SEQUENCE, dtype=bool), scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = powers / powers.sum(-1, keepdims=True) @ exact[2]
    far = float(np.nan_to_num(np.abs(lse - np.log(powers.sum(-1)) - scores.max(-1)).max(), nan=np.inf))
    errors = {"error": dsl.error_of(dsl.by_heads(out), wanted), "log-sum-exp error": far}
    return found, {"head_dim": head_dim, "causal": causal, "seed": seed, **errors, **row}


def right(row: Row) -> bool:
    """Whether the result of a run is attention's, within bf16's rounding."""
    return row["error"] <= 2 and row["log-sum-exp error"] < 1e-3


def tried() -> list[Row]:
    """What became of each mutant of the kernel for 64."""
    tools: Any = importlib.import_module("tests.ptx.mutants")
    elected = r"{ .reg .pred one; elect.sync _|one, -1; @one \1 }"
    text = re.sub(r"(cp\.async\.bulk\.tensor\.3d\.global[^;]*;)", elected, compiled(64))

    known = {f.message for seed in tools.SEEDS for f in checked(text, 64, seed)[0]}

    def run(mutant: str, seed: int | None) -> tuple[Any, float]:
        found, row = checked(mutant, 64, seed)
        new = [f for f in found if f.message not in known]
        return SimpleNamespace(findings=new), 0.0 if right(row) else 2.0

    subject = tools.Subject("FlashAttention-4, head_dim 64", text, run, None)
    rows: list[Row] = []
    for mutant in tools.mutants(text, flips=6):
        rows.append(tools.judged(subject, mutant))
        if rows[-1]["verdict"] not in ("found", "wrong result"):
            print(rows[-1], flush=True)
    print(Counter(row["verdict"] for row in rows))
    return rows


def runs() -> Iterator[Row]:
    """Both head dimensions, full and causal, in two orders."""
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        ptx = compiled(head_dim, causal)
        yield from (checked(ptx, head_dim, seed, causal)[1] for seed in (None, 3))


if __name__ == "__main__":
    sys.exit(dsl.main(__doc__, "ptx-flash-attention.json", runs(), right, mutants=tried))
