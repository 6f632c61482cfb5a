"""Prompts and chunks of prompts on a cache in pages, beside the same keys side by side, on one GPU in one process.

    PYTHONPATH=src python benchmarks/prefill_cells.py --out OUT

``warploom.attention_paged`` at pages of 64, 128 and 256 and without ("no pages"), beside ``attention`` ("attention")
and ``attention_varlen`` ("packed") on keys that lie side by side, and beside the kernels of few queries at pages of 64
("few queries"). bf16, causal, heads × head_dim = 2048; head_dim 64 and 128. Prompts of 4000 tokens, chunks of 512
queries whose sequences have 8100 keys with them, and where tiles and the kernels of few queries meet, 32 to 128
queries, what is taken there ("chosen"). Pages are in random order, with NaN in all that no sequence has. Every result
is checked first against float64; then all are timed interleaved as replays of CUDA graphs, on inputs that rotate past
the L2. Writes OUT/prefill-cells.json, prints the table, and exits with 1 if a result is wrong, or if pages of a prompt
or chunk run at less than 0.95 of the rate of ``attention``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cell_runs import architecture, in_processes, measured, parser_of
from varlen_cells import AT_LEAST, CHECKED_ROWS, SMALLEST_SAMPLE, WIDTH, excess

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.decode import DecodeOperands, DecodeProblem, decode_configuration
from warploom.kernels.attention.packed import PackedProblem, choose_packed, packed_calls
from warploom.kernels.attention.paged import PagedConfig, choose_paged, paged_calls, parse_config
from warploom.kernels.attention.problem import AttentionProblem, Operands
from warploom.ops.attention import calls_of
from warploom.ops.backends import built

PAGES = 64, 128, 256
SPARE_PAGES = 7
CAUSAL = None, 0


@dataclass(frozen=True)
class Cell:
    """``queries`` of each sequence, which has ``keys`` keys with them; ``judged``: whether pages must keep up."""

    head_dim: int
    batch: int
    queries: int
    keys: int
    kv_heads: int | None = None
    judged: bool = True

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries and of keys."""
        heads = WIDTH // self.head_dim
        return heads, self.kv_heads or heads

    @property
    def name(self) -> str:
        """As the table has it."""
        heads, kv_heads = self.heads
        group = "" if heads == kv_heads else f" {heads}/{kv_heads} heads"
        return f"d{self.head_dim} {self.batch}×{self.queries} on {self.keys}{group}"

    @property
    def flops(self) -> int:
        """Of the two products."""
        q, n = self.queries, self.keys
        return 4 * WIDTH * self.batch * (q * n - q * (q - 1) // 2)

    def problem(self, page: int) -> DecodeProblem:
        """What ``attention_paged`` is asked."""
        capacity = -(-self.keys // max(1, page)) * max(1, page)
        return DecodeProblem(
            self.batch, *self.heads, self.queries, capacity, self.head_dim, bf16, CAUSAL, page_size=page,
            pages=self.batch * (capacity // page) + SPARE_PAGES if page else 0,
            table_pages=capacity // page if page else 0,
        )  # fmt: skip


def cells() -> list[Cell]:
    """All of them."""
    found = [Cell(d, *size) for d in (64, 128) for size in ((8, 4000, 4000), (4, 512, 8100))]
    found.append(Cell(128, 4, 512, 8100, 4))
    return [*found, *(Cell(128, batch, q, 8100, 4, judged=False) for batch in (1, 8) for q in (32, 64, 128))]


Inputs = dict[str, Any]
Run = Callable[[Inputs], Any]


def in_pages(x: Any, page: int, order: Any) -> Any:
    """(batch, keys, heads, head_dim) in pages that come in an order; NaN behind the last keys and in spare pages."""
    import torch

    batch, keys = x.shape[:2]
    each = -(-keys // page)
    whole = torch.full((batch, each * page, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
    whole[:, :keys] = x
    found = torch.full((batch * each + SPARE_PAGES, page, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
    found[order] = whole.view(batch * each, page, *x.shape[2:])
    return found


def fresh(cell: Cell) -> Inputs:
    """Random q, k and v, side by side and in pages."""
    import torch

    heads, kv_heads = cell.heads

    def make(rows: int, heads: int) -> Any:
        return torch.randn(cell.batch, rows, heads, cell.head_dim, device="cuda", dtype=torch.bfloat16)

    x: Inputs = {"q": make(cell.queries, heads), "k": make(cell.keys, kv_heads), "v": make(cell.keys, kv_heads)}
    for name, rows in (("q_starts", cell.queries), ("k_starts", cell.keys)):
        x[name] = torch.arange(cell.batch + 1, device="cuda", dtype=torch.int32) * rows
    x["lengths"] = torch.full((cell.batch,), cell.keys, device="cuda", dtype=torch.int32)
    for page in PAGES:
        each = -(-cell.keys // page)
        order = torch.randperm(cell.batch * each + SPARE_PAGES, device="cuda")[: cell.batch * each]
        x[f"table {page}"] = order.view(cell.batch, each).to(torch.int32)
        x |= {f"{name} {page}": in_pages(x[name], page, order) for name in "kv"}
    return x


def contiguous(x: Inputs) -> Any:
    """``attention``."""
    return warploom.attention(x["q"], x["k"], x["v"], causal=True)


def packed(x: Inputs) -> Any:
    """``attention_varlen``."""
    q, k, v = (x[name].flatten(0, 1) for name in "qkv")
    return warploom.attention_varlen(q, k, v, x["q_starts"], x["k_starts"], causal=True).view_as(x["q"])


def paged(page: int, config: PagedConfig | None = None) -> Run:
    """``attention_paged``."""

    def run(x: Inputs) -> Any:
        k, v, table = (x[f"{name} {page}"] for name in ("k", "v", "table")) if page else (x["k"], x["v"], None)
        return warploom.attention_paged(x["q"], k, v, x["lengths"], block_table=table, config=config)

    return run


def candidates_of(cell: Cell, arch: str, configs: list[str]) -> dict[str, Run]:
    """Who is timed."""
    asked = {text: paged(64, parse_config(text)) for text in configs if f"head_dim={cell.head_dim}," in text}
    few = decode_configuration(cell.problem(64), target(arch))
    tiled: Any = choose_packed(typical(cell), target(arch))
    found: dict[str, Run] = {"attention": contiguous, "packed": packed, "no pages": paged(0)}
    if not cell.judged:
        meeting = {"chosen": paged(64), "pages of 64": paged(64, tiled), "few queries": paged(64, few)}
        return {"attention": contiguous, **meeting}
    return found | {f"pages of {page}": paged(page) for page in PAGES} | {"few queries": paged(64, few)} | asked


def largest_error(cell: Cell, x: Inputs, out: Any) -> float:
    """The largest error over what bf16 allows, of some rows of the first and the last sequence."""
    import torch

    heads, kv_heads = cell.heads
    worst = 0.0
    for number, head in ((0, heads - 1), (cell.batch - 1, 0)):
        rows = torch.randperm(cell.queries, device="cuda")[:CHECKED_ROWS]
        k, v = (x[name][number, :, head * kv_heads // heads] for name in "kv")
        last = rows + (cell.keys - cell.queries)
        worst = max(worst, excess(x["q"][number, rows, head], k, v, last, out[number, rows, head]))
    return worst


def timed(cell: Cell, arch: str, options: argparse.Namespace) -> dict[str, Any]:
    """One cell: checked, and timed."""
    import torch

    from warploom.bench.timing import Candidate, EventClock, graphed, input_sets, measure, paired_spread

    _, kv_heads = cell.heads
    size = 2 * cell.head_dim * 2 * kv_heads * cell.keys * cell.batch
    count = input_sets(size, torch.cuda.get_device_properties(0).L2_cache_size)
    sets, errors = [fresh(cell) for _ in range(count)], dict[str, float]()
    candidates: list[Any] = []
    for name, run in candidates_of(cell, arch, options.config).items():
        torch.full_like(sets[0]["q"], math.nan)  # the memory that the result is likely to get
        errors[name] = largest_error(cell, sets[0], run(sets[0]))
        candidates.append(graphed(Candidate(name, lambda i, run=run: run(sets[i])), count, torch))
    clock = EventClock(int(torch.cuda.current_stream().cuda_stream))
    found = measure(candidates, 1, clock, rounds=options.rounds, sample_seconds=SMALLEST_SAMPLE)
    return {
        "cell": cell.name, "head_dim": cell.head_dim, "batch": cell.batch, "queries": cell.queries, "keys": cell.keys,
        "kv_heads": kv_heads, "judged": cell.judged, "error": errors,
        "tflops": {n: m.seconds.rate(count * cell.flops / 1e12).json() for n, m in found.items()},
        "ratio": {n: paired_spread(m, found["attention"]).json() for n, m in found.items() if n != "attention"},
    }  # fmt: skip


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Every wrong result, and every cell where pages are slower than they should be."""
    said = [f"{n} is wrong at {c['cell']}: {e:.2f}" for c in found for n, e in c["error"].items() if not e <= 1.0]
    for c in (c for c in found if c["judged"]):
        for page in PAGES:
            name = f"pages of {page}"
            ratio = c["ratio"][name]["median"]
            if ratio < AT_LEAST:
                said.append(f"{c['cell']}, {name}: {ratio} × attention, wanted {AT_LEAST}")
    return said


# -- kernels that are compiled before
def typical(cell: Cell) -> PackedProblem:
    """The packed problem of a cell."""
    rows, keys = cell.batch * cell.queries, cell.batch * cell.keys
    return PackedProblem(cell.batch, *cell.heads, rows, keys, cell.head_dim, bf16, CAUSAL)


def make(job: tuple[Cell, str]) -> None:
    """Compile the kernels of a cell for an architecture into the cache."""
    cell, arch = job
    d, goal, (h, g) = cell.head_dim, target(arch), cell.heads
    q, kv = (h * d, d), (g * d, d)
    tiled: Any = choose_packed(typical(cell), goal)
    calls = [*packed_calls(tiled, typical(cell), (q, kv, kv, q), 132)]
    even = AttentionProblem(cell.batch, h, g, cell.queries, cell.keys, d, bf16, CAUSAL)
    rows = (cell.queries * h * d, d, h * d)
    side_by_side = (cell.keys * g * d, d, g * d)
    calls += calls_of(choose(even, goal)[0], even, Operands.contiguous(even), 132)
    for page in (0, *PAGES):
        problem = cell.problem(page)
        of_page = (page * g * d, d, g * d) if page else side_by_side
        lying = DecodeOperands(rows, of_page, of_page, rows, table=problem.table_pages)
        chosen, _ = choose_paged(problem, lying, goal, 132)
        for config in dict.fromkeys((tiled, decode_configuration(problem, goal), chosen)):
            calls += paged_calls(config, problem, lying, 132)
    for call in calls:
        built(call.source, arch)


def line(c: dict[str, Any]) -> str:
    """A cell as a line of text."""
    speeds = (
        f"{n} {s['median']:.0f}" + (f" ×{c['ratio'][n]['median']:.3f}" if n in c["ratio"] else "")
        for n, s in c["tflops"].items()
    )
    return f"{c['cell']:32} error {max(c['error'].values()):.2f}  " + "  ".join(speeds)


def main() -> int:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--config", nargs="*", default=[], help="configurations timed besides, in their notation")
    parser.add_argument("--only", default="", help="cells whose name has this")
    options = parser.parse_args()
    todo, arch = [cell for cell in cells() if options.only in cell.name], architecture(options)
    in_processes(make, [(cell, arch) for cell in todo])
    if options.compile_only:
        return 0
    file = options.out / "prefill-cells.json"
    return measured(todo, lambda cell: timed(cell, arch, options), line, missed, file)


if __name__ == "__main__":
    sys.exit(main())
