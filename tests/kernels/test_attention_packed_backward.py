"""Gradients of packed sequences, emulated: sequence by sequence as float64 has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from tests.kernels.gradient_reference import Gradient, GradientReference, gradient_reference
from warploom.core.dtypes import f16
from warploom.core.targets import target
from warploom.interop.arrays import describe
from warploom.kernels.attention.backward_choice import BackwardConfig, choose
from warploom.kernels.attention.backward_shares import WGMMA_RATE, HeadShares
from warploom.kernels.attention.backward_sm80 import BackwardSm80
from warploom.kernels.attention.backward_sm90 import KEYS, BackwardSm90
from warploom.kernels.attention.lists import list_gradient_tiles
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, BackwardProblem, Packed
from warploom.kernels.attention.reference import attention_reference
from warploom.kernels.attention.scores import seen_of
from warploom.ops.steps import Steps

UNTOUCHED, PAD = 7.0, 5
MULTIPROCESSORS = 2
SM80 = BackwardSm80(head_dim=32, tile_m=32, num_warps=4)
KINDS = {
    "sm80": SM80,
    "sm90": BackwardSm90(head_dim=64, tile_m=32, rising=True),
    "tile after tile": BackwardSm90(head_dim=64, tile_m=32, rising=True, persistent=True),
    "wide keys, sm80": BackwardSm80(head_dim=40, v_dim=24, tile_m=32, num_warps=4),
    "wide keys": BackwardSm90(head_dim=64, v_dim=40, tile_m=32),
    "sm80 in turn": BackwardSm80(head_dim=40, tile_m=32, num_warps=4, dtype=f16, in_turn=True),
}


@dataclass(frozen=True)
class Case:
    """Sequences of so many queries and keys, and NaN in ``PAD`` rows behind them."""

    config: BackwardConfig
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: tuple[int | None, int | None] = (None, None)
    heads: int = 2
    kv_heads: int = 1
    sinks: tuple[float, ...] = ()

    @cached_property
    def starts(self) -> tuple[Any, Any]:
        """Where sequences begin."""
        q, k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (self.queries, self.keys))
        return q, k

    def sequences(self) -> Any:
        """(rows of queries, rows of keys, which scores count) of each."""
        for i, (n, m) in enumerate(zip(self.queries, self.keys, strict=True)):
            q, k = (slice(int(x[i]), int(x[i + 1])) for x in self.starts)
            yield q, k, seen_of(n, m, self.window)

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """Everything by the kernels' names; the forward pass in float64."""
        numbers, d, dtype = np.random.default_rng(0), self.config.head_dim, self.config.dtype.numpy
        rows, keys = (int(x[-1]) + PAD for x in self.starts)
        q, dout = (numbers.standard_normal((rows, self.heads, n)).astype(dtype) for n in (d, self.config.value_dim))
        k, v = (numbers.standard_normal((keys, self.kv_heads, n)).astype(dtype) for n in (d, self.config.value_dim))
        out, lse = np.full_like(dout, np.nan), np.full((self.heads, rows), np.nan, np.float32)
        for own, others, seen in self.sequences():
            turned = (np.swapaxes(x, 0, 1) for x in (q[own], k[others], v[others]))
            found = attention_reference(*turned, dtype=self.config.dtype, seen=seen, sinks=self._logits)
            out[own], lse[:, own] = np.swapaxes(found.output, 0, 1), found.lse
        for x in (q, k, v, dout):
            x[-PAD:] = np.nan
        gradients = {f"d{name}": np.full_like(x, UNTOUCHED) for name, x in (("q", q), ("k", k), ("v", v))}
        change = numbers.standard_normal(lse.shape).astype(np.float32)
        starts = {"q_starts": self.starts[0], "k_starts": self.starts[1]}
        if self.sinks:
            gradients |= {"sinks": self._logits, "dsinks": np.full_like(self._logits, UNTOUCHED)}
        return {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": change, **starts, **gradients}

    @property
    def _logits(self) -> Any:
        return np.asarray(self.sinks or (-np.inf,) * self.heads, np.float32)

    def run(self) -> list[str]:
        """The sequences that float64 has otherwise."""
        x, config = self.arrays, self.config
        forward = AttentionProblem(
            len(self.queries),
            self.heads,
            self.kv_heads,
            Packed(x["q"].shape[0], x["k"].shape[0]),
            config.head_dim,
            config.dtype,
            window=self.window,
            sinks=bool(self.sinks),
            v_dim=0 if config.value_dim == config.head_dim else config.value_dim,
        )
        problem = BackwardProblem(forward, True, getattr(config, "in_turn", True))
        strides = {name: (a.shape[1] * a.shape[2], a.shape[2]) for name, a in x.items() if a.ndim == 3}
        calls = config.calls(problem, ArrayStrides(strides), MULTIPROCESSORS)
        Steps(tuple(calls)).emulate({name: describe(a) for name, a in x.items()})
        found = [self._excess(i) for i in self.sequences()]
        wrong = [f"{i}: {excess}" for i, excess in enumerate(found) if excess > 1.0] + self._of_sinks()
        return wrong + [
            f"rows of no sequence in {name}"
            for name in ("dq", "dk", "dv")
            if np.any(x[name][-PAD:].astype(np.float32) != 0)
        ]

    def _of_sinks(self) -> list[str]:
        """What is wrong with their gradient: the sum over sequences. One without keys has the sink as its lse."""
        if not self.sinks:
            return []
        parts = [self._reference(*i).dsinks for i in self.sequences() if 0 not in i[2].shape]
        value, allowed = (sum(getattr(part, name) for part in parts) for name in ("value", "allowed"))
        alone = [own for own, _, seen in self.sequences() if not seen.shape[1]]
        value += sum(self.arrays["dlse"][:, own].astype(np.float64).sum(1) for own in alone)
        excess = Gradient(value, allowed).excess(self.arrays["dsinks"])
        return [f"sinks: {excess}"] if excess > 1.0 else []

    def _excess(self, sequence: Any) -> float:
        own, others, seen = sequence
        x = self.arrays
        found = [np.swapaxes(x[name][rows], 0, 1) for name, rows in (("dq", own), ("dk", others), ("dv", others))]
        if 0 in seen.shape:
            return 2.0 if any(np.any(g != 0) for g in found) else 0.0
        reference = replace(self._reference(own, others, seen), dsinks=None)
        return max(reference.excess(*found).values())

    def _reference(self, own: Any, others: Any, seen: Any) -> GradientReference:
        x = self.arrays
        given = [np.swapaxes(x[name][others if name in "kv" else own], 0, 1) for name in ("dout", "q", "k", "v", "out")]
        return gradient_reference(
            *given, dtype=self.config.dtype, seen=seen, dlse=x["dlse"][:, own], sinks=x.get("sinks")
        )


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_lengths(kind: str) -> None:
    assert Case(KINDS[kind], (5, 0, 40, 30), (9, 3, 80, 0), (None, 0)).run() == []


@pytest.mark.parametrize(("heads", "kv_heads", "share"), [(4, 2, 1), (6, 1, 2)])
@pytest.mark.parametrize("kind", ["sm90", "wide keys"])
def test_ctas_share_the_heads_of_sequences(
    kind: str, heads: int, kv_heads: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadShares, "of", lambda problem, tile, *_, **__: HeadShares(heads // kv_heads, share, tile))
    assert Case(KINDS[kind], (5, 0, 40, 30), (9, 3, 200, 0), (None, 0), heads, kv_heads).run() == []


@pytest.mark.parametrize("kind", ["sm80", "sm90"])
def test_the_gradient_of_sinks_is_the_sum_over_the_rows_of_all_sequences(kind: str) -> None:
    """Also of rows that see no key, whose log-sum-exp is the sink; never of places that no row has."""
    assert Case(KINDS[kind], (5, 0, 20, 3), (9, 3, 7, 0), (None, 0), sinks=(0.5, -1.0)).run() == []


@pytest.mark.parametrize(("rows", "batch", "shares"), [(8192, 6, 12), (131072, 32, 1), (0, 1, 1)])
def test_heads_of_packed_sequences_are_shared_where_these_do_not_fill_the_gpu(
    rows: int, batch: int, shares: int
) -> None:
    problem = BackwardProblem(AttentionProblem(batch, 48, 1, Packed(rows, rows), 128, f16, window=(None, 0)))
    assert HeadShares.of(problem, (64, KEYS), 132, rate=WGMMA_RATE).count == shares


def test_windows_and_more_keys_than_queries() -> None:
    assert Case(SM80, (40, 3), (90, 70), (20, 5), heads=3, kv_heads=3).run() == []


def test_heads_come_together_by_what_one_sequence_has() -> None:
    """All heads of a sequence come before the next: how many of them the L2 holds is no question of the batch."""
    together = {
        batch: list_gradient_tiles(
            BackwardProblem(AttentionProblem(batch, 32, 32, Packed(batch * 4096, batch * 4096), 64, f16, lse=True)),
            (128, KEYS),
            BackwardSm90(head_dim=64).side_by_side,
        )[1].scalars["batch_together_value"]
        for batch in (1, 8)
    }
    assert together[1] == together[8] > 1


def test_narrow_heads_share_ctas_however_many_sequences_there_are() -> None:
    """A call with other totals makes no other kernel."""
    found = {
        choose(
            BackwardProblem(AttentionProblem(batch, 32, 32, Packed(rows, rows), 64, f16, window=(None, 0), lse=True)),
            target("sm_90a"),
        )[0]
        for batch, rows in ((1, 64), (300, 1 << 20))
    }
    assert [config.persistent for config in found if isinstance(config, BackwardSm90)] == [True]
