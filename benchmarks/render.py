"""Fill the tables of the README and of docs/ from the committed results: ``python benchmarks/render.py [--check]``.

A table stands between ``<!-- table: FILE COLUMNS -->`` and ``<!-- end table -->``: FILE is a result below
benchmarks/results (h200/attention-d128-bf16.json), as ``warploom bench`` or ``ladder --json`` writes it; COLUMNS is a
word of ``MARKDOWN_TABLES`` (``page_tables.py``), ``CALL_TABLES`` (``call_tables.py``) or ``SECTIONS``
(``training_sections.py``, ``serving_sections.py``). Below each table stands what it was made with; a table whose file
is not there says so, a section is left out. Pictures of sections are drawn too (needs matplotlib). ``--check`` changes
nothing and ends with 1 if a table is out of date or a picture missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from call_tables import CALL_TABLES
from page_tables import MARKDOWN_TABLES, fill_markdown, table_names
from serving_sections import SECTIONS as SERVING
from training_sections import SECTIONS as TRAINING
from training_sections import draw_training

SECTIONS = {**SERVING, **TRAINING}
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite (or check) every page that has tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    check = parser.parse_args(arguments).check
    stale = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = fill_markdown(text, {name: table(name) for name in table_names(text)})
        if filled == text:
            continue
        stale += 1
        print(f"{page.name} {'is out of date' if check else 'rewritten'}")
        if not check:
            page.write_text(filled, encoding="utf-8")
    for file, (picture, draw) in PICTURES.items():
        source, out = RESULTS / file, ROOT / picture
        if not source.is_file() or (check and out.is_file()):
            continue
        stale += 1
        print(f"{out.name} {'is missing' if check else 'drawn'}")
        if not check:
            draw(json.loads(source.read_text(encoding="utf-8")), out)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
