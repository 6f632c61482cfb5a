"""Two versions of this package beside each other on one GPU: the same calls on the same inputs, in turns.

    python benchmarks/compare_trees.py OLD NEW [--only attention,other,products,reductions] [--cells 'NAME|NAME …']
                                               [--rounds 7] [--out FILE]

OLD and NEW are folders with the package's sources (``src``, with or without the folder that holds it). Each runs in a
process of its own; the processes take turns, cell by cell and round by round. Inputs are drawn by the cell's name and
rotate past the L2, the calls of a round are one CUDA graph, and before a cell is timed what a graph wrote over NaN is
held against float64 in both. At the power limit a round's clock depends on the one before: a cell that seems below
0.98 is measured once more, with four times the rounds, which then count. Writes medians, spread, clock and watts of
every cell as JSON ($OUT/compare.json by default). Exit code 1 if a result is wrong, a cell of NEW is slower than 0.98
of OLD, or the geometric mean of all below 1.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from scripts import products, write

LEAST_CELL, LEAST_MEAN = 0.98, 1.0
ROUND_SECONDS = 0.012
WARMERS = 12
"""Processes that compile a tree's kernels ahead."""


@dataclass(frozen=True)
class Cell:
    """One call: what of the package, on inputs of which shapes, with which options."""

    group: str
    name: str
    call: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    flops: float = 0.0


def attention(
    group: str,
    name: str,
    q: tuple[int, ...],
    kv_heads: int = 0,
    kv_len: int = 0,
    dtype: str = "bfloat16",
    **options: Any,
) -> Cell:
    """Of q (batch, length, heads, head_dim), by default with as many keys and key heads."""
    batch, q_len, heads, dim = q
    kv = batch, kv_len or q_len, kv_heads or heads, dim
    flops = 4.0 * batch * heads * q_len * kv[1] * dim * (0.5 if options.get("causal") else 1.0)
    return Cell(group, name, "attention", (q, kv, kv), dtype, options, flops)


def attention_cells() -> Iterator[Cell]:
    """The 36 cells: 16384 tokens, heads × head_dim = 2048."""
    for dim, causal, seq in product((64, 128, 256), (False, True), (512, 1024, 2048, 4096, 8192, 16384)):
        name = f"d{dim} {'causal' if causal else 'full'} {seq}"
        yield attention("attention", name, (16384 // seq, seq, 2048 // dim, dim), causal=causal)


def other_cells() -> Iterator[Cell]:
    """Attention on shapes that nobody tuned for."""

    def causal(name: str, q: tuple[int, ...], kv_heads: int = 0, **options: Any) -> Cell:
        return attention("other", name, q, kv_heads, causal=True, **options)

    def full(name: str, q: tuple[int, ...], kv_heads: int = 0, **options: Any) -> Cell:
        return attention("other", name, q, kv_heads, **options)

    yield causal("70B prefill 4k", (1, 4096, 64, 128), 8)
    yield causal("8B 8k", (1, 8192, 32, 128), 8)
    yield causal("1x2048 32/8", (1, 2048, 32, 128), 8)
    yield causal("32k 40/8", (1, 32768, 40, 128), 8)
    yield causal("131k 8/1", (1, 131072, 8, 128), 1)
    yield causal("3000 causal", (4, 3000, 16, 128))
    yield full("1000 full", (16, 1000, 16, 128))
    yield full("8191 full", (2, 8191, 16, 128))
    yield causal("window 1024 16k", (1, 16384, 16, 128), window=(1023, 0))
    yield causal("softcap d256 16/8", (2, 4096, 16, 256), 8, softcap=50.0)
    yield causal("d96 causal", (4, 4096, 16, 96))
    yield full("d80 full", (4, 4096, 16, 80))
    yield full("d72 full", (4, 4096, 16, 72))
    yield causal("d192 causal", (2, 4096, 16, 192))
    yield full("197 d64", (64, 197, 12, 64))
    yield full("decode 8k 32/8", (16, 1, 32, 128), 8, kv_len=8192)
    yield causal("f16 d128 causal 4k", (4, 4096, 16, 128), dtype="float16")
    yield full("f16 d64 full 4k", (4, 4096, 32, 64), dtype="float16")
    yield full("one head 16k", (1, 16384, 1, 128))
    yield causal("lse causal 4k", (4, 4096, 16, 128), return_lse=True)


def product_cells() -> Iterator[Cell]:
    """y = x·Wᵀ of ``gemm_shapes.csv``, W stored as (n, k)."""
    for name, m, n, k in products():
        yield Cell("products", name, "matmul", ((m, k), (n, k)), "float16", {}, 2.0 * m * n * k)


def reduction_cells() -> Iterator[Cell]:
    """Row reductions of products that are never written."""
    large, narrow = (8192, 131072, 4096), (16384, 16384, 128)
    for op, (m, n, k) in (
        ("max", large),
        ("logsumexp", large),
        ("max", narrow),
        ("logsumexp", narrow),
        ("sum", (4096, 32768, 2048)),
    ):
        yield Cell(
            "reductions",
            f"{op} {m}x{n}x{k}",
            "matmul_reduce",
            ((m, k), (n, k)),
            options={"op": op},
            flops=2.0 * m * n * k,
        )


GROUPS: dict[str, Callable[[], Iterator[Cell]]] = {
    "attention": attention_cells,
    "other": other_cells,
    "products": product_cells,
    "reductions": reduction_cells,
}


def cells_of(groups: str, names: str = "") -> list[Cell]:
    """The cells of some groups ("attention,other"), or of those the ones with ``names`` ("3000 causal|8191 full")."""
    found = [cell for name in groups.split(",") for cell in GROUPS[name]()]
    return [cell for cell in found if not names or cell.name in names.split("|")]


# -- a tree's process
class Prepared:
    """A cell in this process: rotating inputs and the graph of a round."""

    def __init__(self, cell: Cell) -> None:
        import torch

        import warploom

        self._torch, self._cell = torch, cell
        generator = torch.Generator("cuda").manual_seed(zlib.crc32(cell.name.encode()))
        kind = getattr(torch, cell.dtype)
        size = 2 * sum(math.prod(shape) for shape in cell.shapes)
        sets = max(1, min(16, -(-(180 << 20) // size)))
        make = partial(torch.randn, generator=generator, device="cuda", dtype=torch.float32)
        self._sets = [[make(shape).to(kind) for shape in cell.shapes] for _ in range(sets)]
        call, options = getattr(warploom, cell.call), dict(cell.options)
        if cell.call == "attention":
            self._run = lambda x: call(*x, **options)
        else:
            self._run = lambda x: call(x[0], x[1].T, **options)

    def compile(self) -> None:
        """Make the kernels, once."""
        self._run(self._sets[0])
        self._torch.cuda.synchronize()

    def capture(self) -> float:
        """The graph of a round, over every input set; the error of what it wrote over NaN, 1 at most if it is right."""
        torch = self._torch
        self.compile()
        once = self._elapsed(lambda: [self._run(inputs) for inputs in self._sets])
        repeats = max(1, min(400, round(ROUND_SECONDS / max(once, 1e-6))))
        self._calls = repeats * len(self._sets)
        last: Any = None
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i in range(self._calls):
                last = self._run(self._sets[i % len(self._sets)])
        outputs = last if isinstance(last, tuple) else (last,)
        for x in outputs:
            x.fill_(float("nan"))
        self._graph.replay()
        torch.cuda.synchronize()
        return self._error(self._sets[(self._calls - 1) % len(self._sets)], outputs)

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

    def _error(self, inputs: list[Any], outputs: tuple[Any, ...]) -> float:
        torch, cell = self._torch, self._cell
        if any(bool(torch.isnan(x).any()) for x in outputs):
            return math.inf
        unit = 2.0**-8 if cell.dtype == "bfloat16" else 2.0**-11
        if cell.call == "attention":
            return _attention_error(torch, cell, inputs, outputs[0], unit)
        rows = slice(0, 256)
        a, b = (x.double() for x in inputs)
        product, magnitude = a[rows] @ b.T, a[rows].abs() @ b.abs().T
        slack = cell.shapes[0][1] * 2.0**-22
        if cell.call == "matmul":
            error = (outputs[0][rows].double() - product).abs()
            return float((error / (unit * product.abs() + slack * magnitude + 1e-7)).max())
        op = cell.options["op"]
        expected = product.max(1)[0] if op == "max" else product.sum(1) if op == "sum" else torch.logsumexp(product, 1)
        allowed = slack * (magnitude.sum(1) if op == "sum" else magnitude.max(1)[0]) + 2.0**-20 * expected.abs()
        return float(((outputs[0][rows].double() - expected).abs() / allowed).max())


def _attention_error(torch: Any, cell: Cell, inputs: list[Any], out: Any, unit: float) -> float:
    """The worst error of a head's last rows over what the type allows: P and O are rounded to it."""
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = cell.shapes[:2]
    rows = min(q_len, 512)
    head, options = heads - 1, cell.options
    q, k, v = (x[batch - 1].double() for x in inputs)
    q, k, v = q[-rows:, head], k[:, head * kv_heads // heads], v[:, head * kv_heads // heads]
    scores = q @ k.T / math.sqrt(dim)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    at = torch.arange(q_len - rows, q_len, device="cuda")[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device="cuda")[None]
    if options.get("causal"):
        scores = scores.masked_fill(key > at, -math.inf)
    if options.get("window"):
        scores = scores.masked_fill(key < at - options["window"][0], -math.inf)
    weights = torch.softmax(scores, -1)
    expected, magnitude = weights @ v, weights @ v.abs()
    allowed = 2 * unit * (expected.abs() + magnitude) + 2.0**-18 * (magnitude + 1)
    return float(((out[batch - 1, -rows:, head].double() - expected).abs() / allowed).max())


def worker(cells: list[Cell]) -> None:
    """Answer one JSON line for each on standard input: prepare a cell, time it, forget it."""
    import torch

    ready = None
    for line in sys.stdin:
        what, index = json.loads(line)
        try:
            if what == "prepare":
                ready = Prepared(cells[index])
                answer: Any = ready.capture()
            elif what == "time":
                answer = ready.seconds() if ready is not None else None
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


def compare(trees: list[str], groups: str, names: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of all cells, printed as they come."""
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
    for process in pair:
        process.kill()
    return rows


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
    rows = compare(given.trees, given.groups, given.cells, given.rounds)
    below = [r["cell"] for r in rows if r.get("ratio", 0.0) < LEAST_CELL]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["group"], []).extend([row["ratio"]] if "ratio" in row else [])
    means = {group: geometric_mean(of) for group, of in ratios.items() if of}
    write(Path(given.out), {"means": means, "below": below, "rows": rows})
    print({group: round(x, 4) for group, x in means.items()}, "below:", below)
    whole = geometric_mean(row["ratio"] for row in rows if "ratio" in row)
    print(f"all: {whole:.4f}")
    return 1 if below or whole < LEAST_MEAN or any("ratio" not in r for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
