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
    """What compute-sanitizer's tools report of mutants that the emulator finds, and of the kernels as they are."""
    every: list[dict[str, Any]] = read("h200/ptx-sanitizer.json")["mutants"]
    rows = [row for row in every if row["kinds"]]
    clean = [row for row in every if not row["kinds"]]
    silent = Counter(_reason(row) for row in rows if not any(row["tools"].values()))

    def cell(reports: dict[str, int] | None) -> str:
        return "not reached" if reports is None else str(sum(reports.values()) or "")

    tools = list(rows[0]["tools"])
    shown = [
        [r["kernel"], r["change"], ", ".join(r["kinds"]), *(cell(r["tools"][tool]) for tool in tools)] for r in rows
    ]
    return (
        "\n## Beside compute-sanitizer\n\n"
        "The first mutant of each kind of change that the emulator finds, kernel after kernel, launched on a GPU\n"
        "under each tool (`benchmarks/ptx_sanitizer_h200.py`): how many reports? Mutants that could wait for ever\n"
        "are left out.\n\n"
        f"{markdown_table(['kernel', 'change', 'the emulator', *tools], shown)}\n"
        f"{len(rows) - sum(silent.values())} of {len(rows)} have a report of some tool. No tool reports\n\n"
        + "".join(f"- {count} in which {why}.\n" for why, count in silent.items())
        + _of_clean(clean)
    )


def _of_clean(rows: list[dict[str, Any]]) -> str:
    """What the tools report of kernels as they are."""
    if not rows:
        return ""
    found = [f"{row['kernel']}: {row['tools']}" for row in rows if any(row["tools"].values())]
    return f"\nOf {len(rows)} kernels as they are, {'; '.join(found) if found else 'no tool reports anything'}.\n"


def _reason(row: dict[str, Any]) -> str:
    """Why no tool of compute-sanitizer reports a mutant."""
    if row["kernel"].startswith("Triton: matmul, sm_90"):
        return "`wgmma` is on one side: it reads shared memory and writes registers asynchronously"
    if (row["kernel"], row["code"].split()[0]) == ("CUDA: histogram", "bar.sync"):
        return "a warp's plain store to shared memory meets other warps' atomics"
    return "**the reason is not known**"


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
