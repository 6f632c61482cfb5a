"""Check files, folders and patterns: what is in them to check, and each kernel's outcome, files side by side."""

from __future__ import annotations

import glob
import linecache
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from warploom.checking.baseline import Accepted
from warploom.checking.kernel_file import (
    Checked,
    check_kernel,
    configuration_of,
    in_orders,
    kernels_of,
    split_target,
    traced_kernel,
    without_example,
)
from warploom.checking.launch_file import (
    SUFFIXES,
    check_launch,
    check_sequence,
    in_row,
    kernel_of,
    launch_beside,
    launches_in_row,
    read_launches,
)
from warploom.core.errors import ProblemError, WarploomError
from warploom.cuda.signatures import plain_name
from warploom.emulate import recorded
from warploom.lang import KernelFunction

_NOT_SEARCHED = {"build", "dist", "node_modules", "__pycache__"}
"""Folders in which nobody keeps sources; hidden ones are not searched either."""
_DECLARES = {".cu": ("__global__",), ".ptx": (".entry",), ".py": ("warploom", ".example")}
"""What the text of a file in a folder must contain: there is a kernel, in Python one that says how to run it."""


@dataclass(frozen=True)
class CheckedFile:
    """A file to check, or ``FILE.py:KERNEL``. A ``launch`` of None stands for the file beside a kernel's.

    ``found`` in a folder or by a pattern, it may lack a launch; a file that the user named may not.
    """

    name: str
    launch: str | None = None
    found: bool = False


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome for one kernel: it was checked, it could not be (``error``), or it was ``skipped`` for a reason.

    ``kernel``, at ``line`` of the file, is empty where a whole file could not be read. ``compiles``: it is a kernel in
    Python.
    """

    file: str
    kernel: str = ""
    line: int = 1
    checked: Checked | None = None
    error: WarploomError | None = None
    skipped: str = ""
    seconds: float = 0.0
    compiles: bool = False

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 for an error or a wrong result, 2 if the kernel could not be checked."""
        return 2 if self.error is not None else int(self.checked is not None and not self.checked.ok)


@dataclass(frozen=True)
class How:
    """The rules of a check: a ``seed`` chooses one order, ``settings`` give trace-time parameters.

    Findings that a baseline has ``accepted`` are no failures; with ``strict`` findings for review are. With ``record``
    each emulation keeps a record of its run.
    """

    seed: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    accepted: Accepted = Accepted()
    strict: bool = False
    record: bool = False

    def judged(self, checked: Checked, file: str) -> Checked:
        """The run of a kernel of a file with its findings so judged."""
        return self.accepted.screened(replace(checked, strict=self.strict), file)

    def run(self, file: str, once: Callable[[int | None], Checked]) -> Checked:
        """Run a kernel of a file in this order, or in several until one fails."""
        return in_orders(lambda order: self.judged(once(order), file), self.seed)


def targets_of(names: Sequence[str], launch: str | None = None) -> list[CheckedFile]:
    """The files that names, folders and patterns stand for, each once. ``launch`` belongs to the only one.

    Raises ProblemError for a launch of several files, and for a folder or pattern without anything to check.
    """
    if launch is not None and (len(names) != 1 or not names[0].endswith(SUFFIXES)):
        raise ProblemError(
            "--launch belongs to one file of PTX or CUDA C++; of several, each has its launches beside it, in "
            "NAME.launch.json, and a kernel in Python says itself how it runs (@KERNEL.example)"
        )
    named: dict[str, CheckedFile] = {}
    found: dict[str, CheckedFile] = {}
    for name in names:
        if Path(name).is_dir():
            inside = [str(path) for path in _files_in(Path(name))]
        elif glob.has_magic(name) and not Path(name).exists():
            inside = [path for path in sorted(glob.glob(name, recursive=True)) if _has_kernel(Path(path))]
        else:
            named.setdefault(_key(name), CheckedFile(name, launch))
            continue
        if not inside:
            raise ProblemError(
                f"{name} has nothing to check: no .py with warploom kernels and their examples (@KERNEL.example), no "
                ".cu or .ptx with a kernel"
            )
        for path in inside:
            found.setdefault(_key(path), CheckedFile(path, found=True))
    return list({**found, **named}.values())


def _key(name: str) -> str:
    return os.path.realpath(name)


def _files_in(folder: Path) -> Iterator[Path]:
    for inside, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_SEARCHED and not name.startswith("."))
        yield from (path for name in sorted(files) if _has_kernel(path := Path(inside, name)))


def _has_kernel(path: Path) -> bool:
    words = _DECLARES.get(path.suffix)
    if words is None or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return all(word in text for word in words)


def check_all(targets: Sequence[CheckedFile], how: How, jobs: int | None = None) -> Iterator[list[CheckOutcome]]:
    """Yield the outcomes of one target after the other; ``jobs`` are checked at the same time (None: one a core).

    One target, or one job, runs in this process. Where a process is killed, its files are tried once more, each alone.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(targets))
    if jobs <= 1:
        yield from (check_target(target, how) for target in targets)
        return
    with _processes(jobs) as pool:
        running = [pool.submit(check_target, target, how) for target in targets]
        for target, future in zip(targets, running, strict=True):
            yield _finished(future) or _alone(target, how)


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def _finished(future: Future[list[CheckOutcome]]) -> list[CheckOutcome]:
    """The outcomes; empty if the process has ended before them."""
    try:
        return future.result()
    except BrokenProcessPool:
        return []


def _alone(target: CheckedFile, how: How) -> list[CheckOutcome]:
    with _processes(1) as pool:
        killed = ProblemError(f"the process that checked {target.name} was killed: was there enough memory?")
        return _finished(pool.submit(check_target, target, how)) or [CheckOutcome(target.name, error=killed)]


def check_target(target: CheckedFile, how: How) -> list[CheckOutcome]:
    """The outcome of each kernel of a file. Errors, of whatever type, are part of them."""
    linecache.checkcache()  # whoever checks again may have edited
    try:
        path, kernel = split_target(target.name)
        file = target.name.removesuffix(f":{kernel}")
        with _own_modules(path.parent), recorded(how.record):
            foreign = file.endswith(SUFFIXES)
            return list(_of_launches(target, how) if foreign else _of_python(target.name, file, how))
    except Exception as error:
        return [CheckOutcome(target.name, error=_as_error(error))]


def _as_error(error: Exception) -> WarploomError:
    """The error as one of warploom's: another one is a mistake in warploom."""
    if isinstance(error, WarploomError):
        return error
    told = WarploomError(f"{type(error).__name__}: {error} (warploom --debug check … shows where: please report it)")
    told.__cause__ = error
    return told


def _timed(outcome: CheckOutcome, run: partial[Checked]) -> CheckOutcome:
    start = time.perf_counter()
    try:
        outcome = replace(outcome, checked=run())
    except Exception as error:
        outcome = replace(outcome, error=_as_error(error))
    return replace(outcome, seconds=time.perf_counter() - start)


def _of_python(name: str, file: str, how: How) -> Iterator[CheckOutcome]:
    for function in kernels_of(name):
        outcome = CheckOutcome(file, function.name, function.where.line, compiles=True)
        yield _timed(outcome, partial(check_function, file, function, how))
    for without in without_example(name):
        yield CheckOutcome(file, without, skipped="for want of an example (@KERNEL.example)")


def check_function(file: str, function: KernelFunction, how: How) -> Checked:
    """Check a kernel in Python by its example. Raises WarploomError if it cannot run."""
    configuration = configuration_of(function, how.settings)
    program = traced_kernel(function, configuration)
    return how.run(file, lambda order: check_kernel(function, order, configuration, program))


def _of_launches(target: CheckedFile, how: How) -> Iterator[CheckOutcome]:
    file, beside = target.name, launch_beside(Path(target.name))
    path = beside if target.launch is None else Path(target.launch)
    if target.launch is None and not beside.exists():
        if not target.found:
            raise ProblemError(f"{file} does not say how it is run: write {beside}, or add --launch FILE.json")
        yield CheckOutcome(file, skipped=f"for want of a launch ({beside.name} beside it)")
        return
    launches = read_launches(path)
    for number, launch in enumerate(launches):
        kernels = [str(one.get("kernel") or Path(file).stem) for one in launches_in_row(launch, path) or [launch]]
        name = ", ".join(kernels) + (f", launch {number + 1}" if len(launches) > 1 else "")
        yield _timed(
            CheckOutcome(file, name, _line_of(file, plain_name(kernels[0]))), partial(_check, file, launch, path, how)
        )


def _check(file: str, launch: dict[str, Any], path: Path, how: How) -> Checked:
    if row := launches_in_row(launch, path):
        kernels = [kernel_of(Path(file), in_row(one), path) for one in row]
        return how.run(file, lambda order: check_sequence(kernels, launch, path, order))
    kernel = kernel_of(Path(file), launch, path)
    return how.run(file, lambda order: check_launch(kernel, launch, path, order))


def _line_of(file: str, kernel: str) -> int:
    """The line on which a kernel's name stands before a parenthesis, 1 if there is none."""
    lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    named = re.compile(rf"\b{re.escape(kernel)}\s*\(")
    return next((number for number, text in enumerate(lines, 1) if named.search(text)), 1)


@contextmanager
def _own_modules(folder: Path) -> Iterator[None]:
    """Forget modules of the file's folder afterwards: a file in another folder may import others of these names."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for module in set(sys.modules) - before:
            if str(getattr(sys.modules[module], "__file__", None)).startswith(f"{folder}{os.sep}"):
                del sys.modules[module]
