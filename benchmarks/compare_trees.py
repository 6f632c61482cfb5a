"""Two versions of this package beside each other on one GPU: the same calls on the same inputs, in turns.

    python benchmarks/compare_trees.py OLD NEW [--only attention,backward,…] [--cells 'NAME|NAME …']
                                               [--rounds 7] [--out FILE]

OLD and NEW are folders with the package's sources (``src``, with or without the folder that holds it). Each runs in a
process of its own; the processes take turns, cell by cell and round by round. Inputs are drawn by the cell's name and
rotate past the L2, the calls of a round are one CUDA graph, and before a cell is timed what a graph wrote over NaN is
held against float64 in both. At the power limit a round's clock depends on the one before: a cell that seems below
0.98 is measured once more, with four times the rounds, which then count. Writes medians, spread, clock and watts of
every cell as JSON ($OUT/compare.json by default), and names the kernels of NEW. Exit code 1 if a result is wrong, a
cell of NEW is slower than 0.98 of OLD, or the geometric mean of all below 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from compare_calls import GROUPS, Cell, cells_of

LEAST_CELL, LEAST_MEAN = 0.98, 1.0
ROUND_SECONDS = 0.012
WARMERS = 12
"""Processes that compile a tree's kernels ahead."""


# -- a tree's process
class Prepared:
    """A cell in this process: rotating inputs and the graph of a round."""

    def __init__(self, cell: Cell) -> None:
        import torch

        self._torch, self._cell = torch, cell
        generator = torch.Generator("cuda").manual_seed(zlib.crc32(cell.name.encode()))
        kind = getattr(torch, cell.dtype)

        def make(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(kind)

        torch.manual_seed(zlib.crc32(cell.name.encode()))
        torch.set_default_device("cuda")
        first = cell.inputs(make)
        size = sum(x.nbytes for x in first if isinstance(x, torch.Tensor))
        count = max(1, min(16, -(-(180 << 20) // size)))  # so many rotate past the L2
        self._sets = [first, *(cell.inputs(make) for _ in range(count - 1))]

    def compile(self) -> None:
        """Make the kernels, once."""
        self._cell.run(self._sets[0])
        self._torch.cuda.synchronize()

    def capture(self) -> float:
        """The graph of a round, over every input set; the error of what it wrote over NaN, 1 at most if it is right."""
        torch = self._torch
        self.compile()
        once = self._elapsed(lambda: [self._cell.run(inputs) for inputs in self._sets])
        repeats = max(1, min(400, round(ROUND_SECONDS / max(once, 1e-6))))
        self._calls = repeats * len(self._sets)
        results: tuple[Any, ...] = ()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            for i in range(self._calls):
                results = self._cell.run(self._sets[i % len(self._sets)])
        for x in results:
            x.detach().fill_(float("nan"))
        self._graph.replay()
        torch.cuda.synchronize()
        if any(bool(torch.isnan(x).any()) for x in results):
            return math.inf
        return self._cell.error(self._sets[(self._calls - 1) % len(self._sets)], results)

    def seconds(self) -> float:
        """Of one call, in a replay of the graph."""
        return self._elapsed(self._graph.replay) / self._calls

    def _elapsed(self, run: Callable[[], object]) -> float:
        """Seconds on the GPU."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        self._torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def worker(cells: list[Cell]) -> None:
    """Answer one JSON line for each on standard input: prepare a cell, time it, forget it.

    All work is queued on one stream: autograd runs a backward pass on the stream of its forward pass, which a graph on
    another stream cannot capture.
    """
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())
    ready = None
    for line in sys.stdin:
        what, index = json.loads(line)
        try:
            if what == "prepare":
                ready = Prepared(cells[index])
                answer: Any = ready.capture()
            elif what == "time":
                answer = ready.seconds() if ready is not None else None
            elif what == "kernels":
                from warploom_lab.bench.evidence import kernels_that_ran

                answer = kernels_that_ran()
            else:
                ready, answer = None, True
                torch.cuda.empty_cache()
        except Exception as error:  # the other tree goes on without this cell
            ready, answer = None, f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(answer), flush=True)


def warm(cells: list[Cell], number: int) -> None:
    """Compile every so-manieth cell's kernels."""
    for cell in cells[number::WARMERS]:
        try:
            Prepared(cell).compile()
        except Exception as error:
            print(f"{cell.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)


# -- the process that takes turns
def _spawn(tree: str, cache: str, *arguments: str) -> subprocess.Popen[str]:
    source = Path(tree).resolve()
    source = source / "src" if (source / "src").is_dir() else source
    environment = {**os.environ, "PYTHONPATH": str(source), "WARPLOOM_CACHE": cache}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], what: str, index: int) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([what, index]) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line else "the process ended"


def _state() -> list[float]:
    """[SM clock in MHz, watts] of GPU 0."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        return [float(x) for x in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []


def compare(trees: list[str], groups: str, names: str, rounds: int) -> tuple[list[dict[str, Any]], Any]:
    """The rows of all cells, printed as they come, and the kernels of the new tree that ran."""
    which = "--groups", groups, "--cells", names
    caches = [f"/tmp/compare-cache-{i}" for i in range(2)]
    started = time.perf_counter()
    jobs = [(tree, cache, n) for tree, cache in zip(trees, caches, strict=True) for n in range(WARMERS)]
    with ThreadPoolExecutor(WARMERS) as pool:
        list(pool.map(lambda job: _spawn(job[0], job[1], *which, "--warm", str(job[2])).wait(), jobs))
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    pair = [_spawn(tree, cache, *which, "--worker") for tree, cache in zip(trees, caches, strict=True)]
    rows: list[dict[str, Any]] = []
    for index, cell in enumerate(cells_of(groups, names)):
        errors = [_ask(process, "prepare", index) for process in pair]
        row: dict[str, Any] = {"group": cell.group, "cell": cell.name, "errors": errors}
        if all(isinstance(x, float | int) and x <= 1.0 for x in errors):
            row |= _timed(pair, index, cell.flops, rounds)
            if row["ratio"] < LEAST_CELL:
                row |= {"before": row["ratio"], **_timed(pair, index, cell.flops, 4 * rounds)}
            words = f"{row['old_tflops']:.0f} {row['new_tflops']:.0f} {row['ratio']:.3f}"
            print(f"{cell.group} {cell.name}: {words}", flush=True)
        else:
            print(f"{cell.group} {cell.name}: WRONG {errors}", flush=True)
        for process in pair:
            _ask(process, "forget", index)
        rows.append(row)
    kernels = _ask(pair[1], "kernels", 0)
    for process in pair:
        process.kill()
    return rows, kernels if isinstance(kernels, list) else []


def _timed(pair: list[subprocess.Popen[str]], index: int, flops: float, rounds: int) -> dict[str, Any]:
    """Both trees' rates, and their ratio in each round."""
    samples: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            seconds = _ask(pair[i], "time", index)
            if turn:  # the first warms up
                samples[i].append(seconds)
    ratios = sorted(old / new for old, new in zip(*samples, strict=True))
    rates = [flops / median(x) / 1e12 for x in samples]
    return {
        "old_tflops": rates[0],
        "new_tflops": rates[1],
        "ratio": median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "rounds": rounds,
        "clock_watts": _state(),
    }


def main() -> int:
    """The comparison; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--only", "--groups", dest="groups", default=",".join(GROUPS))
    parser.add_argument("--cells", default="", help="names, with | between them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=str(Path(os.environ.get("OUT", ".")) / "compare.json"))
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--warm", type=int)
    given = parser.parse_args()
    cells = cells_of(given.groups, given.cells)
    if given.worker:
        worker(cells)
        return 0
    if given.warm is not None:
        warm(cells, given.warm)
        return 0
    if len(given.trees) != 2:
        parser.error("give two folders: OLD NEW")
    from warploom_lab.bench.evidence import write  # of this tree: workers run others

    rows, kernels = compare(given.trees, given.groups, given.cells, given.rounds)
    below = [r["cell"] for r in rows if r.get("ratio", 0.0) < LEAST_CELL]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["group"], []).extend([row["ratio"]] if "ratio" in row else [])
    means = {group: geometric_mean(of) for group, of in ratios.items() if of}
    write(Path(given.out), {"means": means, "below": below, "rows": rows}, kernels=kernels)
    print({group: round(x, 4) for group, x in means.items()}, "below:", below)
    whole = geometric_mean(row["ratio"] for row in rows if "ratio" in row)
    print(f"all: {whole:.4f}")
    return 1 if below or whole < LEAST_MEAN or any("ratio" not in r for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
