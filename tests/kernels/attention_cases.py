"""Attention kernels on the emulator beside float64: one batch, some heads, through a configuration's call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from tests.kernels.mutate import objection
from warploom.emulate import Emulation, emulate
from warploom.interop.arrays import describe
from warploom.ir.program import Program
from warploom.kernels.attention.problem import FORWARD, ArrayStrides, AttentionConfig, AttentionProblem, Even
from warploom.kernels.attention.reference import ErrorReport, attention_error, attention_reference
from warploom.kernels.attention.scores import Window, seen_of
from warploom.kernels.source import KernelCall
from warploom.ops.backends import emulator_arguments
from warploom_lab.kernels.attention.ladder import FULL_LADDER, LADDER

RUNGS = {rung.key: rung.config for rung in LADDER.rungs}
"""The rungs for every GPU: ``mma.sync``."""
EVERY_RUNG = {rung.key: rung.config for rung in FULL_LADDER.rungs}

Arrays = tuple[Any, Any, Any]


def changed(problem: AttentionProblem, **changes: Any) -> AttentionProblem:
    """The problem with other values of some fields, those of its sequences among them."""
    own = {f.name for f in fields(problem.sequences)}
    sequences = replace(problem.sequences, **{name: x for name, x in changes.items() if name in own})
    return replace(problem, sequences=sequences, **{name: x for name, x in changes.items() if name not in own})


@dataclass(frozen=True)
class Case:
    """A kernel and a problem of one batch. ``growth``: keys grow by this factor from the last to the first.

    The last keys are visited first. ``ctas``: of a persistent kernel.
    """

    config: AttentionConfig
    q_len: int
    kv_len: int
    window: Window = (None, None)
    growth: float = 1.0
    heads: int = 1
    ctas: int = 1

    @classmethod
    def of_blocks(cls, config: AttentionConfig, kv_blocks: int, q_blocks: int = 1, **options: Any) -> Case:
        """Whole tiles."""
        return cls(config, config.tile_m * q_blocks, config.tile_n * kv_blocks, **options)

    @cached_property
    def problem(self) -> AttentionProblem:
        """What is asked."""
        c, h = self.config, self.heads
        v_dim = 0 if c.value_dim == c.head_dim else c.value_dim
        return AttentionProblem(
            1, h, h, Even(self.q_len, self.kv_len), c.head_dim, c.dtype, window=self.window, v_dim=v_dim
        )

    @cached_property
    def call(self) -> KernelCall:
        """The kernel and its launch on arrays (batch, sequence, heads, head_dim)."""
        c, h = self.config, self.heads
        lying = (
            (self.q_len, c.head_dim),
            (self.kv_len, c.head_dim),
            (self.kv_len, c.value_dim),
            (self.q_len, c.value_dim),
        )
        strides = ((length * h * d, d, h * d) for length, d in lying)
        (call,) = c.calls(self.problem, ArrayStrides(dict(zip(FORWARD, strides, strict=True))), self.ctas)
        return call

    @property
    def program(self) -> Program:
        """The traced kernel."""
        return self.call.source.program

    def inputs(self, seed: int) -> Arrays:
        """Q, K and V, (1, length, heads, head_dim)."""
        numbers, d, v_dim = np.random.default_rng(seed), self.config.head_dim, self.config.value_dim
        shapes = (self.q_len, d), (self.kv_len, d), (self.kv_len, v_dim)
        q, k, v = (numbers.standard_normal((1, n, self.heads, cols)) for n, cols in shapes)
        k *= np.linspace(self.growth, 1.0, self.kv_len)[:, None, None]
        return tuple(x.astype(self.config.dtype.numpy) for x in (q, k, v))  # type: ignore[return-value]

    @property
    def seen(self) -> Any:
        """Which scores count, (q_len, kv_len)."""
        return seen_of(self.q_len, self.kv_len, self.window)

    def run(
        self, *, seed: int | None = None, arrays: Arrays | None = None, program: Program | None = None, **how: Any
    ) -> Outcome:
        """Emulate the kernel (or ``program`` in its place) on ``arrays``, by default its own; O starts as NaN."""
        q, k, v = arrays or self.inputs(seed or 0)
        out = np.full_like(q, np.nan, shape=(*q.shape[:3], v.shape[3]))
        scalars, maps = self.call.scalars, self.call.maps
        program = program or self.program
        arguments = emulator_arguments(program, [describe(x) for x in (q, k, v, out)], scalars, maps)
        found = emulate(program, self.call.grid, arguments, seed=seed, **how)
        q, k, v, out = (np.swapaxes(x[0], 0, 1) for x in (q, k, v, out))
        with np.errstate(invalid="ignore"):
            reference = attention_reference(q, k, v, self.config.dtype, seen=self.seen)
            return Outcome(found, out, attention_error(out, reference, self.config.dtype))

    def survives(self, program: Program, seed: int | None = None) -> bool:
        """Whether nothing objects to ``program`` in the kernel's place; the first finding is enough."""
        return objection(lambda: self.run(program=program, seed=seed, stop=True)) is None


@dataclass(frozen=True)
class Outcome:
    """What a run found, O (heads, q_len, head_dim), and how far it is from float64."""

    emulation: Emulation
    out: Any
    error: ErrorReport

    @property
    def fine(self) -> bool:
        """No finding, and every element within its bound."""
        return not self.emulation.findings and self.error.ok

    @property
    def executed(self) -> Mapping[str, int]:
        """Instructions by mnemonic."""
        return self.emulation.executed

    def count(self, start: str) -> int:
        """How many instructions whose mnemonic starts so were executed."""
        return sum(n for name, n in self.executed.items() if name.startswith(start))

    def __str__(self) -> str:
        return "\n".join([str(self.error), *map(str, self.emulation.findings)])
