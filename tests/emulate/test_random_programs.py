"""Some random programs of each family; ``pytest -m nightly`` runs a hundred times as many.

``python -m tests.emulate.random_programs`` runs as many as one likes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulate.random_programs import order, values

CHUNK = 50


def chunks(count: int) -> list[Any]:
    """The first programs of so many chunks, and of a hundred times as many for the night."""
    night = [pytest.param(i * CHUNK, marks=pytest.mark.nightly) for i in range(count, 100 * count)]
    return [*range(0, count * CHUNK, CHUNK), *night]


@pytest.mark.parametrize("first", chunks(3))
def test_values_are_those_of_python(first: int) -> None:
    assert [d for i in range(first, first + CHUNK) if (d := values.difference(i))] == []


@pytest.mark.parametrize("first", chunks(6))
def test_what_is_not_ordered_is_found_and_nothing_else(first: int) -> None:
    assert [d for i in range(first, first + CHUNK) if (d := order.difference(i))] == []
    kinds = [order.verdict(i) for i in range(first, first + CHUNK)]
    assert 0.1 * CHUNK < kinds.count(frozenset()) < 0.9 * CHUNK  # neither all clean nor all wrong


@pytest.mark.parametrize("number", [1008302, 1009119, 1033125])
def test_half_a_warp_that_met_knows_of_the_equal_stores_of_its_lanes(number: int) -> None:
    assert order.difference(number) == ""


def test_a_lane_that_an_mbarrier_told_of_the_other_reader_may_write() -> None:
    assert order.difference(10014253) == ""
