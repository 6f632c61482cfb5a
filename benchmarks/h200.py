"""Everything that needs the GPU, in one run of at most eight minutes.

    python benchmarks/h200.py --out DIR

runs the tests marked ``gpu``, the attention ladder beside PyTorch's kernels, and the host cost of a call, each in a
process of its own, and writes their JSON files (at most eight) to DIR, by default ``$OUT``. What each printed goes to
DIR/log.txt; its last lines come in a summary at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts import targets

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS = 460.0
LENGTHS = "512,1024,2048,4096,8192,16384"
SHOWN = 40
"""Last lines of what a section prints that stand in the summary."""


@dataclass(frozen=True)
class Section:
    """One command, and the most seconds that it may take."""

    name: str
    command: list[str]
    seconds: float


def sections(out: Path) -> list[Section]:
    """What is run, the most important first."""

    def ladder(name: str, seconds: float, *options: str) -> Section:
        script, file = str(ROOT / "benchmarks" / "ladders.py"), str(out / f"{name}.json")
        return Section(name, [sys.executable, script, "attention", "--out", file, *options], seconds)

    host_cost = [sys.executable, __file__, "--host-cost", str(out / "host-cost.json")]
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider", "tests"]
    return [
        ladder("attention-d128-bf16", 300, "--gpu-seq", LENGTHS),
        Section("host-cost", host_cost, 60),
        Section("gpu-tests", tests, 240),
        ladder("attention-d64-bf16", 90, "--head-dim", "64", "--rung", "1,2,best", "--gpu-seq", LENGTHS),
        ladder("attention-d128-f16", 90, "--dtype", "f16", "--gpu-seq", "4096"),
    ]


def run(section: Section, out: Path, seconds: float) -> tuple[str, list[str]]:
    """Run one section in its own process, with its output in ``out``: (how it ended, lines for the summary)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    start = time.monotonic()
    try:
        done = subprocess.run(
            section.command,
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        state, log = ("passed" if done.returncode == 0 else f"FAILED (exit code {done.returncode})"), done.stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        state, log = f"STOPPED after {seconds:.0f} s", text if isinstance(text, str) else text.decode(errors="replace")
    with (out / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"==== {section.name}: {state}\n{log}\n")
    lines = [f"  | {line}" for line in log.strip().splitlines()[-SHOWN:]]
    return f"{state} in {time.monotonic() - start:.0f} s", lines


def write_host_cost(file: Path) -> int:
    """The host cost of calls, as JSON with their targets; 1 if one takes longer than ``targets.json`` allows."""
    from host_cost import host_cost, missed

    most = targets()["host_microseconds"]
    found = host_cost()
    short = missed(found, most)
    rows = [{"call": name, "microseconds": spread, "most": most.get(name)} for name, spread in found.items()]
    write(file, {"rows": rows, "missed": short})
    for name, spread in found.items():
        print(f"{name}: {spread['median']:.1f} µs")
    for line in short:
        print(f"MISSED {line}")
    return 1 if short else 0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="names of sections, with commas between")
    parser.add_argument("--host-cost", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host_cost:
        return write_host_cost(options.host_cost)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "log.txt").unlink(missing_ok=True)
    end = time.monotonic() + BUDGET_SECONDS
    failed, summary = 0, []
    for section in sections(options.out):
        if options.only and section.name not in options.only.split(","):
            continue
        left = end - time.monotonic()
        state, lines = (
            run(section, options.out, min(section.seconds, left)) if left > 5 else ("NOT RUN: no time left", [])
        )
        print(f"{section.name}: {state}", flush=True)
        failed += not state.startswith("passed")
        summary += [f"{section.name}: {state}", *lines]
    print("\n" + "\n".join(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
