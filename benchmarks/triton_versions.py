"""What ``check_triton`` says of one kernel under two versions of Triton: ``python benchmarks/triton_versions.py``.

pip puts each version into a folder of its own (1.4 GB for both while it runs), and a process with that folder compiles
and checks the plain matmul of ``tests/with_triton/kernels.py`` for sm_90, on the CPU. Triton 3.7.0 leaves out a fence
that 3.7.1 has. Writes triton-versions.json; other versions can be named: ``… 3.6.0 3.9.0``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from scripts import kept, result_with, seconds

from warploom_lab.bench.cells import parser_of

_TIMES = 5


def checked() -> dict[str, Any]:
    """Findings, error over the tolerance and processor seconds under the Triton of this process."""
    import numpy as np
    import triton
    from tests.with_triton.cases import matmul

    import warploom

    def once() -> dict[str, Any]:
        case = matmul(np.random.default_rng(1))
        start = seconds()
        found = warploom.check_triton(case.kernel, case.grid, case.arguments, target="sm_90", **case.meta)
        taken = seconds() - start
        findings = [
            {"kind": f.kind, "file": Path(f.where.file).name, "line": f.where.line, "message": f.message}
            for f in found.findings
        ]
        return {"findings": findings, "error": case.error(), "seconds": taken}

    runs = [once() for _ in range(_TIMES)]
    return {"triton": triton.__version__, **runs[0], "seconds": median(run["seconds"] for run in runs)}


def lines(row: dict[str, Any]) -> list[str]:
    """What is printed of a version."""
    findings, right = row["findings"], "right" if row["error"] <= 1 else "wrong"
    count = f"{len(findings) or 'no'} finding{'s' * (len(findings) != 1)}"
    printed = [f"Triton {row['triton']}: {count}, in {row['seconds']:.1f} s; the result is {right}"]
    for f in findings:
        text = f"{f['kind']} at {f['file']}:{f['line']}: {f['message']}"
        printed += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ")
    return printed


def found(versions: list[str]) -> Iterator[dict[str, Any]]:
    """What is found under each version, with its lines."""
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            row = result_with([f"triton=={version}"], Path(folder), __file__, "--inside")
        yield row | {"printed": lines(row)}


def main() -> None:
    """Print what is found under each version, and write the file."""
    parser = parser_of(__doc__)
    parser.add_argument("versions", nargs="*", default=["3.7.0", "3.7.1"])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(checked()))
        return
    result = kept(found(options.versions), options.out / "triton-versions.json")
    print("\n".join(line for row in result["rows"] for line in row["printed"]))


if __name__ == "__main__":
    main()
