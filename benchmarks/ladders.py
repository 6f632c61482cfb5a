"""A ladder on the GPU at every size, written as evidence and held against ``targets.json``.

    python benchmarks/ladders.py attention [--rung best] [--gpu-seq 4096] [--out FILE]
    python benchmarks/ladders.py gemm [--tuned] [--gpu-n 4096,8192] [--data uniform,normal] [--load sustained,rested]

Every rung is checked against float64 on fresh inputs in the same run before it is timed, interleaved with PyTorch's
kernels; at the last size each also runs alone without a pause, for its power. ``--tuned`` searches every rung's tile
first, as the seed's tuner does (``rung_search.py``). Exit code 1 if a kernel is wrong or a target is missed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from figures import Figure, load_targets, missed
from page_tables import power_cells
from rung_search import RungSearch, Searched

from warploom.cli.errors import explains_errors
from warploom.cli.options import grouped, on_gpu, sequence_lengths
from warploom.cli.output import console, listed, note, progress_bar
from warploom.measure.matmul import DATA
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, EventClock
from warploom.tune.tuner import gpu_for_tuning
from warploom_lab.bench.evidence import gpu_slug, made_by
from warploom_lab.bench.gemm import LOADS, Square
from warploom_lab.bench.ladder import Family, LadderResult, fitting
from warploom_lab.bench.power import power_of
from warploom_lab.cli.ladder import attention_rungs, gemm_rungs, report, run
from warploom_lab.cli.rungs import Accumulate, DTypeName, HeadDim, RungList, Settings
from warploom_lab.kernels.ladder import Rung

HERE = Path(__file__).resolve().parent

app = typer.Typer(help=(__doc__ or "").splitlines()[0], no_args_is_help=True, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Evidence:
    """Where a result goes, and what it is held against."""

    out: Annotated[Path | None, typer.Option(help="File to write; default benchmarks/results/GPU/FAMILY-….json")] = None
    targets: Annotated[Path, typer.Option(help="Figures to reach (JSON).")] = HERE / "targets.json"


@app.command()
@explains_errors
@grouped
def attention(
    rung: RungList = None,
    set_: Settings = None,
    head_dim: HeadDim = 128,
    dtype: DTypeName = "bf16",
    gpu_seq: Annotated[str, typer.Option(metavar="SEQ,…", help="Lengths, at 16384 tokens and 2048 columns.")] = (
        "512,1024,2048,4096,8192,16384"
    ),
    *,
    evidence: Evidence,
) -> None:
    """Every rung of attention and PyTorch's backends at every length."""
    figures = load_targets(evidence.targets, "attention")
    sizes = sequence_lengths(gpu_seq)
    family, rungs = attention_rungs(rung, set_, 256, 1, head_dim, dtype)
    _measure(Run(family, rungs, sizes), figures, evidence.out, f"attention-d{head_dim}-{dtype}.json")


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
    tuned: Annotated[bool, typer.Option("--tuned", help="First search every rung's tile, warps and stages.")] = False

    def words(self, option: str, known: Collection[str]) -> tuple[str, ...]:
        """The words of an option. Raises typer.BadParameter for one that is not ``known``."""
        found = tuple(dict.fromkeys(word.strip() for word in getattr(self, option).split(",")))
        for word in found:
            if word not in known:
                raise typer.BadParameter(f"--{option} takes {' and '.join(known)}, with a comma between, not {word!r}")
        return found


@app.command()
@explains_errors
@grouped
def gemm(
    rung: RungList = None,
    set_: Settings = None,
    accumulate: Accumulate = None,
    *,
    conditions: Conditions,
    evidence: Evidence,
) -> None:
    """Every rung of matmul and cuBLAS at every size; --tuned with f16 accumulators unless told otherwise."""
    data, loads = conditions.words("data", DATA), conditions.words("load", LOADS)
    figures = load_targets(evidence.targets, "gemm")
    sizes = sequence_lengths(conditions.gpu_n)
    accumulate = accumulate or ("f16" if conditions.tuned else None)
    family, rungs = gemm_rungs(rung, set_, accumulate, (256, 256, 512))
    kept, left_out = fitting(family, rungs)
    for text in left_out:
        note(text)
    on_gpu("gpu")
    places, search = [Square(n, of, load, conditions.tuned) for n in sizes for of in data for load in loads], None
    if conditions.tuned:
        with progress_bar() as told:
            search = RungSearch(gpu_for_tuning(), places[0].data, report=told).run(kept, list(dict.fromkeys(sizes)))
        for text in search.notes:
            note(text)
        kept = [search.at_size(rung, places[-1]) for rung in search.rungs]
    name = f"gemm-{'tuned-' * conditions.tuned}{accumulate or 'ladder'}.json"
    timed = Run(family, kept, places, conditions.rounds, search)
    _measure(timed, figures, evidence.out, name)


@dataclass(frozen=True)
class Run:
    """What is timed: rungs of a family at sizes, as a search has found them if there was one."""

    family: Family[Any]
    rungs: list[Rung[Any]]
    sizes: Sequence[Any]
    rounds: int = 25
    search: Searched | None = None

    def at_size(self, rung: Rung[Any], place: Any) -> Rung[Any]:
        """The rung as it is timed at a size."""
        return rung if self.search is None else self.search.at_size(rung, place)


def add_power(timed: Run, result: LadderResult) -> None:
    """Run every rung and baseline alone at the last size; its cells there tell what it drew, None if nobody knows."""
    place = timed.sizes[-1]
    case = timed.family.gpu_case(place, 0, 0)
    clock, monitor = EventClock(case.work.stream), GpuMonitor.of(0)

    def power(candidate: Candidate) -> dict[str, Any] | None:
        drawn = power_of(candidate, case.work.sets, clock, monitor)
        return None if drawn is None else drawn.json(case.flops)

    baselines = {baseline.name: power(baseline) for baseline in case.baselines}
    for row, rung in zip(result.rows, timed.rungs, strict=True):
        if row["gpu"] and case.label.items() <= row["gpu"].items():
            drawn = power(case.candidate(timed.at_size(rung, place)))
            for cell in (row["gpu"], row["gpu"]["cells"][-1]):
                cell["power"] = drawn
                cell["baselines"] = {
                    name: baseline | {"power": baselines[name]} for name, baseline in cell["baselines"].items()
                }


def _measure(timed: Run, figures: list[Figure], out: Path | None, name: str) -> None:
    """Run the ladder on the GPU, write the evidence and hold it against the figures: exit code 1 for a miss."""
    on_gpu("gpu")
    result = run(timed.family, timed.rungs, timed.sizes, None, rounds=timed.rounds, at_size=timed.at_size)
    add_power(timed, result)
    if timed.search is not None:
        for row in result.rows:
            row["search"] = timed.search.json(row["rung"])
    configs = {timed.at_size(rung, place).config for rung in timed.rungs for place in timed.sizes}
    result.environment |= made_by({str(config) for config in (*configs, *(rung.config for rung in timed.rungs))})
    header, body = power_cells(result.rows)
    console().print(listed("run alone for power", [dict(zip(header, row, strict=True)) for row in body], header[:2]))
    report(result, str(out or HERE / "results" / gpu_slug(result.environment) / name))
    failures = missed(figures, result.rows)
    for text in failures:
        note(f"target missed: {text}")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
