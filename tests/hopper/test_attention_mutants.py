"""Synchronisation of the ``wgmma`` attention kernels: what is deleted or shifted is caught, or needs no catching.

The suite tries one mutant of each kind; ``pytest -m mutation tests/hopper`` (or ``python -m
tests.hopper.attention_mutants``) tries them all.
"""

from __future__ import annotations

import pytest

from tests.hopper import attention_mutants as every
from tests.hopper.attention_mutants import CONFIGS, Mutant, cases, mutants, objection, program
from tests.hopper.mutants import rewritten
from tests.kernels.attention_cases import Case
from tests.project import needs_nvdisasm
from warploom.core.errors import CompileError
from warploom.cuda.cubin import disassemble
from warploom.ops.backends import compiled

FENCE = "without wgmma.fence.sync.aligned in _add_values"
FENCE_SASS = "WARPGROUP.ARRIVE"


def one_of_each_kind() -> list[Mutant]:
    """The first mutant of the production kernel that is edited in each way."""
    kinds: dict[str, Mutant] = {}
    for mutant in mutants("h8"):
        if not mutant.may_survive:
            kinds.setdefault(mutant.label.rpartition(" in ")[0], mutant)
    return list(kinds.values())


@pytest.mark.parametrize("case", cases("h8"), ids=lambda case: f"{case.q_len} {case.kv_len}")
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_kernel_is_right_and_clean(case: Case, seed: int | None) -> None:
    assert (outcome := case.run(seed=seed)).fine, outcome


@pytest.mark.parametrize("mutant", one_of_each_kind(), ids=lambda m: m.label)
def test_one_mutant_of_each_kind_is_caught(mutant: Mutant) -> None:
    assert objection(mutant) is not None


@pytest.mark.parametrize(
    ("name", "place"),
    [("h1", " in exchange"), ("masked blocks", "try_wait.parity in _leave")],
    ids=["one tile a CTA", "passed over"],
)
def test_every_mutant_of_a_place_is_caught(name: str, place: str) -> None:
    """Where a CTA has one tile nothing stands for a second; and a wait left out lets the next one pass at once."""
    of_it = [m for m in mutants(name) if m.label.endswith(place) and not m.may_survive]
    assert of_it
    assert [m.label for m in of_it if objection(m) is None] == []


def test_every_kind_of_statement_has_mutants() -> None:
    assert len(one_of_each_kind()) >= 25
    for name in CONFIGS:
        assert len(mutants(name)) >= 100, name


@needs_nvdisasm
def test_the_fence_of_a_steps_second_product_is_there_for_ptxas() -> None:
    """Nothing is wrong without it, so the emulator says nothing; ptxas injects one.

    That of CUDA 13.0 says so, which is an error; that of 13.4 does it in silence.
    """
    (_, mutant, *_) = [m for m in mutants("h6") if m.label == FENCE]
    rewrite = list(every.edits(list(program("h6").ops())[mutant.number]))[mutant.edit][1]
    without = rewritten(program("h6"), mutant.number, rewrite)
    assert cases("h6")[0].run(program=without).fine
    said = ""
    try:
        cubin = compiled(without, "sm_90a").cubin
    except CompileError as error:
        said = str(error)
    else:
        with_it = compiled(program("h6"), "sm_90a").cubin
        assert disassemble(cubin).count(FENCE_SASS) >= disassemble(with_it).count(FENCE_SASS) > 0
    assert not said or "C7519" in said


@pytest.mark.mutation
@pytest.mark.parametrize("name", CONFIGS)
def test_every_mutant_is_caught_or_equivalent(name: str) -> None:
    assert every.result([name])["configs"][name]["survivors"] == []
