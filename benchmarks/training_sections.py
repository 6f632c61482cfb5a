"""What training with this package reaches, as parts of pages made from results of ``benchmarks``, and its picture."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from page_tables import markdown_table

Result = Mapping[str, Any]

SEQUENCES = (512, 1024, 4096, 16384)
"""Lengths that stand in the table of attention's gradients; the result has more."""
COLOURS = {"warploom": "#3b6ea5", "torch": "#d98032"}
SMOOTHED = 10
"""Steps whose mean a point of a curve is."""


def gradients(result: Result, how: str = "", option: str = "") -> str:
    """Attention's backward pass: TFLOP/s and the ratios to its peers."""
    plain = [c for c in result["cells"] if c["q_len"] == c["kv_len"] and c["cell"].endswith(f" {c['q_len']}")]
    names = {"cudnn": "cuDNN", "flash_attention_2": "FlashAttention-2", "flash_attention_4": "FlashAttention-4"}
    there = [name for name in names if any(name in c["ratio"] for c in plain)]
    body: list[list[str]] = []
    for (dims, causal), found in groupby(plain, key=lambda c: (c["cell"].split()[0][1:], bool(c["causal"]))):
        cells = {c["q_len"]: c for c in found}
        body.append([dims, "causal" if causal else "full", *(_cell(cells.get(n), there) for n in SEQUENCES)])
    said = (
        f"`warploom.attention_backward`{how}, bf16, 16384 tokens, heads × head_dim = 2048, with all its kernels: "
        f"TFLOP/s · ratio to {' · to '.join(names[n] for n in there)} "
        f"(`benchmarks/attention_backward_cells.py{option}`).\n\n"
    )
    return said + markdown_table(["head_dim", "mask", *(f"seq {n}" for n in SEQUENCES)], body) + _in_order(plain)


def _in_order(cells: list[Mapping[str, Any]]) -> str:
    """What equal bits cost, where a call does not give them anyway."""
    if not (found := [c["ratio"]["deterministic"]["median"] for c in cells if "deterministic" in c["ratio"]]):
        return ""
    mean = math.exp(sum(map(math.log, found)) / len(found))
    return (
        f"\nUp to head_dim 128 `deterministic=True` takes {min(found):.2f} to {max(found):.2f} times as long, "
        f"{mean:.2f} times in the mean.\n"
    )


def _cell(cell: Mapping[str, Any] | None, peers: list[str]) -> str:
    if cell is None:
        return "–"
    ratios = (f"{cell['ratio'][name]['median']:.2f}×" if name in cell["ratio"] else "–" for name in peers)
    return " · ".join((f"{cell['tflops']['warploom']['median']:.0f}", *ratios))


def limits(result: Result) -> str:
    """What bounds attention's backward pass: power, and the cycles of a step."""
    body: list[list[str]] = []
    for row in result["rows"]:
        load, forward, need = row["backward"], row["forward"], row["demand"]
        body.append([
            row["cell"], f"{load['tflops']:.0f}", f"{load['tflops'] / forward['tflops']:.2f}",
            f"{load['watts']:.0f} W, {load['sm_mhz']} MHz", f"{forward['watts']:.0f} W, {forward['sm_mhz']} MHz",
            str(row["cycles"]), str(need["tensor"]), f"{need['banks']} / {row['banks']}",
        ])  # fmt: skip
    said = (
        "Under sustained load, and the cycles of a step (a block of query rows and a tile of 128 keys) of one "
        "multiprocessor: all, those that tensor cores need, and those that banks of shared memory need / were counted "
        "busy (`benchmarks/attention_backward_limits.py`).\n\n"
    )
    header = ["cell", "TFLOP/s", "× forward", "backward", "forward", "cycles", "tensor cores", "banks"]
    return said + markdown_table(header, body)


def losses(result: Result) -> str:
    """``linear_cross_entropy`` forward and backward: milliseconds and memory, beside its peers."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["seconds"]))
    body = [[f"{row['m']} × {row['n']} × {row['k']}", *(_step(row, name) for name in names)] for row in result["rows"]]
    said = (
        "Forward and backward, bf16: milliseconds, and MiB beyond inputs and gradients "
        "(`benchmarks/linear_cross_entropy_h200.py`).\n\n"
    )
    return said + markdown_table(["tokens × words × width", *names], body)


def _step(row: Mapping[str, Any], name: str) -> str:
    if name not in row["seconds"]:
        return "–"
    return f"{1e3 * row['seconds'][name]['median']:.1f} ms · {row['extra_bytes'][name] / 2**20:.0f} MiB"


def training(result: Result) -> str:
    """A training of ``examples/train_gpt.py`` with each choice of kernels: losses, speed, memory, and the picture."""
    runs, last = result["runs"], result["last"]
    body: list[list[str]] = []
    for kind, found in groupby(runs, key=lambda run: (run["attention"], run["loss"])):
        own = list(found)
        ends = [sum(run["losses"][-last:]) / last for run in own]
        tokens = sorted(run["tokens_per_second"] for run in own)[len(own) // 2]
        peak = max(run["peak_bytes"] for run in own) / 2**30
        body.append([*kind, " · ".join(f"{end:.3f}" for end in ends), f"{tokens / 1e3:.0f}k", f"{peak:.1f} GiB"])
    verdict = "no further" if result["apart"] <= result["spread"] else "further"
    said = (
        f"## The same curve\n\n{runs[0]['parameters'] / 1e6:.0f} million parameters, {result['steps']} steps of "
        f"{result['tokens']} tokens, `torch.compile`, attention and loss by these kernels or by PyTorch's, "
        f"{len(runs) // len(body)} seeds each (`benchmarks/train_gpt_h200.py`). From the same seed the last losses lie "
        f"{result['apart']:.4f} from PyTorch's at most, {verdict} than those of two seeds from each other "
        f"({result['spread']:.4f}):\n\n"
        "![Losses of all runs by step](../evidence/train-gpt.svg)\n\n"
    )
    header = ["attention", "loss", f"mean loss of the last {last} steps", "tokens/s", "peak memory"]
    return said + markdown_table(header, body)


def draw_training(result: Result, out: Path) -> None:
    """The loss of every run by step, as an SVG."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    style = {"svg.hashsalt": "warploom", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.0, 3.6))
        named: set[str] = set()
        for run in result["runs"]:
            name = f"{run['attention']}, loss {run['loss']}"
            parts = [run["losses"][i : i + SMOOTHED] for i in range(0, len(run["losses"]), SMOOTHED)]
            axes.plot(
                [SMOOTHED * i + len(part) / 2 for i, part in enumerate(parts)],
                [sum(part) / len(part) for part in parts],
                color=COLOURS[run["attention"]], label=None if name in named else name, linewidth=1.0,
                linestyle="-" if run["loss"] == "warploom" else "--",
            )  # fmt: skip
            named.add(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend(frameon=False)
        figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def gpus(result: Result) -> str:
    """One long sequence on several GPUs: time, and efficiency beside one GPU."""
    body = [
        [row["by"], row["way"], f"{row['ms']:.0f}", f"{row['tflops']:.0f}",
         f"{row['efficiency']:.0%}" if "efficiency" in row else "–"]
        for row in result["rows"]
    ]  # fmt: skip
    said = (
        f"Causal attention of {result['heads']} heads of {result['head_dim']} on {result['tokens']} tokens, bf16, "
        "forward and backward, by `context_parallel` through NCCL (`benchmarks/context_parallel_h200.py`): "
        "milliseconds, TFLOP/s of all GPUs, and one GPU's time over that of n times n.\n\n"
    )
    return said + markdown_table(["kernels", "rotation", "ms", "TFLOP/s", "efficiency"], body)


SECTIONS: dict[str, Callable[[Result], str]] = {
    "gradients": gradients,
    "sync_gradients": lambda result: gradients(result, " by `mma.sync`, as on GPUs without `wgmma`", " --sync"),
    "limits": limits, "losses": losses, "training": training, "gpus": gpus,
}  # fmt: skip
"""Parts of a page that bring their own sentences: nothing is there until they were measured."""
