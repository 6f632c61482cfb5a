"""Fill the tables of the README and of docs/ from the committed results: ``python benchmarks/render.py [--check]``.

A table stands between ``<!-- table: FILE COLUMNS -->`` and ``<!-- end table -->``: FILE is a result below
benchmarks/results (h200/attention-d128-bf16.json), as ``ladders.py`` writes it; COLUMNS is a
word of ``MARKDOWN_TABLES`` (``page_tables.py``), ``CALL_TABLES`` (``call_tables.py``) or ``SECTIONS``
(``training_sections.py``, ``serving_sections.py``). Below each table stands what it was made with; a table whose file
is not there says so, a section is left out. Pictures of sections are drawn too (needs matplotlib). ``--check`` changes
nothing and ends with 1 if a table is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from call_tables import CALL_TABLES
from page_parts import RESULTS, ROOT, read
from page_parts import main as write
from page_tables import MARKDOWN_TABLES, fill_markdown, table_names
from serving_sections import SECTIONS as SERVING
from training_sections import SECTIONS as TRAINING
from training_sections import draw_training

SECTIONS = {**SERVING, **TRAINING}
PICTURES = {"h200/train-gpt.json": ("docs/evidence/train-gpt.svg", draw_training)}
PAGES = (ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts))


def table(name: str) -> str:
    """The table ``FILE COLUMNS`` with a line that says what it was made with. Raises KeyError for unknown columns."""
    file, _, columns = name.partition(" ")
    makers = {**CALL_TABLES, **SECTIONS}
    known = (*MARKDOWN_TABLES, *makers)
    if columns not in known:
        raise KeyError(f"<!-- table: {name} --> names no columns; write one of {', '.join(known)} after the file")
    path = RESULTS / file
    if not path.is_file():
        return "\n" if columns in SECTIONS else "\n*Not measured yet.*\n\n"
    result = json.loads(path.read_text(encoding="utf-8"))
    filled = makers[columns](result) if columns in makers else MARKDOWN_TABLES[columns](result["rows"])
    return f"\n{filled}\n*{provenance(environment_of(result))}*\n\n"


def environment_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The environment of a result; an old one of ``gemm_h200.py`` notes the GPU, torch and the date alone."""
    if "environment" in result:
        return result["environment"]
    packages = {"torch": result["torch"].partition("+")[0]}
    return {"gpu": {"name": result["gpu"]}, "packages": packages, "date": result["date"]}


def provenance(environment: Mapping[str, Any]) -> str:
    """GPU, versions and date of a result, with commas between."""
    gpu, packages, nvrtc = environment.get("gpu"), environment.get("packages", {}), environment.get("nvrtc")
    parts = [
        gpu["name"] if gpu else "without a GPU",
        f"NVRTC {_dotted(nvrtc)}" if nvrtc else "",
        _driver(environment),
        f"torch {packages['torch']}" if "torch" in packages else "",
        str(environment.get("date", ""))[:10],
    ]
    return ", ".join(part for part in parts if part)


def _driver(environment: Mapping[str, Any]) -> str:
    """The driver's own version where it was noted, else the CUDA that it supports."""
    own, cuda = environment.get("driver"), environment.get("cuda_driver")
    return f"driver {own}" if own else f"a driver for CUDA {_dotted(cuda)}" if cuda else ""


def _dotted(version: Any) -> str:
    return version if isinstance(version, str) else ".".join(map(str, version))


def with_tables(page: Path) -> str:
    """The text of a page, its tables filled."""
    text = page.read_text(encoding="utf-8")
    return fill_markdown(text, {name: table(name) for name in table_names(text)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite every page that has tables and draw the pictures, or only compare the pages; returns the exit code."""
    code = write({page: partial(with_tables, page) for page in PAGES}, arguments)
    for file, (picture, draw) in PICTURES.items():
        if (result := read(file)) and "--check" not in (sys.argv if arguments is None else arguments):
            draw(result, ROOT / picture)
    return code


if __name__ == "__main__":
    sys.exit(main())
