"""What generated pages share: results, figures as text, tables of SASS, and writing or checking them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from page_tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
RESULTS = HERE / "results"
EVIDENCE = ROOT / "docs" / "evidence"
Row = Mapping[str, Any]
Pages = Mapping[Path, Callable[[], str]]
"""Page → its text."""


def wavefronts(row: Row) -> str:
    """Executed wavefronts over conflict-free ones: ldmatrix, everything else."""
    parts: list[str] = []
    for names in (["ldmatrix"], [n for n in row["wavefronts"] if n != "ldmatrix"]):
        actual, ideal = (sum(row["wavefronts"][n][what] for n in names) for what in ("actual", "ideal"))
        parts.append(f"{actual / ideal:.2f}" if ideal else "–")
    return ", ".join(parts)


def registers(kernel: Row) -> str:
    """``255 (48+32)``: registers, and bytes of spill stores and loads."""
    stored, loaded = kernel["spill_store_bytes"], kernel["spill_load_bytes"]
    return f"{kernel['registers']} ({f'{stored}+{loaded}' if stored or loaded else '0'})"


def group_table(kernels: Mapping[str, Row]) -> str:
    """Instructions of one main-loop iteration by purpose, a row for each kernel."""
    names = list(dict.fromkeys(name for kernel in kernels.values() for name in kernel["loop_groups"]))
    body = [
        [key, *(str(k["loop_groups"].get(name, 0)) for name in names), str(k["loop_instructions"]), distance(k)]
        for key, k in kernels.items()
    ]
    return markdown_table(["rung", *names, "all", "LDSM → HMMA"], body)


def distance(kernel: Row) -> str:
    """The median number of instructions between an LDSM and the HMMA that reads it."""
    found = kernel["ldsm_to_hmma"]
    return "–" if found is None else f"{found['median']:g}"


def loop_changes(before: Row, after: Row, most: int = 6) -> str:
    """Opcodes whose number in one iteration of the main loop changes: ``BAR +2, MOV −1``."""
    first, second = before["loop_counts"], after["loop_counts"]
    changes = {name: second.get(name, 0) - first.get(name, 0) for name in {*first, *second}}
    ordered = sorted((name for name in changes if changes[name]), key=lambda name: (-abs(changes[name]), name))
    text = ", ".join(f"{name} {changes[name]:+d}".replace("-", "−") for name in ordered[:most])
    return text or "no opcode's number changes"


def spread(figures: Row) -> str:
    """``512 (505–514)``: the median, and the 10th and 90th percentile."""
    return f"{figures['median']:.0f} ({figures['low']:.0f}–{figures['high']:.0f})"


_NAME = re.compile(r"@([A-Z0-9]+)@")
_CONDITION = re.compile(r"<!-- if (\w+) -->\n(.*?)<!-- end if -->\n", re.DOTALL)


def filled(template: Path, figures: Mapping[str, str], measured: Collection[str] = ()) -> str:
    """The template with every ``@NAME@`` replaced. Raises KeyError for a name that the template or ``figures`` lacks.

    What stands between ``<!-- if NAME -->`` and ``<!-- end if -->`` stays where NAME is among ``measured``.
    """
    text = template.read_text(encoding="utf-8")
    text = _CONDITION.sub(lambda found: found[2] if found[1] in measured else "", text)
    for name in figures:
        if f"@{name}@" not in text:
            raise KeyError(f"{template.name} has no @{name}@")
    if missing := set(_NAME.findall(text)) - set(figures):
        raise KeyError(f"{template.name} has no figures for {', '.join(sorted(missing))}")
    return _NAME.sub(lambda found: figures[found[1]].rstrip("\n"), text)


def read(name: str) -> Any:
    """The JSON of a file below benchmarks/results; {} where it has not been measured."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main(pages: Pages, arguments: Sequence[str] | None = None) -> int:
    """The command line of a script that makes pages: rewrite them, or with ``--check`` only compare; the exit code."""
    parser = argparse.ArgumentParser(description="Write pages from committed evidence.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is out of date")
    check, stale = parser.parse_args(arguments).check, 0
    for page, content in pages.items():
        text = content()
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{page.name} {'is out of date' if check else 'rewritten'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return int(check and stale > 0)
