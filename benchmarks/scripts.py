"""What scripts share: the option of a folder, results as files, a log, targets, and the products of layers."""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START = time.perf_counter()


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``: a folder, by default $OUT, else the folder out."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="folder of the result")
    return parser


def write(file: Path, result: Mapping[str, Any], configs: Collection[str] | None = None) -> None:
    """A result as JSON; its environment says the commit, and the kernels that ran with their digests.

    ``configs``: only kernels of these configurations, where a search has run others too.
    """
    from evidence import made_by

    from warploom_lab.bench.environment import environment  # not by processes that run another version of the package

    result = {**result, "environment": {**(result.get("environment") or environment()), **made_by(configs)}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def log(*words: Any) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


def targets() -> dict[str, Any]:
    """What ``targets.json`` says."""
    return json.loads((HERE / "targets.json").read_text(encoding="utf-8"))


def products() -> list[tuple[str, int, int, int]]:
    """(name, m, n, k) of the products of ``gemm_shapes.csv``."""
    with (HERE / "gemm_shapes.csv").open(encoding="utf-8") as file:
        return [(row["name"], int(row["m"]), int(row["n"]), int(row["k"])) for row in csv.DictReader(file)]
