"""The kernels of ``attention_paged`` on the emulator, one after another, with the main one replaced by a mutant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tests.kernels.mutate import run_calls
from tests.ops.paged_cases import Step
from warploom.core.errors import WarploomError
from warploom.ir.program import Program
from warploom.kernels.attention.choice import CachedConfig
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.source import KernelCall
from warploom.ops.attention_paged import attention_paged_call, cached_strides, problem_on_cache
from warploom.ops.declare import Arguments


@dataclass(frozen=True)
class DecodeCase:
    """A configuration's kernels on a step, for so many multiprocessors."""

    config: CachedConfig
    step: Step
    multiprocessors: int = 1

    @cached_property
    def given(self) -> Arguments:
        """The arguments, checked."""
        (q, k, v, lens), named = self.step.arguments
        arrays = {"q": q, "k_cache": k, "v_cache": v, "kv_lens": lens}
        views, options = attention_paged_call.positions({"return_lse": True, **named, **arrays, "fixed_split": None})
        declaration = attention_paged_call.declaration
        return declaration.bind(attention_paged_call.views(views), declaration.plain(options), lambda x: x)

    @cached_property
    def problem(self) -> AttentionProblem:
        """The problem of the step, whose pieces may be smaller than those that callers may ask for."""
        problem = problem_on_cache(self.given)
        split = self.step.arguments[1].get("fixed_split")
        return replace(problem, sequences=replace(problem.cache, split=split))

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The two launches."""
        views = self.given.views
        return self.config.calls(self.problem, cached_strides({**views, "out": views["q"]}), self.multiprocessors)

    @property
    def main(self) -> KernelCall:
        """The launch that multiplies: of the decode kernels the first, behind a list of tiles the last."""
        return self.calls[0 if isinstance(self.config, Decode) else -1]

    @property
    def program(self) -> Program:
        """Its kernel."""
        return self.main.source.program

    def run(self, program: Program | None = None, seed: int | None = None) -> Any:
        """(findings, O, log-sum-exps), the main kernel replaced by ``program``, if given."""
        q, p = self.given.views["q"], self.problem
        arrays: dict[str, Any] = {name: view.owner for name, view in self.given.views.items()}
        arrays["out"] = np.full(q.shape, np.nan, q.dtype.numpy)
        arrays["lse"] = np.full(
            (p.heads, p.q_len) if p.cache.packed else (p.batch, p.heads, p.q_len), np.nan, np.float32
        )
        done = run_calls(self.calls, arrays, seed, program, of=self.calls.index(self.main))
        found = [finding for one in done for finding in one.findings]
        return found, arrays["out"], arrays["lse"]

    def escapes(self, programs: dict[str, Program]) -> list[str]:
        """The mutants with no finding and the same bits as the kernel itself."""
        findings, out, lse = self.run()
        assert findings == []

        def same(program: Program) -> bool:
            try:
                found, other, logs = self.run(program)
            except WarploomError:
                return False
            return (
                not found and np.array_equal(other.view(np.uint16), out.view(np.uint16)) and np.array_equal(logs, lse)
            )

        return sorted(what for what, program in programs.items() if same(program))
