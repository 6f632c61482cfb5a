"""Write docs/evidence/ptx-mutants.md from the committed evidence: ``python benchmarks/ptx_mutants_page.py [--check]``.

The evidence is benchmarks/results/static/ptx-mutants.json (``python -m tests.ptx.mutants``), and of the GPU what
``ptx_round_trip_h200.py`` and ``ptx_sanitizer_h200.py`` write. ``--check`` changes nothing and ends with 1 if the page
is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from page_parts import EVIDENCE, main, read
from page_tables import markdown_table

VERDICTS = ("found", "wrong result", "does not end", "refused", "equivalent", "unseen")
PLAIN = "as it is"
"""The change of a kernel without one."""
_INTRODUCTION = """# Mutants of other compilers' PTX

Triton and NVRTC compile the kernels of `tests/with_triton` and `tests/ptx/cuda_cases.py`; `python -m tests.ptx.mutants`
changes one line of the PTX at a time: a barrier, wait, commit, fence or arrival deleted, a count raised, a predicate
flipped (at most six of a kernel). Each mutant runs in the emulator's own order and under three seeds. *Found* is a
finding of the emulator; a *wrong result* differs from NumPy's beyond the tolerance without a finding, as a flipped mask
should; one that *does not end* hangs a GPU too. A mutant is *equivalent* for the reason given below.

"""


def table(rows: list[dict[str, Any]], key: str) -> str:
    """Verdicts by a column of the evidence."""
    counts = {row[key]: Counter[str]() for row in rows}
    for row in rows:
        counts[row[key]][row["verdict"]] += 1
    shown = [v for v in VERDICTS if any(c[v] for c in counts.values())]
    body = [[name, *(str(c[v] or "") for v in shown)] for name, c in counts.items()]
    total = Counter(row["verdict"] for row in rows)
    return markdown_table([key, *shown], [*body, ["all", *(str(total[v]) for v in shown)]])


def round_trip() -> str:
    """What the kernels gave on a GPU as they are, by way of a Program, and on the emulator."""
    evidence = read("h200/ptx-round-trip.json")
    rows = [[row["kernel"], *("yes" if row[key] else "no" for key in ("equal", "equal on the emulator"))]
            for row in evidence["kernels"]]  # fmt: skip
    head = ["kernel", "as it is and by way of a Program", "and on the emulator"]
    gpu = evidence["environment"]["gpu"]["name"]
    return (
        "## The same bits on a GPU\n\n"
        "The kernels as their compilers left them, and their PTX read as a Program, printed as CUDA C++ and compiled\n"
        f"again, on one {gpu} (`benchmarks/ptx_round_trip_h200.py`): are all outputs equal bit for bit? The\n"
        "emulator's products and approximations (`ex2`, `rsqrt`) are not the hardware's to the last bit.\n\n"
        f"{markdown_table(head, rows)}"
    )


def sanitizer() -> str:
    """What compute-sanitizer's tools report of the mutants and of the kernels as they are, beside the emulator."""
    verdicts = {_place(row): row for row in read("static/ptx-mutants.json")["mutants"]}
    launched: list[dict[str, Any]] = read("h200/ptx-sanitizer.json")["mutants"]
    every = [{**row, **verdicts.get(_place(row), {})} for row in launched]
    rows = [{**row, "finding": ", ".join(row["kinds"]) or row["verdict"]} for row in every if row["change"] != PLAIN]
    both = sum(bool(row["kinds"]) and _reported(row) for row in rows)
    alone = [row for row in rows if row["kinds"] and not _reported(row) and None not in row["tools"].values()]
    theirs = [row for row in rows if not row["kinds"] and _reported(row)]
    return (
        "\n## Beside compute-sanitizer\n\n"
        "Mutants and kernels launched on a GPU under each tool (`benchmarks/ptx_sanitizer_h200.py`): of how many has\n"
        "the emulator a finding, any tool a report, and each? A launch that does not end is cut off.\n\n"
        + "\n".join(_beside(rows, key) for key in ("kernel", "change", "finding"))
        + f"\nThe emulator and a tool find {both}, the emulator alone {len(alone)}, a tool alone {len(theirs)}.\n"
        + _listed("The emulator alone", alone)
        + _listed("A tool alone", theirs)
        + _of_plain([row for row in every if row["change"] == PLAIN])
    )


def _place(row: dict[str, Any]) -> tuple[str, str, int, str]:
    """What a mutant changes, by which its emulated and its launched runs are told to be of one."""
    return row["kernel"], row["change"], row.get("line", 0), row.get("code", "")


def _reported(row: dict[str, Any]) -> bool:
    return any(row["tools"].values())


def _stops(row: dict[str, Any]) -> bool:
    """Whether a launch hangs, or ends in an error of the driver or of the process."""
    return not {"ran", None}.issuperset(row.get("ended", {}).values())


def _beside(rows: list[dict[str, Any]], key: str) -> str:
    """By a column: how many mutants, and how many each side finds."""
    tools = list(rows[0]["tools"])

    def counts(mine: list[dict[str, Any]]) -> list[str]:
        of_tools = [sum(bool(row["tools"][tool]) for row in mine) for tool in tools]
        unreached = sum(None in row["tools"].values() for row in mine)
        hang = sum(map(_stops, mine))
        found = sum(bool(row["kinds"]) for row in mine), sum(map(_reported, mine))
        return [str(n or "") for n in (len(mine), *found, *of_tools, hang, unreached)]

    names = dict.fromkeys(row[key] for row in rows)
    body = [[name, *counts([row for row in rows if row[key] == name])] for name in names]
    head = [key, "mutants", "the emulator", "any tool", *tools, "hangs or fails", "not reached by all"]
    return markdown_table(head, [*body, ["all", *counts(rows)]])


def _listed(title: str, rows: list[dict[str, Any]]) -> str:
    """Mutants that one side alone finds, alike ones joined."""
    changes: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        tools = ", ".join(tool for tool, of in row["tools"].items() if of)
        side = tools or (_reason(row) if row["kinds"] else "")
        changes.setdefault((row["kernel"], row["finding"], side), Counter())[row["change"]] += 1
    body = [[kernel, finding, ", ".join(f"{n} {change}" for change, n in of.items()), side]
            for (kernel, finding, side), of in changes.items()]  # fmt: skip
    last = "reason, if known" if title.startswith("The") else "tools"
    return f"\n### {title}\n\n{markdown_table(['kernel', 'finding', 'mutants', last], body)}" if body else ""


def _of_plain(rows: list[dict[str, Any]]) -> str:
    """What the tools report of kernels as they are."""
    if not rows:
        return ""
    found = [
        f"{row['kernel']}: {', '.join(t for t, of in row['tools'].items() if of)}" for row in rows if _reported(row)
    ]
    return f"\nOf {len(rows)} kernels as they are, {'; '.join(found) if found else 'no tool reports anything'}.\n"


def _reason(row: dict[str, Any]) -> str:
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
    rows: list[dict[str, Any]] = evidence["mutants"]
    rest = Counter((r["kernel"], f"{r['change']}: `{r['code']}`", r["reason"] or "**not shown**")
                   for r in rows if r["verdict"] in ("equivalent", "unseen"))  # fmt: skip
    known = [f"- {name}: {message}.\n" for name, message in evidence["mended before"].items()]
    return "".join([
        _INTRODUCTION, table(rows, "kernel"), "\n", table(rows, "change"), "\n## Equivalent mutants\n\n",
        markdown_table(["kernel", "change", "times", "why it is the same kernel"],
                       [[kernel, change, str(n), why] for (kernel, change, why), n in rest.items()]),
        *(["\n## Found in the kernels as they are\n\n", *known] if known else []), "\n", round_trip(), sanitizer(),
    ])  # fmt: skip


PAGES = {EVIDENCE / "ptx-mutants.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
