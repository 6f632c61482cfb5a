"""How fast the emulator runs PTX: ``PYTHONPATH=src:. python benchmarks/ptx_speed.py [--out DIR]``, in a minute.

Measures processor seconds, all checks on, without a GPU: of Triton's attention forward at 1×1×1024×64 (where Triton is
installed), compiled and checked, and of two rungs of the attention ladder as Programs and by way of NVRTC's PTX. Writes
ptx-speed.json.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from scripts import kept
from tests.kernels.attention_cases import RUNGS, Case
from tests.ptx.test_round_trip import ptx, reread

from warploom_lab.bench.cells import parser_of

_TIMES = 7


def seconds(*calls: Callable[[], Any]) -> list[float]:
    """Processor seconds of each call, the median of some, one after the other in turn."""
    taken = [[0.0] * _TIMES for _ in calls]
    for turn in range(_TIMES):
        for call, mine in zip(calls, taken, strict=True):
            start = time.process_time()
            call()
            mine[turn] = time.process_time() - start
    return [median(mine) for mine in taken]


def measured() -> Iterator[dict[str, Any]]:
    """A row for each kernel; ``throughput`` is that of PTX over that of the Program."""
    if importlib.util.find_spec("triton") is not None:
        from tests.with_triton.cases import attention
        from tests.with_triton.test_triton import run as check

        for target in ("sm_80", "sm_90"):
            case = attention(np.random.default_rng(0), 1024, 1, causal=False)
            (taken,) = seconds(lambda case=case, target=target: check(case, target=target).raise_if_found())
            yield {"kernel": f"Triton's attention, 1×1×1024×64, {target}", "ptx": taken}
    for rung, name in (("2", "warploom's attention, `mma.sync`, rung 2"), ("16", "its last rung for `mma.sync`")):
        case = Case.of_blocks(RUNGS[rung], 8, 4)
        programs = (case.program, reread(case.program, ptx(case.program)))
        mine, theirs = seconds(*(partial(case.run, program=program) for program in programs))
        yield {"kernel": name, "program": mine, "ptx": theirs, "throughput": mine / theirs}


if __name__ == "__main__":
    kept(measured(), parser_of(__doc__).parse_args().out / "ptx-speed.json")
