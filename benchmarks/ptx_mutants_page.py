"""Write docs/evidence/ptx-mutants.md from the committed evidence: ``python benchmarks/ptx_mutants_page.py [--check]``.

The evidence is benchmarks/results/static/ptx-mutants.json (``python -m tests.ptx.mutants``), and of the GPU what
``ptx_round_trip_h200.py`` and ``ptx_sanitizer_h200.py`` write. ``--check`` changes nothing and ends with 1 if the page
is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from page_parts import EVIDENCE, filled, main, read

PLAIN = "as it is"
"""The change of a kernel without one."""
Mutant = dict[str, Any]


def counts(rows: Iterable[Mutant], verdicts: Iterable[str]) -> list[str]:
    """How many mutants have each verdict."""
    found = Counter(row["verdict"] for row in rows)
    return [str(found[verdict] or "") for verdict in verdicts]


def _place(row: Mutant) -> tuple[str, str, int, str]:
    """What a mutant changes, by which its emulated and its launched runs are told to be of one."""
    return row["kernel"], row["change"], row.get("line", 0), row.get("code", "")


def _reported(row: Mutant) -> bool:
    return any(row["tools"].values())


def _stops(row: Mutant) -> bool:
    """Whether a launch hangs, or ends in an error of the driver or of the process."""
    return not {"ran", None}.issuperset(row.get("ended", {}).values())


def sides(rows: Iterable[Mutant], tools: Iterable[str]) -> list[str]:
    """How many mutants there are, how many each side finds, how many stop, and how many no tool came to."""
    mine = list(rows)
    found = sum(bool(row["kinds"]) for row in mine), sum(map(_reported, mine))
    of_tools = (sum(bool(row["tools"][tool]) for row in mine) for tool in tools)
    unreached = sum(None in row["tools"].values() for row in mine)
    return [str(n or "") for n in (len(mine), *found, *of_tools, sum(map(_stops, mine)), unreached)]


def alike(rows: Iterable[Mutant]) -> list[tuple[tuple[str, str, str], str]]:
    """Mutants that one side alone finds, alike ones joined."""
    changes: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        tools = ", ".join(tool for tool, of in row["tools"].items() if of)
        side = tools or (_reason(row) if row["kinds"] else "")
        changes.setdefault((row["kernel"], row["finding"], side), Counter())[row["change"]] += 1
    return [(key, ", ".join(f"{n} {change}" for change, n in of.items())) for key, of in changes.items()]


def _reason(row: Mutant) -> str:
    """Why no tool of compute-sanitizer reports a mutant that the emulator finds; '' where it is not known."""
    if _stops(row):
        return "it hangs and is cut off, or the driver refuses what it does"
    if row["kernel"].startswith("Triton: matmul, sm_90") and row["change"] != "flipped predicate":
        return "`wgmma` is on one side: it reads shared memory and writes registers asynchronously"
    if (row["kernel"], row["code"].split()[0]) == ("CUDA: histogram", "bar.sync"):
        return "a warp's plain store to shared memory meets other warps' atomics"
    return ""


def page() -> str:
    """The page."""
    evidence = read("static/ptx-mutants.json")
    mutants: list[Mutant] = evidence["mutants"]
    verdicts = {_place(row): row for row in mutants}
    every = [{**row, **verdicts.get(_place(row), {})} for row in read("h200/ptx-sanitizer.json")["mutants"]]
    rows = [{**row, "finding": ", ".join(row["kinds"]) or row["verdict"]} for row in every if row["change"] != PLAIN]
    plain = [row for row in every if row["change"] == PLAIN]
    return filled(
        "ptx-mutants.template.md",
        __name__,
        evidence=evidence,
        equivalent=Counter(
            (r["kernel"], f"{r['change']}: `{r['code']}`", r["reason"] or "**not shown**")
            for r in mutants
            if r["verdict"] in ("equivalent", "unseen")
        ),
        launched=rows,
        tools=list(rows[0]["tools"]),
        both=sum(bool(row["kinds"]) and _reported(row) for row in rows),
        plain=plain,
        emulator_alone=[r for r in rows if r["kinds"] and not _reported(r) and None not in r["tools"].values()],
        tool_alone=[r for r in rows if not r["kinds"] and _reported(r)],
        reporting=[
            f"{r['kernel']}: {', '.join(t for t, of in r['tools'].items() if of)}" for r in plain if _reported(r)
        ],
    )


PAGES = {EVIDENCE / "ptx-mutants.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
