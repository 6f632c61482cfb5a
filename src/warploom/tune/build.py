"""Candidates compiled on all cores, and what their cubins tell without a GPU.

Tracing and printing are Python and take about as long as NVRTC, so threads would leave half of the work on one core:
candidates go to processes. Each is in the disk cache by then, where this process finds it.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from warploom.core.errors import WarploomError
from warploom.core.targets import Target
from warploom.cuda.occupancy import occupancy
from warploom.kernels.source import KernelSource

if TYPE_CHECKING:
    from warploom.cuda.store import CompiledKernel

MOST_SPILLED_BYTES = 128
"""Spill stores and loads of a candidate worth timing: a few outside the main loop cost nothing, hundreds always do."""
LEAST_WARPS_PER_SM = 4
"""One for each of the SM's four schedulers."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Built:
    """A compiled candidate; ``shared_bytes`` is the dynamic shared memory per CTA."""

    kernel: CompiledKernel
    threads: int
    shared_bytes: int

    def faults(self, target: Target, most_spilled: int = MOST_SPILLED_BYTES) -> list[str]:
        """Why it is not worth timing, from the cubin alone; empty if it is."""
        found: list[str] = []
        needs = self.kernel.resources
        if (spilled := needs.spill_bytes or 0) > most_spilled:
            found.append(f"spills {spilled} bytes")
        shared = needs.static_shared_bytes + self.shared_bytes
        resident = occupancy(target, threads=self.threads, registers=needs.registers, shared_bytes=shared)
        if resident.ctas_per_sm == 0:
            found.append(f"no CTA fits an SM ({', '.join(resident.limited_by)})")
        elif resident.warps_per_sm < LEAST_WARPS_PER_SM:
            found.append(f"only {resident.warps_per_sm} warps fit an SM")
        return found


def build(source: KernelSource, arch: str) -> Built | str:
    """One candidate; what the compiler or the generator said where it is none."""
    from warploom.ops.backends import built

    try:
        kernel, signature = built(source, arch)
    except WarploomError as error:
        return f"does not compile: {str(error).splitlines()[0]}"
    return Built(kernel, signature.threads, signature.shared_bytes)


def build_all(
    sources: Sequence[KernelSource], arch: str, progress: Progress = lambda done, total: None
) -> list[Built | str]:
    """:func:`build` for many, in their order; ``progress(done, total)`` after each.

    Processes are spawned, so a script that tunes needs the usual ``if __name__ == "__main__"``.
    """
    from warploom.cuda.compile import available_cores

    if min(available_cores(), len(sources)) < 2:
        results: list[Built | str] = []
        for source in sources:
            results.append(build(source, arch))
            progress(len(results), len(sources))
        return results
    pool = _pool(available_cores())
    running = {pool.submit(build, source, arch): i for i, source in enumerate(sources)}
    found: dict[int, Built | str] = {}
    for future in as_completed(running):
        found[running[future]] = future.result()
        progress(len(found), len(sources))
    return [found[i] for i in range(len(sources))]


@lru_cache(maxsize=1)
def _pool(workers: int) -> ProcessPoolExecutor:
    """Kept until this process ends: a search builds many times, and starting Python costs as much as a kernel.

    A kernel cache without room costs time and no result: a warning of that from each process helps nobody.
    """
    quiet = {"initializer": warnings.simplefilter, "initargs": ("ignore", RuntimeWarning)}
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), **quiet)
