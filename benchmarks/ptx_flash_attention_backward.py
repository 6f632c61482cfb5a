"""FlashAttention-4's backward kernel for sm_90a, compiled by CuTe DSL without a GPU, under all checks of the emulator.

    PYTHONPATH=src python benchmarks/ptx_flash_attention_backward.py [--out DIR]

Needs what ``ptx_flash_attention.py`` needs. For head dimensions 64 and 128, full and causal: the errors of dK and dV to
float64 relative to bf16's rounding, of the sums of dQ (whose elements the kernel leaves in the order of its registers:
compared as sorted numbers), findings, processor seconds. Exit status 1 where a result is wrong.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import cute_dsl as dsl
import ml_dtypes
import numpy as np
from cute_dsl import Array, Row
from ptx_flash_attention import HEADS, SEQUENCE

TILE_N = 128
TILE_M = {(64, False): 128, (64, True): 128, (128, False): 80, (128, True): 64}
"""Rows of Q that FlashAttention-4 takes at a time, by head dimension and whether the mask is causal."""


def compiled(head_dim: int, causal: bool) -> str:
    """The PTX for (1, SEQUENCE, HEADS, head_dim), with FlashAttention-4's configuration."""
    cutlass = dsl.cutlass()
    family: Any = importlib.import_module("flash_attn.cute.flash_bwd_sm90").FlashAttentionBackwardSm90
    tile_m = TILE_M[head_dim, causal]
    backward = family(
        cutlass.BFloat16,
        head_dim,
        head_dim,
        1,
        is_causal=causal,
        tile_m=tile_m,
        tile_n=TILE_N,
        SdP_swapAB=True,
        dQ_swapAB=tile_m % 64 != 0,
        AtomLayoutMdQ=2 if head_dim == 64 else 1,
    )

    inputs, outputs = ([dsl.fake(cutlass.BFloat16, 1, SEQUENCE, HEADS, head_dim) for _ in range(n)] for n in (4, 2))
    rows = padded(tile_m)
    sums = [dsl.fake(cutlass.Float32, 1, HEADS, n) for n in (rows, rows, rows * head_dim)]
    scale = cutlass.Float32(head_dim**-0.5)
    return dsl.compiled(backward, *inputs, *sums, *outputs, scale, stream=dsl.stream())


def padded(tile_m: int) -> int:
    """Rows of what there is one number a row of, or of dQ's sums: whole tiles."""
    return -(-SEQUENCE // tile_m) * tile_m


def reference(given: list[Array], causal: bool) -> dict[str, Array]:
    """Of Q, K, V and dO in float64, (heads, sequence, head_dim): gradients; of each row log2-sum-exp2 and dO·O."""
    q, k, v, do = given
    scale = q.shape[-1] ** -0.5
    scores = q @ k.swapaxes(1, 2) * scale
    if causal:
        scores = np.where(np.tri(SEQUENCE, dtype=bool), scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    powers = np.exp(scores - most)
    total = powers.sum(-1, keepdims=True)
    p = powers / total
    row = (do * (p @ v)).sum(-1)
    ds = p * (do @ v.swapaxes(1, 2) - row[:, :, None])
    lse = (np.log(total) + most)[:, :, 0] * np.log2(np.e)
    return {"dq": ds @ k, "dk": ds.swapaxes(1, 2) @ q * scale, "dv": p.swapaxes(1, 2) @ do, "lse": lse, "row": row}


def checked(ptx: str, head_dim: int, causal: bool) -> Row:
    """One run: errors, findings, seconds."""
    rng, tile_m = np.random.default_rng(0), TILE_M[head_dim, causal]
    shape, scale = (1, SEQUENCE, HEADS, head_dim), head_dim**-0.5
    given = [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(4)]  # Q, K, V, dO
    wanted = reference([dsl.by_heads(x) for x in given], causal)
    dk, dv = (np.full(shape, np.nan, ml_dtypes.bfloat16) for _ in range(2))
    lse, row = (np.zeros((HEADS, padded(tile_m)), np.float32) for _ in range(2))
    lse[:, :SEQUENCE], row[:, :SEQUENCE] = wanted["lse"], wanted["row"]
    sums = np.zeros((HEADS, padded(tile_m) * head_dim), np.float32)
    q, k, v, do = given
    tiles = (q, tile_m), (k, TILE_N), (v, TILE_N), (do, tile_m), (dk, TILE_N), (dv, TILE_N)
    maps = [dsl.heads_map(x, n) for x, n in tiles]
    absent = [[np.uint8(0)]] * 4 + [np.float32(scale * np.log2(np.e)), np.float32(scale), [np.int32(0)] * 3]
    arguments = [*maps, [lse], [row], [sums], *absent, HEADS]
    _, told = dsl.checked(ptx, (SEQUENCE // TILE_N, HEADS, 1), arguments, "flash_bwd_sm90.ptx")
    errors = {name: dsl.error_of(dsl.by_heads(got), wanted[name]) for name, got in (("dk", dk), ("dv", dv))}
    whole = np.concatenate([wanted["dq"].reshape(-1), np.zeros(sums.size - wanted["dq"].size)])
    errors["dq"] = dsl.error_of(np.sort(sums, axis=None), np.sort(whole))
    return {"head_dim": head_dim, "causal": causal, "errors": errors, **told}


if __name__ == "__main__":
    cells = itertools.product((64, 128), (False, True))
    found = (checked(compiled(*cell), *cell) for cell in cells)
    sys.exit(
        dsl.main(__doc__, "ptx-flash-attention-backward.json", found, lambda row: max(row["errors"].values()) <= 2)
    )
