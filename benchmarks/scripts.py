"""What scripts share: a log, rows that are kept as they come, targets, and the products of layers."""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START = time.perf_counter()


def log(*words: Any) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


def kept(rows: Iterable[dict[str, Any]], file: Path, key: str = "rows", **head: Any) -> dict[str, Any]:
    """Print each row and write all that there are after it; the result, whose rows stand under ``key``."""
    from warploom_lab.bench.evidence import write  # not for those who time imports, or those of other trees

    result: dict[str, Any] = {**head, key: (found := list[dict[str, Any]]())}
    for row in rows:
        found.append(row)
        print(row, flush=True)
        write(file, result)
    return result


def seconds() -> float:
    """Processor seconds of this process and of those it started, ptxas among them."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def result_with(packages: Sequence[str], folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """What a script prints last, as JSON, in a process with these packages, which pip puts into the folder."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*install, *packages], check=True)
    paths = os.pathsep.join([str(folder), str(HERE.parent / "src"), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, script, *arguments]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    return json.loads(printed.splitlines()[-1])


def targets() -> dict[str, Any]:
    """What ``targets.json`` says."""
    return json.loads((HERE / "targets.json").read_text(encoding="utf-8"))


def products() -> list[tuple[str, int, int, int]]:
    """(name, m, n, k) of the products of ``gemm_shapes.csv``."""
    with (HERE / "gemm_shapes.csv").open(encoding="utf-8") as file:
        return [(row["name"], int(row["m"]), int(row["n"]), int(row["k"])) for row in csv.DictReader(file)]
