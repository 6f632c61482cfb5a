"""Every synchronisation of the flat ``wgmma`` attention kernel deleted or shifted: caught, or shown to be redundant."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.hopper.mutants import edits, rewritten
from warploom.core.dtypes import bf16
from warploom.emulate import Emulation, TensorMapArgument, emulate
from warploom.ir.program import Program
from warploom.kernels.attention.hopper import attention_hopper
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.layout.tensor_map import TensorMapSpec

CONFIG = HopperConfig(head_dim=64, tile_n=64, hold=False)
QUERIES = 5 * CONFIG.tile_m  # by one CTA: both Q buffers are used twice
BLOCKS = (5, 1)  # key blocks: 5 wrap the ring of two stages twice; 1 takes the path of single-block tiles
ROUNDS = (None, 0, 1, 2)

REDUNDANT = {
    # The fence before the scores orders P and O as well: nothing accesses them between the two products. It is there
    # for ptxas, which otherwise injects one and says so.
    "without wgmma.fence.sync.aligned in _issue_product",
}


@cache
def program() -> Program:
    return attention_hopper.trace(config=CONFIG, heads_inside=False)


def run(mutant: Program, blocks: int, seed: int | None) -> tuple[Emulation, float]:
    """The emulation, and the largest error of O."""
    c, numbers = CONFIG, np.random.default_rng(2)
    length = blocks * c.tile_n
    q, k, v = (
        numbers.standard_normal((1, 1, n, c.head_dim)).astype(ml_dtypes.bfloat16) for n in (QUERIES, length, length)
    )
    o = np.zeros_like(q)

    def tensor_map(x: np.ndarray[Any, Any], rows: int) -> TensorMapArgument:
        spec = TensorMapSpec(bf16, x.shape[::-1], x.strides[2::-1], (64, rows, 1, 1), 128)
        return TensorMapArgument(x, spec)

    values: dict[str, Any] = {
        "q_map": tensor_map(q, 64),
        "k_map": tensor_map(k, c.tile_n),
        "v_map": tensor_map(v, c.tile_n),
        "o_map": tensor_map(o, 64),
        "lse": np.zeros(QUERIES, np.float32),
        "q_len": QUERIES,
        "kv_len": length,
        "q_blocks": QUERIES // c.tile_m,
        "kv_blocks": blocks,
        "heads": 1,
        "tiles": QUERIES // c.tile_m,
    }
    emulation = emulate(mutant, 1, {p.name: values[p.name] for p in mutant.parameters}, seed=seed)
    a, b, w = (x[0, 0].astype(np.float64) for x in (q, k, v))
    p = np.exp(a @ b.T / np.sqrt(c.head_dim))
    return emulation, float(np.abs(o[0, 0].astype(np.float64) - p / p.sum(1, keepdims=True) @ w).max())


def caught(mutant: Program) -> bool:
    return any(run(mutant, blocks, seed)[0].findings for seed in ROUNDS for blocks in BLOCKS)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_kernel_is_right_and_clean(blocks: int, seed: int | None) -> None:
    emulation, error = run(program(), blocks, seed)
    assert emulation.findings == ()
    assert error < 0.02


def test_every_mutant_is_caught_or_redundant() -> None:
    survivors: list[str] = []
    ops = list(program().ops())
    labels = [[f"{what} in {op.where.function}" for what, _ in edits(op)] for op in ops]
    last = {label: i for i, names in enumerate(labels) for label in names}
    count = 0
    for number, op in enumerate(ops):
        for label, (_, rewrite) in zip(labels[number], edits(op), strict=True):
            count += 1
            if not caught(rewritten(program(), number, rewrite)):
                survivors.append(f"{label}, the last" if last[label] == number and label not in REDUNDANT else label)
    assert count > 100
    assert set(survivors) <= REDUNDANT
