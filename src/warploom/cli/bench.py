"""``warploom bench``: the whole ladder on the GPU at every length, written as evidence and held against targets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import (
    Accumulate,
    DTypeName,
    HeadDim,
    JsonFile,
    KernelFile,
    KernelSettings,
    RungList,
    Settings,
    TakesFiles,
    Tuned,
    grouped,
    on_gpu,
    parse_settings,
)
from warploom.cli.output import note, write_json

if TYPE_CHECKING:
    from warploom.bench.ladder import Family
    from warploom.bench.targets import Figure
    from warploom.kernels.ladder import Rung
    from warploom.tune.rungs import Searched

app = typer.Typer(help="Measure on the GPU beside PyTorch's kernels.", no_args_is_help=True, cls=TakesFiles)

TARGETS_FILE = Path("benchmarks/targets.json")
RESULTS = Path("benchmarks/results")
ROUNDS = 25
"""Samples of every cell."""

Targets = Annotated[
    Path | None,
    typer.Option("--targets", help="Figures to reach (JSON); default benchmarks/targets.json if it exists."),
]


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
    targets: Targets = None,
) -> None:
    """Time every rung and PyTorch's backends at every length.

    Each kernel is checked against float64 on fresh inputs in the same run before it is timed. Exit code 1 if a target
    is missed.

    \b
    Examples:
      warploom bench attention
      warploom bench attention --rung best --gpu-seq 4096 --out /tmp/best.json
    """
    from warploom.cli.ladder import attention_rungs, sequence_lengths

    figures = _figures(targets, "attention")
    sizes = sequence_lengths(gpu_seq)
    family, rungs = attention_rungs(rung, set_, 256, 1, head_dim, dtype)
    _measure(Run(family, rungs, sizes), figures, out, f"attention-d{head_dim}-{dtype}.json")


@dataclass(frozen=True)
class Conditions:
    """What products are timed on, and how."""

    gpu_n: Annotated[str, typer.Option(metavar="N,…", help="Sizes of the square products.")] = (
        "1024,2048,4096,8192,16384"
    )
    data: Annotated[
        str, typer.Option(metavar="normal,uniform", help="What the matrices hold: N(0, 1), or [0, 1) as in the seed.")
    ] = "normal"
    load: Annotated[
        str, typer.Option(metavar="rested,sustained", help="With a rest before each sample, or without.")
    ] = "rested"
    rounds: Annotated[int, typer.Option(min=3, help="Samples of every cell.")] = 15
    tuned: Tuned = False

    def words(self, option: str, known: Collection[str]) -> tuple[str, ...]:
        """The words of an option. Raises typer.BadParameter for one that is not ``known``."""
        found = tuple(dict.fromkeys(word.strip() for word in getattr(self, option).split(",")))
        for word in found:
            if word not in known:
                raise typer.BadParameter(f"--{option} takes {' and '.join(known)}, with a comma between, not {word!r}")
        return found


@app.command("gemm")
@explains_errors
@grouped
def gemm(
    rung: RungList = None,
    set_: Settings = None,
    accumulate: Accumulate = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default benchmarks/results/GPU/gemm-….json")] = None,
    targets: Targets = None,
    *,
    conditions: Conditions,
) -> None:
    """Time every rung and cuBLAS at every size.

    Each kernel is checked against float64 on fresh inputs, element by element, in the same run before it is timed. The
    GPU rests before each sample, unless --load says otherwise; at the last size every kernel also runs alone without a
    pause, for its power. --tuned searches every rung's tile first, as the seed's tuner does, without rests and with f16
    accumulators unless told otherwise: four minutes on an H200 for three sizes. Exit code 1 if a target is missed.

    \b
    Examples:
      warploom bench gemm
      warploom bench gemm --accumulate f32 --out /tmp/f32.json
      warploom bench gemm --rung best32 --gpu-n 8192
      warploom bench gemm --tuned --gpu-n 4096,8192,16384 --data uniform,normal --load sustained,rested
    """
    from warploom.bench.gemm import DATA, LOADS, Square
    from warploom.bench.ladder import fitting
    from warploom.cli.ladder import gemm_rungs, searched, sequence_lengths

    data, loads = conditions.words("data", DATA), conditions.words("load", LOADS)
    figures = _figures(targets, "gemm")
    sizes = sequence_lengths(conditions.gpu_n)
    accumulate = accumulate or ("f16" if conditions.tuned else None)
    family, rungs = gemm_rungs(rung, set_, accumulate, (256, 256, 512))
    kept, left_out = fitting(family, rungs)
    for text in left_out:
        note(text)
    on_gpu("gpu")
    places = [Square(n, of, conditions.tuned) for n in sizes for of in data]
    kept, search = searched(kept, places, tuned=conditions.tuned)
    name = f"gemm-{'tuned-' * conditions.tuned}{accumulate or 'ladder'}.json"
    run = Run(replace(family, load_names=loads), kept, places, conditions.rounds, search)
    _measure(run, figures, out, name)


@app.command("file")
@explains_errors
def file(
    target: KernelFile,
    set_: KernelSettings = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples.")] = ROUNDS,
    json: JsonFile = None,
) -> None:
    """Check and time a kernel of yours, launched by its example. The word ``file`` may be left out.

    Its launches rotate through copies of the arguments that exceed the L2. The rate counts each array's bytes once.

    \b
    Examples:
      warploom bench my_kernels.py:row_max
      warploom bench my_kernels.py:row_max --set tile=128 --json -
    """
    from warploom.bench.checking import configuration_of, one_kernel
    from warploom.bench.kernel_file import bench_kernel

    kernel = one_kernel(target)
    timed = bench_kernel(kernel, configuration_of(kernel, parse_settings(set_)), rounds)
    if json != "-":
        typer.echo(f"{kernel.name}: {timed.text()}")
    if json is not None:
        write_json({"kernel": kernel.name, **timed.json()}, json)


def _figures(targets: Path | None, family: str) -> list[Figure]:
    from warploom.bench.targets import load_targets

    wanted = targets or (TARGETS_FILE if TARGETS_FILE.exists() else None)
    return load_targets(wanted, family) if wanted else []


@dataclass(frozen=True)
class Run:
    """What is timed: rungs of a family at sizes, as a search has found them if there was one."""

    family: Family[Any]
    rungs: list[Rung[Any]]
    sizes: Sequence[Any]
    rounds: int = ROUNDS
    search: Searched | None = None


def _measure(timed: Run, figures: list[Figure], out: Path | None, name: str) -> None:
    """Run the ladder on the GPU, write the evidence and hold it against the figures: exit code 1 for a miss."""
    from warploom.bench.environment import gpu_slug
    from warploom.bench.targets import missed
    from warploom.cli.ladder import report, run

    on_gpu("gpu")
    result = run(timed.family, timed.rungs, timed.sizes, None, timed.rounds, metered=True, search=timed.search)
    report(result, str(out or RESULTS / gpu_slug(result.environment) / name))
    failures = missed(figures, result.rows)
    for text in failures:
        note(f"target missed: {text}")
    if failures:
        raise typer.Exit(1)
