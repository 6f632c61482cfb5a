"""``warploom discover``: trace who holds which element of every fragment, and compare with the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile
from warploom.cli.output import console, note, progress_bar, write_json

if TYPE_CHECKING:
    from warploom_lab.discover.fragments import Discovered


@explains_errors
def discover(
    name: Annotated[str, typer.Argument(help="Only fragments with this in their name.")] = "",
    on: Annotated[str, typer.Option(metavar="gpu|emulator", help="Where the tracers run.")] = "",
    figures: Annotated[bool, typer.Option("--figures", help="Print each mapping as a table of lanes.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Keep the maps of wmma that a GPU showed: the emulator then has them.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Trace every fragment and compare it with the catalogue.

    A pass traces one bit of the coordinates; what was seen is fitted, and its formulas are printed.

    On a GPU this tells whether the catalogue holds there; on the emulator, whether the catalogue is what the PTX ISA
    says. A difference names lane and register, and the exit status is 1. The default is a GPU where there is one.

    \b
    Examples:
      warploom discover
      warploom discover wmma.m16n16k16 --on gpu --figures
      warploom discover --on gpu --write --json discovery.json
    """
    if on not in ("", "gpu", "emulator"):
        raise typer.BadParameter(f"--on is gpu or emulator, not {on!r}")
    from warploom.ops.backends import gpu_present

    where = on or ("gpu" if gpu_present() else "emulator")
    if write and where != "gpu":
        raise typer.BadParameter("--write keeps what a GPU showed: use it with --on gpu")
    if where == "gpu":
        from warploom.cuda.device import require_driver

        require_driver()
    found = _traced(where, name)
    if json != "-":
        if figures:
            _figures(found)
        _table(found, where)
    _summary(found)
    if write:
        _write(found)
    if json is not None:
        from warploom_lab.bench.evidence import environment

        write_json({"on": where, "environment": environment(), "fragments": [d.as_row() for d in found]}, json)
    if any(d.verdict == "differs" for d in found):
        raise typer.Exit(1)


def _traced(where: Any, name: str) -> list[Discovered]:
    from warploom_lab.discover.fragments import discover as trace
    from warploom_lab.discover.tracers import tracers

    total = sum(name in t.name for t in tracers())
    found: list[Discovered] = []
    with progress_bar() as advance:
        for one in trace(where, name):
            found.append(one)
            advance(one.name, len(found) / max(1, total))
    return found


def _figures(found: list[Discovered]) -> None:
    """Each observation as the paper's Figure 1: lanes by row and column, as they were seen."""
    from warploom.cli.pictures import show
    from warploom.layout.draw import draw_observation

    for one in found:
        show(draw_observation(one.observation))
        console().print()


def _table(found: list[Discovered], where: str) -> None:
    from rich.table import Table

    from warploom.layout.fit import formulas

    table = Table(title=f"Fragments traced on the {where}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in ("fragment", "row", "col", "catalogue"):
        table.add_column(head, no_wrap=head != "catalogue")
    colours = {"agrees": "green", "differs": "bold red", "new": "yellow"}
    for one in found:
        unknown = {"row": f"not linear: {one.fit.reason}", "col": ""}
        text = unknown if one.fit.map is None else formulas(one.fit.map)
        verdict = str(one.difference) if one.difference else one.verdict
        table.add_row(one.name, text["row"], text["col"], f"[{colours[one.verdict]}]{verdict}[/]")
    out = console()
    if not out.is_terminal:
        out.width = 180
    out.print(table)


def _summary(found: list[Discovered]) -> None:
    """Print the number of fragments that agree with the catalogue in one line on standard error."""
    wrong = sum(d.verdict == "differs" for d in found)
    note(
        f"{len(found)} fragments: {wrong} differ, {sum(d.verdict == 'new' for d in found)} new, "
        f"{sum(not d.fit.is_linear for d in found)} not linear"
    )


def _write(found: list[Discovered]) -> None:
    from warploom.layout.wmma import MAPS_FILE
    from warploom_lab.bench.evidence import environment
    from warploom_lab.discover.fragments import wmma_maps

    gpu = environment()["gpu"] or {}
    write_json(wmma_maps(found, str(gpu.get("name", ""))), str(MAPS_FILE))
