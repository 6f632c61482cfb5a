"""The ladder of attention forward: its problems on the emulator and on a GPU, and the baselines beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, bf16
from warploom.interop.arrays import describe
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem, Even
from warploom.kernels.attention.reference import ErrorReport, attention_error, attention_reference
from warploom.kernels.settings import refuse
from warploom.measure.attention import AttentionOnGpu
from warploom.measure.timing import Candidate
from warploom.ops.attention import plan
from warploom.ops.backends import EMULATION_OVERHEAD, SECONDS_PER_FLOP, emulator_arguments
from warploom_lab.bench.baselines import flash_attention_4, sdpa
from warploom_lab.bench.ladder import EmulatorCase, ErrorEntry, GpuCase
from warploom_lab.kernels.ladder import Rung

GPU_TOKENS = 16384
"""Batch times sequence length of every size on the GPU."""
GPU_WIDTH = 2048
"""Heads times head_dim there."""
OVER_ROUNDED = "max |o - o64| / (2·max |rounded - o64|), where rounded is float64 that rounds P and O to the type"


def settled(
    rung: Rung[AttentionConfig], head_dim: int, dtype: DType, settings: Mapping[str, str]
) -> Rung[AttentionConfig]:
    """The rung for a head_dim and type, with flags overridden. Raises ConfigError for flags that are not valid."""
    config = dataclasses.replace(rung.config, head_dim=head_dim, dtype=dtype).with_settings(dict(settings))
    refuse(f"rung {rung.key} with these flags is not valid", config.check())
    return dataclasses.replace(rung, config=config)


def has_room(rung: Rung[AttentionConfig], head_dim: int, dtype: DType) -> bool:
    """Whether the rung's row sums can be a column of P·V at this head_dim and type; without such a column, yes."""
    config = dataclasses.replace(rung.config, head_dim=head_dim, dtype=dtype)
    if not getattr(config, "sum_column", False):
        return True
    return not config.check() or bool(dataclasses.replace(config, sum_column=False).check())


@dataclass(frozen=True)
class AttentionFamily:
    """Attention forward, full (no mask), self-attention. ``heads`` and ``seq`` are the emulator's problem."""

    heads: int = 1
    seq: int = 256
    head_dim: int = 128
    dtype: DType = bf16
    name: str = "attention"

    def emulator_case(self, config: AttentionConfig, seed: int) -> EmulatorCase:
        """q, k, v ~ N(0, 1) of shape (1, seq, heads, head_dim), and an output full of NaN."""
        rng = np.random.default_rng(seed)
        shape = (1, self.seq, self.heads, config.head_dim)
        q, k, v = (rng.standard_normal(shape, np.float32).astype(config.dtype.numpy) for _ in range(3))
        out = np.full_like(q, np.nan)
        made = plan(q, k, v, config=config)

        def errors() -> ErrorEntry:
            heads_first = (np.swapaxes(x, 1, 2) for x in (q, k, v))
            reference = attention_reference(*heads_first, dtype=config.dtype)
            return _entry(attention_error(np.swapaxes(out, 1, 2), reference, config.dtype))

        views = [describe(x) for x in (q, k, v, out)]
        arguments = emulator_arguments(made.program, views, made.calls[0].scalars, made.calls[0].maps)
        return EmulatorCase(made.program, made.grid, arguments, errors)

    def expected_seconds(self, config: AttentionConfig) -> float:
        """From the floating-point operations of the two products."""
        return EMULATION_OVERHEAD + SECONDS_PER_FLOP * 4 * self.heads * self.seq**2 * config.head_dim

    def gpu_case(self, size: int, device: int, seed: int) -> GpuCase[AttentionConfig]:
        """16384 tokens of sequences of length ``size``, heads × head_dim = 2048."""
        batch, heads = max(1, GPU_TOKENS // size), max(1, GPU_WIDTH // self.head_dim)
        problem = AttentionProblem(batch, heads, heads, Even(size, size), self.head_dim, self.dtype)
        work, label = AttentionOnGpu(problem, device, seed), {"seq": size, "batch": batch, "heads": heads}
        return GpuCase(label, problem.flops, work, baselines(work.inputs), lambda config: _entry(work.error(config)))


def _entry(report: ErrorReport) -> ErrorEntry:
    """The error by element; or, where that holds but the worst error is too far from a rounding reference's, that one.

    NaN in the output counts as very far (a finite number: JSON has no infinity).
    """
    metric, value = report.metric, report.value / report.bound
    if value <= 1.0 and report.against_rounded > 2.0:
        metric, value = OVER_ROUNDED, report.against_rounded / 2.0
    return ErrorEntry(metric, value if value < np.inf else float(np.finfo(np.float64).max), 1.0)


def baselines(
    inputs: Sequence[tuple[Any, Any, Any]],
    causal: bool = False,
    backends: Sequence[str] = ("torch_flash", "torch_cudnn"),
) -> list[Candidate]:
    """PyTorch's backends on (batch, heads, seq, head_dim) views of the inputs, and FlashAttention-4: what runs here."""
    swapped = [tuple(x.transpose(1, 2) for x in of) for of in inputs]
    latest, _ = flash_attention_4()
    calls: dict[str, tuple[Any, Sequence[tuple[Any, ...]]]] = {x: (sdpa(x, causal), swapped) for x in backends}
    if latest is not None:
        calls["flash_attention_4"] = partial(latest, causal=causal), inputs
    found: list[Candidate] = []
    for name, (run, sets) in calls.items():
        with contextlib.suppress(Exception):  # this build, GPU or head_dim lacks the kernel
            run(*sets[0])
            found.append(Candidate(name, lambda i, run=run, sets=sets: run(*sets[i])))
    return found
