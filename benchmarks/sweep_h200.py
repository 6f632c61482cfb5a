"""Every combination of tiles and flags of ``wgmma`` attention, under sustained load and beside the peers.

    PYTHONPATH=src python benchmarks/sweep_h200.py --out OUT [--cells 128:full:16384 …]

The tuner (``tune_h200.py``) tries one more flag at a time on short samples. At the power limit that is not enough: here
all combinations are built, checked against float64 and timed interleaved with FlashAttention-4 and cuDNN where they are
there, in samples long enough for the clock to follow, and the best half goes on to longer ones. Writes
OUT/attention-sweep.json, and OUT/<gpu>.json: the winners that ship with the package, those of the swept classes
replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.tune.gpu import gpu_for_tuning
from warploom.winners.classes import attention_class
from warploom.winners.store import SHIPPED, Winner, find_winner, gpu_file_name, package_version

from warploom.bench.environment import environment
from warploom.bench.monitor import GpuMonitor
from warploom.bench.peers import flash_attention_4, sdpa
from warploom.bench.power import power_of
from warploom.bench.timing import Candidate, Measured, measure, paired_ratio
from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.cuda.device import cuda_core
from warploom.kernels.attention.problem import AttentionProblem
from warploom.tune.attention import AttentionFamily, AttentionWorkload
from warploom.tune.build import build_all

TOKENS, WIDTH = 16384, 2048
GOAL = target("sm_90a")
CELLS = tuple(
    f"{d}:{mask}:{n}"
    for d in (64, 128, 256)
    for mask in ("full", "causal")
    for n in (16384, 4096, 1024, 8192, 2048, 512)
)
ROUNDS = ((3, 0.006, 10), (5, 0.015, 4), (11, 0.03, 4))
"""(rounds, seconds of a sample, how many stay)."""
BOTH, NEVER = (False, True), (False,)


def space(head_dim: int, causal: bool) -> list[HopperConfig]:
    """Combinations worth building: maxima are carried, and what lost in every cell of an earlier sweep is left out."""
    found: list[HopperConfig] = []

    def add(consumers: int, tiles: tuple[int, ...], stages: tuple[int, ...], **choices: tuple[bool, ...]) -> None:
        flags = {"pingpong": BOTH, "skip_hidden": BOTH if causal else NEVER} | choices
        unset = dict.fromkeys(("flat", "q_in_registers", "sum_column", "hold"), False)
        for tile_n, count, values in product(tiles, stages, product(*flags.values())):
            settings = unset | dict(zip(flags, values, strict=True))
            config = HopperConfig(consumers, tile_n, count, head_dim, bf16, overlap=True, carry_max=True, **settings)
            if not config.check(GOAL):
                found.append(config)

    if head_dim == 64:
        add(3, (96, 112, 128), (2, 3), flat=BOTH, sum_column=(True,))
        add(3, (96,), (2,), flat=(True,), q_in_registers=(True,), sum_column=(True,))
        add(2, (64, 128), (3,), flat=(True,), q_in_registers=BOTH, sum_column=(True,))
    elif head_dim == 128:
        add(3, (64, 80), (2,), flat=BOTH)
        add(2, (64, 128), (2,), flat=(True,), q_in_registers=BOTH, sum_column=BOTH)
    else:
        add(2, (48, 64, 80), (2,), flat=BOTH, hold=BOTH)
    return found


class Cell:
    """One head_dim, mask and length: its candidates, built and checked, and its peers."""

    def __init__(self, name: str) -> None:
        head_dim, mask, length = name.split(":")
        d, n, heads = int(head_dim), int(length), WIDTH // int(head_dim)
        self.name, self.causal = name, mask == "causal"
        window = (None, 0 if self.causal else None)
        self.problem = AttentionProblem(TOKENS // n, heads, heads, n, n, d, bf16, window)
        family = AttentionFamily()
        self.default = family.default(self.problem, GOAL)
        shipped = find_winner(gpu_for_tuning().name, attention_class(self.problem))
        before = (family.parse(shipped.winner.config),) if shipped else ()
        wanted = dict.fromkeys((self.default, *before, *space(d, self.causal)))
        configs = [c for c in wanted if not family.misfits(self.problem, c, GOAL)]
        built = build_all(family, self.problem, configs, GOAL.name)
        usable = [(c, b) for c, b in zip(configs, built, strict=True) if not isinstance(b, str) and not b.faults(GOAL)]
        self.workload = AttentionWorkload(self.problem, 0)
        self.configs = {str(c): c for c, _ in usable}
        self.candidates = {
            str(c): Candidate(str(c), self.workload.prepare(c, b))
            for c, b in usable
            if self.workload.fault(c, b) is None
        }
        self.peers = self._peers()

    def _peers(self) -> list[Candidate]:
        inputs = self.workload._inputs
        cudnn = sdpa("torch_cudnn", self.causal)
        swapped = [tuple(x.transpose(1, 2) for x in of) for of in inputs]
        found = [Candidate("torch_cudnn", lambda i: cudnn(*swapped[i]))]
        latest, _ = flash_attention_4()
        if latest is not None:
            latest(*inputs[0], causal=self.causal)
            found.append(Candidate("flash_attention_4", lambda i: latest(*inputs[i], causal=self.causal)))
        return found

    def best(self, clock: Any) -> tuple[list[str], dict[str, Measured]]:
        """The names that stayed, the fastest first, and the last round of timing."""
        left, found = list(self.candidates), dict[str, Measured]()
        for rounds, seconds, keep in ROUNDS:
            timed = [*(self.candidates[name] for name in dict.fromkeys((*left, str(self.default)))), *self.peers]
            found = measure(timed, self.workload.sets, clock, rounds=rounds, sample_seconds=seconds,
                            warm_up_seconds=0.01)  # fmt: skip
            left = sorted(left, key=lambda name: found[name].seconds.median)[:keep]
        return left, found


def winner(cell: Cell, name: str, found: dict[str, Measured], gpu: str) -> Winner:
    """A record for the store."""
    took, rounds = found[name].seconds, ROUNDS[-1][0]
    ahead = paired_ratio(found[name], found[str(cell.default)])
    date, problem = datetime.now(UTC).date().isoformat(), attention_class(cell.problem)
    return Winner(gpu, package_version(), problem, name, took.median, took.low, took.high, rounds, ahead,
                  len(cell.candidates), date)  # fmt: skip


def write(folder: Path, gpu: str, winners: list[Winner], rows: list[dict[str, Any]]) -> None:
    """The sweep, and the shipped winners with those of the swept classes replaced."""
    runs = {"runs": [{"environment": environment(), "rows": rows}]}
    (folder / "attention-sweep.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    shipped = json.loads((SHIPPED / gpu_file_name(gpu)).read_text(encoding="utf-8"))
    mine = {str(w.problem): w.json() for w in winners}
    kept = {str(Winner.from_json(w).problem): w for w in shipped["winners"]}
    content = {"gpu": gpu, "made_with": environment(), "winners": [w for _, w in sorted((kept | mine).items())]}
    (folder / gpu_file_name(gpu)).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Sweep the cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), help="head_dim:mask:length")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpu, monitor = gpu_for_tuning(), GpuMonitor(cuda_core().Device(0).pci_bus_id)
    winners: list[Winner] = []
    rows: list[dict[str, Any]] = []
    for name in options.cells:
        start = time.monotonic()
        cell = Cell(name)
        built = time.monotonic() - start
        left, found = cell.best(gpu.clock)
        print(f"{name}: {len(cell.candidates)} candidates, built in {built:.0f} s", flush=True)
        for one in dict.fromkeys((*left, str(cell.default), *(p.name for p in cell.peers))):
            ratios = {p.name: round(paired_ratio(found[one], found[p.name]), 4) for p in cell.peers}
            chosen = cell.candidates.get(one) or next(p for p in cell.peers if p.name == one)
            drawn = (
                power_of(chosen, cell.workload.sets, gpu.clock, monitor, window=0.4)
                if one in (left[0], *ratios)
                else None
            )
            row = {"cell": name, "config": one, "tflops": found[one].seconds.rate(cell.problem.flops / 1e12).json(),
                   "ratio": ratios, "power": drawn and drawn.json(cell.problem.flops)}  # fmt: skip
            rows.append(row)
            print(f"  {row['tflops']['median']:6.1f}  {ratios}  {row['power'] or ''}  {one}", flush=True)
        winners.append(winner(cell, left[0], found, gpu.name))
        write(options.out, gpu.name, winners, rows)


if __name__ == "__main__":
    main()
