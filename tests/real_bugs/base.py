"""What a miniature is: a small kernel with the pattern of accesses of a bug that another project repaired.

The kernel has both forms: ``REPAIR(…)`` holds what the repair added, ``FAULT(…)`` what it took away, and ``//!`` marks
the lines that are to blame. Each takes ``x`` (0, 1, 2 …), ``y`` for its result, and ``z`` (zeros) for scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import warploom
from warploom.emulate import Finding

Array = np.ndarray[Any, Any]
X = np.arange(4096, dtype=np.int32)
T = np.arange(128)

WORDS = (Path(__file__).parent / "words.cuh").read_text(encoding="utf-8")
HEAD = 'extern "C" __global__ void k(const int* x, int* y, int* z) {'


@dataclass(frozen=True)
class Miniature:
    """A repaired bug: the ``thread`` that tells of it, what it ``was``, its kernel, and what ``y`` must begin with.

    ``before`` is the body of a kernel that is launched first, while which the other one may begin. ``missed`` says what
    the checker would have to see, where it is silent on the bug, and ``seeds`` give orders in which control flow runs
    into it.
    """

    thread: str
    was: str
    kinds: str
    body: str
    right: Array
    block: int = 128
    grid: int = 1
    target: str = "sm_80"
    cluster: int | None = None
    missed: str = ""
    seeds: tuple[int | None, ...] = (None, 3)
    before: str = ""

    def source(self, repaired: bool) -> str:
        """The CUDA C++ of one of its forms."""
        before = HEAD.replace(" k(", " before(").replace("const ", "") + self.before
        return f"#define REPAIRED {int(repaired)}\n{WORDS}\n{before}\n}}\n{HEAD}{self.body}\n}}\n"

    def check(self, repaired: bool, seed: int | None = None) -> tuple[tuple[Finding, ...], bool]:
        """The findings, and whether the result is right."""
        given = [X.copy(), np.zeros(512, np.int32), np.zeros(512, np.int32)]
        launch: dict[str, Any] = {"target": self.target, "cluster": self.cluster}
        with warploom.sequence(seed) as found:
            for name in ("before", "k") if self.before else ("k",):
                source = self.source(repaired)
                found.launch_cuda(source, name, self.grid, self.block, given, programmatic=name == "k", **launch)
        return found.findings, np.array_equal(given[1][: len(self.right)], self.right)

    def blames(self, finding: Finding) -> bool:
        """Whether a finding is this bug's: of its kind, at a line that is to blame."""
        lines = self.source(False).splitlines()
        both = [where for where in (finding.where, finding.other) if where is not None]
        places = [place for where in both for place in (where, *where.callers)]
        return finding.kind in self.kinds.split() and any("//!" in lines[place.line - 1] for place in places)
