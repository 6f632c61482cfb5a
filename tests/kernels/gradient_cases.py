"""Small backward passes on the emulator, beside float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tests.kernels.gradient_reference import GradientReference, gradient_reference
from tests.kernels.mutate import run_calls
from warploom.emulate.findings.findings import Finding
from warploom.interop.arrays import describe
from warploom.ir.program import Program
from warploom.kernels.attention.backward_choice import BackwardConfig
from warploom.kernels.attention.problem import BACKWARD, ArrayStrides, AttentionProblem, BackwardProblem, Even
from warploom.kernels.attention.reference import attention_reference
from warploom.kernels.attention.scores import Window, seen_of
from warploom.kernels.source import KernelCall
from warploom.ops.attention import strides_of

GRADIENTS = "dq", "dk", "dv"
CTAS = 3
"""That run at a time."""
SINKS = np.array([1.5, -np.inf, 4.0, -2.0], np.float32)


@dataclass(frozen=True)
class GradientCase:
    """A configuration on a small problem; ``heads`` = (query heads, key heads)."""

    config: BackwardConfig
    q_len: int
    kv_len: int
    window: Window = (None, None)
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    softcap: float | None = None
    scale: float | None = None
    lse_gradient: bool = False
    layout: str = "bshd"
    sinks: bool = False

    @property
    def problem(self) -> BackwardProblem:
        """What is asked."""
        c, (heads, kv_heads) = self.config, self.heads
        v_dim = 0 if c.value_dim == c.head_dim else c.value_dim
        forward = AttentionProblem(
            self.batch,
            heads,
            kv_heads,
            Even(self.q_len, self.kv_len),
            c.head_dim,
            c.dtype,
            window=self.window,
            v_dim=v_dim,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return BackwardProblem(forward, self.lse_gradient, deterministic=False)

    @property
    def seen(self) -> Any:
        """Which scores count, (q_len, kv_len)."""
        return seen_of(self.q_len, self.kv_len, self.window)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Random arrays, heads first, and what the forward pass gives for them."""
        numbers = np.random.default_rng(self.q_len + 7 * self.kv_len)
        (heads, kv_heads), d, v_dim = self.heads, self.config.head_dim, self.config.value_dim
        shapes = {
            "q": (heads, self.q_len, d),
            "k": (kv_heads, self.kv_len, d),
            "v": (kv_heads, self.kv_len, v_dim),
            "dout": (heads, self.q_len, v_dim),
        }
        dtype = self.config.dtype.numpy
        found = {n: numbers.standard_normal((self.batch, *s)).astype(dtype) for n, s in shapes.items()}
        found["sinks"] = SINKS[:heads] if self.sinks else np.full(heads, -np.inf, np.float32)
        how = {"seen": self.seen, "scale": self.scale, "softcap": self.softcap, "sinks": found["sinks"]}
        forward = attention_reference(*(found[n] for n in "qkv"), dtype=self.config.dtype, **how)
        found["out"], found["lse"] = forward.output.astype(dtype), forward.lse.astype(np.float32)
        found["dlse"] = numbers.standard_normal(found["lse"].shape).astype(np.float32)
        return found

    @cached_property
    def reference(self) -> GradientReference:
        """In float64."""
        x = self.inputs
        return gradient_reference(
            *(x[n] for n in ("dout", "q", "k", "v", "out")),
            dtype=self.config.dtype,
            scale=self.scale,
            seen=self.seen,
            softcap=self.softcap,
            dlse=x["dlse"] if self.lse_gradient else None,
            sinks=x["sinks"] if self.sinks else None,
        )

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels."""
        assert not self.config.check()
        assert not self.config.violations(self.problem)
        arrays = self.arrays()
        strides = {n: strides_of(describe(arrays[n]), self.layout) for n in BACKWARD}
        return self.config.calls(self.problem, ArrayStrides(strides, self.layout), CTAS)

    def arrays(self) -> dict[str, Any]:
        """The arrays of a call, gradients full of NaN."""
        found = dict(self.inputs)
        for name in GRADIENTS:
            found[name] = np.full_like(found[name[1:]], np.nan)
        found["dsinks"] = np.full_like(found["sinks"], np.nan)
        for name in BACKWARD if self.layout == "bshd" else ():
            found[name] = np.ascontiguousarray(np.swapaxes(found[name], 1, 2))
        return found

    def run(
        self, seed: int | None = None, changed: Program | None = None, of: str = "dk", stop: bool = False
    ) -> Outcome:
        """All kernels in order, in an order of warps; with another Program for the one that multiplies for ``of``.

        Raises EmulationError at the first finding where it is asked to ``stop``.
        """
        arrays = self.arrays()
        ways = {of, "shares"} if of == "dk" else {of}
        multiplies = next(i for i, call in enumerate(self.calls) if "q" in call.arrays and ways & {*call.arrays})
        done = run_calls(self.calls, arrays, seed, changed, of=multiplies, stop=stop)
        findings = tuple(finding for one in done for finding in one.findings)
        swapped = (arrays[n] if self.layout == "bhsd" else np.swapaxes(arrays[n], 1, 2) for n in GRADIENTS)
        of_sinks = (arrays["dsinks"],) if self.sinks else ()
        return Outcome(findings, self, (*swapped, *of_sinks))


@dataclass(frozen=True)
class Outcome:
    """What one run found, and dQ, dK and dV, heads first, and the gradient of sinks."""

    findings: tuple[Finding, ...]
    case: GradientCase
    gradients: tuple[Any, ...]

    @property
    def excess(self) -> dict[str, float]:
        """The largest error of each gradient over what is allowed."""
        return self.case.reference.excess(*self.gradients)

    @property
    def fine(self) -> bool:
        """No finding, and every element within its bound."""
        return not self.findings and max(self.excess.values()) <= 1.0
