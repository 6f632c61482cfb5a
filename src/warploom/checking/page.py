"""A checked kernel as one page of HTML: its source beside findings, bank conflicts and bytes, and its timeline."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from warploom.checking.kernel_file import Checked
from warploom.checking.timeline import drawing
from warploom.emulate import Finding
from warploom.emulate.findings.traffic import SECTOR_BYTES
from warploom.ir.statements import NOWHERE, SourceLine

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1b1f24; background: #fff }
table { border-collapse: collapse } td, th { padding: 0 .8em; text-align: right; white-space: pre; vertical-align: top }
th { position: sticky; top: 0; background: #f3f4f6 }
td.source { text-align: left; font-family: ui-monospace, monospace } td.says { text-align: left; white-space: normal }
tr.wrong td { background: #fdecec } tr.review td { background: #fff7e0 } tr:target td { outline: 2px solid #3b6fd4 }
.cost { color: #a33 } figure { margin: 1rem 0; overflow-x: auto }
"""
_HEADS = ("line", "source", "wavefronts", "without conflicts", "global bytes", "if coalesced", "findings")


def page(title: str, checked: Iterable[tuple[str, Checked]]) -> str:
    """A page that stands by itself, with a section for each kernel, by its name."""
    body = "".join(f"<section>{''.join(_section(name, one))}</section>" for name, one in checked)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


def _section(name: str, one: Checked) -> Iterator[str]:
    findings = one.emulation.findings
    wrong = [result.name for result in one.results if not result.ok]
    said = [f"{len(findings)} findings" if findings else "no findings", *(f"{x} is WRONG" for x in wrong)]
    yield f"<h2>{escape(name)}: {escape(', '.join(said))}</h2><ul>"
    for finding in findings:
        yield f"<li>{_link(name, finding)} {_says(finding)}</li>"
    yield "</ul>"
    if one.emulation.recording is not None:
        yield f"<figure>{drawing(f'{name}: a run', one.program, one.emulation.recording).svg()}</figure>"
    lines, counts = _by_line(findings), _counts(one)
    for file in dict.fromkeys(file for file, _ in (*lines, *counts)):
        yield f"<h3>{escape(file)}</h3><table><tr>{''.join(f'<th>{head}</th>' for head in _HEADS)}</tr>"
        for number, text in enumerate(linecache.getlines(file), 1):
            here = lines.get((file, number), [])
            grade = "" if not here else "wrong" if any(f.grade == "error" for f in here) else "review"
            yield f'<tr id="{_anchor(name, file, number)}" class="{grade}"><td>{number}</td>'
            yield f'<td class="source">{escape(text.rstrip())}</td>{_cells(counts.get((file, number)))}'
            yield f'<td class="says">{"<br>".join(map(_says, here))}</td></tr>'
        yield "</table>"


def _anchor(name: str, file: str, line: int) -> str:
    return escape(f"{name}-{Path(file).name}-{line}".replace(" ", "-"), quote=True)


def _link(name: str, finding: Finding) -> str:
    return f'<a href="#{_anchor(name, finding.where.file, finding.where.line)}">{escape(str(finding.where))}</a>'


def _says(finding: Finding) -> str:
    relies = f" For review: {finding.relies_on}" if finding.relies_on else ""
    return f"<b>{escape(finding.kind)}</b> {escape(finding.message + relies)}"


def _by_line(findings: Iterable[Finding]) -> dict[tuple[str, int], list[Finding]]:
    found: dict[tuple[str, int], list[Finding]] = defaultdict(list)
    for finding in findings:
        for where in dict.fromkeys(filter(None, (finding.where, finding.other))):
            if where != NOWHERE:
                found[where.file, where.line].append(finding)
    return found


def _counts(one: Checked) -> dict[tuple[str, int], list[int]]:
    """Wavefronts and bytes of each line, each as it is and at best."""
    found: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * 4)

    def add(where: SourceLine, first: int, *numbers: int) -> None:
        if where != NOWHERE:
            counts = found[where.file, where.line]
            counts[first : first + 2] = [a + b for a, b in zip(counts[first:], numbers, strict=False)]

    for (where, _), w in one.emulation.traffic.lines.items():
        add(where, 0, w.actual, w.ideal)
    for (where, _), s in one.emulation.traffic.global_lines.items():
        add(where, 2, SECTOR_BYTES * s.sectors, SECTOR_BYTES * s.ideal)
    return found


def _cells(counts: list[int] | None) -> str:
    if counts is None:
        return "<td></td>" * 4
    pairs = ((counts[i], counts[i + 1]) for i in (0, 2))
    return "".join(
        f"<td{' class=cost' if actual > ideal else ''}>{actual or ''}</td><td>{ideal or ''}</td>"
        for actual, ideal in pairs
    )
