"""Tables, progress bars and JSON: results go to standard output, everything else to standard error."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from warploom.cli.errors import outlives_its_reader

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


PLAIN_WIDTH = 140
"""Columns of a table that does not go to a terminal."""


_PLAIN = {
    "×": "x",
    "·": ".",
    "…": "...",
    "→": "->",
    "↔": "<->",
    "–": "-",
    "—": "-",
    "−": "-",
    "ᵀ": "^T",
    "Σ": "sum",
    "µ": "u",
    "√": "sqrt",
    "⊕": "^",
    "≤": "<=",
    "≥": ">=",
    "²": "^2",
    "³": "^3",
    "•": "*",
}
"""What our tables and messages write beyond ASCII → what a console that cannot show it gets."""


def accept_any_text(*streams: TextIO) -> None:
    """Let streams whose encoding lacks a character (ASCII, a Windows code page) write something like it, or ``?``."""
    codecs.register_error("warploom", _plainly)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="warploom")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a terminal cannot encode: an error handler of :mod:`codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


def console(stderr: bool = False) -> Console:
    """A rich console; tables that are piped away keep a fixed, wide layout."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich's own ends with exit code 1

    found = Piped(stderr=stderr, highlight=False, emoji=False)
    if not found.is_terminal:
        found = Piped(stderr=stderr, highlight=False, emoji=False, width=PLAIN_WIDTH)
    return found


def listed(title: str, rows: Sequence[Mapping[str, str]], words: Collection[str]) -> Table:
    """A line for each row and a column for each of its heads; those in ``words`` are words, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in rows[0] if rows else ():
        longest = max(len(word) for text in (head, *(row[head] for row in rows)) for word in (*text.split(), ""))
        table.add_column(head, justify="left" if head in words else "right", min_width=longest)
    for row in rows:
        table.add_row(*row.values())
    return table


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error (when it is a terminal): call what it yields with (what is being done, fraction)."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    target = console(stderr=True)
    with Progress(*columns, console=target, transient=True, disable=not target.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, fraction: bar.update(task, description=text, completed=fraction)


def write_json(value: Any, destination: str) -> None:
    """``value`` to a file, or to standard output for ``-``. Folders on the way are made."""
    text = json.dumps(value, indent=2, allow_nan=False, default=str)
    if destination == "-":
        typer.echo(text)
        return
    write_text(text + "\n", destination)


def write_text(text: str, destination: str) -> None:
    """``text`` to a file. Folders on the way are made."""
    path = Path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    note(f"written to {path}")


def note(text: str) -> None:
    """A remark for the person at the terminal, on standard error."""
    with outlives_its_reader():
        typer.echo(text, err=True)
