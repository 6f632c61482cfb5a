"""Tracing, printing and compiling candidates on all cores.

Tracing and printing are Python and take about as long as NVRTC, so threads would leave half of the work on one core:
candidates go to processes, and come back as cubins. Each is in the disk cache by then.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from warploom.core.errors import WarploomError
from warploom.core.targets import Target
from warploom.inspect.occupancy import Occupancy, occupancy

if TYPE_CHECKING:
    from warploom.cuda.store import CompiledKernel
    from warploom.tune.family import Family

MOST_SPILLED_BYTES = 128
"""Spill stores and loads of a candidate worth timing: a few outside the main loop cost nothing, hundreds always do."""

LEAST_WARPS_PER_SM = 4
"""One for each of the SM's four schedulers."""


@dataclass(frozen=True)
class Built:
    """A compiled candidate: all a launch needs, so that the program is not traced again in this process.

    ``shared_bytes`` is the dynamic shared memory per CTA; ``scalars`` are the names of the scalar parameters in order.
    """

    kernel: CompiledKernel
    threads: int
    shared_bytes: int
    scalars: tuple[str, ...]

    def occupancy(self, goal: Target) -> Occupancy:
        """Theoretical occupancy on a target."""
        needs = self.kernel.resources
        shared = needs.static_shared_bytes + self.shared_bytes
        return occupancy(goal, threads=self.threads, registers=needs.registers, shared_bytes=shared)

    def faults(self, goal: Target) -> list[str]:
        """Why it is not worth timing, from the cubin alone; empty if it is."""
        found: list[str] = []
        spilled = self.kernel.resources.spill_bytes or 0
        if spilled > MOST_SPILLED_BYTES:
            found.append(f"spills {spilled} bytes")
        resident = self.occupancy(goal)
        if resident.ctas_per_sm == 0:
            found.append(f"no CTA fits an SM ({', '.join(resident.limited_by)})")
        elif resident.warps_per_sm < LEAST_WARPS_PER_SM:
            found.append(f"only {resident.warps_per_sm} warps fit an SM")
        return found


Progress = Callable[[int, int], None]


def build(family: Family[Any, Any], problem: Any, config: Any, arch: str) -> Built | str:
    """One candidate; what the compiler or the generator said where it is none."""
    from warploom.ops.backends import compiled

    try:
        program = family.program(problem, config)
        kernel = compiled(program, arch)
    except WarploomError as error:
        return f"does not compile: {str(error).splitlines()[0]}"
    scalars = tuple(p.name for p in program.parameters if p.kind == "scalar")
    return Built(kernel, program.threads, program.shared_bytes, scalars)


def build_all(
    family: Family[Any, Any],
    problem: Any,
    configs: Sequence[Any],
    arch: str,
    progress: Progress = lambda done, total: None,
    workers: int | None = None,
) -> list[Built | str]:
    """:func:`build` for many, in their order; ``progress(done, total)`` after each.

    Processes are spawned, so a script that tunes needs the usual ``if __name__ == "__main__"``.
    """
    from warploom.cuda.compile import available_cores

    count = min(workers or available_cores(), len(configs))
    if count < 2:
        results: list[Built | str] = []
        for config in configs:
            results.append(build(family, problem, config, arch))
            progress(len(results), len(configs))
        return results
    pool = _pool(workers or available_cores())
    running = {pool.submit(build, family, problem, config, arch): i for i, config in enumerate(configs)}
    found: dict[int, Built | str] = {}
    for future in as_completed(running):
        found[running[future]] = future.result()
        progress(len(found), len(configs))
    return [found[i] for i in range(len(configs))]


@lru_cache(maxsize=1)
def _pool(workers: int) -> ProcessPoolExecutor:
    """Kept until this process ends: a search builds many times, and starting Python costs as much as a kernel."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_say_nothing)


def _say_nothing() -> None:
    """A kernel cache without room costs time and no result: one line of that for each core helps nobody."""
    warnings.simplefilter("ignore", RuntimeWarning)
