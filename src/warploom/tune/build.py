"""Tracing, printing and compiling candidates on all cores.

Tracing and printing are Python and take about as long as NVRTC, so threads would leave half of the work on one core:
candidates go to processes, and come back as cubins. Each is in the disk cache by then.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from typing import Any

from warploom.core.errors import WarploomError
from warploom.tune.built import Built
from warploom.tune.family import Family

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
