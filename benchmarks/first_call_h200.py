"""What the first call of a shape family costs, on this machine's GPU: with an empty cache, and in a later process.

    PYTHONPATH=src python benchmarks/first_call_h200.py [--out DIR] [--cells NAME,…] [--fresh 3] [--later 5]
    PYTHONPATH=src python benchmarks/first_call_h200.py --beside OLD/src --cells matmul,matmul_reduce --fresh 1

Each sample is a process of its own: it imports warploom, its operations, torch and cuda.core, makes the inputs (so the
CUDA context exists), synchronises, and then times its first call up to the end of a synchronisation. The result, whose
memory held NaN before, is compared with float64 on rows of each kind; then the host time of repeated calls is taken.
Sources are compiled to bytecode first, as an installation does. Processes start side by side and are timed one after
the other; with another tree of sources ``--beside``, the two in turns. Writes ``first-call.json`` to DIR (``$OUT`` by
default); exit status 1 for a wrong result or a figure of ``targets.json`` that was missed.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare_calls import Attention, Cell, Product
from scripts import targets

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 8
"""Processes that get ready side by side."""
SECONDS = 120
"""The most that one of them may take."""

SHAPE = 1, 1024, 8
"""Batch, length and heads of attention."""
M, N, K = 1024, 2048, 512


def _attention(head_dim: int, causal: bool, mma: bool) -> Attention:
    """A cell of attention; with ``mma`` the default of GPUs without wgmma."""
    name = f"attention d={head_dim}" + " causal" * causal + " mma.sync" * mma
    options: dict[str, Any] = {"causal": causal} | ({"config": "mma.sync"} if mma else {})
    return Attention("attention", name, q=(*SHAPE, head_dim), options=options)


CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        *(_attention(64, causal, False) for causal in (False, True)),
        *(_attention(128, causal, mma) for mma in (False, True) for causal in (False, True)),
        Product("products", "matmul", m=M, n=N, k=K),
        Product("products", "matmul gelu", m=M, n=N, k=K, options={"epilogue": "gelu"}),
        Product("reductions", "matmul_reduce", m=M, n=N, k=K, options={"op": "logsumexp"}),
    )
}


# -- in the process that makes the call
def child(cell: Cell) -> None:
    """Get ready, say so, wait for a line, make the call, and tell its seconds and its error as JSON."""
    start = time.perf_counter()
    import warploom

    import_s = time.perf_counter() - start
    import cuda.core
    import torch
    from host_cost import microseconds

    operations = warploom.attention, warploom.matmul, warploom.matmul_reduce
    cell = prepared(cell)
    torch.manual_seed(0)
    inputs = cell.inputs(lambda shape: torch.randn(shape, device="cuda", dtype=getattr(torch, cell.dtype)))
    assert all((*operations, cuda.core)), "imported: what is timed begins after that"
    kind = torch.float32 if "op" in cell.options else getattr(torch, cell.dtype)
    poison = torch.full(cell.result_shape, math.nan, dtype=kind, device="cuda")
    poisoned = poison.data_ptr()
    del poison  # the allocator gives this memory to the result
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    results = cell.run(inputs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    poison_met, written = results[0].data_ptr() == poisoned, not bool(torch.isnan(results[0]).any())
    error = cell.error(inputs, results) if written else math.inf
    repeated = microseconds({"call": lambda: cell.run(inputs)}, torch.cuda.synchronize, 1024)["call"].json()
    told = {"seconds": seconds, "import_s": import_s, "microseconds": repeated, "error": error, "poisoned": poison_met}
    print(json.dumps(told), flush=True)


def prepared(cell: Cell) -> Cell:
    """The cell with what its options name: the configuration of GPUs without wgmma, and gelu."""
    from warploom.core.dtypes import bf16
    from warploom.core.targets import target
    from warploom.kernels.attention.choice import choose
    from warploom.kernels.attention.problem import AttentionProblem, Even
    from warploom.lang.functions import gelu

    options = dict(cell.options)
    if "config" in options and isinstance(cell, Attention):
        batch, length, heads, head_dim = cell.q
        problem = AttentionProblem(batch, heads, heads, Even(length, length), head_dim, bf16)
        options["config"] = choose(problem, target("sm_80"))[0]
    if "epilogue" in options:
        options["epilogue"] = gelu
    return replace(cell, options=options)


# -- in the process that starts them
@dataclass(frozen=True)
class Sample:
    """One process: its cell, the cache it uses, and the sources it imports."""

    cell: str
    cache: Path
    sources: Path = ROOT / "src"


def run(samples: list[Sample], at_once: int = AT_ONCE) -> list[dict[str, Any]]:
    """What each process told; an "error" of infinity where it failed."""
    told: list[dict[str, Any]] = []
    for first in range(0, len(samples), at_once):
        batch = samples[first : first + at_once]
        running = [_start(sample) for sample in batch]
        try:
            for process in running:
                _line(process)
            told += [_finish(sample, process) for sample, process in zip(batch, running, strict=True)]
        finally:
            for process in running:
                process.kill()
                process.communicate()
    return told


def _start(sample: Sample) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(sample.sources), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "WARPLOOM_CACHE": str(sample.cache)}
    return subprocess.Popen(
        [sys.executable, __file__, "--child", sample.cell],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _finish(sample: Sample, process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, errors = process.communicate("go\n", timeout=SECONDS)
        told = json.loads(out.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError):
        process.kill()
        _, errors = process.communicate()
        print(f"{sample.cell} FAILED: {errors[-1500:]}", flush=True)
        nothing: dict[str, Any] = dict.fromkeys(("seconds", "import_s", "error"), math.inf)
        return nothing | {"microseconds": {"median": math.inf}, "poisoned": False}
    print(f"  {sample.cell:34s} {told['seconds'] * 1e3:7.1f} ms, error {told['error']:.2f}", flush=True)
    return told


def measure(
    names: list[str], fresh: int, later: int, beside: Path | None = None, at_once: int = AT_ONCE
) -> list[list[dict[str, Any]]]:
    """Each cell's figures, for each tree. The first fresh process leaves the cache that the later ones find."""
    trees = [ROOT / "src", *([] if beside is None else [beside])]
    with tempfile.TemporaryDirectory() as folder:

        def samples(turns: int, own: bool) -> list[Sample]:
            return [
                Sample(name, Path(folder) / f"{i} {of} {turn if own else 0}", tree)
                for turn in range(turns)
                for i, name in enumerate(names)
                for of, tree in enumerate(trees)
            ]

        both = [*samples(fresh, True), *samples(later, False)]  # those get ready while others compile
        told = list(zip(both, run(both, at_once), strict=True))
    count = fresh * len(names) * len(trees)
    early, late = told[:count], told[count:]
    return [[_row(tree, name, early, late) for name in names] for tree in trees]


Told = list[tuple[Sample, dict[str, Any]]]


def _row(tree: Path, name: str, early: Told, late: Told) -> dict[str, Any]:
    """The figures of one cell in one tree."""
    fresh, later = ([t for s, t in told if (s.cell, s.sources) == (name, tree)] for told in (early, late))
    both = [*fresh, *later]
    return {
        "call": name,
        "fresh_s": spread([t["seconds"] for t in fresh]),
        "later_s": spread([t["seconds"] for t in later]),
        "import_s": spread([t["import_s"] for t in later]),
        "repeated_us": spread([t["microseconds"]["median"] for t in both]),
        "error": {"value": max(t["error"] for t in both), "bound": 1.0},
        "poisoned": all(t["poisoned"] for t in both),
    }


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median, lowest and highest, and all of them."""
    ordered = sorted(seconds)
    return {"median": ordered[len(ordered) // 2], "low": ordered[0], "high": ordered[-1], "samples": seconds}


def missed(cells: list[dict[str, Any]], most: dict[str, float]) -> list[str]:
    """Each wrong result, and each median above the most it may be."""
    found = [f"{c['call']}: error {c['error']['value']}" for c in cells if not c["error"]["value"] <= 1.0]
    found += [f"{c['call']}: the result's memory was not poisoned" for c in cells if not c["poisoned"]]
    for name, limit in most.items():
        found += [
            f"{c['call']}: {name} {c[f'{name}_s']['median']:.3f} s, at most {limit} s"
            for c in cells
            if not c[f"{name}_s"]["median"] <= limit
        ]
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", default=",".join(CELLS), help="names of cells, with commas between")
    parser.add_argument("--fresh", type=int, default=3, help="processes with an empty cache per cell")
    parser.add_argument("--later", type=int, default=5, help="later processes per cell")
    parser.add_argument("--beside", type=Path, help="folder with another tree's sources, measured in turns with these")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="processes that get ready side by side")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(CELLS[options.child])
        return 0

    for tree in (ROOT / "src", options.beside):
        if tree is not None:
            compileall.compile_dir(tree, quiet=2)
    cells, *others = measure(options.cells.split(","), options.fresh, options.later, options.beside, options.at_once)
    most = targets()["first_call_seconds"]
    short = missed(cells, most)
    result = {"rows": cells, "most_seconds": most, "missed": short}
    if others:
        result["beside"] = others[0]
    write(options.out / "first-call.json", result)
    table(cells, "this tree")
    if others:
        table(others[0], "the tree beside")
    for line in short:
        print(f"MISSED {line}")
    return 1 if short else 0


def table(cells: list[dict[str, Any]], title: str) -> None:
    """Print medians, and in brackets lowest and highest."""
    names = {
        "fresh_s": "empty cache, ms",
        "later_s": "later process, ms",
        "import_s": "import, ms",
        "repeated_us": "again, µs",
    }
    print(f"\n{title:34s}" + "".join(f"{text:>22s}" for text in names.values()) + f"{'error':>7s}")
    for cell in cells:
        line = f"{cell['call']:34s}"
        for name in names:
            s, scale = cell[name], 1e3 if name.endswith("_s") else 1.0
            line += f"{s['median'] * scale:8.1f} ({s['low'] * scale:.1f}-{s['high'] * scale:.1f})".rjust(22)
        print(f"{line}{cell['error']['value']:7.2f}")


if __name__ == "__main__":
    sys.exit(main())
