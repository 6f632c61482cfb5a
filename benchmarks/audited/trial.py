"""What a case of the audit is, and what its process records: launches, their findings, and how right results are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import seconds

from warploom_lab.bench.cells import said

CASES: dict[str, Case] = {}
KERNELS: dict[str, dict[str, Any]] = {}
"""A row for each kernel that this process has launched, in the order of the first launches."""
Result = tuple[Any, Any, float]
"""What a kernel wrote, what it should have written, and the error that is allowed, relative to the largest element."""


@dataclass(frozen=True)
class Case:
    """A call of a package: ``run`` yields its results. ``requirements`` are what pip installs, the package first."""

    name: str
    requirements: tuple[str, ...]
    problem: str
    run: Callable[[], Iterator[Result]]
    target: str = "sm_90"
    gpu: bool = False


def case(requirements: Sequence[str], problem: str, **options: Any) -> Callable[[Any], Any]:
    """Make a generator of results a case with the generator's name; ``problem`` says sizes and types.

    ``target`` is the architecture (sm_90), ``gpu`` whether torch should say that a GPU is there.
    """

    def register(run: Callable[[], Iterator[Result]]) -> Callable[[], Iterator[Result]]:
        CASES[run.__name__] = Case(run.__name__, tuple(requirements), problem, run, **options)
        return run

    return register


def launch(kernel: str, file: str, checked: Callable[[], Any]) -> None:
    """Check a launch and add what was found to the kernel's row; equal findings of later launches count once."""
    row = KERNELS.setdefault(
        kernel, {"kernel": kernel, "file": _below_packages(file), "launches": 0, "findings": [], "seconds": 0.0}
    )
    start = seconds()
    try:
        result = checked()
    except Exception as error:  # a refusal is a row as well: what the checker cannot run
        row["refused"] = said(error)
        raise
    finally:
        row["seconds"] += seconds() - start
    row["launches"] += 1
    counts = [count for _, count in result.emulation.counts]
    row["covered"] = max(row.get("covered", 0.0), sum(count > 0 for count in counts) / max(len(counts), 1))
    for finding in result.findings:
        told = _told(finding)
        if told not in row["findings"]:
            row["findings"].append(told)


def _told(finding: Any) -> dict[str, Any]:
    """A finding as JSON; its place is the innermost line of the package."""
    lines = [finding.where, *finding.where.callers]
    told = {"kind": finding.kind, "grade": finding.grade, "message": finding.message}
    told["at"] = f"{_below_packages(lines[0].file)}:{lines[0].line}"
    if finding.other is not None:
        told["other"] = f"{_below_packages(finding.other.file)}:{finding.other.line}"
    if finding.relies_on:
        told["relies_on"] = finding.relies_on
    return told


def _below_packages(file: str) -> str:
    """A path from the folder on, into which pip installs; the name of a file elsewhere, which a package has written."""
    below = re.search(r"/(?:packages-[^/]*|site-packages)/(.*)", file)
    return below[1] if below else re.sub(r"_pid_\d+", "", Path(file).name)


def error_of(result: Result) -> float:
    """The error of a result over the one allowed; infinite for NaN where there should be none."""
    import torch

    got, wanted = (torch.as_tensor(x).detach().double() for x in result[:2])
    if got.shape != wanted.shape:
        raise ValueError(f"the result has shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
    wrong = (got - wanted).abs() if result[2] != 0 else (got != wanted).double()
    wrong[(got == wanted) | (got.isnan() & wanted.isnan())] = 0
    if not wrong.numel() or float(wrong.nan_to_num(float("inf")).max()) == 0:
        return 0.0
    if result[2] == 0:
        return float("inf")
    size = wanted[wanted.isfinite()].abs().max().clamp(min=1e-30)
    return float(wrong.nan_to_num(float("inf")).max() / size / result[2])
