"""The reduction experiments on this machine's GPU: `python benchmarks/reduce_h200.py OUTPUT_FOLDER`.

Writes ``reduce.json`` (the paper's experiment in its three settings) and ``matmul-reduce.json`` (``matmul_reduce``
beside PyTorch); about two minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from warploom.bench.environment import environment
from warploom.bench.reduce import against_torch, run_experiment
from warploom.kernels.reduce.ladder import LADDER


def main(folder: Path) -> None:
    """Run, write, print."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, found: object) -> None:
        text = json.dumps({"environment": environment(), "result": found}, indent=1, default=str)
        (folder / name).write_text(text + "\n", encoding="utf-8")
        print(text)

    write(
        "reduce.json", run_experiment(LADDER.rungs, True, lambda text, done: print(f"{done:4.0%} {text}", flush=True))
    )
    write("matmul-reduce.json", against_torch())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
