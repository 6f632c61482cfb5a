"""Fill the tables of the README and of docs/ from the committed results: ``python benchmarks/render.py [--check]``.

A table stands between ``<!-- table: FILE COLUMNS -->`` and ``<!-- end table -->``: FILE is a result below
benchmarks/results (h200/attention-d128-bf16.json), as ``ladders.py`` writes it; COLUMNS is a word of
``MARKDOWN_TABLES`` (``page_tables.py``), or of ``TABLES`` or ``SECTIONS`` (``page_sections.py``). Below each table
stands what it was made with; a table whose file is not there says so, a section is left out. Pictures of sections are
drawn too (needs matplotlib). Between ``<!-- names: MODULE[:CLASS] -->`` and ``<!-- end names -->`` stand the public
names there with the first sentences of their docstrings. ``--check`` changes nothing and ends with 1 if a table is out
of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from page_parts import ROOT, provenance, read
from page_parts import main as write
from page_sections import SECTIONS, TABLES, WRONG, draw_training, made
from page_tables import MARKDOWN_TABLES

from warploom.isa.conversion import FULL_MASK

PICTURES = {"h200/train-gpt.json": ("docs/evidence/train-gpt.svg", draw_training)}
PAGES = (ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts))


_MARKED = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end table -->)", re.DOTALL)


def table(name: str) -> str:
    """The table ``FILE COLUMNS`` with a line that says what it was made with. Raises KeyError for unknown columns."""
    file, _, columns = name.partition(" ")
    known = (*MARKDOWN_TABLES, *TABLES, *SECTIONS)
    if columns not in known:
        raise KeyError(f"<!-- table: {name} --> names no columns; write one of {', '.join(known)} after the file")
    if not (result := read(file)):
        return "\n" if columns in SECTIONS else "\n*Not measured yet.*\n\n"
    filled = MARKDOWN_TABLES[columns](result["rows"]) if columns in MARKDOWN_TABLES else made(columns, result)
    notes = [provenance(result["environment"])]
    if WRONG in filled:
        notes.append(f"{WRONG} the baseline's own result was beyond the error that its types allow")
    return f"\n{filled}\n*{'. '.join(notes)}*\n\n"


_NAMED = re.compile(r"(<!-- names: (\S+) -->\n).*?(<!-- end names -->)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?(?:[^`<]*<)?(?:warploom\.)?([^`>]+)>?`")


def names(place: str) -> str:
    """A table of the public names of a module, or of the words of a class, as ``module:Class``."""
    module, _, kind = place.partition(":")
    owner = import_module(module)
    owner = getattr(owner, kind) if kind else owner
    words = (name for name, x in vars(owner).items() if inspect.isfunction(x) or isinstance(x, property))
    listed = [name for name in words if not name.startswith("_")] if kind else owner.__all__
    rows = ["| name | what it is |", "| --- | --- |"]
    for name in listed:
        value = getattr(owner, name)
        text = _ROLE.sub(r"`\1`", inspect.getdoc(value) or "").replace("``", "`")
        sentence = " ".join(re.split(r"(?<=[.])\s(?=[A-Z`])|\n\n", text, maxsplit=1)[0].split())
        taken = ""
        if inspect.isfunction(value):
            given = [x.replace(annotation=x.empty) for x in inspect.signature(value).parameters.values()]
            taken = str(inspect.Signature(given[bool(kind) :])).replace(str(FULL_MASK), f"{FULL_MASK:#x}")
        rows.append(f"| `{name}{taken}` | {sentence} |")
    return "\n" + "\n".join(rows) + "\n\n"


def with_tables(page: Path) -> str:
    """The text of a page, its tables filled."""
    text = _NAMED.sub(lambda found: found[1] + names(found[2]) + found[3], page.read_text(encoding="utf-8"))
    return _MARKED.sub(lambda found: found[1] + table(found[2].strip()) + found[3], text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite every page that has tables and draw the pictures, or only compare the pages; returns the exit code."""
    code = write({page: partial(with_tables, page) for page in PAGES}, arguments)
    for file, (picture, draw) in PICTURES.items():
        if (result := read(file)) and "--check" not in (sys.argv if arguments is None else arguments):
            draw(result, ROOT / picture)
    return code


if __name__ == "__main__":
    sys.exit(main())
