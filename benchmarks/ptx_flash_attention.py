"""FlashAttention-4's forward kernel for sm_90a, compiled by CuTe DSL without a GPU, under all checks of the emulator.

    PYTHONPATH=src:. python benchmarks/ptx_flash_attention.py [--mutants] [--out FILE.json]

Needs Python 3.12 or newer and ``pip install flash-attn-4`` (which brings CuTe DSL and PyTorch), but no GPU. For head
dimensions 64 and 128, full and causal, in the emulator's own order and an adversarial one: the error to attention in
float64 relative to bf16's rounding, findings, processor seconds. (The scheduler of causal tiles does not compile with
CuTe DSL 4.8; FlashAttention-4's plain one takes its place, which takes the tiles in another order.) With
``--mutants`` also every change of one line of the kernel for 64 that ``tests.ptx.mutants`` knows, after one thread
has been elected for the copy of the output; found is what the kernel itself does not show. Exit status 1 where a
result is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    CUTE_DSL_ARCH="sm_90a",
    CUTE_DSL_KEEP_PTX="1",
    CUTE_DSL_LINEINFO="1",
    CUTE_DSL_NO_CACHE="1",
    CUTE_DSL_DUMP_DIR=tempfile.gettempdir(),
)

import ml_dtypes
import numpy as np

import warploom
from warploom.core.dtypes import bf16
from warploom.layout.tensor_map import TensorMapSpec
from warploom_lab.bench.evidence import write

SEQUENCE, HEADS, TILE, SHARED_BYTES = 512, 2, 128, 227 * 1024
"""One batch; 227 KiB is what a CTA may have on sm_90."""


def compiled(head_dim: int, causal: bool = False) -> str:
    """The PTX of FlashAttention-4's kernel for (1, SEQUENCE, HEADS, head_dim)."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
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

    def tensor(dtype: Any, *shape: int) -> Any:
        order = tuple(reversed(range(len(shape))))
        return runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    arrays = [tensor(cutlass.BFloat16, 1, SEQUENCE, HEADS, head_dim) for _ in range(4)]
    lse = tensor(cutlass.Float32, 1, HEADS, SEQUENCE)
    stream = runtime.make_fake_stream()
    return cute.compile(forward, *arrays, lse, cutlass.Float32(head_dim**-0.5), stream=stream).__ptx__


def checked(ptx: str, head_dim: int, seed: int | None, causal: bool = False) -> tuple[Any, dict[str, Any]]:
    """One run: what it found, and a row of error, findings, seconds."""
    rng = np.random.default_rng(0)
    shape = (1, SEQUENCE, HEADS, head_dim)
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(3))
    out, lse = np.full(shape, np.nan, ml_dtypes.bfloat16), np.full((HEADS, SEQUENCE), np.nan, np.float32)
    spec = TensorMapSpec(bf16, (head_dim, SEQUENCE, HEADS), (2 * HEADS * head_dim, 2 * head_dim), (64, TILE, 1), 128)
    scale = head_dim**-0.5
    unused = [[np.uint8(0)], [np.uint8(0)], [np.int32(0)] * 3]  # absent windows, and divisors of absent features
    given = [[lse], *((x, spec) for x in (q, k, v, out)), np.float32(scale * np.log2(np.e)), *unused, HEADS]
    start = time.process_time()
    found = warploom.check_ptx(
        ptx, (SEQUENCE // TILE, HEADS, 1), 384, given, shared_bytes=SHARED_BYTES, seed=seed, file="flash_fwd_sm90.ptx"
    )
    seconds = time.process_time() - start
    exact = [x[0].astype(np.float64).transpose(1, 0, 2) for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(0, 2, 1) * scale
    if causal:
        scores = np.where(np.tri(SEQUENCE, dtype=bool), scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = powers / powers.sum(-1, keepdims=True) @ exact[2]
    error = np.abs(out[0].astype(np.float64).transpose(1, 0, 2) - wanted).max() / np.abs(wanted).max() * 2**8
    far = np.abs(lse - np.log(powers.sum(-1)) - scores.max(-1)).max()
    each = [f for cause in found.findings for f in (cause, *cause.follows)]
    findings = [{"kind": f.kind, "where": str(f.where), "message": f.message} for f in each]
    row = {"head_dim": head_dim, "causal": causal, "seed": seed, "error": float(np.nan_to_num(error, nan=np.inf))}
    far = float(np.nan_to_num(far, nan=np.inf))
    return found, {**row, "log-sum-exp error": far, "findings": findings, "seconds": round(seconds, 2)}


def right(row: dict[str, Any]) -> bool:
    """Whether the result of a run is attention's, within bf16's rounding."""
    return row["error"] <= 2 and row["log-sum-exp error"] < 1e-3


def tried(ptx: str) -> list[dict[str, Any]]:
    """What became of each mutant of a kernel for 64."""
    tools: Any = importlib.import_module("tests.ptx.mutants")
    elected = r"{ .reg .pred one; elect.sync _|one, -1; @one \1 }"
    text = re.sub(r"(cp\.async\.bulk\.tensor\.3d\.global[^;]*;)", elected, ptx)

    known = {f["message"] for seed in tools.SEEDS for f in checked(text, 64, seed)[1]["findings"]}

    def run(mutant: str, seed: int | None) -> tuple[Any, float]:
        found, row = checked(mutant, 64, seed)
        new = [f for cause in found.findings for f in (cause, *cause.follows) if f.message not in known]
        return SimpleNamespace(findings=new), 0.0 if right(row) else 2.0

    subject = tools.Subject("FlashAttention-4, head_dim 64", text, run, None)
    rows: list[dict[str, Any]] = []
    for mutant in tools.mutants(text, flips=6):
        rows.append(tools.judged(subject, mutant))
        if rows[-1]["verdict"] not in ("found", "wrong result"):
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Compile, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        ptx = compiled(head_dim, causal)
        rows += [checked(ptx, head_dim, seed, causal)[1] for seed in (None, 3)]
        for row in rows[-2:]:
            print(row, flush=True)
    names = ("flash-attn-4", "nvidia-cutlass-dsl")
    result: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in names}, "runs": rows}
    if options.mutants:
        result["mutants"] = tried(compiled(64))
        print(Counter(row["verdict"] for row in result["mutants"]))
    if options.out:
        write(options.out, result)
    return int(not all(map(right, rows)))


if __name__ == "__main__":
    sys.exit(main())
