"""Kernels on packed sequences, emulated: each as float64 has it, and what no sequence has is not touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import without
from tests.hopper.mutants import edits, rewritten
from tests.kernels.mutate import run_calls
from warploom.core.dtypes import f16
from warploom.emulate import Emulation
from warploom.ir.program import Program
from warploom.kernels.attention.choice import PackedConfig
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Packed
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.attention.scores import seen_of
from warploom.kernels.source import KernelCall, named
from warploom.tile.mask import Mask

UNTOUCHED = 7.0
PAD = 5
SM80 = ForwardSm80(head_dim=32, tile_m=64, tile_n=32, num_warps=4)
SM90 = ForwardSm90(head_dim=32, tile_n=48, consumers=1)
KINDS = {
    "sm80": SM80,
    "sm90": SM90,
    "sum column": ForwardSm90(head_dim=64, tile_n=64, consumers=1, sum_column=True, q_in_registers=False),
    "masked blocks": ForwardSm90(head_dim=32, tile_n=48, skip_masked=True, turns=False),
    "wide keys, sm80": ForwardSm80(head_dim=48, v_dim=24, tile_m=64, tile_n=32, num_warps=4),
    "wide keys": ForwardSm90(head_dim=96, v_dim=40, tile_n=48, consumers=1),
    "wide values": ForwardSm90(head_dim=32, v_dim=80, tile_n=48, consumers=1, q_in_registers=False),
    "not persistent": ForwardSm90(head_dim=72, tile_n=64, consumers=1, persistent=False, dtype=f16),
}


@dataclass(frozen=True)
class Case:
    """Sequences of so many queries and keys; NaN in ``PAD`` rows behind them, and in unused ones."""

    config: PackedConfig
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: tuple[int | None, int | None] = (None, None)
    heads: int = 2
    kv_heads: int = 1
    used: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    lse: bool = True

    @cached_property
    def starts(self) -> tuple[Any, Any]:
        """Where sequences begin."""
        q, k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (self.queries, self.keys))
        return q, k

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """The rows of each sequence that count."""
        counts = [own if used is None else used for own, used in zip((self.queries, self.keys), self.used, strict=True)]
        q, k = (
            [slice(a, a + n) for a, n in zip(starts[:-1], count, strict=True)]
            for starts, count in zip(self.starts, counts, strict=True)
        )
        return list(zip(q, k, strict=True))

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """Everything by the kernels' names."""
        numbers, d, dtype = np.random.default_rng(0), self.config.head_dim, self.config.dtype.numpy
        q_rows, k_rows = (int(x[-1]) + PAD for x in self.starts)
        q, k = np.full((q_rows, self.heads, d), np.nan), np.full((k_rows, self.kv_heads, d), np.nan)
        v = np.full((*k.shape[:2], self.config.value_dim), np.nan)
        for rows, keys in self.spans:
            q[rows], k[keys], v[keys] = (numbers.standard_normal(x.shape) for x in (q[rows], k[keys], v[keys]))
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        used = {
            f"{name}_used": np.asarray(x, np.int32) for name, x in zip("qk", self.used, strict=True) if x is not None
        }
        return {
            "q": q,
            "k": k,
            "v": v,
            "out": np.full((*q.shape[:2], v.shape[2]), UNTOUCHED, dtype),
            "lse": np.full((self.heads, q_rows), UNTOUCHED, np.float32),
            "q_starts": self.starts[0],
            "k_starts": self.starts[1],
            **used,
        }

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """Both launches."""
        x = self.arrays
        problem = AttentionProblem(
            len(self.queries),
            self.heads,
            self.kv_heads,
            Packed(x["q"].shape[0], x["k"].shape[0], ("q_used" in x, "k_used" in x)),
            self.config.head_dim,
            self.config.dtype,
            window=self.window,
            lse=self.lse,
            v_dim=0 if x["v"].shape[2] == x["k"].shape[2] else x["v"].shape[2],
        )
        lying = {name: (x[name].shape[1] * x[name].shape[2], x[name].shape[2]) for name in ("q", "k", "v", "out")}
        return self.config.calls(problem, ArrayStrides(lying), 3)

    def run(self, program: Program | None = None, seed: int | None = None) -> list[str]:
        """What is wrong: findings, and sequences that float64 has otherwise. ``program`` in place of the second."""
        arrays, done = self.launched(program, seed)
        return [str(x) for one in done for x in one.findings] + self._wrong(arrays["out"], arrays["lse"])

    def launched(self, program: Program | None = None, seed: int | None = None) -> tuple[Any, tuple[Emulation, ...]]:
        """The arrays after both launches, and how these went."""
        arrays = {name: x.copy() for name, x in self.arrays.items()}
        return arrays, run_calls(self.calls, arrays, seed, program, of=1)

    def _wrong(self, out: Any, lse: Any) -> list[str]:
        found: list[str] = []
        rest = np.ones(out.shape[0], np.bool_)
        for number, (rows, keys) in enumerate(self.spans):
            rest[rows] = False
            q, got = (np.swapaxes(x[rows], 0, 1) for x in (self.arrays["q"], out))
            k, v = (np.swapaxes(self.arrays[x][keys], 0, 1) for x in "kv")
            if q.shape[1] == 0:
                continue
            if k.shape[1] == 0:
                if np.any(got != 0) or (self.lse and not np.isneginf(lse[:, rows]).all()):
                    found.append(f"sequence {number} without keys")
                continue
            seen = seen_of(q.shape[1], k.shape[1], self.window)
            exact = attention_reference(q, k, v, self.config.dtype, seen=seen)
            error = attention_error(got, exact, self.config.dtype)
            if not error.ok:
                found.append(f"sequence {number}: {error}")
            if self.lse and not np.allclose(lse[:, rows], exact.lse, rtol=0, atol=1e-3):
                found.append(f"log-sum-exps of sequence {number}")
        if np.any(out[rest].astype(np.float32) != UNTOUCHED) or np.any(lse[:, rest] != UNTOUCHED):
            found.append("rows of no sequence are written")
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_lengths(kind: str) -> None:
    """Empty ones, ones without keys, ends within a tile; NaN beside them."""
    lse, mask = kind != "sum column", (None, None) if kind == "sum column" else (None, 0)
    assert Case(KINDS[kind], (5, 0, 70, 20), (9, 3, 80, 0), mask, lse=lse).run() == []


@pytest.mark.parametrize("kind", ["sm80", "sm90"])
def test_windows_and_parts_of_sequences(kind: str) -> None:
    used = (2, 40, 0), (9, 0, 7)
    assert Case(KINDS[kind], (3, 60, 5), (40, 10, 9), (20, 3), heads=3, kv_heads=3, used=used).run() == []


def test_random_problems() -> None:
    numbers = np.random.default_rng(3)
    for turn in range(4):
        q, k = numbers.integers(0, 100, (2, int(numbers.integers(1, 5))))
        window = [(None, None), (30, 0)][turn // 2]
        case = Case((SM80, SM90)[turn % 2], tuple(q.tolist()), tuple(k.tolist()), window)
        assert case.run(seed=turn) == [], case


def test_no_thread_falls_behind_the_one_that_claims() -> None:
    """Of CTAs that take more tiles than are remembered at a time."""
    case = Case(replace(SM90, head_dim=8, tile_n=16), (3,) * 27, (9,) * 27, (None, 0), heads=1)
    assert case.run(seed=0) == []


def test_a_consumer_without_rows_multiplies_one_block() -> None:
    """Of five, beside one that has rows."""
    products: list[int] = []
    for rows in (20, 70):
        case = Case(ForwardSm90(head_dim=32, tile_n=48), (rows,), (240,), heads=1)
        assert case.run() == []
        _, (_, work) = case.launched()
        products.append(sum(n for name, n in work.executed.items() if name.startswith("wgmma.mma")))
    few, many = products
    assert few * 10 == many * 6 > 0


@pytest.mark.parametrize(
    ("causal", "length", "steps"), [(False, 33, 3), (False, 48, 3), (False, 7, 1), (True, 96, 4 + 6)]
)
def test_values_of_keys_that_no_row_sees_are_not_multiplied(
    causal: bool, length: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 16 keys, beside those of Q·Kᵀ, which has the whole block; under a causal mask of each consumer apart."""
    consumers = 2 if causal else 1
    config = ForwardSm90(head_dim=32, tile_n=96 if causal else 48, consumers=consumers)
    case = Case(config, (length,), (length,), (None, 0 if causal else None), heads=1)
    assert case.run() == []
    _, (_, work) = case.launched()
    products = sum(n for name, n in work.executed.items() if name.startswith("wgmma.mma"))
    assert products == 4 * (2 * consumers + steps)
    reach: Any = Mask.reach
    monkeypatch.setattr(Mask, "reach", lambda *given: reach(*given) - 32)
    source = case.calls[1].source
    if steps > 1:
        narrower = named(source.function).trace(source.name, **dict(source.arguments))
        assert case.run(narrower), "a step too few is found"


def test_the_check_sees_a_missing_mask() -> None:
    """Were the last block not masked, the zeros behind a sequence would count as keys."""
    case = Case(SM90, (20,), (20,))
    source = case.calls[1].source
    arguments = dict(source.arguments)
    unmasked = replace(arguments["features"], ragged_kv=False)
    assert case.run(replace(source, arguments=tuple((arguments | {"features": unmasked}).items())).program)


def test_a_missing_wait_is_found() -> None:
    """The first wait for an mbarrier of every function that has one; ``tests/hopper`` tries all of the same kernel."""
    case = Case(SM90, (70,), (250,), heads=1, kv_heads=1)
    program = case.calls[1].source.program
    first: dict[str, tuple[int, Any]] = {}
    for number, op in enumerate(program.ops()):
        if op.instruction.mnemonic.startswith("mbarrier.try_wait"):
            first.setdefault(op.where.function, (number, op))
    assert len(first) >= 4
    for function, (number, op) in first.items():
        _, rewrite = next(iter(edits(op)))
        assert case.run(rewritten(program, number, rewrite)), function


def test_a_launch_that_overlaps_with_the_list_waits_before_it_reads_memory() -> None:
    first, second = Case(SM90, (20,), (20,)).calls
    assert (first.overlaps, second.overlaps) == (False, True)
    names = [op.instruction.mnemonic for op in second.source.program.ops()]
    before = names[: names.index("griddepcontrol.wait")]
    assert "mbarrier.init" in " ".join(before)
    assert not [name for name in before if name.startswith(("ld.global", "cp.async"))]


def test_a_launch_that_does_not_wait_for_the_list_is_found() -> None:
    case = Case(SM90, (20,), (20,))
    program = without(case.calls[1].source.program, "griddepcontrol.wait")
    _, (_, second) = case.launched(program)
    assert {finding.kind for finding in second.findings} == {"race"}
    assert "of launch 0, " in second.findings[0].message
