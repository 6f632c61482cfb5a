"""``wgmma`` attention on the emulator, beside float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.emulate import emulate
from warploom.emulate.findings import Finding
from warploom.interop.arrays import describe
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.reference import ErrorReport, attention_error, attention_reference
from warploom.ops.attention import plan
from warploom.ops.attention_kernels import mapped
from warploom.ops.backends import emulator_arguments

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Case:
    """One head of one batch. ``growth``: keys grow by this factor from the first visited, the last, to the first."""

    config: HopperConfig
    q_len: int
    kv_len: int
    window: Window = (None, None)
    growth: float = 1.0

    def inputs(self, seed: int | None) -> tuple[Any, Any, Any]:
        """q, k and v, (1, length, 1, head_dim)."""
        numbers = np.random.default_rng(seed)
        q, k, v = (
            numbers.standard_normal((1, n, 1, self.config.head_dim)) for n in (self.q_len, self.kv_len, self.kv_len)
        )
        k *= np.linspace(self.growth, 1.0, self.kv_len)[:, None, None]
        return tuple(x.astype(self.config.dtype.numpy) for x in (q, k, v))  # type: ignore[return-value]

    @property
    def seen(self) -> Any:
        """Which scores count, (q_len, kv_len)."""
        left, right = self.window
        aligned = np.arange(self.q_len)[:, None] + self.kv_len - self.q_len
        key = np.arange(self.kv_len)[None]
        found = np.ones((self.q_len, self.kv_len), bool)
        if left is not None:
            found &= key >= aligned - left
        if right is not None:
            found &= key <= aligned + right
        return found


@dataclass(frozen=True)
class Run:
    """What the emulator found, what it executed by mnemonic, O (q_len, head_dim), and how far that is off."""

    findings: tuple[Finding, ...]
    executed: Mapping[str, int]
    out: Any
    error: ErrorReport

    def count(self, start: str) -> int:
        """How many instructions whose mnemonic starts so were executed."""
        return sum(n for name, n in self.executed.items() if name.startswith(start))


def emulated(case: Case, seed: int | None = 0, arrays: tuple[Any, Any, Any] | None = None, ctas: int = 1) -> Run:
    """Run a case, by default on its own inputs; persistent kernels with ``ctas`` CTAs."""
    q, k, v = arrays or case.inputs(seed)
    out = np.full_like(q, np.nan)
    made = plan(q, k, v, config=case.config, window=None if case.window == (None, None) else case.window)
    views = [describe(x) for x in (q, k, v, out)]
    arguments = emulator_arguments(made.program, views, made.scalars, mapped(made.config, made.layout, views))
    run = emulate(made.program, ctas if case.config.flat else made.grid, arguments, seed=seed)
    reference = attention_reference(*(x[0, :, 0] for x in (q, k, v)), dtype=case.config.dtype, seen=case.seen)
    error = attention_error(out[0, :, 0], reference, case.config.dtype)
    return Run(run.findings, run.executed, out[0, :, 0], error)
