"""The order of a tile's loads and mma when fragments roll."""

from __future__ import annotations

from itertools import product

import pytest

from warploom_lab.kernels.matmul.ladder_rolling import FragmentLoad, Mark, Multiply, RollingOrder

ORDERS = [
    RollingOrder(steps, rows, cols, lead)
    for steps, rows, cols in [(2, 4, 8), (4, 4, 8), (2, 6, 8), (2, 1, 4), (4, 2, 2)]
    for lead in sorted({1, cols, rows * cols - 1})
    if lead < rows * cols
]


def tiles(order: RollingOrder) -> tuple[list[FragmentLoad | Multiply | Mark], list[FragmentLoad | Multiply | Mark]]:
    """The events of a tile, cut at the border."""
    events = list(order.events())
    border = events.index(Mark.BORDER)
    return events[:border], events[border + 1 :]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_product_comes_once_and_row_by_row(order: RollingOrder) -> None:
    found = [(e.a.step, e.row, e.col) for e in order.events() if isinstance(e, Multiply)]
    assert found == list(product(range(order.steps), range(order.rows), range(order.cols)))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_load_comes_once_and_lead_mma_before_its_first_use(order: RollingOrder) -> None:
    """Over two tiles, of which the second is whole: its first loads lie behind the first one's border."""
    before, after = tiles(order)
    stream = [(e, 1) for e in before]
    stream += [(e, 2 if isinstance(e, FragmentLoad) else 1) for e in after]
    stream += [(e, 2) for e in before] + [(e, 3 if isinstance(e, FragmentLoad) else 2) for e in after]
    loads: dict[FragmentLoad, list[int]] = {}
    uses: dict[FragmentLoad, int] = {}
    done = 0
    for event, tile in stream:
        if isinstance(event, FragmentLoad) and tile == 2:
            loads.setdefault(event, []).append(done)
        if isinstance(event, Multiply):
            if tile == 2:
                for load in (event.a, event.b):
                    uses.setdefault(load, done)
            done += 1
    assert loads.keys() == uses.keys()
    assert loads == {load: [use - order.lead] for load, use in uses.items()}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_what_is_carried_is_what_lies_behind_the_border(order: RollingOrder) -> None:
    before, after = tiles(order)
    assert [e for e in after if isinstance(e, FragmentLoad)] == order.carried
    assert all(load.step == 0 for load in order.carried)
    assert Mark.MIDDLE in before, "copies start while no warp has yet waited for the next tile"
