"""``warploom ladder``: every rung of a kernel family, checked, compiled and, on a GPU, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile, On, grouped, on_gpu, parse_settings, sequence_lengths
from warploom.cli.output import console, listed, note, progress_bar, write_json
from warploom_lab.cli.plot import PlotFile, draw
from warploom_lab.cli.rungs import Accumulate, DTypeName, HeadDim, RungList, Settings, chosen_rungs

if TYPE_CHECKING:
    from warploom.kernels.attention.problem import AttentionConfig
    from warploom.kernels.matmul.problem import MatmulConfig
    from warploom_lab.bench.attention import AttentionFamily
    from warploom_lab.bench.gemm import GemmFamily
    from warploom_lab.bench.ladder import Family, LadderResult
    from warploom_lab.kernels.ladder import Rung

app = typer.Typer(no_args_is_help=True)

SHOWN_AFTER = 5.0
"""Seconds between two remarks on how long a ladder will still take."""


@dataclass(frozen=True)
class Telling:
    """Where to run, and what to make of the rows: what the families share."""

    on: On = "auto"
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Draw other inputs, and run the warps in an adversarial order."),
    ] = None
    json: JsonFile = None
    plot: PlotFile = None


@app.callback()
def _ladder() -> None:
    """The steps of a kernel, each checked, compiled and timed.

    They are checked against float64 and for defects, without a GPU; on a GPU they are timed too.
    """


@app.command("attention")
@explains_errors
@grouped
def attention(
    rung: RungList = None,
    set_: Settings = None,
    seq: Annotated[int, typer.Option(metavar="N", min=1, help="Sequence length on the emulator.")] = 256,
    heads: Annotated[int, typer.Option(metavar="N", min=1, help="Heads on the emulator.")] = 1,
    head_dim: HeadDim = 128,
    dtype: DTypeName = "bf16",
    gpu_seq: Annotated[
        str, typer.Option(metavar="SEQ,…", help="Sequence lengths on the GPU, at 16384 tokens and 2048 columns.")
    ] = "4096",
    *,
    telling: Telling,
) -> None:
    """Attention forward, rung by rung: error, findings, TFLOP/s.

    Every rung runs on the emulator with all checks (races, uninitialised data, bounds, bank conflicts) and is compiled
    for sm_80 and sm_90a where NVRTC is installed; no GPU is needed. Exit code 1 if a rung is wrong.

    \b
    Examples:
      warploom ladder attention
      warploom ladder attention --rung 1,2 --set tile_n=32 --json -
      warploom ladder attention --on gpu --gpu-seq 4096,16384
      warploom ladder attention --plot ladder.svg
    """
    sizes = sequence_lengths(gpu_seq) if on_gpu(telling.on) else []
    family, rungs = attention_rungs(rung, set_, seq, heads, head_dim, dtype)
    _run_and_report(family, rungs, telling, asked=bool(rung), sizes=sizes)


@app.command("gemm")
@explains_errors
@grouped
def gemm(
    rung: RungList = None,
    set_: Settings = None,
    m: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of A and C on the emulator.")] = 256,
    n: Annotated[int, typer.Option(metavar="N", min=1, help="Columns of B and C on the emulator.")] = 256,
    k: Annotated[int, typer.Option(metavar="N", min=1, help="Columns of A, rows of B on the emulator.")] = 512,
    accumulate: Accumulate = None,
    gpu_n: Annotated[str, typer.Option(metavar="N,…", help="Sizes of the square products on the GPU.")] = "4096,8192",
    *,
    telling: Telling,
) -> None:
    """Matrix products, rung by rung, beside cuBLAS.

    Every rung runs on the emulator with all checks (races, uninitialised data, bounds, bank conflicts) and is compiled
    for sm_80 and sm_90a where NVRTC is installed; no GPU is needed. Exit code 1 if a rung is wrong. --set takes the
    seeds' words too: BM, BN, BK, WM, WN, STAGES, BLOCK_STRIDE.

    \b
    Examples:
      warploom ladder gemm
      warploom ladder gemm --rung 01b,02 --set BM=64 --accumulate f32 --json -
      warploom ladder gemm --on gpu --gpu-n 1024,2048,4096,8192,16384
    """
    from warploom_lab.bench.gemm import Square

    sizes = sequence_lengths(gpu_n, "sizes") if on_gpu(telling.on) else []
    family, rungs = gemm_rungs(rung, set_, accumulate, (m, n, k))
    _run_and_report(family, rungs, telling, asked=bool(rung), sizes=[Square(size) for size in sizes])


@app.command("reduce")
@explains_errors
def reduce(rung: RungList = None, on: On = "auto", json: JsonFile = None) -> None:
    """Row maxima of 16×16 products, in three ways.

    They go through shared memory, through shared memory done fairly, and stay in registers.

    Every rung runs on the emulator with all checks and is compiled for sm_90a; on a GPU it is timed in three settings:
    one warp per launch, a loop inside one warp, a grid that fills the GPU. Power is sampled over seconds through NVML
    (nvidia-ml-py). Exit code 1 if a rung is wrong.

    \b
    Examples:
      warploom ladder reduce
      warploom ladder reduce --rung 1w,4
      warploom ladder reduce --on gpu --json reduce.json
    """
    from warploom_lab.bench.evidence import environment
    from warploom_lab.bench.reduce import run_experiment
    from warploom_lab.kernels.reduce.ladder import LADDER

    timed = on_gpu(on)
    with progress_bar() as progress:
        found = run_experiment(chosen_rungs(LADDER, rung), timed, progress)
    if json != "-":
        _report_reduce(found, timed)
    if json is not None:
        write_json({"environment": environment()} | found, json)
    if any(not row["right"] or row["findings"] for row in found["rungs"]):
        raise typer.Exit(1)


def _run_and_report(
    family: Family[Any], rungs: list[Rung[Any]], telling: Telling, *, asked: bool, sizes: Sequence[Any]
) -> None:
    """Run, draw and report the rungs that fit. Raises ConfigError where none does, or one asked for does not."""
    from warploom_lab.bench.ladder import fitting
    from warploom_lab.bench.plot import check_plot

    if telling.plot is not None:  # before minutes of work
        check_plot(telling.plot)
    rungs, left_out = fitting(family, rungs)
    if left_out and (asked or not rungs):
        from warploom.core.errors import ConfigError

        raise ConfigError("; ".join(left_out))
    result = run(family, rungs, sizes, telling.seed)
    result.notes[:0] = left_out
    if telling.plot is not None:
        draw(result.json(), telling.plot)
    report(result, telling.json)


def attention_rungs(
    rung: list[str] | None, settings: list[str] | None, seq: int, heads: int, head_dim: int, dtype: str
) -> tuple[AttentionFamily, list[Rung[AttentionConfig]]]:
    """The family with the emulator's problem, and the rungs asked for with their flags overridden.

    Of all rungs those are left out that have no room for their idea at this head_dim and type.
    """
    from warploom.core.dtypes import bf16, f16
    from warploom_lab.bench.attention import AttentionFamily, has_room, settled
    from warploom_lab.kernels.attention.ladder import FULL_LADDER

    kinds, overrides = {"bf16": bf16, "f16": f16, "fp16": f16}, parse_settings(settings)
    if (kind := kinds.get(dtype.lower())) is None:
        raise typer.BadParameter(f"--dtype is bf16 or f16, not {dtype!r}")
    chosen = [r for r in chosen_rungs(FULL_LADDER, rung) if rung or has_room(r, head_dim, kind)]
    rungs = [settled(r, head_dim, kind, overrides) for r in chosen]
    return AttentionFamily(heads, seq, head_dim, kind), rungs


def gemm_rungs(
    rung: list[str] | None, settings: list[str] | None, accumulate: str | None, sizes: tuple[int, int, int]
) -> tuple[GemmFamily, list[Rung[MatmulConfig]]]:
    """The family with the emulator's (m, n, k), and the rungs asked for with their flags overridden."""
    from warploom.core.dtypes import f16
    from warploom_lab.bench.gemm import ACCUMULATORS, GemmFamily, settled
    from warploom_lab.kernels.matmul.ladder import FULL_LADDER

    kind = None if accumulate is None else ACCUMULATORS.get(accumulate.lower())
    if accumulate is not None and kind is None:
        raise typer.BadParameter(f"--accumulate is f16 or f32, not {accumulate!r}")
    rungs = settled(chosen_rungs(FULL_LADDER, rung), kind, parse_settings(settings))
    return GemmFamily(*sizes, rungs[0].config.dtype if rungs else f16), rungs


def run(
    family: Family[Any], rungs: list[Rung[Any]], sizes: Sequence[Any], seed: int | None, **more: Any
) -> LadderResult:
    """Run the ladder under a progress bar; ``more`` as it takes it.

    Each step that ends is told, with the time that the others will take on this machine.
    """
    from warploom_lab.bench.ladder import run_ladder

    note(f"{len(rungs)} rungs on the emulator with all checks, and through the compiler")
    start, last, told = time.perf_counter(), "", 0.0
    with progress_bar() as progress:

        def tell(text: str, fraction: float) -> None:
            nonlocal last, told
            seconds = time.perf_counter() - start
            if text != last and 0 < fraction < 1 and seconds - told >= SHOWN_AFTER:
                note(f"{last}: done; about {seconds / fraction - seconds:.0f} s to go on this machine")
                told = seconds
            last = text
            progress(text, fraction)

        return run_ladder(family, rungs, seed=seed, gpu_sizes=sizes, progress=tell, **more)


def report(result: LadderResult, json: str | None) -> None:
    """The table (for ``-`` the JSON alone), what was left out, and what is wrong: exit code 1 then."""
    if json != "-":
        from warploom_lab.bench.tables import ladder_tables

        out = console()
        for table in ladder_tables(result.rows):
            out.print(table)
    if json is not None:
        write_json(result.json(), json)
    for text in result.notes:
        note(text)
    if result.problems:
        for text in result.problems:
            note(f"wrong: {text}")
        raise typer.Exit(1)


def _report_reduce(found: dict[str, Any], timed: bool) -> None:
    from warploom_lab.bench.ladder import missing_compiler

    rows = found["rungs"]
    _table("Row maxima of 16×16 products, one of them", _static, rows)
    if (reason := missing_compiler()) is not None:
        note(reason)
    if not timed:
        return
    _table("A launch of one warp (times a launch, energy as the paper has it: power × latency)", _launched, rows)
    _table("Operations inside the kernel: one warp, and every SM full", _inside, rows)
    for gpu, row in found["paper"].items():
        (slow, fast), (much, little) = row["latency_ms"], row["energy_mj"]
        note(
            f"the paper on an {gpu}: {slow * 1e3:.1f} and {fast * 1e3:.1f} µs a launch, {row['speed_up']} times as "
            f"fast; {much} and {little} mJ, {row['energy_gain']} times"
        )


def _table(title: str, cells: Callable[[dict[str, Any], dict[str, Any]], dict[str, str]], rows: list[Any]) -> None:
    """A line for each rung; ``cells`` gives head → text of a rung, beside the first one."""
    lines = [{"rung": row["rung"], "": row["name"]} | cells(row, rows[0]) for row in rows]
    console().print(listed(title, lines, ("rung", "")))


def _static(row: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    compiled = row["compiled"]
    return {
        "ok": "yes" if row["right"] and not row["findings"] else "NO",
        "registers": str(compiled.get("registers", "–")),
        "shared": str(row["shared_bytes"]),
        "barriers": str(row["barriers"]),
        "shuffles": str(row["shuffles"]),
        "wavefronts": str(row["wavefronts"]),
        "conflicts": str(row["bank_conflicts"]),
        "SASS": str(compiled.get("instructions", "–")),
    }


def _launched(row: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    one, base = row["launch"], first["launch"]
    return {
        "plain µs": f"{one['launch_s']['median'] * 1e6:.2f}",
        "×": f"{base['launch_s']['median'] / one['launch_s']['median']:.2f}",
        "graph µs": f"{one['graph_s']['median'] * 1e6:.3f}",
        "× ": f"{base['graph_s']['median'] / one['graph_s']['median']:.2f}",
        "mean of 1000 µs": f"{one['paper_protocol_s']['median'] * 1e6:.2f}",
        "W": _number(one.get("watts"), 1, "{:.0f}"),
        "mJ": _number(one.get("energy_per_operation_j"), 1e3, "{:.3f}"),
    }


def _inside(row: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    loop, grid = row["loop"]["cycles_per_operation"], row["grid"]
    energy, base = grid.get("energy_per_operation_j"), first["grid"].get("energy_per_operation_j")
    return {
        "cycles/op": f"{loop['median']:.0f}",
        "×": f"{first['loop']['cycles_per_operation']['median'] / loop['median']:.2f}",
        "Gop/s": f"{grid['operations_per_s']['median'] / 1e9:.2f}",
        "× ": f"{grid['speed_up']['median']:.2f}",
        "W": _number(grid.get("watts"), 1, "{:.0f}"),
        "idle": _number(grid.get("idle_watts"), 1, "{:.0f}"),
        "nJ/op": _number(energy, 1e9, "{:.2f}"),
        "energy ×": f"{base / energy:.1f}" if base and energy else "–",
    }


def _number(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else form.format(value * factor)
