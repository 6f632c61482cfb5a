"""The kernels of ``attention_paged`` on the emulator, one after another, with the main one replaced by a mutant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tests.kernels.mutate import run_calls
from tests.ops.paged_cases import Step
from warploom.core.errors import WarploomError
from warploom.interop.arrays import describe
from warploom.ir.program import Program
from warploom.kernels.attention.choice import CachedConfig
from warploom.kernels.attention.decode import Decode
from warploom.kernels.source import KernelCall
from warploom.ops.attention_arrays import Options
from warploom.ops.attention_paged import NAMES
from warploom.ops.attention_paged_arrays import CacheInputs, read_cache


@dataclass(frozen=True)
class DecodeCase:
    """A configuration's kernels on a step, for so many multiprocessors."""

    config: CachedConfig
    step: Step
    multiprocessors: int = 1

    @cached_property
    def inputs(self) -> CacheInputs:
        """The arrays, checked."""
        (q, k, v, lens), named = self.step.arguments
        given = {"q": q, "k_cache": k, "v_cache": v, "kv_lens": lens}
        given |= {name: named[name] for name in ("cu_seqlens_q", "block_table") if name in named}
        others = {name: x for name, x in named.items() if name not in given and name != "fixed_split"}
        options = Options(**{"causal": True, "return_lse": True, **others})
        views = {name: describe(x) for name, x in given.items()}
        return read_cache(views, options, named.get("fixed_split"))

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The two launches."""
        out = self.inputs.views["q"]
        return self.config.calls(self.inputs.problem, self.inputs.operands(out), self.multiprocessors)

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
        q, p = self.inputs.views["q"], self.inputs.problem
        arrays: dict[str, Any] = {NAMES.get(name, name): view.owner for name, view in self.inputs.views.items()}
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
