"""How fast a kernel can be on a GPU, from what the emulator counted in a run of its example: a roofline.

For each resource of the GPU the amount that the run takes is divided by what all SMs have of it in a second. The
largest of these times bounds the kernel from below, where its CTAs fill the GPU evenly and everything overlaps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.targets import ISSUED_PER_CYCLE, SHARED_BYTES_PER_CYCLE, SPECIAL_PER_CYCLE, GpuRates
from warploom.emulate import Emulation
from warploom.emulate.findings.traffic import SECTOR_BYTES
from warploom.isa.instruction import Instruction
from warploom.lang import Launch

_SPECIAL = frozenset({"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"})
_LANES = 32


@dataclass(frozen=True)
class ResourceUse:
    """What a run takes of one resource, in its unit, and what the whole GPU has of it in a second."""

    resource: str
    amount: float
    unit: str
    per_second: float

    @property
    def seconds(self) -> float:
        """The time that the GPU needs at least."""
        return self.amount / self.per_second


@dataclass(frozen=True)
class Estimate:
    """The shares of a run of ``ctas`` CTAs on a GPU, the bound first; ``l2_bytes`` go between the L2 and the SMs."""

    gpu: GpuRates
    ctas: int
    shares: tuple[ResourceUse, ...]
    l2_bytes: int

    @property
    def bound(self) -> ResourceUse:
        """The resource that the run needs longest."""
        return self.shares[0]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        rows = {
            s.resource: {"amount": s.amount, "unit": s.unit, "per_second": s.per_second, "seconds": s.seconds}
            for s in self.shares
        }
        return {
            "gpu": self.gpu.name,
            "ctas": self.ctas,
            "bound": self.bound.resource,
            "resources": rows,
            "l2_bytes": self.l2_bytes,
        }


def estimate(gpu: GpuRates, launch: Launch, emulation: Emulation) -> Estimate:
    """The :class:`Estimate` of a launch that was emulated.

    Of memory the arrays count once, or what the kernel moved where that is less. Tensor cores take 8-bit inputs at
    twice the rate of 16-bit ones, tf32 at half of it, f64 at a sixteenth. The issue slots are the instructions of the
    Program but for moves, which ptxas makes others of.
    """
    traffic = emulation.traffic
    moved = SECTOR_BYTES * sum(s.sectors for s in traffic.global_memory.values())
    moved += sum(e.global_bytes for e in traffic.engines.values())
    arrays = [x[0] if isinstance(x, tuple) else x for x in launch.arguments]
    held = sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))
    shared = sum(SHARED_BYTES_PER_CYCLE * w.actual for w in traffic.shared.values())
    shared += sum(e.shared_bytes for e in traffic.engines.values())
    counts = [(op.instruction, count) for op, count in emulation.counts]
    products = sum(count * tensor_work(i) for i, count in counts)
    special = sum(count * _LANES for i, count in counts if i.fields["op"] in _SPECIAL)
    issued = sum(count for i, count in counts if not i.copies)
    cycles = gpu.multiprocessors * gpu.clock
    shares = (
        ResourceUse("memory", min(held, moved), "bytes", gpu.bandwidth),
        ResourceUse("tensor cores", products, "FLOP of 16 bits", gpu.tensor_flops_per_cycle * cycles),
        ResourceUse("issue", issued, "instructions of warps", ISSUED_PER_CYCLE * cycles),
        ResourceUse("special functions", special, "results", SPECIAL_PER_CYCLE * cycles),
        ResourceUse("shared memory", shared, "bytes", SHARED_BYTES_PER_CYCLE * cycles),
    )
    grid: Sequence[int] = (launch.grid,) if isinstance(launch.grid, int) else launch.grid
    return Estimate(gpu, int(np.prod(grid)), tuple(sorted(shares, key=lambda s: -s.seconds)), moved)


def tensor_work(instruction: Instruction) -> float:
    """FLOP of one warp's share of a matrix product, as many of 16-bit inputs as take the same time; else 0."""
    product, fields = instruction.warpgroup_product, instruction.fields
    inputs = product.a if product is not None else fields.get("inputs")
    if inputs is None:
        return 0.0
    m, n, k = map(int, re.findall(r"\d+", fields["shape"]))
    warps = 1 if product is None else 4
    factor = 16 if inputs.bits == 64 else inputs.bits / 16
    return 2 * m * n * k * factor / warps
