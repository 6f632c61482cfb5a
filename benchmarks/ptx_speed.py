"""How fast the emulator runs PTX: ``PYTHONPATH=src:. python benchmarks/ptx_speed.py``, in a minute, without a GPU.

Prints processor seconds, all checks on, of Triton's attention forward at 1×1×1024×64 (where Triton is installed), and
of the attention ladder's rungs 2 and 16 as Programs and by way of NVRTC's PTX, with the ratio of the two.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.kernels.attention_cases import RUNGS, Case
from tests.ptx.test_round_trip import ptx, reread


def seconds(call: Callable[[], Any]) -> float:
    """Processor seconds of the faster of two calls."""
    taken: list[float] = []
    for _ in range(2):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    """Print a line for each kernel."""
    if importlib.util.find_spec("triton") is not None:
        from tests.with_triton.cases import attention
        from tests.with_triton.test_triton import run as check

        for target in ("sm_80", "sm_90"):
            case = attention(np.random.default_rng(0), 1024, 1, causal=False)
            taken = seconds(lambda case=case, target=target: check(case, target=target).raise_if_found())
            print(f"Triton attention 1x1x1024x64, {target}: {taken:.1f} s")
    for rung in ("2", "16"):
        case = Case.of_blocks(RUNGS[rung], 8, 4)
        mine, theirs = (
            seconds(lambda case=case, p=p: case.run(program=p))
            for p in (case.program, reread(case.program, ptx(case.program)))
        )
        print(f"rung {rung}: Program {mine:.2f} s, its PTX {theirs:.2f} s, {mine / theirs:.2f} of the throughput")


if __name__ == "__main__":
    main()
