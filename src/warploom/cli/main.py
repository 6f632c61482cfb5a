"""``warploom``: the command line."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from warploom.cli import bench, check, doctor, layout, new, pack, tune
from warploom.cli.commands import SETTINGS, Commands
from warploom.cli.errors import settings
from warploom.cli.output import accept_any_text

app = typer.Typer(
    name="warploom",
    help="Tensor-core kernels that a person can write, check and understand in Python.",
    epilog="Start with: warploom ladder attention",
    no_args_is_help=True,
    cls=Commands,
    **SETTINGS,
)
app.command("check")(check.check)
app.add_typer(new.app, name="new")
app.command("bench")(bench.bench)
app.add_typer(tune.app, name="tune")
app.command("doctor")(doctor.doctor)
app.command("pack")(pack.pack)
app.command("layout")(layout.layout)


def _version(wanted: bool) -> None:
    if wanted:
        from warploom import __version__

        typer.echo(f"warploom {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    settings.debug = debug
    if not debug:
        warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, category: type[Warning], *_place: object) -> None:
    """A warning in one line: where in the package it was given helps nobody at a terminal."""
    typer.echo(f"warning: {message}", err=True)


def main() -> None:
    """The script ``warploom``: the commands, on streams that take every character."""
    accept_any_text(sys.stdout, sys.stderr)
    app()
