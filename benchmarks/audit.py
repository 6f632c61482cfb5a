"""What the checker says of kernels that packages ship: ``python benchmarks/audit.py``.

pip puts each package into a folder of its own, and each case of ``benchmarks/audited`` runs in a process of its own,
two at a time: it calls the package with small arrays on the CPU, where launches of kernels are checks, and compares
the results with PyTorch's. Writes audit.json, from which ``render.py`` makes the page. Names of cases run these alone
and leave the other rows as they are (``none`` judges these anew); ``--packages FOLDER`` keeps what pip has installed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from audited.launches import triton_launches_checked
from audited.trial import CASES, KERNELS, Case, error_of
from audited.verdicts import judged
from scripts import HERE, kept, seconds

from warploom_lab.bench.cells import parser_of, said

_MODULES = ("flag_gems", "fla", "flashinfer", "liger", "sglang", "vllm")
_PYTHON_ALONE = ("vllm",)
"""Packages of whose wheels the Python files are enough."""
_LIMIT_S = 300
_AT_ONCE = 2


def cases() -> dict[str, Case]:
    """All cases by name."""
    for name in _MODULES:
        import_module(f"audited.{name}")
    return CASES


def inside(case: Case) -> dict[str, Any]:
    """The row of a case, with the packages of this process."""
    import torch

    torch.manual_seed(1)
    row, start = dict[str, Any](), seconds()
    try:
        with triton_launches_checked(case.target, case.gpu):
            row["error"] = max(error_of(result) for result in case.run())
    except Exception as error:
        if "AUDIT_RAISE" in os.environ:
            raise
        row["refused"] = said(error)
    return row | {"kernels": list(KERNELS.values()), "seconds": seconds() - start}


def installed(requirements: Sequence[str], folder: Path) -> Path:
    """The folder with what pip has installed of these requirements."""
    name = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:8]
    packages = folder / f"packages-{name}"
    if not packages.exists():
        pip, large = [sys.executable, "-m", "pip"], [x for x in requirements if x.startswith(_PYTHON_ALONE)]
        rest = [x for x in requirements if x not in large]
        install = [*pip, "install", "--quiet", "--no-deps", "--no-compile", "--target", str(packages)]
        subprocess.run([*install, *rest], check=True)
        with tempfile.TemporaryDirectory() as wheels:
            for requirement in large:
                subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", wheels, requirement], check=True)
            for wheel in Path(wheels).glob("*.whl"):
                with zipfile.ZipFile(wheel) as files:
                    files.extractall(packages, [name for name in files.namelist() if name.endswith(".py")])
    return packages


def row(case: Case, packages: Path) -> dict[str, Any]:
    """The row of a case, from a process with these packages."""
    paths = os.pathsep.join([str(packages), str(HERE.parent / "src"), str(HERE), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(packages / "triton-cache")}
    command = [sys.executable, __file__, "--inside", case.name]
    head = {"case": case.name, "package": case.requirements[0].replace("==", " "), "problem": case.problem}
    head |= {"target": case.target, "kernels": [], "seconds": 0.0}
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return head | {"refused": f"not done after {_LIMIT_S} s"}
    if ran.returncode:
        return head | {"refused": ran.stderr.strip().splitlines()[-1][:300]}
    return head | json.loads(ran.stdout.splitlines()[-1])


def rows(asked: Sequence[Case], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    folders = {case.requirements: installed(case.requirements, folder) for case in asked}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(lambda case: row(case, folders[case.requirements]), asked)


def main() -> int:
    """Write the file; the exit code is 1 if a case was not run to its end."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help="cases to run, as shell patterns")
    parser.add_argument("--packages", type=Path, help="folder that keeps what pip installs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = cases()
    if options.inside:
        print("\n" + json.dumps(inside(known[options.inside])))
        return 0
    asked = [c for c in known.values() if not options.names or any(fnmatch.fnmatch(c.name, n) for n in options.names)]
    file = options.out / "audit.json"
    before = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() and options.names else []
    again = {case.name for case in asked}
    stay = [found for found in before if found["case"] in known.keys() - again]
    with tempfile.TemporaryDirectory() as temporary:
        found = kept(map(judged, chain(stay, rows(asked, options.packages or Path(temporary)))), file)["rows"]
    return int(any("refused" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
