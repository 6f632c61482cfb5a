"""A cache in use: sequences come, grow and go, pages are reused; every step beside a float64 model of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from warploom.core.dtypes import bf16
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.attention.scores import seen_of

BF16 = np.dtype(ml_dtypes.bfloat16)
PAGE, PAGES, SLOTS, ENTRIES, HEADS, KV_HEADS, WIDTH = 16, 10, 3, 5, 4, 2, 16
NO_PAGE = 2**30
Array = np.ndarray[Any, Any]


@dataclass
class Cache:
    """Pages of NaN but for the keys of ``SLOTS`` sequences, and the keys and values that each should have."""

    numbers: np.random.Generator
    tables: Array = field(default_factory=lambda: np.full((SLOTS, ENTRIES), NO_PAGE, np.int32))
    lens: Array = field(default_factory=lambda: np.zeros(SLOTS, np.int32))
    model: list[list[Array]] = field(default_factory=lambda: [[np.zeros((0, KV_HEADS, WIDTH), BF16)] * 2] * SLOTS)
    free: list[int] = field(default_factory=lambda: list(range(PAGES)))
    roundings: list[float] = field(default_factory=list[float])
    """Errors over those of rounding alone: of few elements now and then more than twice them."""

    def __post_init__(self) -> None:
        self.pages = [np.full((PAGES, PAGE, KV_HEADS, WIDTH), np.nan, BF16) for _ in range(2)]

    def random(self, *shape: int) -> Array:
        """Normal numbers."""
        return self.numbers.standard_normal(shape).astype(BF16)

    def release(self, slot: int) -> None:
        """A sequence goes: its pages are for others, with poison in them."""
        for page in self.tables[slot][self.tables[slot] != NO_PAGE]:
            self.free.append(int(page))
            for cache in self.pages:
                cache[page] = np.nan
        self.tables[slot], self.lens[slot] = NO_PAGE, 0
        self.model[slot] = [np.zeros((0, KV_HEADS, WIDTH), BF16)] * 2

    def append(self, tokens: int) -> None:
        """So many new keys for every sequence that has room; for others none, by a length that leaves no place."""
        new = [self.random(SLOTS, tokens, KV_HEADS, WIDTH) for _ in range(2)]
        given = self.lens.copy()
        for slot in range(SLOTS):
            needed = -(-int(self.lens[slot] + tokens) // PAGE)
            have = int((self.tables[slot] != NO_PAGE).sum())
            if needed > ENTRIES or needed - have > len(self.free):
                given[slot] = -tokens
                continue
            for entry in range(have, needed):
                self.tables[slot, entry] = self.free.pop(0)
            self.lens[slot] += tokens
            given[slot] = self.lens[slot]
            self.model[slot] = [np.concatenate([old, x[slot]]) for old, x in zip(self.model[slot], new, strict=True)]
        k_pages, v_pages = self.pages
        warploom.append_to_cache(k_pages, v_pages, new[0], new[1], given, block_table=self.tables)

    def wrong(self, queries: int) -> list[str]:
        """What a step of attention gets wrong, and pages that hold anything but what they should."""
        q = self.random(SLOTS, queries, HEADS, WIDTH)
        k_pages, v_pages = self.pages
        out = warploom.attention_paged(q, k_pages, v_pages, self.lens, block_table=self.tables)
        found: list[str] = []
        for slot, (k, v) in enumerate(self.model):
            k, v, got = (x.swapaxes(0, 1) for x in (k, v, out[slot]))
            if not k.shape[1]:
                found += [f"{slot}: no keys"] if got.any() else []
                continue
            seen = seen_of(queries, k.shape[1], (None, 0))
            report = attention_error(got, attention_reference(q[slot].swapaxes(0, 1), k, v, bf16, seen=seen), bf16)
            found += [] if report.value <= report.bound else [f"{slot}: {report}"]
            self.roundings.append(report.against_rounded)
        return found + self._foreign()

    def _foreign(self) -> list[str]:
        expected = [np.full_like(x, np.nan) for x in self.pages]
        for slot, rows in enumerate(self.model):
            for cache, row in zip(expected, rows, strict=True):
                for first in range(0, len(row), PAGE):
                    part = row[first : first + PAGE]
                    cache[self.tables[slot, first // PAGE], : len(part)] = part
        same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(self.pages, expected, strict=True)]
        return [] if all(same) else ["the pages"]


@pytest.mark.parametrize(
    "steps", [8, pytest.param(2000, marks=pytest.mark.nightly), pytest.param(10_000, marks=pytest.mark.gpu)]
)
def test_every_step_is_that_of_the_model(steps: int) -> None:
    cache = Cache(np.random.default_rng(steps))
    for step in range(steps):
        if cache.numbers.random() < 0.2:
            cache.release(int(cache.numbers.integers(SLOTS)))
        cache.append(int(cache.numbers.choice([1, 1, 2, 19])))
        assert cache.wrong(int(cache.numbers.choice([1, 1, 2]))) == [], step
    assert np.median(cache.roundings) <= 1.5
