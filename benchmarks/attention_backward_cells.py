"""``warploom.attention_backward`` as users call it, beside the kernels of others, on one GPU in one process.

    PYTHONPATH=src python benchmarks/attention_backward_cells.py --out OUT

Peers: cuDNN and FlashAttention-2 as PyTorch has them, and FlashAttention-4 wherever ``flash_attn.cute`` can be
imported. 16384 tokens, heads × head_dim = 2048, bf16; head_dim 64 to 256, full and causal, sequences of 512 to 16384;
then grouped heads, a window, lengths that no tile divides, and head_dim 192 with a V of 128. Every gradient, those of
peers included, is checked element by element against float64 first (one group of heads); then all are timed interleaved
as replays of CUDA graphs, on inputs that rotate past the L2. FLOPs are those of five products, and all kernels of a
call count. ``--sync`` times the kernels for GPUs without wgmma instead, in as much shared memory as this one has.
Writes OUT/attention-backward-cells.json after each cell, prints the table, and exits with 1 if a result is wrong (a
peer's from twice our bound on) or a figure below is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from cell_runs import architecture, in_processes, measured, on_one_stream, parser_of

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.kernels.attention.backward import BackwardConfig, BackwardOperands, BackwardProblem
from warploom.kernels.attention.backward_choice import choose
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.gradient_reference import gradient_reference
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.attention.reference import seen_of
from warploom.ops.backends import built

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 96, 128, 192, 256)
MOST_SCORES = 2**28
"""Scores of the reference at a time: 2 GiB of float64, in some twenty arrays."""
SMALLEST_SAMPLE = 0.010
OTHERS_ERROR = 2.0
"""What a peer's gradients may be off by, in bounds of ours: they round at other places."""


@dataclass(frozen=True)
class Cell:
    """One problem."""

    head_dim: int
    causal: bool
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    window: int | None = None
    v_dim: int = 0
    """Of V and dO, where it is not head_dim."""

    @property
    def name(self) -> str:
        """As the table has it."""
        lengths = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}×{self.kv_len}"
        mask = "causal" if self.causal else "full"
        group = f" {self.heads}/{self.kv_heads} heads" if self.heads != self.kv_heads else ""
        dims = f"{self.head_dim}/{self.v_dim}" if self.v_dim else str(self.head_dim)
        return f"d{dims} {mask} {lengths}{group}{f' window {self.window}' if self.window else ''}"

    @property
    def batch(self) -> int:
        """So that there are about TOKENS tokens."""
        return max(1, TOKENS // max(self.q_len, self.kv_len))

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The window that ``attention`` takes."""
        return self.window, 0 if self.causal else None

    @property
    def problem(self) -> AttentionProblem:
        """The forward problem."""
        return AttentionProblem(
            self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, bf16, self.sides, self.v_dim
        )

    @property
    def flops(self) -> int:
        """Of the five products."""
        return BackwardProblem(self.problem).flops

    @property
    def options(self) -> dict[str, Any]:
        """Of the call."""
        return {"causal": self.causal, "window": None if self.window is None else (self.window, None)}


def cells() -> list[Cell]:
    """All of them."""
    found = [
        Cell(d, causal, n, n, WIDTH // d, WIDTH // d) for d in HEAD_DIMS for causal in (False, True) for n in LENGTHS
    ]
    found += [Cell(128, True, n, n, 64, 8) for n in (4096, 16384)]
    found += [Cell(128, True, 16384, 16384, 16, 16, window=1024)]
    found += [Cell(128, causal, 3001, 5003, 16, 16) for causal in (False, True)]
    found += [Cell(192, causal, n, n, 16, 16, v_dim=128) for causal in (False, True) for n in (4096, 16384)]
    return found


@dataclass(frozen=True)
class Figure:
    """At least so many times as fast as a peer in each cell of these head_dims (None: all), or in the mean."""

    peer: str
    at_least: float
    head_dims: tuple[int, ...] | None = None
    mean: bool = False


FIGURES = (
    Figure("cudnn", 1.0),
    Figure("flash_attention_4", 0.97, (64, 128)),
    Figure("flash_attention_4", 1.05, (64, 128), mean=True),
    Figure("best", 1.2, (256,)),
)
SYNC_FIGURES = (Figure("flash_attention_2", 1.0),)

PEERS = ("cudnn", "flash_attention_2", "flash_attention_4")
ARGUMENTS = ("dout", "q", "k", "v", "out", "lse")
Inputs = dict[str, Any]
Run = Callable[[Inputs], tuple[Any, ...]]


def fresh(cell: Cell) -> Inputs:
    """Random q, k, v and dO, and what the forward pass makes of them."""
    import torch

    def make(heads: int, length: int, width: int) -> Any:
        return torch.randn(cell.batch, length, heads, width, device="cuda", dtype=torch.bfloat16)

    both = cell.problem.head_dim, cell.problem.value_dim
    x: Inputs = {name: make(cell.heads, cell.q_len, d) for name, d in zip(("q", "dout"), both, strict=True)}
    x |= {name: make(cell.kv_heads, cell.kv_len, d) for name, d in zip("kv", both, strict=True)}
    x["out"], x["lse"] = warploom.attention(x["q"], x["k"], x["v"], return_lse=True, **cell.options)
    return x


# -- who is timed


def ours(cell: Cell, config: str | None = None, *, deterministic: bool = False) -> Run:
    """This package's call."""
    how = {**cell.options, "config": config, "deterministic": deterministic}
    return lambda x: warploom.attention_backward(*(x[name] for name in ARGUMENTS), **how)


def through_autograd(forward: Callable[[Any, Any, Any], Any]) -> Run:
    """A peer's backward pass, by PyTorch's autograd; its forward pass runs once for each set of inputs."""
    import torch

    kept: dict[int, tuple[Any, Any]] = {}

    def run(x: Inputs) -> tuple[Any, ...]:
        if id(x) not in kept:
            leaves = [x[name].detach().requires_grad_() for name in "qkv"]
            kept[id(x)] = forward(*leaves), leaves
        out, leaves = kept[id(x)]
        return torch.autograd.grad(out, leaves, x["dout"], retain_graph=True)

    return run


def cudnn(cell: Cell) -> Run | None:
    """PyTorch's cuDNN backend; it has no windows."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if cell.window is not None or (cell.causal and cell.q_len != cell.kv_len):
        return None

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            swapped = (x.transpose(1, 2) for x in (q, k, v))
            found = torch.nn.functional.scaled_dot_product_attention(
                *swapped, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads
            )
        return found.transpose(1, 2)

    return through_autograd(forward)


def flash_attention_2(cell: Cell) -> Run:
    """PyTorch's copy of FlashAttention-2, by its operators, which have windows and align the last query."""
    import torch

    aten, kept = torch.ops.aten, dict[int, tuple[Any, ...]]()
    left = -1 if cell.window is None else cell.window
    sides = {"window_size_left": left, "window_size_right": 0 if cell.causal else -1}
    lengths = None, None, cell.q_len, cell.kv_len, 0.0, cell.causal

    def run(x: Inputs) -> tuple[Any, ...]:
        q, k, v = (x[name] for name in "qkv")
        if id(x) not in kept:
            kept[id(x)] = aten._flash_attention_forward(q, k, v, *lengths, False, **sides)[:4]
        out, lse, seed, offset = kept[id(x)]
        return aten._flash_attention_backward(x["dout"], q, k, v, out, lse, *lengths, seed, offset, **sides)

    return run


def flash_attention_4(cell: Cell) -> Run | None:
    """The newest release, wherever it can be imported."""
    from warploom.bench import peers

    latest, _ = peers.flash_attention_4()
    if latest is None:
        return None
    window = {} if cell.window is None else {"window_size": (cell.window, 0 if cell.causal else None)}
    return through_autograd(lambda q, k, v: latest(q, k, v, causal=cell.causal, **window))


def configurations(cell: Cell, options: argparse.Namespace) -> dict[str, str | None]:
    """The configurations of this package that are timed, in their notation (None: what a call chooses), by name."""
    first = str(choose(BackwardProblem(cell.problem), target("sm_100a"))[0]) if options.sync else None
    return {"warploom": first} | {text: text for text in options.config if f"head_dim={cell.head_dim}," in text}


def default_is_deterministic(cell: Cell) -> bool:
    """Whether a call runs the same kernels with and without ``deterministic``."""
    goal = target("sm_90a")
    return choose(BackwardProblem(cell.problem), goal) == choose(BackwardProblem(cell.problem, False, True), goal)


def runs(cell: Cell, options: argparse.Namespace) -> dict[str, Run]:
    """By name, warploom first."""
    found: dict[str, Run | None] = {n: ours(cell, text) for n, text in configurations(cell, options).items()}
    if not options.sync and not default_is_deterministic(cell):
        found["deterministic"] = ours(cell, deterministic=True)
    makers = {"cudnn": cudnn, "flash_attention_2": flash_attention_2, "flash_attention_4": flash_attention_4}
    found |= {name: makers[name](cell) for name in options.peers}
    return {name: run for name, run in found.items() if run is not None}


# -- checked, then timed


def seen(cell: Cell) -> Any:
    """Which scores count, or None."""
    if cell.sides == (None, None):
        return None
    return seen_of(cell.q_len, cell.kv_len, cell.sides, device="cuda")


def errors(cell: Cell, named: dict[str, Run], failed: dict[str, str]) -> dict[str, float]:
    """The largest error of each over what is allowed, of the first key head and the query heads that share it."""
    import torch

    x, group = fresh(cell), cell.heads // cell.kv_heads
    first = {n: x[n][0, :, : group if n in ("dout", "q", "out") else 1].transpose(0, 1) for n in x if n != "lse"}
    rows = MOST_SCORES // (cell.kv_len * group)
    reference = gradient_reference(**first, dtype=bf16, seen=seen(cell), rows=rows)
    found: dict[str, float] = {}
    for name, run in named.items():
        for like in (x["q"], x["k"], x["v"]):  # the memory that results are likely to get
            torch.full_like(like, math.nan)
        try:
            dq, dk, dv = (g[0].transpose(0, 1) for g in run(x)[:3])
            torch.cuda.synchronize()
        except Exception as error:
            if name == "warploom":
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        found[name] = max(reference.excess(dq[:group], dk[:1], dv[:1]).values())
    return found


def timed(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """One cell: checked, and timed."""
    import torch

    from warploom.bench.timing import Candidate, EventClock, graphed, input_sets, measure, paired_spread

    named, failed = runs(cell, options), dict[str, str]()
    wrong = errors(cell, named, failed)
    torch.cuda.empty_cache()
    moved = 2 * cell.batch * cell.head_dim * (3 * cell.heads * cell.q_len + 2 * cell.kv_heads * cell.kv_len)
    count = input_sets(moved, torch.cuda.get_device_properties(0).L2_cache_size)
    sets = [fresh(cell) for _ in range(count)]
    candidates: list[Any] = []
    for name, run in named.items():
        if name not in failed:
            for x in sets:  # forward passes of peers are no part of a graph
                run(x)
            candidates.append(graphed(Candidate(name, lambda i, run=run: run(sets[i])), count, torch))
    clock = EventClock(int(torch.cuda.current_stream().cuda_stream))
    found = measure(candidates, 1, clock, rounds=options.rounds, sample_seconds=SMALLEST_SAMPLE)
    best = max((n for n in found if n in PEERS), key=lambda n: -found[n].seconds.median, default=None)
    ratios = {n: paired_spread(found["warploom"], m).json() for n, m in found.items() if n != "warploom"}
    how = {**cell.options, "config": configurations(cell, options)["warploom"]}
    plan = warploom.plan_attention_backward(*(sets[0][n] for n in ARGUMENTS), **how)
    return {
        "cell": cell.name, "head_dim": cell.head_dim, "causal": cell.causal, "q_len": cell.q_len,
        "kv_len": cell.kv_len, "heads": cell.heads, "kv_heads": cell.kv_heads, "batch": cell.batch,
        "config": str(plan.config), "workspace_mib": plan.workspace_bytes / 2**20, "not_run": failed, "error": wrong,
        "tflops": {n: m.seconds.rate(count * cell.flops / 1e12).json() for n, m in found.items()},
        "ratio": ratios | ({"best": ratios[best]} if best else {}),
    }  # fmt: skip


def missed(found: list[dict[str, Any]], figures: Iterable[Figure]) -> list[str]:
    """Every figure that is not reached, and every wrong result, a peer's included."""
    said = [
        f"{n} is wrong at {c['cell']}: {e:.2f}"
        for c in found
        for n, e in c["error"].items()
        if not e <= (OTHERS_ERROR if n in PEERS else 1.0)
    ]
    for figure in figures:
        mine = [c for c in found if figure.peer in c["ratio"]]
        mine = [c for c in mine if figure.head_dims is None or c["head_dim"] in figure.head_dims]
        ratios = [c["ratio"][figure.peer]["median"] for c in mine]
        if figure.mean and ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            if mean < figure.at_least:
                said.append(f"{mean:.3f} × {figure.peer} in the mean, wanted {figure.at_least}")
            continue
        said += [
            f"{c['cell']}: {r} × {figure.peer}, wanted {figure.at_least}"
            for c, r in zip(mine, ratios, strict=True)
            if r < figure.at_least
        ]
    return said


# -- kernels that are compiled before


def make(job: tuple[Cell, str | None, str]) -> None:
    """Compile the kernels of a cell for an architecture into the cache; "forward" is the forward pass's."""
    from warploom.kernels.attention.backward_choice import parse_config
    from warploom.kernels.attention.choice import choose as choose_forward
    from warploom.kernels.attention.problem import Operands

    cell, text, arch = job
    problem, goal = cell.problem, target(arch)

    def strides(heads: int, length: int, width: int) -> tuple[int, int, int]:
        return length * heads * width, width, heads * width

    q, o = (strides(cell.heads, cell.q_len, d) for d in (problem.head_dim, problem.value_dim))
    k, v = (strides(cell.kv_heads, cell.kv_len, d) for d in (problem.head_dim, problem.value_dim))
    if text == "forward":
        forward = replace(problem, lse=True)
        chosen = choose_forward(forward, goal)[0]
        assert not isinstance(chosen, Decode), "every cell has many queries"
        built(chosen.call(forward, Operands.contiguous(forward), 132).source, arch)
        return
    config: BackwardConfig = choose(BackwardProblem(problem), goal)[0] if text is None else parse_config(text)
    for call in config.calls(BackwardProblem(problem), BackwardOperands((o, q, k, v, o, q, k, v), "bshd"), 132):
        built(call.source, arch)


def compile_all(todo: list[Cell], options: argparse.Namespace, arch: str) -> None:
    """In as many processes as there are cores: afterwards nothing waits for a compiler."""
    distinct = {(c.head_dim, c.v_dim, c.heads // c.kv_heads, c.problem.features(128, 128)): c for c in todo}
    jobs = [(c, text, arch) for c in distinct.values() for text in ("forward", *configurations(c, options).values())]
    in_processes(make, jobs)


def line(c: dict[str, Any]) -> str:
    """A cell as a line of text."""
    speeds = (
        f"{n} {s['median']:.0f}" + (f" ×{c['ratio'][n]['median']:.3f}" if n in c["ratio"] else "")
        for n, s in c["tflops"].items()
    )
    worst = max(c["error"].values())
    return f"{c['cell']:28} error {worst:.2f}  " + "  ".join(speeds) + (f"  {c['not_run']}" if c["not_run"] else "")


def main() -> int:
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="only cells of these lengths")
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--config", nargs="*", default=[], help="configurations timed besides, in their notation")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--sync", action="store_true", help="the kernels without wgmma, beside FlashAttention-2")
    options = parser.parse_args()
    todo = [c for c in cells() if c.head_dim in options.head_dims]
    if options.lengths is not None:
        todo = [c for c in todo if c.q_len in options.lengths]
    compile_all(todo, options, architecture(options))
    if options.compile_only:
        return 0
    from warploom.bench.peers import flash_attention_4 as newest

    figures = SYNC_FIGURES if options.sync else FIGURES
    name = "attention-backward-sync-cells.json" if options.sync else "attention-backward-cells.json"
    each = on_one_stream(lambda cell: timed(cell, options))
    head = {"flash_attention_4": newest()[1]}
    return measured(todo, each, line, lambda found: missed(found, figures), options.out / name, head)


if __name__ == "__main__":
    sys.exit(main())
