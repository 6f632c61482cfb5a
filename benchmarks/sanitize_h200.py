"""Every rung of every ladder under compute-sanitizer's memcheck, racecheck and synccheck, on small problems.

    PYTHONPATH=src python benchmarks/sanitize_h200.py [--out DIR] [--only attention,gemm,reduce]

Writes ``sanitizer.json``: per family and tool the errors it counted and, per rung, whether the result was right; a
family that was not asked for keeps what the file had. Exit status 1 for any error. Arrays are NumPy's, so that no
framework's kernels run under the tool.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import warploom
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.matmul.reference import gemm_error, gemm_reference
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import environment, write
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.matmul.ladder import LADDER as GEMM_LADDER
from warploom_lab.kernels.reduce.ladder import LADDER as REDUCE_LADDER
from warploom_lab.kernels.reduce.reference import row_max_reference, row_max_tolerance
from warploom_lab.kernels.reduce.tile import matmul_row_max

TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
LENGTHS = (512, 512)
PRODUCT = (328, 264, 200)
"""m, n and k: ragged for every tile, two CTAs along m and n, more k-tiles than stages."""
SPLIT = (40, 72, 4096)
"""A long sum of few elements, which is cut along k."""
TILES = 8
SECONDS = 100


def attention() -> Iterator[tuple[str, bool]]:
    """Each rung once."""
    rng = np.random.default_rng(0)
    for rung in FULL_LADDER.rungs:
        q, k, v = (rng.standard_normal((1, n, 2, 128), np.float32) for n in (LENGTHS[0], LENGTHS[1], LENGTHS[1]))
        arrays = [x.astype(rung.config.dtype.numpy) for x in (q, k, v)]
        out = warploom.attention(*arrays, config=rung.config)
        reference = attention_reference(*(x.swapaxes(1, 2) for x in arrays), dtype=rung.config.dtype)
        yield rung.key, attention_error(out.swapaxes(1, 2), reference, rung.config.dtype).ok


def gemm() -> Iterator[tuple[str, bool]]:
    """Each rung with B row-major and column-major, and a product whose K is split."""
    rng = np.random.default_rng(0)

    def right(sizes: tuple[int, int, int], b_rows: bool, **options: Any) -> bool:
        m, n, k = sizes
        a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n) if b_rows else (n, k)))
        b = b if b_rows else b.T
        made = warploom.plan_matmul(a, b, **options)
        out = warploom.matmul(a, b, **options)
        return gemm_error(out, gemm_reference(a, b), made.config.dtype, made.config.accumulate).ok

    for rung in GEMM_LADDER.rungs:
        options = {"config": rung.config, "accumulate": rung.config.accumulate}
        yield rung.key, all(right(PRODUCT, b_rows, **options) for b_rows in (True, False))
    yield "split K", right(SPLIT, True)


def reduce() -> Iterator[tuple[str, bool]]:
    """Each rung of the paper's experiment, and the operation on top of it."""
    rng = np.random.default_rng(0)
    for rung in REDUCE_LADDER.rungs:
        kind = rung.config.dtype.numpy
        a, b = (rng.standard_normal((TILES, 16, 16)).astype(kind) for _ in range(2))
        out = np.full((TILES, 16), np.nan, np.float32)
        program = matmul_row_max.trace(config=rung.config)
        arrays = {"a": a.view(np.uint16), "b": b.view(np.uint16), "out": out}
        given = {p.name: arrays.get(p.name, 0) for p in program.parameters}
        warploom.launch(program, TILES // rung.config.num_warps, given)
        yield rung.key, bool((np.abs(out - row_max_reference(a, b)) <= row_max_tolerance(a, b)).all())
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((200, 72), (72, 777)))
    values = warploom.matmul_reduce(a, b, "max")
    yield "matmul_reduce", bool(np.abs(values - (a.astype(np.float64) @ b.astype(np.float64)).max(-1)).max() < 1e-3)


FAMILIES = {"attention": attention, "gemm": gemm, "reduce": reduce}


def run_rungs(family: str) -> None:
    """Each rung; prints a line of JSON."""
    print("RUNGS " + json.dumps(dict(FAMILIES[family]())), flush=True)


def under(tool: str, family: str) -> dict[str, object]:
    """The rungs of a family under one tool."""
    # Asking which context is current, where there is none yet, is an API error that is expected and handled.
    options = ["--tool", tool, *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = ["compute-sanitizer", *options, sys.executable, __file__, "--rungs", family]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"errors": None, "reason": str(error)}
    errors = [int(n) for n in SUMMARY.findall(done.stdout + done.stderr)]
    rungs = [line for line in done.stdout.splitlines() if line.startswith("RUNGS ")]
    right = json.loads(rungs[0].removeprefix("RUNGS ")) if rungs else None
    return {"errors": sum(errors) if errors else None, "right": right, "tail": (done.stdout + done.stderr)[-600:]}


def clean(result: dict[str, Any]) -> bool:
    """No error, and every rung ran and was right."""
    return result["errors"] == 0 and bool(result["right"]) and all(result["right"].values())


def main() -> int:
    """Run the families under every tool; the file is written after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, with commas between")
    parser.add_argument("--rungs", choices=FAMILIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rungs:
        run_rungs(options.rungs)
        return 0
    path = options.out / "sanitizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))["families"] if path.is_file() else {}
    failed = False
    for family in options.only.split(","):
        found[family] = {"environment": environment(), "tools": {tool: under(tool, family) for tool in TOOLS}}
        write(path, {"families": found})
        for tool, result in found[family]["tools"].items():
            right = result.get("right")
            wrong = [key for key, ok in right.items() if not ok] if isinstance(right, dict) else "not known"
            print(f"{family}, {tool}: {result['errors']} errors, wrong: {wrong or 'none'} {result.get('reason', '')}")
            failed |= not clean(result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
