"""Caches with poison wherever no sequence has a key, calls of ``attention_paged`` on them, and float64 beside."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

import warploom
from tests.kernels.attention64 import near
from warploom.core.dtypes import DType, bf16, f16
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.attention.scores import seen_of

NUMPY = {f16: np.dtype(np.float16), bf16: np.dtype(ml_dtypes.bfloat16)}
LSE_ERROR = 2e-4
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Step:
    """One call: ``lengths`` of the sequences in the cache, ``queries`` of each (packed, where they differ).

    ``page``: keys of a page, 0 without pages. Everything beyond a length is NaN, and tables name no page there.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...] = ()
    page: int = 16
    capacity: int = 256
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    dtype: DType = bf16
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    fp8: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Queries of each sequence; one by default."""
        return self.queries or (1,) * len(self.lengths)

    @property
    def packed(self) -> bool:
        """Whether sequences have different counts of queries."""
        return len(set(self.counts)) > 1

    @cached_property
    def dense(self) -> tuple[list[Array], list[Array], list[Array]]:
        """Queries, keys and values of each sequence, (length, heads, head_dim)."""
        numbers, d, kind = np.random.default_rng(self.seed), self.head_dim, NUMPY[self.dtype]

        def random(lengths: tuple[int, ...], heads: int) -> list[Array]:
            return [numbers.standard_normal((n, heads, d)).astype(kind) for n in lengths]

        q = random(self.counts, self.kv_heads * self.group)
        if self.fp8:
            kind = np.dtype(ml_dtypes.float8_e4m3fn)
        return q, random(self.lengths, self.kv_heads), random(self.lengths, self.kv_heads)

    @cached_property
    def table(self) -> Array:
        """The block table: pages in random order, and far beyond the last where a sequence needs none."""
        entries, batch = self.capacity // self.page, len(self.lengths)
        found = np.random.default_rng(self.seed + 1).permutation(batch * entries).reshape(batch, entries)
        for row, length in zip(found, self.lengths, strict=True):
            row[-(-length // self.page) :] = 10**9
        return found.astype(np.int32)

    def cache(self, rows: list[Array]) -> Array:
        """What the call gets of keys or values."""
        batch, size = len(self.lengths), self.page or self.capacity
        blocks = batch * (self.capacity // size)
        found = np.full((blocks, size, self.kv_heads, self.head_dim), np.nan, rows[0].dtype)
        for sequence, own in enumerate(rows):
            for first in range(0, len(own), size):
                at = self.table[sequence, first // size] if self.page else sequence
                found[at, : len(own) - first] = own[first : first + size]
        return found

    @cached_property
    def arguments(self) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        q, k, v = self.dense
        named: dict[str, Any] = {"block_table": self.table} if self.page else {}
        if self.packed:
            named["cu_seqlens_q"] = np.cumsum((0, *self.counts)).astype(np.int32)
        queries = np.concatenate(q) if self.packed else np.stack(q)
        return (queries, self.cache(k), self.cache(v), np.array(self.lengths, np.int32)), {**named, **self.options}

    def call(self, **more: Any) -> tuple[list[Array], list[Array]]:
        """O of each sequence (heads, queries, head_dim), and its log-sum-exps (heads, queries)."""
        arrays, named = self.arguments
        return self.by_sequence(*warploom.attention_paged(*arrays, **named, return_lse=True, **more))

    def by_sequence(self, out: Array, lse: Array) -> tuple[list[Array], list[Array]]:
        """A call's results by sequences."""
        return self.split(out), [np.swapaxes(x, 0, 1) for x in self.split_rows(lse)]

    def split(self, out: Array) -> list[Array]:
        """O by sequences."""
        flat = out.reshape(-1, *out.shape[-2:])
        bounds = np.cumsum(self.counts)[:-1]
        return [np.swapaxes(x, 0, 1) for x in np.split(flat, bounds)]

    def split_rows(self, lse: Array) -> list[Array]:
        """Log-sum-exps by sequences, (queries, heads)."""
        if not self.packed:
            return [x.T for x in lse]
        return np.split(lse.T, np.cumsum(self.counts)[:-1])

    def problems(self) -> list[str]:
        """What is wrong with a call's results, by sequences; empty if nothing is."""
        return self._problems(*self.call())

    def problems_of(self, out: Array, lse: Array) -> list[str]:
        """What is wrong with these results."""
        return self._problems(*self.by_sequence(out, lse))

    def _problems(self, outs: list[Array], logs: list[Array]) -> list[str]:
        found: list[str] = []
        for number, (out, lse, *of) in enumerate(zip(outs, logs, *self.dense, strict=True)):
            q, k, v = (np.swapaxes(x, 0, 1) for x in of)
            wrong = self._wrong(out, lse, q, self._scaled(k, "k_scale", number), self._scaled(v, "v_scale", number))
            found += [f"sequence {number}: {what}" for what in wrong]
        return found

    def _scaled(self, x: Array, name: str, number: int) -> Array:
        """Keys or values (heads, keys, head_dim) as they count."""
        if name not in self.options:
            return x
        scale = np.broadcast_to(self.options[name], (len(self.lengths), self.kv_heads))[number]
        return x.astype(np.float64) * scale[:, None, None]

    def _wrong(self, out: Array, lse: Array, q: Array, k: Array, v: Array) -> list[str]:
        queries, keys = q.shape[1], k.shape[1]
        if not keys:
            return [] if not out.any() and np.isneginf(lse).all() else ["no key, but no zeros"]
        if not queries:
            return []
        left, right = self.options.get("window") or (None, None)
        seen = seen_of(queries, keys, (left, 0 if self.options.get("causal", True) else right))
        cap, sinks, scale = (self.options.get(name) for name in ("softcap", "sinks", "scale"))
        exact = attention_reference(q, k, v, self.dtype, scale, seen, sinks=sinks, softcap=cap)
        with np.errstate(invalid="ignore"):
            close = np.where(np.isneginf(exact.lse), lse == exact.lse, np.abs(lse - exact.lse) <= LSE_ERROR)
        wrong = [] if close.all() else ["log-sum-exps"]
        error = attention_error(out, exact, self.dtype)
        right = error.ok if cap is None else near(out, exact, self.dtype).all()
        return wrong if right else [*wrong, str(error)]
