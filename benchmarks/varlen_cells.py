"""Packed sequences of even and of uneven lengths that take the same FLOPs, on one GPU in one process.

    PYTHONPATH=src python benchmarks/varlen_cells.py --out OUT

``warploom.attention_varlen`` on uneven lengths ("uneven") beside itself on even ones ("even") and ``attention`` there
("dense"); on the uneven ones also FlashAttention-2 as PyTorch has it, and FlashAttention-4 where ``flash_attn.cute``
can be imported. bf16, heads × head_dim = 2048; head_dim 64 and 128, causal and full, and grouped heads. Lengths are a
geometric progression from the longest to a sixteenth of it, shuffled, with an empty sequence among them, and NaN in the
rows behind. Every result is checked first, rows of several sequences against float64; then all are timed interleaved as
replays of CUDA graphs, on inputs that rotate past the L2. Writes OUT/varlen-cells.json after each cell, prints the
table with what whole blocks alone would leave of even lengths' rate ("whole blocks"), and exits with 1 if a result is
wrong or uneven lengths run at less than 0.95 of that rate.
``--backward`` does the same for gradients and writes OUT/varlen-backward-cells.json. ``--kernels`` adds how long each
kernel of a call takes, by CUPTI.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cell_runs import architecture, in_processes, measured, parser_of

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.kernels.attention.backward import TENSORS, BackwardOperands, BackwardProblem
from warploom.kernels.attention.backward_choice import choose as choose_backward
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.gradient_reference import gradient_reference
from warploom.kernels.attention.packed import PackedProblem, choose_packed, packed_calls
from warploom.kernels.attention.packed_backward import choose_packed_backward, packed_backward_calls
from warploom.kernels.attention.packed_backward_problem import PackedBackwardProblem
from warploom.kernels.attention.problem import AttentionProblem, Operands
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.source import KernelSource
from warploom.ops.attention_varlen_backward import attention_varlen_backward
from warploom.ops.backends import built

WIDTH = 2048
SPREAD = 16
"""How many times as long as the shortest sequence the longest one is."""
BEHIND = 64
"""Rows of no sequence."""
CHECKED_ROWS = 256
ROWS = 64
"""Query rows of a consumer."""
STEP = 32
"""Keys that P·V leaves out at a time."""
MOST_SCORES = 2**26
"""Of the gradients' reference at a time."""
SMALLEST_SAMPLE = 0.010
AT_LEAST = 0.95
PROFILED = 3
"""Calls whose kernels are timed one by one."""


@dataclass(frozen=True)
class Cell:
    """``batch`` sequences of ``length``, and as many uneven ones that take as many FLOPs."""

    head_dim: int
    causal: bool
    batch: int
    length: int
    kv_heads: int | None = None

    @property
    def heads(self) -> int:
        """Of the queries."""
        return WIDTH // self.head_dim

    @property
    def name(self) -> str:
        """As the table has it."""
        group = "" if self.kv_heads is None else f" {self.heads}/{self.kv_heads} heads"
        return f"d{self.head_dim} {'causal' if self.causal else 'full'} {self.batch}×{self.length}{group}"

    @property
    def even(self) -> list[int]:
        """All as long."""
        return [self.length] * self.batch

    @cached_property
    def uneven(self) -> list[int]:
        """A geometric progression whose squares add up to those of the even ones; the last has no rows."""
        weights = [SPREAD ** (-i / (self.batch - 1)) for i in range(self.batch)]
        factor = self.length * math.sqrt(self.batch / sum(w * w for w in weights))
        found = [*(round(factor * w) for w in weights), 0]
        random.Random(0).shuffle(found)
        return found

    @property
    def packed(self) -> PackedProblem:
        """What is asked, whatever the lengths."""
        window = None, 0 if self.causal else None
        heads = self.heads, self.kv_heads or self.heads
        return PackedProblem(self.batch, *heads, WIDTH, WIDTH, self.head_dim, bf16, window)

    def whole_blocks(self) -> float:
        """The rate of uneven lengths over that of even ones that the forward pass's products leave.

        Q·Kᵀ has whole blocks of keys, P·V parts of them, and consumers have 64 rows: a sequence's last ones are beyond
        it.
        """
        config: Any = choose_packed(self.packed, target("sm_90a"))

        def products(n: int, first: int) -> float:
            found, whole = 0.0, -(-(min(n, first + config.tile_m) if self.causal else n) // config.tile_n)
            for row in range(first, min(n, first + config.tile_m), ROWS):
                seen = (min(n, row + ROWS) if self.causal else n) - (whole - 1) * config.tile_n
                found += whole - 1 + (1 + max(1, -(-seen // STEP)) * STEP / config.tile_n) / 2
            return found

        even, uneven = (
            sum(products(n, first) for n in lengths for first in range(0, n, config.tile_m)) / self.flops(lengths)
            for lengths in (self.even, self.uneven)
        )
        return even / uneven

    def flops(self, lengths: list[int], *, backward: bool = False) -> int:
        """Of the two products, or the five of the backward pass."""
        scores = sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)
        return (10 if backward else 4) * self.heads * self.head_dim * scores


def cells() -> list[Cell]:
    """All of them."""
    found = [Cell(d, causal, *size) for d in (64, 128) for causal in (False, True) for size in ((32, 1024), (8, 4096))]
    return [*found, Cell(128, True, 8, 4096, kv_heads=4)]


Inputs = dict[str, Any]
Run = Callable[[Inputs], Any]


def fresh(cell: Cell, lengths: list[int], *, backward: bool = False) -> Inputs:
    """Random q, k and v, NaN behind them, and where sequences begin; of a backward pass what the forward one gives."""
    import torch

    total = sum(lengths)

    def make(heads: int) -> Any:
        x = torch.randn(total + BEHIND, heads, cell.head_dim, device="cuda", dtype=torch.bfloat16)
        x[total:] = math.nan
        return x

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    kv_heads = cell.kv_heads or cell.heads
    x = {"q": make(cell.heads), "k": make(kv_heads), "v": make(kv_heads), "starts": starts, "longest": max(lengths)}
    if backward:
        x["out"], x["lse"] = warploom.attention_varlen(
            x["q"], x["k"], x["v"], starts, causal=cell.causal, return_lse=True
        )
        x["dout"] = make(cell.heads)
    return x


def ours(cell: Cell, config: str | None = None) -> Run:
    """This package's call."""
    return lambda x: warploom.attention_varlen(x["q"], x["k"], x["v"], x["starts"], causal=cell.causal, config=config)


def our_gradients(cell: Cell, config: str | None = None) -> Run:
    """This package's backward pass."""
    names = "dout", "q", "k", "v", "out", "lse", "starts"
    return lambda x: attention_varlen_backward(*(x[n] for n in names), causal=cell.causal, config=config)


def dense_gradients(cell: Cell) -> Run:
    """``attention_backward``, where all sequences are as long."""

    def run(x: Inputs) -> Any:
        size = cell.batch, cell.length
        dout, q, k, v, out = (x[n][:-BEHIND].unflatten(0, size) for n in ("dout", "q", "k", "v", "out"))
        lse = x["lse"][:, :-BEHIND].unflatten(1, size).transpose(0, 1).contiguous()
        found = warploom.attention_backward(dout, q, k, v, out, lse, causal=cell.causal)
        return tuple(g.flatten(0, 1) for g in found)

    return run


def flash_attention_2_gradients(cell: Cell) -> Run:
    """PyTorch's copy, by its operators; its forward pass runs once for each set of inputs."""
    import torch

    aten, kept = torch.ops.aten, dict[int, tuple[Any, ...]]()

    def run(x: Inputs) -> Any:
        lengths = x["starts"], x["starts"], x["longest"], x["longest"], 0.0, cell.causal
        q, k, v = (x[n] for n in "qkv")
        if id(x) not in kept:
            kept[id(x)] = aten._flash_attention_forward(q, k, v, *lengths, False)[:4]
        out, lse, seed, offset = kept[id(x)]
        return aten._flash_attention_backward(x["dout"], q, k, v, out, lse, *lengths, seed, offset)

    return run


def dense(cell: Cell) -> Run:
    """``attention``, where all sequences are as long; the result in the place that packed ones have."""

    def run(x: Inputs) -> Any:
        q, k, v = (x[name][:-BEHIND].unflatten(0, (cell.batch, cell.length)) for name in "qkv")
        return warploom.attention(q, k, v, causal=cell.causal).flatten(0, 1)

    return run


def flash_attention_2(cell: Cell) -> Run:
    """PyTorch's copy, by its operator."""
    import torch

    def run(x: Inputs) -> Any:
        lengths = x["starts"], x["starts"], x["longest"], x["longest"], 0.0, cell.causal, False
        return torch.ops.aten._flash_attention_forward(x["q"], x["k"], x["v"], *lengths)[0]

    return run


def flash_attention_4(cell: Cell) -> Run | None:
    """The newest release, wherever it can be imported."""
    try:
        function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except Exception:
        return None

    def run(x: Inputs) -> Any:
        q, k, v = (x[n][:-BEHIND] for n in "qkv")  # it multiplies what lies behind by zero, which NaN survives
        found = function(
            q, k, v, cu_seqlens_q=x["starts"], cu_seqlens_k=x["starts"], max_seqlen_q=x["longest"],
            max_seqlen_k=x["longest"], causal=cell.causal,
        )  # fmt: skip
        return found[0] if isinstance(found, tuple) else found

    return run


# -- checked, then timed
def excess(q: Any, k: Any, v: Any, last: Any, out: Any) -> float:
    """The largest |o - o64| over what bf16 allows: (rows, head_dim); row i sees keys up to last[i], or all of them."""
    import torch

    seen = None if last is None else torch.arange(len(k), device=k.device)[None] <= last[:, None]
    return attention_error(out, attention_reference(q, k, v, bf16, seen=seen), bf16).value


def largest_error(cell: Cell, x: Inputs, lengths: list[int], out: Any) -> float:
    """The largest |o - o64| over what bf16 allows, of rows of the longest, the shortest and the last sequences."""
    import torch

    worst, starts = 0.0, [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    group = cell.heads // (cell.kv_heads or cell.heads)
    for number in {order[0], order[-1], max(order), min(order)}:
        first, n = starts[number], lengths[number]
        rows = torch.randperm(n, device="cuda")[:CHECKED_ROWS]
        head = number % cell.heads
        keys = slice(first, first + n)
        q, k, v = x["q"][first + rows, head], x["k"][keys, head // group], x["v"][keys, head // group]
        worst = max(worst, excess(q, k, v, rows if cell.causal else None, out[first + rows, head]))
    return worst


def largest_gradient_error(cell: Cell, x: Inputs, lengths: list[int], found: Any) -> float:
    """The largest error over what is allowed, of the first key head of the longest and the shortest sequence."""
    import torch

    group, worst = cell.heads // (cell.kv_heads or cell.heads), 0.0
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    for number in (order[0], order[-1]):
        first, n = sum(lengths[:number]), lengths[number]
        rows = slice(first, first + n)

        def of(y: Any, heads: int, rows: slice = rows) -> Any:
            return y[rows, :heads].transpose(0, 1)

        at = torch.arange(n, device="cuda")
        reference = gradient_reference(
            of(x["dout"], group), of(x["q"], group), of(x["k"], 1), of(x["v"], 1), of(x["out"], group), dtype=bf16,
            seen=at[None] <= at[:, None] if cell.causal else None, rows=MOST_SCORES // (n * group),
        )  # fmt: skip
        dq, dk, dv = found[:3]
        worst = max(worst, *reference.excess(of(dq, group), of(dk, 1), of(dv, 1)).values())
    return worst


def candidates_of(cell: Cell, options: argparse.Namespace) -> dict[str, tuple[Run | None, list[int]]]:
    """Who is timed, and on which lengths."""
    texts = [text for text in options.config if f"head_dim={cell.head_dim}," in text]
    if options.backward:
        return {
            "uneven": (our_gradients(cell), cell.uneven), "even": (our_gradients(cell), cell.even),
            "dense": (dense_gradients(cell), cell.even),
            "flash_attention_2": (flash_attention_2_gradients(cell), cell.uneven),
            **{text: (our_gradients(cell, text), cell.uneven) for text in texts},
        }  # fmt: skip
    return {
        "uneven": (ours(cell), cell.uneven), "even": (ours(cell), cell.even), "dense": (dense(cell), cell.even),
        "flash_attention_2": (flash_attention_2(cell), cell.uneven),
        "flash_attention_4": (flash_attention_4(cell), cell.uneven),
        **{text: (ours(cell, text), cell.uneven) for text in texts},
    }  # fmt: skip


def kernel_times(run: Run, x: Inputs) -> dict[str, float]:
    """Microseconds of each kernel of a call, by its name; the mean of some calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run(x)
        torch.cuda.synchronize()
    times = {event.key: float(event.self_device_time_total) / PROFILED for event in seen.key_averages()}
    return {name: round(time, 1) for name, time in times.items() if time > 0}


def timed(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """One cell: checked, and timed."""
    import torch

    from warploom.bench.timing import Candidate, EventClock, graphed, input_sets, measure, paired_spread

    runs, error_of = candidates_of(cell, options), largest_gradient_error if options.backward else largest_error
    row = cell.head_dim * 2 * 2 * (cell.heads + (cell.kv_heads or cell.heads))
    count = input_sets(row * sum(cell.uneven), torch.cuda.get_device_properties(0).L2_cache_size)
    inputs = {
        str(n): [fresh(cell, n, backward=options.backward) for _ in range(count)] for n in (cell.even, cell.uneven)
    }
    errors, failed, kernels = dict[str, float](), dict[str, str](), dict[str, dict[str, float]]()
    candidates: list[Any] = []
    for name, (run, lengths) in runs.items():
        if run is None:
            continue
        sets = inputs[str(lengths)]
        torch.full_like(sets[0]["q"], math.nan)  # the memory that the result is likely to get
        try:
            errors[name] = error_of(cell, sets[0], lengths, run(sets[0]))
            for x in sets:  # forward passes of peers are no part of a graph
                run(x)
            candidates.append(graphed(Candidate(name, lambda i, run=run, sets=sets: run(sets[i])), count, torch))
            if options.kernels:
                kernels[name] = kernel_times(run, sets[0])
        except Exception as error:
            if name not in ("flash_attention_2", "flash_attention_4"):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    clock = EventClock(int(torch.cuda.current_stream().cuda_stream))
    found = measure(candidates, 1, clock, rounds=options.rounds, sample_seconds=SMALLEST_SAMPLE)
    return {
        "cell": cell.name, "head_dim": cell.head_dim, "causal": cell.causal, "batch": cell.batch,
        "length": cell.length, "lengths": cell.uneven, "not_run": failed,
        "error": errors, "kernels": kernels, "whole_blocks": round(cell.whole_blocks(), 3),
        "tflops": {
            n: m.seconds.rate(count * cell.flops(runs[n][1], backward=options.backward) / 1e12).json()
            for n, m in found.items()
        },
        "ratio": {n: paired_spread(found["uneven"], m).json() for n, m in found.items() if n != "uneven"},
    }  # fmt: skip


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Every wrong result, a peer's included, and every cell where uneven lengths are slower than they should be."""
    said = [f"{n} is wrong at {c['cell']}: {e:.2f}" for c in found for n, e in c["error"].items() if not e <= 1.0]
    for c in found:
        for name in ("even", "dense"):
            ratio = c["ratio"][name]["median"]
            if ratio < AT_LEAST:
                said.append(f"{c['cell']}: {ratio} × {name}, wanted {AT_LEAST}")
    return said


# -- kernels that are compiled before
def make(job: tuple[Cell, str, bool]) -> None:
    """Compile the kernels of a cell for an architecture into the cache."""
    cell, arch, backward = job
    d, h, g = cell.head_dim, cell.heads, cell.kv_heads or cell.heads
    packed, q, kv = cell.packed, (h * d, d), (g * d, d)
    sources = [call.source for call in packed_calls(choose_packed(packed, target(arch)), packed, (q, kv, kv, q), 132)]
    even = AttentionProblem(cell.batch, h, g, cell.length, cell.length, d, bf16, packed.window)
    chosen: Any = choose(even, target(arch))[0]
    sources.append(chosen.call(even, Operands.contiguous(even), 132).source)
    if backward:
        sources += sources_of_gradients(cell, arch)
    for source in sources:
        built(source, arch)


def sources_of_gradients(cell: Cell, arch: str) -> list[KernelSource]:
    """The kernels of the backward passes, and of the forward one with log-sum-exps."""
    d, h, g, goal = cell.head_dim, cell.heads, cell.kv_heads or cell.heads, target(arch)
    packed = replace(cell.packed, lse=True)
    q, kv = (h * d, d), (g * d, d)
    calls = [*packed_calls(choose_packed(packed, goal), packed, (q, kv, kv, q), 132)]
    problem = PackedBackwardProblem(packed)
    strides = {name: kv if name in ("k", "v", "dk", "dv") else q for name in TENSORS}
    calls += packed_backward_calls(choose_packed_backward(problem, goal), problem, strides, 132)
    even = BackwardProblem(AttentionProblem(cell.batch, h, g, cell.length, cell.length, d, bf16, packed.window))
    lying = [(cell.length * row, head, row) for row, head in (strides[name] for name in TENSORS)]
    calls += choose_backward(even, goal)[0].calls(even, BackwardOperands(tuple(lying), "bshd"), 132)
    return [call.source for call in calls]


def line(c: dict[str, Any]) -> str:
    """A cell as a line of text."""
    speeds = (
        f"{n} {s['median']:.0f}" + (f" ×{c['ratio'][n]['median']:.3f}" if n in c["ratio"] else "")
        for n, s in c["tflops"].items()
    )
    worst = max(c["error"].values())
    return (
        f"{c['cell']:28} error {worst:.2f}  whole blocks ×{c['whole_blocks']:.3f}  "
        + "  ".join(speeds)
        + (f"  {c['not_run']}" if c["not_run"] else "")
    )


def main() -> int:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--config", nargs="*", default=[], help="configurations timed besides, in their notation")
    parser.add_argument("--backward", action="store_true", help="gradients")
    parser.add_argument("--kernels", action="store_true", help="how long each kernel takes as well")
    options = parser.parse_args()
    todo, arch = [c for c in cells() if c.head_dim in options.head_dims], architecture(options)
    in_processes(make, [(cell, arch, options.backward) for cell in todo])
    if options.compile_only:
        return 0
    from warploom.bench.peers import flash_attention_4 as newest

    name = "varlen-backward-cells.json" if options.backward else "varlen-cells.json"
    head = {"flash_attention_4": newest()[1]}
    return measured(todo, lambda cell: timed(cell, options), line, missed, options.out / name, head)


if __name__ == "__main__":
    sys.exit(main())
