"""Synchronisation of the ``wgmma`` attention kernels: what is deleted or shifted is caught, or needs no catching.

The suite tries one mutant of each kind; ``pytest -m mutation tests/hopper`` (or ``python -m
tests.hopper.attention_mutants``) tries them all, and what that gave is committed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hopper.attention_mutants import (
    CONFIGS,
    EQUIVALENT,
    FLAT,
    LARGEST_ERROR,
    SIZES,
    Mutant,
    edits,
    mutants,
    objection,
    program,
    result,
    run,
)
from tests.hopper.mutants import rewritten
from warploom.bench.resources import missing_compiler
from warploom.core.errors import CompileError
from warploom.cuda.cubin import disassemble, find_nvdisasm
from warploom.ops.backends import compiled

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "static" / "hopper-mutants.json"
FENCE = "without wgmma.fence.sync.aligned in _issue_product"
FENCE_SASS = "WARPGROUP.ARRIVE"


def one_of_each_kind() -> list[Mutant]:
    """The first mutant of the flat kernel that is edited in each way."""
    kinds: dict[str, Mutant] = {}
    for mutant in mutants("h6"):
        if mutant.label not in EQUIVALENT:
            kinds.setdefault(mutant.label.rpartition(" in ")[0], mutant)
    return list(kinds.values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_kernel_is_right_and_clean(size: tuple[int, int], seed: int | None) -> None:
    emulation, error = run(FLAT, program("h6"), size, seed)
    assert emulation.findings == ()
    assert error < LARGEST_ERROR


@pytest.mark.parametrize("mutant", one_of_each_kind(), ids=lambda m: m.label)
def test_one_mutant_of_each_kind_is_caught(mutant: Mutant) -> None:
    assert objection(mutant) is not None


def test_every_kind_of_statement_has_mutants() -> None:
    assert len(one_of_each_kind()) >= 25
    for name in CONFIGS:
        assert len(mutants(name)) >= 120


@pytest.mark.skipif(missing_compiler() is not None or find_nvdisasm() is None, reason="needs NVRTC and nvdisasm")
def test_the_products_own_fence_is_there_for_ptxas() -> None:
    """Nothing is wrong without it, so the emulator says nothing; ptxas injects one.

    That of CUDA 13.0 says so, which is an error; that of 13.4 does it in silence.
    """
    (mutant, *_) = [m for m in mutants("h6") if m.label == FENCE]
    rewrite = list(edits(list(program("h6").ops())[mutant.number]))[mutant.edit][1]
    without = rewritten(program("h6"), mutant.number, rewrite)
    assert run(FLAT, without, SIZES[0], None)[0].findings == ()
    said = ""
    try:
        cubin = compiled(without, "sm_90a").cubin
    except CompileError as error:
        said = str(error)
    else:
        with_it = compiled(program("h6"), "sm_90a").cubin
        assert disassemble(cubin).count(FENCE_SASS) >= disassemble(with_it).count(FENCE_SASS) > 0
    assert not said or "C7519" in said


def test_the_committed_enumeration_is_whole() -> None:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert committed["reasons"] == EQUIVALENT
    assert committed["core_seconds"] <= 2 * 600, "ten minutes on two cores"
    assert list(committed["configs"]) == list(CONFIGS)
    for name, row in committed["configs"].items():
        assert row["config"] == str(CONFIGS[name])
        assert row["mutants"] == len(mutants(name)), "python -m tests.hopper.attention_mutants --out … again"
        assert row["survivors"] == []
        assert row["caught"] + len(row["equivalent"]) == row["mutants"]
        assert set(row["equivalent"]) <= set(EQUIVALENT)


@pytest.mark.mutation
def test_every_mutant_is_caught_or_equivalent() -> None:
    for name, row in result()["configs"].items():
        assert row["survivors"] == [], name
