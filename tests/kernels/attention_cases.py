"""Small attention problems on the emulator, for the tests of this room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from warploom.core.dtypes import DType
from warploom.emulate import Emulation, emulate
from warploom.ir.program import Program
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.features import PLAIN, AttentionFeatures
from warploom.kernels.attention.forward import attention_forward
from warploom.kernels.attention.ladder import LADDER
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.attention.reference import (
    AttentionReference,
    ErrorReport,
    attention_error,
    attention_reference,
)

RUNGS = {rung.key: rung.config for rung in LADDER.rungs if isinstance(rung.config, AttentionConfig)}
"""The rungs of the ``mma.sync`` generator; those for sm_90a alone have their own tests."""


@lru_cache(maxsize=256)
def traced(config: AttentionConfig, features: AttentionFeatures = PLAIN) -> Program:
    """The Program of a configuration for contiguous tensors of one head, once per process."""
    rows = (config.head_dim,) * 4 if config.static_strides else None
    program = attention_forward.trace(
        config=config, features=features, same_strides=True, row_strides=rows, name="attention"
    )
    return replace(program, min_ctas=config.min_ctas, opt_level=config.opt_level)


@lru_cache(maxsize=64)
def inputs(q_len: int, kv_len: int, head_dim: int, dtype: DType) -> tuple[Any, Any, Any, AttentionReference]:
    """Random Q, K and V of one head, shape (length, head_dim), and their float64 result."""
    rng = np.random.default_rng(q_len + kv_len + head_dim)
    q, k, v = (rng.standard_normal((n, head_dim)).astype(dtype.numpy) for n in (q_len, kv_len, kv_len))
    return q, k, v, attention_reference(q, k, v, dtype)


@dataclass(frozen=True)
class Outcome:
    """What one run found, and how far its result is from float64."""

    emulation: Emulation
    error: ErrorReport
    output: Any

    @property
    def fine(self) -> bool:
        """No finding, and every element within its bound."""
        return not self.emulation.findings and self.error.ok


def launch(
    config: AttentionConfig, problem: AttentionProblem, program: Program, *, seed: int | None = None
) -> tuple[Emulation, Any, AttentionReference]:
    """One head on the emulator: what it found, the output (which starts as NaN), and the unmasked reference."""
    d = config.head_dim
    q, k, v, reference = inputs(problem.q_len, problem.kv_len, d, config.dtype)
    out = np.full_like(q, np.nan)
    by_q, by_k, by_v, by_out = ((x.shape[0] * d, d, d) for x in (q, k, v, out))
    values = problem.scalars(config, by_q, by_k, by_v, by_out)
    arrays = {"q": q, "key": k, "value": v, "out": out}
    everything = values | {name: array.view(np.uint16) for name, array in arrays.items()}
    arguments = {p.name: everything[p.name] for p in program.parameters}
    return emulate(program, problem.grid(config), arguments, seed=seed), out, reference


def run(
    config: AttentionConfig,
    kv_blocks: int,
    *,
    q_blocks: int = 1,
    program: Program | None = None,
    seed: int | None = None,
) -> Outcome:
    """``q_blocks`` CTAs of one head, ``kv_blocks`` steps each."""
    lengths = config.tile_m * q_blocks, config.tile_n * kv_blocks
    problem = AttentionProblem(1, 1, 1, *lengths, config.head_dim, config.dtype)
    emulation, out, reference = launch(config, problem, program or traced(config), seed=seed)
    return Outcome(emulation, attention_error(out, reference, config.dtype), out)
