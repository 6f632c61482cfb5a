"""What the first call of a shape family costs, on this machine's GPU: with an empty cache, and in a later process.

    PYTHONPATH=src python benchmarks/first_call_h200.py [--out DIR] [--cells NAME,…] [--fresh 3] [--later 5]
    PYTHONPATH=src python benchmarks/first_call_h200.py --beside OLD/src --cells matmul,matmul_reduce --fresh 1

Each sample is a process of its own: it imports warploom, its operations, torch and cuda.core, makes the inputs (so the
CUDA context exists), synchronises, and then times its first call up to the end of a synchronisation. The result, whose
memory held NaN before, is compared with float64 element by element; then the host time of repeated calls is taken.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts import targets

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 8
"""Processes that get ready side by side."""
SECONDS = 120
"""The most that one of them may take."""

BATCH, LENGTH, HEADS = 1, 1024, 8
M, N, K = 1024, 2048, 512
# As in warploom.kernels.*.reference, which a tree beside may have elsewhere.
BF16_ROUNDOFF, F32_ROUNDOFF, F32_SLACK = 2.0**-8, 2.0**-24, 2.0**-18
GAMMA = K / 16 * 2.0**-22
"""What summing K products may lose: up to 2^-22 at each step of 16."""


@dataclass(frozen=True)
class Cell:
    """A first call: of attention (``head_dim``) or of a product, with these options."""

    operation: str
    options: dict[str, Any]
    head_dim: int = 0


CELLS: dict[str, Cell] = {
    "attention d=64": Cell("attention", {}, 64),
    "attention d=64 causal": Cell("attention", {"causal": True}, 64),
    "attention d=128": Cell("attention", {}, 128),
    "attention d=128 causal": Cell("attention", {"causal": True}, 128),
    "attention d=128 mma.sync": Cell("attention", {"mma": True}, 128),
    "attention d=128 causal mma.sync": Cell("attention", {"mma": True, "causal": True}, 128),
    "matmul": Cell("matmul", {}),
    "matmul gelu": Cell("matmul", {"gelu": True}),
    "matmul_reduce": Cell("matmul_reduce", {"op": "logsumexp"}),
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
    call = (_attention if cell.operation == "attention" else _product)(cell)
    assert all((*operations, cuda.core)), "imported: what is timed begins after that"
    poison = torch.full(call.shape, math.nan, dtype=call.dtype, device="cuda")
    poisoned = poison.data_ptr()
    del poison  # the allocator gives this memory to the result
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    result = call.run(*call.inputs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    error, poison_met = call.error(result), result.data_ptr() == poisoned
    repeated = microseconds({"call": lambda: call.run(*call.inputs)}, torch.cuda.synchronize, 1024)["call"].json()
    told = {"seconds": seconds, "import_s": import_s, "microseconds": repeated, "error": error, "poisoned": poison_met}
    print(json.dumps(told), flush=True)


@dataclass(frozen=True)
class Call:
    """What is called with which inputs, and what it should give: float64, and what the types allow at each element."""

    inputs: list[Any]
    run: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: Any
    expected: Callable[[], tuple[Any, Any]]

    def error(self, result: Any) -> float:
        """The largest |result - float64| over what is allowed; at most 1 is right."""
        import torch

        expected, allowed = self.expected()
        error = torch.nan_to_num((result.double() - expected).abs(), nan=math.inf)
        return float((error / allowed).max()) if result.shape == expected.shape else math.inf


def _attention(cell: Cell) -> Call:
    import torch

    import warploom

    torch.manual_seed(0)
    shape = BATCH, LENGTH, HEADS, cell.head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    options = {name: value for name, value in cell.options.items() if name != "mma"}
    if cell.options.get("mma"):
        options["config"] = _mma_config(cell.head_dim)

    def expected() -> tuple[Any, Any]:
        q64, k64, v64 = (x.double().transpose(1, 2) for x in (q, k, v))
        scores = q64 @ k64.transpose(-1, -2) / math.sqrt(cell.head_dim)
        if options.get("causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        weights = torch.softmax(scores, -1)
        output, magnitude = ((weights @ x).transpose(1, 2) for x in (v64, v64.abs()))
        return output, BF16_ROUNDOFF * (output.abs() + magnitude) + F32_SLACK * magnitude

    return Call([q, k, v], partial(warploom.attention, **options), shape, torch.bfloat16, expected)


def _mma_config(head_dim: int) -> Any:
    """The default of GPUs without wgmma."""
    from warploom.core.dtypes import bf16
    from warploom.core.targets import target
    from warploom.kernels.attention.choice import choose
    from warploom.kernels.attention.problem import AttentionProblem, Even

    problem = AttentionProblem(BATCH, HEADS, HEADS, Even(LENGTH, LENGTH), head_dim, bf16)
    return choose(problem, target("sm_80"))[0]


def _product(cell: Cell) -> Call:
    import torch

    import warploom
    from warploom.lang.functions import gelu

    torch.manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((M, K), (K, N)))

    def product() -> tuple[Any, Any]:
        """The product and the sums of the products' magnitudes."""
        return a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def reduced() -> tuple[Any, Any]:
        """An error of a sum of products moves the logarithm by at most as much; f32 rounds the rest."""
        found, magnitude = product()
        expected = torch.logsumexp(found, -1)
        return expected, GAMMA * magnitude.amax(-1) + 16 * F32_ROUNDOFF * (1 + expected.abs())

    def expected() -> tuple[Any, Any]:
        found, magnitude = product()
        slack, steep = GAMMA * magnitude, 1.0
        if cell.options.get("gelu"):  # whose slope is at most 1.13, and whose approximation errs by 2^-10 of |x|
            slack, steep = slack + 2.0**-10 * found.abs(), 1.13
            found = torch.nn.functional.gelu(found, approximate="tanh")
        return found, BF16_ROUNDOFF * found.abs() + 1.01 * steep * slack + 2.0**-126

    if cell.operation == "matmul_reduce":
        return Call([a, b], partial(warploom.matmul_reduce, **cell.options), (M,), torch.float32, reduced)
    options: dict[str, Any] = {"epilogue": gelu} if cell.options.get("gelu") else {}
    return Call([a, b], partial(warploom.matmul, **options), (M, N), torch.bfloat16, expected)


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
    from warploom_lab.bench.environment import environment

    for tree in (ROOT / "src", options.beside):
        if tree is not None:
            compileall.compile_dir(tree, quiet=2)
    cells, *others = measure(options.cells.split(","), options.fresh, options.later, options.beside, options.at_once)
    most = targets()["first_call_seconds"]
    short = missed(cells, most)
    result = {"environment": environment(), "rows": cells, "most_seconds": most, "missed": short}
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
