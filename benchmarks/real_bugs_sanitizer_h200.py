"""What each tool of compute-sanitizer reports of the miniatures of tests/real_bugs on a GPU, faulty and repaired.

    PYTHONPATH=src:. python benchmarks/real_bugs_sanitizer_h200.py [--prepared FILE] [--jobs 12] [--out DIR]

As ``ptx_sanitizer_h200.py`` does it with mutants. Kernels for clusters and launches in a row are left out, whose launch
would have to say so. Writes real-bugs-sanitizer.json. About a minute; needs cuda.core and compute-sanitizer.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ptx_sanitizer_h200 import Job, assembled, summary, under_tools

from warploom.core.dtypes import u64
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write


def prepared(arch: str) -> tuple[list[dict[str, Any]], list[Job]]:
    """The rows, with what the emulator finds, and the launches."""
    from tests.real_bugs.base import X
    from tests.real_bugs.miniatures import MINIATURES

    from warploom.cuda.ptx import ptx_of

    rows: list[dict[str, Any]] = []
    jobs: list[Job] = []
    for miniature in (m for m in MINIATURES if m.cluster is None and not m.before):
        for repaired in (False, True):
            kinds = [finding.kind for finding in miniature.check(repaired)[0]]
            change, verdict = ("repaired", "") if repaired else ("faulty", "found" if kinds else "unseen")
            rows.append({"kernel": miniature.thread, "change": change, "verdict": verdict, "kinds": kinds})
            name = f"mutant_{len(jobs)}"
            text = ptx_of(miniature.source(repaired).replace(" k(", f" {name}("), "k.cu", miniature.target).text
            given = [(x, u64) for x in (X, *np.zeros((2, 512), np.int32))]
            grid, block = (miniature.grid, 1, 1), (miniature.block, 1, 1)
            jobs.append(Job(name, assembled(text, arch), grid, block, 0, given))
    return rows, jobs


def main() -> int:
    """Assemble, run and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--prepared", type=Path, help="file of what is assembled: read if it is there, else written")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = options.prepared or Path(scratch) / "jobs.pickle"
        if not path.exists():
            path.write_bytes(pickle.dumps(prepared("sm_90a")))
        rows = pickle.loads(path.read_bytes())[0]
        save = partial(write, options.out / "real-bugs-sanitizer.json", {"rows": rows})
        under_tools(rows, path, options.jobs, (80, 4), save)
        save()
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
