"""``warploom profile``: hardware counters of a rung, where Nsight Compute runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile, KernelFile, KernelSettings, TakesFiles, parse_settings
from warploom.cli.output import console, listed, write_json
from warploom_lab.cli.rungs import Accumulate, Settings

if TYPE_CHECKING:
    from rich.table import Table

    from warploom_lab.bench.counters import Profile
    from warploom_lab.bench.samples import Samples

app = typer.Typer(help="Hardware counters, read by Nsight Compute.", no_args_is_help=True, cls=TakesFiles)


@app.callback()
def _profile() -> None:
    """Hardware counters of a kernel, read by Nsight Compute (ncu): needs a GPU and the right to read its counters."""


@app.command("attention")
@explains_errors
def attention(
    rung: Annotated[str, typer.Option(help="A rung's number or name; h1, h2, … are wgmma's.")] = "1",
    seq: Annotated[int, typer.Option(metavar="N", min=1, help="Sequence length.")] = 4096,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Batch.")] = 4,
    heads: Annotated[int, typer.Option(metavar="N", min=1, help="Heads.")] = 16,
    set_: Settings = None,
    json: JsonFile = None,
) -> None:
    """Where attention waits, and how busy each unit is.

    Stall reasons and the instructions that wait, shares of the pipes, shared memory and L2, bank conflicts.

    One launch (full, head_dim 128, bf16) is replayed by ncu, at the clocks the GPU runs at. Shares of stalls are of the
    cycles between two issues of a warp; "selected" is the issue itself. short_scoreboard is waiting for shared memory
    (ldmatrix before its mma) and the special functions, wait a fixed latency, math_pipe_throttle a busy pipe. Samples
    tell which instructions wait and for whom: few instructions between the two hide little of the latency.

    \b
    Examples:
      warploom profile attention --rung 8
      warploom profile attention --rung 8 --set swizzle=off --json unswizzled.json
    """
    from warploom_lab.bench.profile import AttentionLaunch, profile_launches
    from warploom_lab.kernels.attention.ladder import FULL_LADDER

    key = FULL_LADDER.rung(rung).key
    found = profile_launches([AttentionLaunch(key, seq, batch, heads, _settings(set_))])[0]
    _report(found, f"rung {key}, batch {batch}, heads {heads}, seq {seq}", json)


@app.command("gemm")
@explains_errors
def gemm(
    rung: Annotated[str, typer.Option(help="A rung's number or name.")] = "01b",
    size: Annotated[int, typer.Option("--size", metavar="N", min=1, help="Extents of the square product.")] = 4096,
    accumulate: Accumulate = None,
    set_: Settings = None,
    json: JsonFile = None,
) -> None:
    """Where a matrix product waits, and how busy each unit is.

    Figures are those of ``warploom profile attention``; all matrices are row-major.

    \b
    Examples:
      warploom profile gemm --rung 02
      warploom profile gemm --rung best32 --size 8192 --set block_stride=8 --json -
    """
    from warploom_lab.bench.gemm import ACCUMULATORS
    from warploom_lab.bench.profile import GemmLaunch, profile_launches
    from warploom_lab.kernels.matmul.ladder import LADDER

    if accumulate is not None and accumulate.lower() not in ACCUMULATORS:
        raise typer.BadParameter(f"--accumulate is f16 or f32, not {accumulate!r}")
    key = LADDER.rung(rung).key
    kind = None if accumulate is None else accumulate.lower()
    found = profile_launches([GemmLaunch(key, size, size, size, kind, _settings(set_))])[0]
    _report(found, f"rung {key}, {size}×{size}×{size}", json)


@app.command("file")
@explains_errors
def file(target: KernelFile, set_: KernelSettings = None, json: JsonFile = None) -> None:
    """Profile a kernel of yours, launched as its example says. The word ``file`` may be left out.

    \b
    Example:
      warploom profile my_kernels.py:row_max --set tile=128
    """
    from warploom_lab.bench.profile import KernelLaunch, profile_launches

    settings = _settings(set_)
    found = profile_launches([KernelLaunch(target, settings)])[0]
    _report(found, " ".join(settings) or "its example", json)


def _settings(given: list[str] | None) -> tuple[str, ...]:
    """``FLAG=VALUE`` without spaces."""
    return tuple(f"{name}={value}" for name, value in parse_settings(given).items())


def _report(found: Profile, what: str, json: str | None) -> None:
    if json != "-":
        out = console()
        out.print(f"[bold]{found.kernel}[/bold], {what}")
        for name, figures in _shown(found).items():
            out.print(_table(name, figures))
        if found.samples is not None:
            out.print(_pairs(found.samples))
            for line in _hottest(found.samples):
                typer.echo(line)
    if json is not None:
        write_json(found.json(), json)


def _shown(found: Profile) -> dict[str, Mapping[str, float]]:
    """The tables in the order of reading; stalls as shares, those below half a percent left out."""
    stalls = {reason: share for reason, share in found.stall_shares.items() if share >= 0.5}
    tables: dict[str, Mapping[str, float]] = {"stalls, % of the cycles between two issues": stalls}
    tables |= {name: figures for name, figures in found.tables.items() if name != "stalls"}
    tables["executed warp instructions by purpose"] = found.groups
    return {name: figures for name, figures in tables.items() if figures}


def _pairs(samples: Samples) -> Table:
    """Make the table of stalled instructions and of the instructions that they wait for."""
    rows = [
        {name: str(row[name]) for name in ("reason", "waits", "for", "between", "places")}
        | {"share": f"{row['share, %']:.2f}"}
        for row in samples.pairs()[:8]
    ]
    return listed("who waits for whom, % of all samples", rows, ("reason", "waits", "for"))


def _hottest(samples: Samples) -> Iterator[str]:
    """The instructions with most samples: where in the source, why they wait, whom for."""
    yield "instructions with most samples"
    for row in samples.hottest():
        yield f"{row['share, %']:6.2f} %  {row['sass']:<50} {row['line']}".rstrip()
        yield "          " + ", ".join(f"{name} {share:.1f}" for name, share in row["reasons, %"].items())
        if "waits for" in row:
            yield f"          {row['between']} after {row['waits for']}"


def _table(title: str, figures: Mapping[str, float]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, min_width=44)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.0f}" if value == int(value) and not 0 < abs(value) < 100 else f"{value:,.2f}")
    return table
