"""Mutants of other compilers' PTX on a GPU: what each tool of compute-sanitizer reports, beside the emulator.

    PYTHONPATH=src:. python benchmarks/ptx_sanitizer_h200.py [--prepared FILE] [--dry-run] [--jobs 12] [--out DIR]

The mutants are those of benchmarks/results/static/ptx-mutants.json, with the emulator's verdicts, and the kernels as
they are. Each is assembled under a name of its own and launched under memcheck, racecheck, synccheck and initcheck. So
many processes at a time launch some mutants each; one that ends, or waits for ever, costs the mutant it was at, and the
rest go to a new process. What may hang comes last. Writes to ptx-sanitizer.json, of each mutant and tool, the headlines
of its reports with their counts, and how the launch ended: ``ran``, ``failed`` (the driver's error), ``hangs``
(``--limit`` seconds), or ``dies``; both null where ``--seconds`` were over.
``--dry-run`` assembles and launches nothing: it needs no GPU. ``--prepared`` keeps what was assembled in a file, or
takes it from there: the GPU's machine then needs no Triton, and the lines are the evidence's. Assembling takes a
minute, the tools about two. Needs cuda.core and compute-sanitizer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "benchmarks" / "results" / "static" / "ptx-mutants.json"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
START_SECONDS = 40
"""A process may take so long from start to launch, and from one launch to the next."""
PATIENCE = 2
"""Seconds in which a tool may write what it has seen of a kernel that hung."""
_HANGS = {"deadlock", "mbarrier", "barrier", "divergence", "member_mask", "bounds", "misaligned", "leak"}
"""Kinds of findings after which a kernel may wait for ever, or break the context for those after it."""
_TOGETHER, _ALONE = 32, 6
"""Mutants of one process: those that should end, and those that may not."""

_OPTIONS = ("--print-limit", "100000", "--max-connections", "100", "--show-backtrace", "no")
_OF_TOOL = {"memcheck": ("--report-api-errors", "no"), "racecheck": ("--racecheck-deadlock-timeout", "1500")}
"""What the tools are asked, as version 2025.3 knows it; racecheck looks for deadlocks, in less time than the limit."""

Row = dict[str, Any]


class Job(NamedTuple):
    """One launch: a cubin and its kernel's name, the launch's sizes, and each argument with its parameter's type."""

    name: str
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    values: list[tuple[Any, Any]]


# Choosing and assembling


def rows_of(subject: Any, evidence: dict[tuple[Any, ...], Row]) -> list[tuple[Row, str]]:
    """A kernel as it is and its mutants that the evidence judges, each with its text."""
    from tests.ptx.mutants import mutants

    plain = {"kernel": subject.name, "change": "as it is", "verdict": "", "kinds": []}
    keyed = [(mutant, (subject.name, mutant.kind, mutant.line, mutant.what)) for mutant in mutants(subject.text, 6)]
    return [(plain, subject.text), *((evidence[key], mutant.text) for mutant, key in keyed if key in evidence)]


def prepared(place: int, arch: str) -> list[tuple[Row, Job]]:
    """The rows and launches of one subject."""
    from ptx_round_trip_h200 import triple
    from tests.ptx.mutants import subjects

    subject = list(subjects())[place][1]()
    call = subject.call
    given = [_copied(x) for x in call.arguments]
    program = call.again(subject.text, None, [_copied(x) for x in given]).program
    values = list(zip(given, (p.dtype for p in program.parameters), strict=False))
    sizes = triple(call.grid), triple(call.block), call.options.get("shared_bytes", 0)
    entry = call.options.get("kernel") or re.findall(r"\.entry\s+([\w$]+)", subject.text)[0]
    judged = {
        (r["kernel"], r["change"], r["line"], r["code"]): r
        for r in json.loads(EVIDENCE.read_text(encoding="utf-8"))["mutants"]
    }
    found: list[tuple[Row, Job]] = []
    for number, (row, text) in enumerate(rows_of(subject, judged)):
        name = f"mutant_{place}_{number}"
        renamed = re.sub(rf"(?<![\w$]){re.escape(entry)}(?![\w$])", name, text)
        found.append((row, Job(name, assembled(renamed, arch), *sizes, values)))
    return found


def _copied(x: Any) -> Any:
    """An argument of which the emulator changes only the copy."""
    if isinstance(x, tuple):  # an array and what a tensor map says of it
        return np.copy(x[0]), x[1]
    return np.copy(x) if isinstance(x, np.ndarray) else x


def assembled(text: str, arch: str) -> bytes:
    core: Any = importlib.import_module("cuda.core")
    return bytes(core.Program(text, "ptx", core.ProgramOptions(arch=arch)).compile("cubin").code)


def prepare(count: int, arch: str, jobs: int) -> tuple[list[Row], list[Job]]:
    """Rows and launches of all subjects, or of so many mutants spread evenly."""
    from tests.ptx.mutants import subjects

    total = len(list(subjects()))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pairs = [x for each in pool.map(prepared, range(total), [arch] * total) for x in each]
    rows, launches = [row for row, _ in pairs], [job for _, job in pairs]
    kept = spread(rows, count)
    return [rows[i] for i in kept], [launches[i] for i in kept]


def spread(rows: list[Row], count: int) -> list[int]:
    """The kernels as they are and at most so many mutants: one of each kernel and change, then a second, and so on."""
    each, plain = turns(rows), sum(not row["verdict"] for row in rows)
    return sorted(sorted(range(len(rows)), key=each.__getitem__)[: plain + count])


def turns(rows: list[Row]) -> list[int]:
    """How many mutants of the same kernel and change stand before each; -1 for a kernel as it is."""
    seen = Counter[tuple[str, str]]()
    found: list[int] = []
    for row in rows:
        of = (row["kernel"], row["change"])
        found.append(seen[of] if row["verdict"] else -1)
        seen[of] += 1
    return found


# One process of a tool


def launch_all(path: Path, numbers: list[int]) -> None:
    """Launch these jobs of a file; prints a line before and after each."""
    from warploom.cuda.launch import current_context, synchronize

    print(f"PROCESS {os.getpid()}", flush=True)
    jobs = pickle.loads(path.read_bytes())[1]
    for number in numbers:
        try:
            with current_context(0):
                kept = queued(jobs[number], lambda number=number: print(f"LAUNCH {number}", flush=True))
                synchronize(0, 0)
            del kept
        except RuntimeError as error:
            print(f"FAILED {number}: {error}", flush=True)
            return  # a context that has failed runs no other kernel
        print(f"RAN {number}", flush=True)


def queued(job: Job, announce: Callable[[], None]) -> Any:
    """Bring a job's code and arguments to the current GPU, announce the launch, and queue it; what it needs to live."""
    from warploom.cuda.buffers import DeviceCopy
    from warploom.cuda.device import check, require_driver
    from warploom.cuda.launch import scalar
    from warploom.cuda.tensor_maps import encode

    driver = require_driver()
    library = check(driver, driver.cuLibraryLoadData(job.cubin, [], [], 0, [], [], 0))
    kernel = check(driver, driver.cuLibraryGetKernel(library, job.name.encode()))
    check(driver, driver.cuKernelGetFunction(kernel))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver, driver.cuKernelSetAttribute(most, job.shared_bytes, kernel, check(driver, driver.cuDeviceGet(0))))
    copies: list[DeviceCopy] = []
    passed: list[Any] = []
    for value, dtype in job.values:
        array, spec = value if isinstance(value, tuple) else (value, None)
        if not isinstance(array, np.ndarray):
            passed.append(scalar(dtype, array))
            continue
        copies.append(DeviceCopy(np.ascontiguousarray(array).reshape(-1).view(np.uint8), 0))
        address = copies[-1].pointer
        passed.append(encode(address, spec, 0) if spec else ctypes.c_uint64(address))
    places = (ctypes.c_void_p * len(passed))(*map(ctypes.addressof, passed))
    announce()
    sizes = (*job.grid, *job.block, job.shared_bytes)
    check(driver, driver.cuLaunchKernel(driver.CUfunction(int(kernel)), *sizes, 0, ctypes.addressof(places), 0))
    return copies, passed, places


# All processes of all tools


@dataclass
class Running:
    """A process of a tool over some jobs; what it writes goes to a file."""

    tool: str
    numbers: list[int]
    process: subprocess.Popen[bytes]
    output: Path
    since: float
    marks: int = 0
    stopped: float = 0

    def text(self) -> str:
        """What it has written."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def watch(self, limit: float) -> None:
        """Stop it where no launch has begun or ended for too long: the launcher, and soon after the tool."""
        now = time.monotonic()
        if self.stopped:
            if now - self.stopped > PATIENCE:
                self.kill()
            return
        marks = re.findall(r"^(PROCESS|LAUNCH|RAN|FAILED) (\d+)", self.text(), re.MULTILINE)
        if len(marks) != self.marks:
            self.marks, self.since = len(marks), now
        if now - self.since > (limit if marks and marks[-1][0] == "LAUNCH" else START_SECONDS):
            self.stopped = now
            try:
                os.kill(int(marks[0][1]), signal.SIGKILL) if marks else self.kill()
            except ProcessLookupError:
                self.kill()

    def kill(self) -> None:
        """End the tool and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(tool: str, numbers: list[int], jobs: Path, output: Path) -> Running:
    """A tool over these jobs of a file."""
    tool_command = ["compute-sanitizer", "--tool", tool, *_OPTIONS, *_OF_TOOL.get(tool, ())]
    listed = ",".join(map(str, numbers))
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*tool_command, sys.executable, __file__, "--prepared", str(jobs), "--launch", listed],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(tool, numbers, process, output, since=time.monotonic())


def reports(text: str) -> tuple[dict[int, tuple[dict[str, int], str]], dict[str, int]]:
    """Of each job: headlines of its reports and how it ended; the headlines after the last."""
    found: dict[int, tuple[dict[str, int], str]] = {}
    mine = Counter[str]()
    for line in text.splitlines():
        if ended := re.match(r"(RAN|FAILED) (\d+)", line):
            found[int(ended[2])], mine = (dict(mine), ended[1].lower()), Counter()
        elif headline := re.match(rf"========= (?!{_NO_REPORT})(\S.*)", line):
            mine[re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|mutant_\w+|\b\d+\b", "…", headline[1])[:100]] += 1
    return found, dict(mine)


_NO_REPORT = (
    r"COMPUTE-SANITIZER|(?:ERROR|RACECHECK|LEAK) SUMMARY|Target application|Internal|Program hit|No attachable|Please|"
    r"Error: (?:process didn't|Target|couldn't find|Failed|No attachable)"
)
"""What a tool says of itself, and of the process that it has lost."""


def under_tools(
    rows: list[Row], jobs: Path, processes: int, limits: tuple[float, float], save: Callable[[], None]
) -> None:
    """Launch every job under every tool, within seconds of all and of one launch; each row gets what was reported."""
    for row in rows:
        row["tools"], row["ended"] = dict.fromkeys(TOOLS), dict.fromkeys(TOOLS)
    waiting, end = deque(batches(rows)), time.monotonic() + limits[0]
    running: list[Running] = []
    started = 0
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < processes:
                started += 1
                running.append(start(*waiting.popleft(), jobs, Path(scratch) / str(started)))
            time.sleep(0.05)
            over = time.monotonic() > end
            for one in list(running):
                if over:
                    one.kill()
                elif one.process.poll() is None:
                    one.watch(limits[1])
                    continue
                running.remove(one)
                left = finished(one, rows, None if over else "hangs" if one.stopped else "dies")
                if left and not over:
                    waiting.appendleft((one.tool, left))
                save()
            if over:
                return


def batches(rows: list[Row]) -> Iterable[tuple[str, list[int]]]:
    """Tool and jobs of each process: first what should end, then what may not, one of each kernel and change first."""
    safe, unsafe = list[int](), list[int]()
    for i, row in enumerate(rows):
        (unsafe if row["verdict"] == "does not end" or _HANGS & set(row["kinds"]) else safe).append(i)
    unsafe.sort(key=turns(rows).__getitem__)
    for numbers, size in ((safe, _TOGETHER), (unsafe, _ALONE)):
        for first in range(0, len(numbers), size):
            yield from ((tool, numbers[first : first + size]) for tool in TOOLS)


def finished(one: Running, rows: list[Row], otherwise: str | None) -> list[int]:
    """Note what an ended process has reported, its open job under ``otherwise``; the jobs it did not come to."""
    text = one.text()
    found, rest = reports(text)
    left = [n for n in one.numbers if n not in found]
    if left and otherwise and not any(ended == "failed" for _, ended in found.values()):
        found[left.pop(0)] = rest, otherwise
    for number, (headlines, ended) in found.items():
        row = rows[number]
        row["tools"][one.tool], row["ended"][one.tool] = headlines, ended
        if ended not in ("ran", "hangs"):
            print(f"{one.tool}: {row['kernel']}, {row['change']} {ended}: {text.strip()[-120:]!r}", flush=True)
    return left


# Results


def summary(rows: list[Row]) -> str:
    """By change: how many mutants, how many the emulator finds, on how many each tool or none reports; what hangs."""
    heads = [*(tool.removesuffix("check")[:4] for tool in TOOLS), "none", "hang"]
    lines = [f"{'change':35} {'all':>4} {'emul':>4} {' '.join(f'{head:>4}' for head in heads)}"]
    for change in (*dict.fromkeys(row["change"] for row in rows), "all mutants"):
        mine = [r for r in rows if r["change"] == change or (change == "all mutants" and r["verdict"])]
        columns = [[bool(r["tools"][tool]) for r in mine] for tool in TOOLS]
        silent = [not any(x is None or x for x in r["tools"].values()) for r in mine]
        hang = ["hangs" in r["ended"].values() for r in mine]
        counts = [len(mine), *map(sum, ([bool(r["kinds"]) for r in mine], *columns, silent, hang))]
        lines.append(f"{change[:35]:35} {' '.join(f'{n:4}' for n in counts)}")
    ends = Counter(str(end or "not reached") for r in rows for end in r["ended"].values())
    return "\n".join([*lines, "launches: " + ", ".join(f"{n} {end}" for end, n in ends.items())])


def main() -> int:
    """Choose, assemble, run and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="assemble, launch nothing")
    parser.add_argument("--prepared", type=Path, help="file of what is assembled: read if it is there, else written")
    parser.add_argument("--count", type=int, default=1000, help="mutants, at most")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=130, help="of all launches together")
    parser.add_argument("--limit", type=float, default=4, help="seconds of one launch")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch_all(options.prepared, [int(n) for n in options.launch.split(",")])
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        path = options.prepared or Path(scratch) / "jobs.pickle"
        if not path.exists():
            path.write_bytes(pickle.dumps(prepare(options.count, options.arch, options.jobs)))
        rows: list[Row] = pickle.loads(path.read_bytes())[0]
        mutated = sum(bool(row["verdict"]) for row in rows)
        known = len(json.loads(EVIDENCE.read_text(encoding="utf-8"))["mutants"])
        print(f"{mutated} of the evidence's {known} mutants, {len(rows) - mutated} kernels", flush=True)
        if options.dry_run:
            return 0
        save = partial(write, options.out / "ptx-sanitizer.json", {"mutants": rows})
        under_tools(rows, path, options.jobs, (options.seconds, options.limit), save)
        save()
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
