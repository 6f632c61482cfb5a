"""What generated pages share: results, figures as text, tables of SASS, and writing or checking them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import jinja2
import stale
from figures import load_targets
from figures import missed as missed_figures
from page_tables import markdown_table

from warploom_lab.bench.tables import conflicts

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
RESULTS = HERE / "results"
EVIDENCE = ROOT / "docs" / "evidence"
Row = Mapping[str, Any]
Pages = Mapping[Path, Callable[[], str]]
"""Page → its text."""


def wavefronts(row: Row) -> str:
    """Executed wavefronts over conflict-free ones: ldmatrix, everything else."""
    return ", ".join(conflicts(row["wavefronts"]))


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
    return markdown_table(["rung", *names, "all", "LDSM → HMMA"], body).rstrip()


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


def spread(figures: Row, factor: float = 1.0, digits: int = 0) -> str:
    """``512 (505–514)``: the median, and the 10th and 90th percentile."""
    median, low, high = (f"{figures[name] * factor:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


def median(figures: Row, factor: float = 1.0, spec: str = ".0f") -> str:
    """The median of a spread alone."""
    return f"{figures['median'] * factor:{spec}}"


def provenance(environment: Row) -> str:
    """GPU, versions and date of a result, what is told of an older kernel, and the targets that were missed."""
    gpu, packages, nvrtc = environment.get("gpu"), environment.get("packages", {}), environment.get("nvrtc")
    told = environment.get("told", "")
    own, cuda = environment.get("driver"), environment.get("cuda_driver")  # a version of its own, and the newest CUDA
    parts = [
        gpu["name"] if gpu else "without a GPU",
        f"NVRTC {_dotted(nvrtc)}" if nvrtc else "",
        f"driver {own}" if own else f"a driver for CUDA {_dotted(cuda)}" if cuda else "",
        f"torch {packages['torch']}" if "torch" in packages else "",
        "" if told else str(environment.get("date", ""))[:10],
        f"ncu {environment['ncu']}" if environment.get("ncu") else "",
        told,
    ]
    missed = environment.get("missed")
    return ", ".join(part for part in parts if part) + (f". Targets missed: {'; '.join(missed)}" if missed else "")


def made_with(static: Row) -> str:
    """NVRTC's version of a result without a GPU, and what is told of an older kernel."""
    told = static["environment"]["told"]
    return f"{static['nvrtc']}{told and f' ({told})'}"


def _dotted(version: Any) -> str:
    return version if isinstance(version, str) else ".".join(map(str, version))


def head(*names: object) -> str:
    """The first two lines of a Markdown table."""
    return f"{row(*names)}\n{row(['---' for _ in _flat(names)])}"


def row(*cells: object) -> str:
    """A line of a Markdown table; lists among the cells are several."""
    return f"| {' | '.join(map(str, _flat(cells)))} |"


def _flat(cells: Iterable[Any]) -> list[object]:
    return [x for cell in cells for x in (cell if isinstance(cell, list | tuple) else (cell,))]


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number by Python's format, signs as typographers have them; – for None."""
    return "–" if value is None else f"{value:{spec}}".replace("-", "−") + unit


def joined(parts: Iterable[object]) -> str:
    """``a, b and c``."""
    *others, last = map(str, parts)
    return f"{', '.join(others)} and {last}" if others else last


def templates(**filters: Any) -> jinja2.Environment:
    """The templates of this folder, with the words above and further filters."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"f": number, "mean": geometric_mean} | _named(median, spread, joined, wavefronts) | filters
    made.globals |= _named(read, head, row, provenance, registers, group_table, distance)
    return made


def _named(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


def public(*modules: str) -> dict[str, Any]:
    """The constants and functions of modules."""
    named = ((module, name, x) for module in modules for name, x in vars(import_module(module)).items())
    return {name: x for of, name, x in named if name[0] != "_" and (not callable(x) or x.__module__ == of)}


def functions(values: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Those of some values that can be called."""
    return {name: value for name, value in values.items() if callable(value)}


def filled(template: str, *modules: str, **values: Any) -> str:
    """A template filled by Jinja with values, and constants and functions of modules; functions are filters too.

    Raises jinja2.UndefinedError for a name that nothing has.
    """
    given = public(*modules) | values
    return templates(**functions(given)).get_template(template).render(given)


def missed_targets(name: str, result: Row) -> list[str]:
    """The targets that a result has missed: those that it names, or of a ladder's rungs those of ``targets.json``."""
    if "missed" in result:
        return [reason for reason in result["missed"] if " is wrong at " not in reason]
    rungs = [row for row in result.get("rows", ()) if "rung" in row and "config" in row]
    family = Path(name).name.partition("-")[0]
    return missed_figures(load_targets(HERE / "targets.json", family), rungs) if rungs else []


def read(name: str) -> Any:
    """The JSON of a file below benchmarks/results; {} without it.

    Its environment has what is told of an older kernel, and the targets that were missed. Raises StaleEvidenceError
    where its kernels are not today's and ``older.json`` does not list it.
    """
    path = RESULTS / name
    if not path.is_file():
        return {}
    result = stale.checked(name, json.loads(path.read_text(encoding="utf-8")))
    said = {"told": stale.told(name), "missed": missed_targets(name, result)}
    return {**result, "environment": {**result.get("environment", {}), **said}}


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
