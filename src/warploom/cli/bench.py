"""``warploom bench``: the whole ladder on the GPU at every length, written as evidence and held against targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import DTypeName, HeadDim, RungList, Settings, on_gpu
from warploom.cli.output import note

app = typer.Typer(help="Measure on the GPU beside PyTorch's kernels.", no_args_is_help=True)

TARGETS_FILE = Path("benchmarks/targets.json")
RESULTS = Path("benchmarks/results")
ROUNDS = 25
"""Samples of every cell."""


@app.callback()
def _bench() -> None:
    """Measure on the GPU, interleaved with PyTorch's kernels in the same process, and write the result as JSON."""


@app.command("attention")
@explains_errors
def attention(
    rung: RungList = None,
    set_: Settings = None,
    head_dim: HeadDim = 128,
    dtype: DTypeName = "bf16",
    gpu_seq: Annotated[
        str, typer.Option(metavar="SEQ,…", help="Sequence lengths, at 16384 tokens and 2048 columns.")
    ] = "512,1024,2048,4096,8192,16384",
    out: Annotated[
        Path | None, typer.Option(help="File to write; default benchmarks/results/GPU/attention-….json")
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", help="Figures to reach (JSON); default benchmarks/targets.json if it exists."),
    ] = None,
) -> None:
    """Time every rung and PyTorch's backends at every sequence length; exit code 1 if a target is missed.

    Each kernel is checked against float64 on fresh inputs in the same run before it is timed.

    \b
    Examples:
      warploom bench attention
      warploom bench attention --rung best --gpu-seq 4096 --out /tmp/best.json
    """
    from warploom.bench.environment import gpu_slug
    from warploom.bench.targets import load_targets, missed
    from warploom.cli.ladder import attention_rungs, report, run, sequence_lengths

    wanted = targets or (TARGETS_FILE if TARGETS_FILE.exists() else None)
    figures = load_targets(wanted, "attention") if wanted else []
    sizes = sequence_lengths(gpu_seq)
    family, rungs = attention_rungs(rung, set_, 256, 1, head_dim, dtype)
    on_gpu("gpu")
    result = run(family, rungs, sizes, None, ROUNDS)
    where = out or RESULTS / gpu_slug(result.environment) / f"attention-d{head_dim}-{dtype}.json"
    report(result, str(where))
    failures = missed(figures, result.rows)
    for text in failures:
        note(f"target missed: {text}")
    if failures:
        raise typer.Exit(1)
