"""Attention with V's own head_dim and with sinks, both directions, on one GPU in one process.

    PYTHONPATH=src python benchmarks/head_cells.py --out OUT

bf16, 16384 tokens. head_dim 192 with 128 for V, and 128 with 64, full and causal: the configuration that a call chooses
beside others that fit, cuDNN as PyTorch has it, and FlashAttention-4 wherever ``flash_attn.cute`` can be imported.
Sinks at 64/8 heads of 64, causal, with and without a window of 128: beside the same call without them. The gradients of
each too, which take what the forward call returned. Every result of this package is checked first against float64 (some
rows of a head, the gradients of one group of heads whole); then all are timed interleaved as replays of CUDA graphs, on
inputs that rotate past the L2. Writes OUT/head-cells.json after each cell, prints the table, and exits with 1 if a
result is wrong. ``--compile-only`` needs no GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cell_runs import architecture, in_processes, measured, on_one_stream, parser_of

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.kernels.attention.backward import TENSORS, BackwardOperands, BackwardProblem
from warploom.kernels.attention.backward_choice import choose as choose_backward
from warploom.kernels.attention.choice import choose, parse_config
from warploom.kernels.attention.gradient_reference import gradient_reference
from warploom.kernels.attention.problem import AttentionProblem, Operands
from warploom.kernels.attention.reference import attention_error, attention_reference, seen_of
from warploom.ops.backends import built

TOKENS = 16384
CHECKED_ROWS = 128
MOST_SCORES = 2**27
"""Scores of the gradients' reference at a time."""
SMALLEST_SAMPLE = 0.010
OTHERS = {
    192: (
        "attention_sm90(consumers=2, tile_n=96, stages=2, head_dim=192, v_dim=128, q_in_registers=false)",
        "attention_sm90(consumers=2, tile_n=112, stages=2, head_dim=192, v_dim=128, persistent=false, "
        "q_in_registers=false, sum_column=true)",
    ),
    128: (
        "attention_sm90(consumers=3, tile_n=128, stages=2, head_dim=128, v_dim=64, q_in_registers=false)",
        "attention_sm90(consumers=2, tile_n=176, stages=2, head_dim=128, v_dim=64, persistent=false, "
        "q_in_registers=false)",
    ),
}
"""Configurations of the forward pass beside the chosen one, by head_dim."""

Run = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Cell:
    """One problem; ``v_dim`` is V's head_dim."""

    head_dim: int
    v_dim: int
    heads: int
    kv_heads: int
    causal: bool
    length: int
    window: int | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        mask = ("causal" if self.causal else "full") + (f" window {self.window}" if self.window else "")
        dims = f"d{self.head_dim}" if self.v_dim == self.head_dim else f"d{self.head_dim}/{self.v_dim}"
        return f"{dims} {self.heads}/{self.kv_heads} {mask} {self.length}{' sinks' if self.sinks else ''}"

    @property
    def problem(self) -> AttentionProblem:
        """The forward problem."""
        sides, v_dim = (self.window, 0 if self.causal else None), self.v_dim if self.v_dim != self.head_dim else 0
        return AttentionProblem(
            TOKENS // self.length, self.heads, self.kv_heads, self.length, self.length, self.head_dim, bf16, sides,
            sinks=self.sinks, v_dim=v_dim,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """Of the calls."""
        return {"causal": self.causal, "window": None if self.window is None else (self.window, None)}


def cells() -> list[Cell]:
    """All of them."""
    return [
        *(Cell(d, v, 16, 16, causal, n) for d, v in ((192, 128), (128, 64)) for causal in (False, True)
          for n in (4096, 16384)),
        *(Cell(64, 64, 64, 8, True, 4096, window, sinks=True) for window in (None, 128)),
    ]  # fmt: skip


def fresh(cell: Cell) -> dict[str, Any]:
    """Random arrays, and what the forward pass makes of them."""
    import torch

    def make(heads: int, cols: int) -> Any:
        shape = TOKENS // cell.length, cell.length, heads, cols
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x = {"q": make(cell.heads, cell.head_dim), "k": make(cell.kv_heads, cell.head_dim)}
    x |= {"v": make(cell.kv_heads, cell.v_dim), "dout": make(cell.heads, cell.v_dim)}
    x["sinks"] = torch.randn(cell.heads, device="cuda") if cell.sinks else None
    x["out"], x["lse"] = forward(cell, return_lse=True)(x)
    return x


def forward(cell: Cell, *, config: str | None = None, sinks: bool = True, return_lse: bool = False) -> Run:
    """This package's call."""
    how = {**cell.options, "config": config, "return_lse": return_lse}
    return lambda x: warploom.attention(x["q"], x["k"], x["v"], sinks=x["sinks"] if sinks else None, **how)


def backward(cell: Cell, *, sinks: bool = True) -> Run:
    """The call of its gradients."""
    names = "dout", "q", "k", "v", "out", "lse"
    return lambda x: warploom.attention_backward(
        *(x[name] for name in names), sinks=x["sinks"] if sinks else None, **cell.options
    )


def peers(cell: Cell) -> dict[str, Run]:
    """The forward pass of others, where they can be imported; none with sinks."""
    import torch

    from warploom.bench.peers import flash_attention_4

    def cudnn(x: dict[str, Any]) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            swapped = (x[name].transpose(1, 2) for name in "qkv")
            found = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=cell.causal)
        return found.transpose(1, 2)

    if cell.sinks:
        return {}
    latest, _ = flash_attention_4()
    if latest is None:
        return {"cudnn": cudnn}
    return {"cudnn": cudnn, "flash_attention_4": lambda x: latest(*(x[name] for name in "qkv"), causal=cell.causal)}


def of_autograd(run: Run) -> Run:
    """The gradients of a peer; its forward pass runs once for each set of inputs."""
    import torch

    kept: dict[int, tuple[Any, Any]] = {}

    def gradients(x: dict[str, Any]) -> Any:
        if id(x) not in kept:
            leaves = {name: x[name].detach().requires_grad_() for name in "qkv"}
            found = run({**x, **leaves})
            kept[id(x)] = found[0] if isinstance(found, tuple) else found, [*leaves.values()]
        out, leaves = kept[id(x)]
        return torch.autograd.grad(out, leaves, x["dout"], retain_graph=True)

    return gradients


# -- checked, then timed


def seen(cell: Cell) -> Any:
    """Which scores count."""
    return seen_of(cell.length, cell.length, cell.problem.window, device="cuda")


def forward_error(cell: Cell, x: dict[str, Any], out: Any) -> float:
    """The largest |o - o64| over what bf16 allows, of random rows of one head."""
    import torch

    rows, head = torch.randperm(cell.length, device="cuda")[:CHECKED_ROWS], cell.heads - 1
    given, sinks = (x["q"][0, rows, head], x["k"][0, :, -1], x["v"][0, :, -1]), x["sinks"]
    of_head = None if sinks is None else sinks[head]
    return attention_error(
        out[0, rows, head], attention_reference(*given, dtype=bf16, seen=seen(cell)[rows], sinks=of_head), bf16
    ).value


def backward_error(cell: Cell, x: dict[str, Any], found: Any) -> float:
    """The largest error of the gradients over what is allowed, of the first key head's group."""
    group = cell.heads // cell.kv_heads
    first = {n: x[n][:, :, : 1 if n in "kv" else group].transpose(1, 2) for n in ("dout", "q", "k", "v", "out")}
    sinks = x["sinks"][:group] if cell.sinks else None
    rows = max(1, MOST_SCORES // (TOKENS * group))
    reference = gradient_reference(**first, dtype=bf16, seen=seen(cell), sinks=sinks, rows=rows)
    dq, dk, dv = (g.transpose(1, 2) for g in found[:3])
    return max(reference.excess(dq[:, :group], dk[:, :1], dv[:, :1], *(g[:group] for g in found[3:])).values())


def timed(cell: Cell, rounds: int) -> dict[str, Any]:
    """One cell: checked, and timed."""
    import torch

    from warploom.bench.timing import Candidate, EventClock, graphed, input_sets, measure, paired_spread

    others = OTHERS.get(cell.head_dim, ()) if cell.v_dim != cell.head_dim else ()
    runs: dict[str, dict[str, Run]] = {
        "forward": {"warploom": forward(cell), **{text: forward(cell, config=text) for text in others}},
        "backward": {"warploom": backward(cell)},
    }
    x, wrong, failed = fresh(cell), dict[str, float](), dict[str, str]()
    for name, run in runs["forward"].items():
        torch.full_like(x["out"], math.nan)  # what the output's memory is likely to hold
        wrong[name] = forward_error(cell, x, run(x))
    wrong["backward"] = backward_error(cell, x, runs["backward"]["warploom"](x))
    if cell.sinks:
        runs["forward"]["without"], runs["backward"]["without"] = (
            forward(cell, sinks=False),
            backward(cell, sinks=False),
        )
    for name, run in peers(cell).items():
        runs["forward"][name], runs["backward"][name] = run, of_autograd(run)
    moved = sum(2 * x[name].numel() for name in ("q", "k", "v", "out"))
    del x
    torch.cuda.empty_cache()
    count = input_sets(moved, torch.cuda.get_device_properties(0).L2_cache_size)
    sets = [fresh(cell) for _ in range(count)]
    clock = EventClock(int(torch.cuda.current_stream().cuda_stream))
    result: dict[str, Any] = {"cell": cell.name, "config": str(choose(cell.problem, target("sm_90a"))[0])}
    for direction, named in runs.items():
        flops = cell.problem.flops if direction == "forward" else BackwardProblem(cell.problem).flops
        candidates: list[Any] = []
        for name, run in named.items():
            try:
                for one in sets:
                    run(one)
                candidates.append(graphed(Candidate(name, lambda i, run=run: run(sets[i])), count, torch))
            except Exception as error:
                if name == "warploom":
                    raise
                failed[f"{direction} {name}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        found = measure(candidates, 1, clock, rounds=rounds, sample_seconds=SMALLEST_SAMPLE)
        result[direction] = {
            "tflops": {n: m.seconds.rate(count * flops / 1e12).json() for n, m in found.items()},
            "ratio": {n: paired_spread(found["warploom"], m).json() for n, m in found.items() if n != "warploom"},
        }
    return result | {"error": wrong, "not_run": failed}


# -- kernels that are compiled before


def make(job: tuple[Cell, str | None, str]) -> None:
    """Compile the kernels of a cell for an architecture into the cache; of a configuration, its forward pass."""
    cell, text, arch = job
    p, goal = cell.problem, target(arch)

    def strides(name: str) -> tuple[int, int, int]:
        heads = cell.kv_heads if name in ("k", "v", "dk", "dv") else cell.heads
        cols = cell.v_dim if name in ("v", "dv", "out", "dout") else cell.head_dim
        return cell.length * heads * cols, cols, heads * cols

    operands = Operands(tuple(strides(name) for name in ("q", "k", "v", "out")), "bshd")  # type: ignore[arg-type]
    if text is not None:
        built(parse_config(text).call(p, operands, 132).source, arch)  # type: ignore[union-attr]
        return
    for sinks, lse in ((p.sinks, False), (p.sinks, True), (False, False)):
        problem = replace(p, sinks=sinks, lse=lse)
        built(choose(problem, goal)[0].call(problem, operands, 132).source, arch)  # type: ignore[union-attr]
    whole = BackwardProblem(p)
    for call in choose_backward(whole, goal)[0].calls(
        whole, BackwardOperands(tuple(map(strides, TENSORS)), "bshd"), 132
    ):
        built(call.source, arch)


def compile_all(todo: list[Cell], arch: str) -> None:
    """In as many processes as there are cores: afterwards nothing waits for a compiler."""
    distinct = {(c.head_dim, c.v_dim, c.causal, c.window): c for c in todo}
    jobs = [(c, text, arch) for c in distinct.values()
            for text in (None, *(OTHERS.get(c.head_dim, ()) if c.v_dim != c.head_dim else ()))]  # fmt: skip
    in_processes(make, jobs)


def line(c: dict[str, Any]) -> str:
    """A cell as lines of text."""
    found = [f"{c['cell']:34} error {max(c['error'].values()):.2f}  {c['not_run'] or ''}"]
    for direction in ("forward", "backward"):
        ratio = c[direction]["ratio"]
        speeds = (
            f"{n} {s['median']:.0f}" + (f" ×{ratio[n]['median']:.3f}" if n in ratio else "")
            for n, s in c[direction]["tflops"].items()
        )
        found.append(f"  {direction}: " + "  ".join(speeds))
    return "\n".join(found)


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Every wrong result."""
    return [f"{c['cell']}: {n} is wrong, {e:.2f}" for c in found for n, e in c["error"].items() if not e <= 1]


def main() -> int:
    options = parser_of(__doc__, rounds=7).parse_args()
    compile_all(cells(), architecture(options))
    if options.compile_only:
        return 0
    each, file = on_one_stream(lambda cell: timed(cell, options.rounds)), options.out / "head-cells.json"
    return measured(cells(), each, line, missed, file, otherwise="every result is right")


if __name__ == "__main__":
    sys.exit(main())
