"""The list of tiles of packed sequences: every piece once, the long ones first, nothing beyond the arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.tile.support import clean
from warploom.core.arguments import fields
from warploom.kernels.attention.device.tiles import list_gradient_tiles, list_tiles
from warploom.tile.planning import ENTRY_WORDS, divisors, most_pieces

TILE_M = 64


def listed(
    q_starts: Any,
    k_starts: Any,
    total: tuple[int, int],
    *,
    heads: int = 3,
    together: int = 2,
    by_row: bool = False,
    used: tuple[Any, Any] = (None, None),
) -> Any:
    """The entries of the list: (first query, queries left, first key, keys, head) of each tile."""
    batch, most = len(q_starts) - 1, most_pieces(total[0], len(q_starts) - 1, TILE_M)
    program = list_tiles.trace(tile_m=TILE_M, by_row=by_row, used=(used[0] is not None, used[1] is not None))
    words = np.full(ENTRY_WORDS * (1 + most * heads), 0xDEADBEEF, np.uint32)
    given = {
        "queries_starts": np.asarray(q_starts, np.int32),
        "keys_starts": np.asarray(k_starts, np.int32),
        "tiles": words,
        "queries_total": total[0],
        "keys_total": total[1],
        **fields("batch", sequences=batch, heads=heads, most=most, **divisors(together=together)),
    }
    names = "queries_used", "keys_used"
    given |= {name: np.asarray(x, np.int32) for name, x in zip(names, used, strict=True) if x is not None}
    assert clean(program, (-(-batch // 4), 2, 1), [given[p.name] for p in program.parameters])
    return words.reshape(-1, ENTRY_WORDS)[1 : 1 + words[0], :5].astype(np.int64)


def expected(q_starts: Any, k_starts: Any, heads: int) -> set[tuple[int, ...]]:
    """All pieces."""
    found: set[tuple[int, ...]] = set()
    for a, b, c, d in zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False):
        found |= {(row, b - row, c, d - c, head) for row in range(a, b, TILE_M) for head in range(heads)}
    return found


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_every_piece_once_beside_those_with_as_many_keys(by_row: bool, together: int) -> None:
    rng = np.random.default_rng(together)
    lengths = rng.integers(0, 300, (2, 37))  # more sequences than lanes, some with less keys than queries
    lengths[:, 5] = 0
    q_starts, k_starts = (np.concatenate([[0], np.cumsum(x)]) for x in lengths)
    found = listed(q_starts, k_starts, (q_starts[-1], k_starts[-1]), together=together, by_row=by_row)
    pieces = [tuple(map(int, entry)) for entry in found]
    assert set(pieces) == expected(q_starts.tolist(), k_starts.tolist(), 3)
    assert len(set(pieces)) == len(pieces)
    if not by_row:  # the longest sequence first
        assert (np.diff(found[:, 3]) <= 0).all()
        return
    groups, seen = found[:, 4] // together, found[:, 3] - found[:, 1] + TILE_M  # keys up to the tile's last query
    assert (np.diff(groups) >= 0).all()
    for group in range(groups.max() + 1):  # the last one ends with the short tiles, and the next begins with them
        steps = np.diff(seen[groups == group])
        assert ((steps >= 0) if (groups.max() - group) % 2 else (steps <= 0)).all()


@pytest.mark.parametrize("used", [None, [3, 0, 40, 90]])
def test_rows_of_no_sequence_are_cleared(used: list[int] | None) -> None:
    """In front of the first one, behind each one's used rows, and behind the last; no other row is touched."""
    starts, total, words = [4, 9, 9, 60, 75], 80, (8, 24)
    of_none = np.ones(total, bool)
    for i, (begin, end) in enumerate(pairwise(starts)):
        of_none[begin : end if used is None else min(end, begin + used[i])] = False
    program = list_gradient_tiles.trace(tile=TILE_M, used=(used is not None, False), slots=(64, False), clears=words)
    cleared, too = (np.full((total, n), 7, np.uint32) for n in words)
    most = most_pieces(total, 4, TILE_M)
    lengths = np.asarray(starts, np.int32)
    given: dict[str, Any] = {
        "own_starts": lengths,
        "others_starts": lengths,
        "own_used": np.asarray(used or [0], np.int32),
        "cleared": cleared,
        "cleared_too": too,
        "tiles": np.zeros(ENTRY_WORDS * (1 + most), np.uint32),
        "own_total": total,
        "others_total": total,
        "most_slots": most,
        **fields("batch", sequences=4, heads=1, most=most, **divisors(together=1)),
    }
    assert clean(program, (1, 3, 1), [given[p.name] for p in program.parameters])
    for array in (cleared, too):
        assert (array == np.where(of_none, 0, 7)[:, None]).all()


def test_used_rows_alone() -> None:
    found = listed([0, 100, 200], [0, 50, 90], (200, 90), heads=1, together=1, used=([70, 0], [20, 40]))
    assert [tuple(x) for x in found.tolist()] == [(0, 70, 0, 20, 0), (64, 6, 0, 20, 0)]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    "starts", [[0, 100, 50, 300, 128], [-5, 20, 2**31 - 1, 4, 9], [300, 0, 300, 0, 300], [7, 7, 7, 7, 7]]
)
def test_lengths_that_cannot_be_reach_nothing_beyond_the_arrays(starts: list[int], by_row: bool) -> None:
    found = listed(starts, starts, (128, 128), by_row=by_row)
    assert len(found) <= 3 * most_pieces(128, 4, TILE_M)
    first, count, first_key, keys, head = found.T
    assert ((first + count <= 128) & (first_key + keys <= 128) & (head < 3)).all()  # and every entry was written


@pytest.mark.parametrize("by_row", [False, True])
def test_more_tiles_than_there_is_room_for_are_left_out(by_row: bool) -> None:
    starts = [0, 256, 0, 256]  # two sequences of all rows
    found = listed(starts, starts, (256, 256), by_row=by_row)
    assert len(found) <= 3 * most_pieces(256, 3, TILE_M) < 2 * 3 * 256 // TILE_M
