"""Mutants of other compilers' PTX on a GPU: what each tool of compute-sanitizer reports of what the emulator finds.

    PYTHONPATH=src:. python benchmarks/ptx_sanitizer_h200.py [--dry-run] [--count 32] [--out FILE.json]

Takes kernels as they are and mutants of ``tests.ptx.mutants`` that the emulator finds, one of each kind of change
from kernel after kernel, and leaves out what would hang. Each is assembled under a name of its own and launched once
under memcheck, racecheck, synccheck and initcheck, the four at the same time; a mutant that a tool ends is followed by
the next in a new process.
Writes, of each mutant, the emulator's kinds of findings and the headlines of each tool's reports with their counts
(null: the tool did not come so far). Choosing takes half a minute, the tools at most one. ``--dry-run`` assembles and
launches nothing: it needs no GPU. Needs cuda.core and compute-sanitizer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.ptx.mutants import Subject, judged, mutants, subjects

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ptx_round_trip_h200 import Gpu, triple

from warploom.bench.environment import environment

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 60
"""Of all tools together."""
_HANGS = {"deadlock", "mbarrier", "barrier", "divergence", "member_mask", "bounds", "misaligned"}
"""Kinds of findings after which a kernel may wait for ever, or break the context for those after it."""
_COUNTED = ("arrive", "mbarrier.init", "more arrivals", "more bytes", "more threads")
"""Changes of what others wait for."""


@dataclass(frozen=True)
class Job:
    """One launch: a cubin and its kernel's name, the launch's sizes, arguments and the parameters' types."""

    name: str
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    program: Any
    values: list[Any]


def chosen(subject: Subject) -> Iterator[dict[str, Any]]:
    """A kernel as it is, then the first mutant of each kind of change that the emulator finds and that ends.

    Each is a row of the result with its text.
    """
    yield {"kernel": subject.name, "change": "as it is", "kinds": [], "text": subject.text}
    known: set[str] = set()
    for mutant in mutants(subject.text, flips=0):
        if mutant.kind in known or any(what in mutant.kind for what in _COUNTED):
            continue
        row = judged(subject, mutant)
        if row["verdict"] == "found" and not _HANGS & set(row["kinds"]):
            known.add(mutant.kind)
            yield {**row, "text": mutant.text}


def assembled(subject: Subject, text: str, number: int, arch: str) -> Job:
    """A text as a cubin, its kernel renamed."""
    core: Any = importlib.import_module("cuda.core")
    call = subject.call
    entry = call.options.get("kernel") or re.findall(r"\.entry\s+([\w$]+)", text)[0]
    name = f"mutant_{number}"
    renamed = re.sub(rf"(?<![\w$]){re.escape(entry)}(?![\w$])", name, text)
    code = core.Program(renamed, "ptx", core.ProgramOptions(arch=arch)).compile("cubin").code
    given = [np.copy(x) if isinstance(x, np.ndarray) else x for x in call.arguments]
    program = call.again(subject.text, None, [np.copy(x) if isinstance(x, np.ndarray) else x for x in given]).program
    shared = call.options.get("shared_bytes", 0)
    return Job(name, bytes(code), triple(call.grid), triple(call.block), shared, program, given)


def run_all(folder: Path, first: int) -> None:
    """Launch every job of a folder from one on; prints a line for each."""
    gpu = Gpu()
    for job in pickle.loads((folder / "jobs.pickle").read_bytes())[first:]:
        kernel = gpu.core.ObjectCode.from_cubin(job.cubin).get_kernel(job.name)
        try:
            gpu.run(
                lambda a, job=job, kernel=kernel: gpu.launch(kernel, job.grid, job.block, job.shared_bytes, a),
                job.program, job.values[: len(job.program.parameters)],
            )  # fmt: skip
        except RuntimeError as error:
            print(f"FAILED {job.name}: {error}", flush=True)
            return
        print(f"RAN {job.name}", flush=True)


def under_tools(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each tool and kernel: what it reported, headlines and their counts; None where it did not come so far."""
    end = time.monotonic() + SECONDS
    running = {tool: _started(tool, folder, 0) for tool in TOOLS}
    texts: dict[str, str] = dict.fromkeys(TOOLS, "")
    while running and time.monotonic() < end:
        time.sleep(0.2)
        for tool, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[tool]
            texts[tool] += (folder / tool).read_text(encoding="utf-8", errors="replace")
            ended = re.findall(r"^(?:RAN|FAILED) mutant_(\d+)", texts[tool], re.MULTILINE)
            if ended and int(ended[-1]) + 1 < len(names):  # a report has ended the process: on with the next
                running[tool] = _started(tool, folder, int(ended[-1]) + 1)
    for tool, process in running.items():
        os.killpg(process.pid, signal.SIGKILL)  # and the kernels' process, which would go on
        texts[tool] += (folder / tool).read_text(encoding="utf-8", errors="replace")
    return {tool: reports(texts[tool], names) for tool in TOOLS}


def reports(text: str, names: list[str]) -> dict[str, Any]:
    """The headlines between the ends of kernels, by kernel, without what differs from thread to thread."""
    found: dict[str, Any] = dict.fromkeys(names)
    mine = Counter[str]()
    for line in text.splitlines():
        if ended := re.match(r"(?:RAN|FAILED) (mutant_\d+)", line):
            found[ended[1]], mine = dict(mine), Counter()
        elif headline := re.match(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(\S.*)", line):
            mine[re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|mutant_\d+|\b\d+\b", "…", headline[1])[:100]] += 1
    return found


def _started(tool: str, folder: Path, first: int) -> subprocess.Popen[bytes]:
    """A tool over all jobs from one on; it writes to a file of the folder."""
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000", *quiet]
    with (folder / tool).open("wb") as output:
        return subprocess.Popen(
            [*command, sys.executable, __file__, "--run", str(folder), "--first", str(first)], stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def chosen_jobs(count: int, arch: str) -> tuple[list[dict[str, Any]], list[Job]]:
    """So many mutants at most, of kernel after kernel: their rows, and how each is launched."""
    rows: list[dict[str, Any]] = []
    jobs: list[Job] = []
    for _, make in subjects():
        subject = make()
        if any(isinstance(x, tuple) for x in subject.call.arguments):
            continue  # the maps of a host are no arguments of a plain launch
        for row in chosen(subject):
            jobs.append(assembled(subject, row.pop("text"), len(rows), arch))
            rows.append(row)
            if sum(bool(r["kinds"]) for r in rows) == count:
                return rows, jobs
    return rows, jobs


def main() -> int:
    """Choose, assemble, run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="assemble, launch nothing")
    parser.add_argument("--count", type=int, default=32, help="mutants, at most")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_all(options.run, options.first)
        return 0
    rows, jobs = chosen_jobs(options.count, options.arch)
    result: dict[str, Any] = {"mutants": rows}
    if not options.dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "jobs.pickle").write_bytes(pickle.dumps(jobs))
            tools = under_tools(Path(scratch), [job.name for job in jobs])
        result = {"environment": environment(), **result}
        for row, job in zip(rows, jobs, strict=True):
            row["tools"] = {tool: of[job.name] for tool, of in tools.items()}
    for row in rows:
        print(f"{row['kernel']}, {row['change']}: emulator {', '.join(row['kinds'])}; {row.get('tools', 'assembled')}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
