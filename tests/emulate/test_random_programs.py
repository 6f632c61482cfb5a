"""Some random programs of each family; ``python -m tests.emulate.random_programs`` runs as many as one likes."""

from __future__ import annotations

import pytest

from tests.emulate.random_programs import order, values

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 3 * CHUNK, CHUNK))
def test_values_are_those_of_python(first: int) -> None:
    assert [d for i in range(first, first + CHUNK) if (d := values.difference(i))] == []


@pytest.mark.parametrize("first", range(0, 6 * CHUNK, CHUNK))
def test_what_is_not_ordered_is_found_and_nothing_else(first: int) -> None:
    assert [d for i in range(first, first + CHUNK) if (d := order.difference(i))] == []
    kinds = [order.verdict(i) for i in range(first, first + CHUNK)]
    assert 0.1 * CHUNK < kinds.count(frozenset()) < 0.9 * CHUNK  # neither all clean nor all wrong
