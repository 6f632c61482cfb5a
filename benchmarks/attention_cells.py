"""``warploom.attention`` as users call it, beside PyTorch's flash and cuDNN backends, on one GPU in one process.

    PYTHONPATH=src python benchmarks/attention_cells.py --out OUT

16384 tokens, heads × head_dim = 2048, bf16; head_dim 64, 128 and 256, full and causal, sequences of 512 to 16384. Every
kernel is checked against float64 on fresh inputs with a poisoned output first; then all three are timed interleaved, on
inputs that rotate past the L2. Writes OUT/attention-cells.json with every cell and its spread, prints the table, and
exits with 1 if a figure below is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

import warploom
from warploom.bench.environment import environment
from warploom.bench.monitor import GpuMonitor
from warploom.bench.peers import SDPA_BACKENDS
from warploom.bench.timing import Candidate, EventClock, input_sets, measure, paired_ratio
from warploom.cuda.device import cuda_core
from warploom.kernels.attention.reference import F32_SLACK, UNIT_ROUNDOFF

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CASES = ((128, False), (128, True), (64, False), (64, True), (256, False), (256, True))
CHECKED_ROWS = 128

FLASH_FIGURES = {(128, False): 1.15, (128, True): 1.10, (64, False): 1.05, (256, False): 1.00}
"""(head_dim, causal) → the geometric mean over the lengths, at least so many times torch's flash backend."""


def rows_of_reference(q: Any, k: Any, v: Any, rows: Any, causal: bool) -> tuple[Any, Any]:
    """(O, Σ p·|v|) of some query rows of batch 0, head 0, in float64."""
    scores = q[0, rows, 0].double() @ k[0, :, 0].double().T / math.sqrt(q.shape[-1])
    if causal:
        keys = torch.arange(k.shape[1], device=q.device)
        scores = scores.masked_fill(keys[None] > rows[:, None], -math.inf)
    p = torch.softmax(scores, -1)
    values = v[0, :, 0].double()
    return p @ values, p @ values.abs()


def largest_error(inputs: tuple[Any, Any, Any], out: Any, causal: bool) -> float:
    """The largest |o - o64| over what bf16 allows, of random rows; NaN counts as infinite."""
    q, k, v = inputs
    rows = torch.randperm(q.shape[1], device=q.device)[:CHECKED_ROWS]
    expected, magnitude = rows_of_reference(q, k, v, rows, causal)
    allowed = UNIT_ROUNDOFF["bf16"] * (expected.abs() + magnitude) + F32_SLACK * magnitude
    error = (out[0, rows, 0].double() - expected).abs()
    return float((torch.nan_to_num(error, nan=math.inf) / allowed).max())


def fresh(shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Random q, k, v."""
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))  # type: ignore[return-value]


def sdpa(name: str, causal: bool) -> Any:
    """One of PyTorch's backends on (batch, sequence, heads, head_dim) tensors."""
    backend = getattr(torch.nn.attention.SDPBackend, SDPA_BACKENDS[name])

    def run(q: Any, k: Any, v: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(backend):
            swapped = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=causal).transpose(1, 2)

    return run


def cell(head_dim: int, causal: bool, seq: int, monitor: GpuMonitor) -> dict[str, Any]:
    """One head_dim, mask and length: checked, then timed."""
    shape = TOKENS // seq, seq, WIDTH // head_dim, head_dim
    ours = lambda q, k, v: warploom.attention(q, k, v, causal=causal)  # noqa: E731
    checked = fresh(shape)
    torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)  # what the next allocation of this size finds
    error = largest_error(checked, ours(*checked), causal)
    count = input_sets(3 * 2 * math.prod(shape), torch.cuda.get_device_properties(0).L2_cache_size)
    sets = [fresh(shape) for _ in range(count)]
    runs = {"warploom": ours, **{name: sdpa(name, causal) for name in ("torch_flash", "torch_cudnn")}}
    candidates = [Candidate(name, lambda i, run=run: run(*sets[i])) for name, run in runs.items()]
    clock = EventClock(int(torch.cuda.current_stream().cuda_stream))
    found = measure(candidates, count, clock, rounds=11, sample_seconds=0.015, monitor=monitor)
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    flops = 4 * shape[0] * shape[2] * pairs * head_dim
    return {
        "head_dim": head_dim, "causal": causal, "seq": seq, "batch": shape[0], "heads": shape[2],
        "config": str(warploom.plan(*checked, causal=causal).config),
        "error": {"metric": "max |o - o64| / bf16 bound", "value": error, "bound": 1.0},
        "tflops": {name: m.seconds.rate(flops / 1e12).json() for name, m in found.items()},
        "sm_mhz": {name: m.clock_mhz.json() for name, m in found.items() if m.clock_mhz is not None},
        "ratio": {p: paired_ratio(found["warploom"], found[p]) for p in ("torch_flash", "torch_cudnn")},
    }  # fmt: skip


def missed(cells: list[dict[str, Any]]) -> list[str]:
    """Every figure that is not reached, and every wrong result."""
    found = [f"wrong at {c['head_dim']}, {c['seq']}" for c in cells if not c["error"]["value"] <= 1.0]
    for (head_dim, causal), least in FLASH_FIGURES.items():
        ratios = [c["ratio"]["torch_flash"] for c in cells if (c["head_dim"], c["causal"]) == (head_dim, causal)]
        if ratios and (mean := math.exp(sum(map(math.log, ratios)) / len(ratios))) < least:
            found.append(f"head_dim {head_dim}, causal {causal}: {mean:.3f} × torch_flash, wanted {least}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    folder: Path = parser.parse_args().out
    cells: list[dict[str, Any]] = []
    monitor = GpuMonitor(cuda_core().Device(0).pci_bus_id)
    for head_dim, causal in CASES:
        for seq in LENGTHS:
            cells.append(cell(head_dim, causal, seq, monitor))
            c = cells[-1]
            speeds = "  ".join(f"{n} {s['median']:6.1f}" for n, s in c["tflops"].items())
            ratios = "  ".join(f"{n} {r:.3f}" for n, r in c["ratio"].items())
            print(f"{head_dim:4} {'causal' if causal else 'full':6} {seq:6}  {speeds}  × {ratios}", flush=True)
    failures = missed(cells)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment(), "cells": cells, "missed": failures}
    (folder / "attention-cells.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(failures) or "every figure is reached")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
