"""What bounds attention's backward pass up to head_dim 128: watts, clocks and a step's cycles beside what it must do.

    PYTHONPATH=src:. python benchmarks/attention_backward_limits.py --out OUT

For head_dim 64 and 128, full and causal: TFLOP/s, watts and MHz of the call and of the forward pass under sustained
load, and, counted by Nsight Compute (``ncu``), the cycles of the kernel that multiplies and those in which the banks of
shared memory were read or written. A *step* is a block of query rows against a tile of keys on one multiprocessor.
Beside the counts stand the cycles that tensor cores and banks need by :func:`demand`. Writes
OUT/attention-backward-limits.json. Figures are right only if ``attention_backward_cells.py`` found the results right.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

from attention_backward_cells import TOKENS, WIDTH, Cell, calls, forward, fresh, ours
from scripts import kept

from warploom.core.targets import target
from warploom.kernels.attention.backward_choice import choose
from warploom.kernels.attention.backward_sm90 import CONSUMERS, KEYS, BackwardSm90
from warploom.measure.timing import Candidate
from warploom_lab.bench.cells import TorchGpu, compile_all, parser_of

CELLS = [
    Cell.of(d, causal, n, n, WIDTH // d, WIDTH // d)
    for d in (64, 128)
    for causal in (False, True)
    for n in (4096, TOKENS)
]
METRICS = ("sm__cycles_elapsed.avg", "l1tex__data_bank_reads.sum", "l1tex__data_bank_writes.sum")
BANKS, BANK_ROW = 32, 128
"""Banks of a multiprocessor's shared memory, and the bytes that all of them serve in a cycle."""
FLOPS_PER_CYCLE = 4096
"""Of a multiprocessor's tensor cores, 16-bit operands."""
KERNEL = r"attention_backward_\d+x"


def config_of(cell: Cell) -> BackwardSm90:
    """What a call chooses."""
    found = choose(cell.gradients, target("sm_90a"))[0]
    assert isinstance(found, BackwardSm90)
    return found


def demand(c: BackwardSm90) -> dict[str, int]:
    """Cycles that a step keeps the tensor cores and the banks busy at least.

    ``wgmma`` reads 16 columns of A (64 rows, unless registers hold them) and of B from shared memory at a time. Beside
    the products' operands there are: Q and dO as they arrive, dS, and dQ on its way out, written and read once each.
    """
    m, d, v = c.tile_m, c.head_dim, c.value_dim
    left = 64 * 32
    scores = (d + v) // 16 * (left + m * 32)
    sums = m // 16 * (d + v) * 32
    dq = KEYS // 16 * (left + c.total_cols * 32)
    part = c.total_size * 4
    arriving = m * (c.width + c.value_width) * 2
    moved = CONSUMERS * (scores + sums + dq + 2 * part) + arriving + m * KEYS * 2
    return {"tensor": 2 * m * KEYS * (3 * d + 2 * v) // FLOPS_PER_CYCLE, "banks": moved // BANK_ROW}


def steps(cell: Cell, c: BackwardSm90) -> int:
    """Steps of all tiles of keys."""
    blocks = -(-cell.q_len // c.tile_m)
    visited = [blocks - first // c.tile_m * cell.causal for first in range(0, cell.kv_len, KEYS)]
    return sum(visited) * cell.heads * cell.batch


def counted(cell: Cell) -> dict[str, float]:
    """METRICS of the kernel that multiplies, by a process of its own."""
    from warploom_lab.bench.ncu import find_ncu, record

    driver = [sys.executable, str(Path(__file__).resolve()), "--once", cell.name]
    raw, _ = record(find_ncu(), METRICS, driver, samples=False, seconds=60, kernels=KERNEL)
    header, _, *rows = csv.reader(io.StringIO(raw[raw.index('"ID"') :]))
    return {name: float(rows[0][header.index(name)].split()[0].replace(",", "")) for name in METRICS}


def once(name: str) -> None:
    """One call, for ncu to watch."""
    import torch

    cell = next(c for c in CELLS if c.name == name)
    ours(cell)(fresh(cell))
    torch.cuda.synchronize()


def measured(cell: Cell, gpu: TorchGpu) -> dict[str, Any]:
    """One cell: under load, and counted."""
    import torch

    c, x = config_of(cell), fresh(cell)
    found: dict[str, Any] = {}
    for name, run, flops in (("forward", forward(cell), cell.flops), ("backward", ours(cell), cell.gradients.flops)):
        found[name] = gpu.power(gpu.graphed(Candidate(name, lambda _, run=run: run(x)), 1), flops)
    counts = counted(cell)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    number = steps(cell, c)
    touched = counts["l1tex__data_bank_reads.sum"] + counts["l1tex__data_bank_writes.sum"]
    return {
        "cell": cell.name,
        "config": str(c),
        **found,
        "steps": number,
        "demand": demand(c),
        "cycles": round(counts["sm__cycles_elapsed.avg"] * multiprocessors / number),
        "banks": round(touched / BANKS / number),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--once", default="", help="run one cell once and end")
    parser.add_argument("--dry-run", action="store_true", help="what a step demands, without a GPU")
    options = parser.parse_args()
    if options.once:
        once(options.once)
        return 0
    if options.dry_run:
        for cell in CELLS:
            c = config_of(cell)
            print(f"{cell.name:20} {steps(cell, c):8} steps  {demand(c)}  {c}")
        return 0
    gpu = TorchGpu()
    compile_all((call for cell in CELLS for call in calls(cell, target(gpu.arch))), gpu.arch)
    with gpu.working():
        kept((measured(cell, gpu) for cell in CELLS), options.out / "attention-backward-limits.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
