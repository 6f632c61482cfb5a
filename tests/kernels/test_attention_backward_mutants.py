"""Synchronisation of the backward kernels: what is deleted or shifted is caught, or needs no catching.

The suite tries one mutant of each kind; ``pytest -m mutation tests/kernels`` tries them all.
"""

from __future__ import annotations

import pytest

from tests.kernels.gradient_mutants import CASES, EQUIVALENT, Mutant, mutants, objection, survivors


def one_of_each_kind() -> list[Mutant]:
    """The first mutant that is edited in each way, where that matters; ``mbarrier.init`` of each count is a way."""
    kinds: dict[str, Mutant] = {}
    for name in CASES:
        for mutant in mutants(name):
            if mutant.label not in EQUIVALENT:
                kinds.setdefault(mutant.label.rpartition(" in ")[0], mutant)
    return list(kinds.values())


@pytest.mark.parametrize("mutant", one_of_each_kind(), ids=lambda m: f"{m.case}: {m.label}")
def test_one_mutant_of_each_kind_is_caught(mutant: Mutant) -> None:
    assert objection(mutant) is not None


@pytest.mark.mutation
@pytest.mark.parametrize("name", CASES)
def test_every_mutant_is_caught_or_equivalent(name: str) -> None:
    assert [m for m in survivors(name) if m.label not in EQUIVALENT] == []
