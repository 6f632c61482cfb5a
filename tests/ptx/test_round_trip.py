# pyright: reportInvalidTypeForm=false
"""Own kernels as PTX of NVRTC: the same results, findings and wavefronts as the Program that they came of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import RUNGS, Case
from tests.ptx.text import kinds
from warploom.core.dtypes import f32
from warploom.cuda.printer import print_cuda
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.ir.verify import verify
from warploom.lang import Global, Kernel, kernel
from warploom.ptx.parser import parse
from warploom.ptx.program import Argument, entry_of, to_program

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")


def ptx(program: Program, arch: str = "sm_80") -> str:
    from warploom.cuda.ptx import ptx_of

    return ptx_of(print_cuda(program), f"{program.name}.cu", arch, ["--fmad=false"]).text


def reread(program: Program, text: str, *, checked: bool = True) -> Program:
    """The Program of the PTX of a Program, with the same parameters; ``checked`` holds it against the rules too."""
    module = parse(text)
    arguments = [Argument(p.kind, p.dtype, p.name) for p in program.parameters]
    again = to_program(
        module,
        entry_of(module),
        block=(program.threads, 1, 1),
        arguments=arguments,
        shared_bytes=program.shared_bytes,
        cluster=program.cluster,
    )
    if checked:
        verify(again)
    return again


@pytest.mark.parametrize(("rung", "seed"), [("2", None), ("2", 5), ("16", None)])
def test_attention_survives_the_way_through_ptx(rung: str, seed: int | None) -> None:
    case = Case.of_blocks(RUNGS[rung], 3, 2)
    again = reread(case.program, ptx(case.program))
    mine, theirs = (case.run(program=p, seed=seed) for p in (case.program, again))
    assert theirs.fine
    assert np.array_equal(mine.out.view(np.uint16), theirs.out.view(np.uint16))
    shared = theirs.emulation.traffic.shared
    for name in ("ldmatrix", "cp.async"):
        assert shared[name].actual == mine.emulation.traffic.shared[name].actual


def test_twice_through_nvrtc() -> None:
    case = Case.of_blocks(RUNGS["1"], 2)
    once = reread(case.program, ptx(case.program))
    twice = reread(case.program, ptx(once))
    mine, theirs = (case.run(program=p) for p in (once, twice))
    assert theirs.fine
    assert np.array_equal(mine.out.view(np.uint16), theirs.out.view(np.uint16))


def swap(sync: bool) -> Program:
    @kernel(threads=128, name="swap")
    def traced_swap(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
        tile = k.shared(f32, 128)
        tile.store(x.load(k.thread), 0, k.thread)
        if sync:
            k.syncthreads()
        with k.loop(3):
            y.store(tile.load(0, k.thread ^ 32), k.thread)

    return traced_swap.trace()


@pytest.mark.parametrize("sync", [True, False])
def test_a_missing_barrier_is_found_in_the_ptx_as_in_the_program(sync: bool) -> None:
    program = swap(sync)
    found: list[Any] = []
    for p in (program, reread(program, ptx(program))):
        x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
        found.append(emulate(p, 1, [x, y]).findings)
    assert kinds(found[0]) == kinds(found[1]) == (set() if sync else {"race"})
    if not sync:
        assert found[1][0].where.file.endswith("swap.cu")
        assert found[1][0].where.ptx > 0


DELETIONS = ("bar.sync", "cp.async.wait_group", "cp.async.commit_group")


def test_deleting_any_synchronisation_of_the_ptx_is_found() -> None:
    """Every barrier, wait and commit of a kernel's PTX in turn."""
    case = Case.of_blocks(RUNGS["2"], 3)
    lines = ptx(case.program).splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith(DELETIONS)]
    assert len(places) >= 6
    missed: list[str] = []
    for i in places:
        mutant = reread(case.program, "\n".join([*lines[:i], "", *lines[i + 1 :]]), checked=False)
        if not case.run(program=mutant).emulation.findings:
            missed.append(f"{i + 1}: {lines[i].strip()}")
    assert missed == []
