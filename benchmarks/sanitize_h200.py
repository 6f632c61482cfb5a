"""Every rung of attention under compute-sanitizer's memcheck, racecheck and synccheck, on small problems.

    PYTHONPATH=src python benchmarks/sanitize_h200.py OUTPUT_FOLDER

Writes ``sanitizer.json``: per tool the errors it counted and, per rung, whether the result was right. Exit status 1 for
any error. Arrays are NumPy's, so that no framework's kernels run under the tool.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import warploom
from warploom.bench.environment import environment
from warploom.kernels.attention.ladder import FULL_LADDER
from warploom.kernels.attention.reference import attention_error, attention_reference

TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
LENGTHS = (512, 512)
SECONDS = 100


def run_rungs() -> None:
    """Each rung once; prints a line of JSON."""
    found: dict[str, bool] = {}
    rng = np.random.default_rng(0)
    for rung in FULL_LADDER.rungs:
        q, k, v = (rng.standard_normal((1, n, 2, 128), np.float32) for n in (LENGTHS[0], LENGTHS[1], LENGTHS[1]))
        arrays = [x.astype(rung.config.dtype.numpy) for x in (q, k, v)]
        out = warploom.attention(*arrays, config=rung.config)
        reference = attention_reference(*(x.swapaxes(1, 2) for x in arrays), dtype=rung.config.dtype)
        found[rung.key] = attention_error(out.swapaxes(1, 2), reference, rung.config.dtype).ok
    print("RUNGS " + json.dumps(found), flush=True)


def under(tool: str) -> dict[str, object]:
    """The rungs under one tool."""
    # Asking which context is current, where there is none yet, is an API error that is expected and handled.
    options = ["--tool", tool, *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = ["compute-sanitizer", *options, sys.executable, __file__, "--rungs"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"errors": None, "reason": str(error)}
    errors = [int(n) for n in SUMMARY.findall(done.stdout + done.stderr)]
    rungs = [line for line in done.stdout.splitlines() if line.startswith("RUNGS ")]
    right = json.loads(rungs[0].removeprefix("RUNGS ")) if rungs else None
    return {"errors": sum(errors) if errors else None, "right": right, "tail": (done.stdout + done.stderr)[-600:]}


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    found = {tool: under(tool) for tool in TOOLS}
    text = json.dumps({"environment": environment(), "tools": found}, indent=1)
    (folder / "sanitizer.json").write_text(text + "\n", encoding="utf-8")
    for tool, result in found.items():
        right = result.get("right")
        wrong = [key for key, ok in right.items() if not ok] if isinstance(right, dict) else "not known"
        print(f"{tool}: {result['errors']} errors, wrong rungs: {wrong or 'none'} {result.get('reason', '')}")
    return 0 if all(result["errors"] == 0 for result in found.values()) else 1


if __name__ == "__main__":
    if "--rungs" in sys.argv:
        run_rungs()
    else:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
