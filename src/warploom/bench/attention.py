"""Attention's part of a ladder: inputs, the float64 reference on either side, and PyTorch's backends as peers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.bench.attention_reference import torch_error
from warploom.bench.ladder import EmulatorCase, ErrorEntry
from warploom.bench.peers import available_sdpa, flash_attention_4, torch_module
from warploom.bench.timing import Candidate, input_sets
from warploom.core.dtypes import DType, bf16
from warploom.core.errors import ConfigError
from warploom.interop.arrays import ArrayView, describe
from warploom.kernels.attention.problem import AttentionConfig
from warploom.kernels.attention.reference import ErrorReport, attention_error, attention_reference
from warploom.kernels.ladder import Rung
from warploom.ops.attention import plan
from warploom.ops.backends import EMULATION_OVERHEAD, SECONDS_PER_FLOP, GpuCall, emulator_arguments

GPU_TOKENS = 16384
"""Batch times sequence length of every size on the GPU."""
GPU_WIDTH = 2048
"""Heads times head_dim there."""
OVER_ROUNDED = "max |o - o64| / (2·max |rounded - o64|), where rounded is float64 that rounds P and O to the type"


def settled(
    rung: Rung[AttentionConfig], head_dim: int, dtype: DType, settings: Mapping[str, str]
) -> Rung[AttentionConfig]:
    """The rung for a head_dim and type, with flags overridden. Raises ConfigError for what is no kernel."""
    config = dataclasses.replace(rung.config, head_dim=head_dim, dtype=dtype).with_settings(dict(settings))
    problems = config.check()
    if problems:
        raise ConfigError(f"rung {rung.key} with these flags is no attention kernel: " + "; ".join(problems))
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
        arguments = emulator_arguments(made.program, views, made.call.scalars, made.call.maps)
        return EmulatorCase(made.program, made.grid, arguments, errors)

    def expected_seconds(self, config: AttentionConfig) -> float:
        """From the floating-point operations of the two products."""
        return EMULATION_OVERHEAD + SECONDS_PER_FLOP * 4 * self.heads * self.seq**2 * config.head_dim

    def gpu_case(self, size: int, device: int, seed: int) -> AttentionOnGpu:
        """16384 tokens of sequences of length ``size``, heads × head_dim = 2048."""
        return AttentionOnGpu(size, self.head_dim, self.dtype, device, seed)


def _entry(report: ErrorReport) -> ErrorEntry:
    """The error by element; or, where that holds but the worst error is too far from a rounding reference's, that one.

    NaN in the output counts as very far (a finite number: JSON has no infinity).
    """
    metric, value = report.metric, report.value / report.bound
    if value <= 1.0 and report.against_rounded > 2.0:
        metric, value = OVER_ROUNDED, report.against_rounded / 2.0
    return ErrorEntry(metric, value if value < np.inf else float(np.finfo(np.float64).max), 1.0)


class AttentionOnGpu:
    """One sequence length on the GPU: input sets that rotate past the L2, outputs, reference and peers."""

    def __init__(self, seq: int, head_dim: int, dtype: DType, device: int, seed: int) -> None:
        torch = self._torch = torch_module()
        self._device = torch.device("cuda", device)
        self._index, self._dtype = device, dtype
        self._kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype.name]
        batch, heads = max(1, GPU_TOKENS // seq), max(1, GPU_WIDTH // head_dim)
        self._shape = (batch, seq, heads, head_dim)
        self.label: Mapping[str, int] = {"seq": seq, "batch": batch, "heads": heads}
        self.flops, self.pause = 4 * batch * heads * seq * seq * head_dim, 0.0
        l2 = int(torch.cuda.get_device_properties(self._device).L2_cache_size)
        self.sets = input_sets(3 * 2 * int(np.prod(self._shape)), l2)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._inputs = [self._fresh() for _ in range(self.sets)]
        self._output = torch.empty(self._shape, dtype=self._kind, device=self._device)
        self._calls: dict[str, GpuCall] = {}
        self.peers: Sequence[Candidate] = self._peers()
        self.stream = int(torch.cuda.current_stream(self._device).cuda_stream)

    def _fresh(self) -> tuple[Any, Any, Any]:
        q, k, v = (
            self._torch.randn(self._shape, generator=self._generator, device=self._device, dtype=self._torch.float32)
            .to(self._kind)
            for _ in range(3)
        )  # fmt: skip
        return q, k, v

    def _peers(self) -> list[Candidate]:
        """PyTorch's flash and cuDNN backends, on the same memory seen as (batch, heads, seq, head_dim); and
        FlashAttention-4 where it can be imported and runs."""
        sets = [tuple(x.transpose(1, 2) for x in inputs) for inputs in self._inputs]
        found = [Candidate(name, _on_sets(run, sets)) for name, run in available_sdpa(*sets[0]).items()]
        latest, _ = flash_attention_4()
        if latest is not None:
            with contextlib.suppress(Exception):  # its compiler does not take this GPU or head_dim
                latest(*self._inputs[0])
                found.append(Candidate("flash_attention_4", _on_sets(latest, self._inputs)))
        return found

    def prepare(self, rung: Rung[AttentionConfig]) -> Candidate:
        """The rung's kernel, loaded, as launches without allocation."""
        made = plan(*self._inputs[0], config=rung.config)
        arrays = [self._arrays(inputs) for inputs in self._inputs]
        call = GpuCall.of(made.call, self._index)
        self._calls[rung.key] = call
        return Candidate(f"rung {rung.key}", lambda i: call.launch(arrays[i], "torch"))

    def _arrays(self, inputs: tuple[Any, Any, Any]) -> tuple[ArrayView, ...]:
        return tuple(describe(x) for x in (*inputs, self._output))

    def error(self, rung: Rung[AttentionConfig]) -> ErrorEntry:
        """Against float64 on the GPU, on inputs drawn for this check alone."""
        inputs = self._fresh()
        self._output.fill_(float("nan"))
        self._calls[rung.key].launch(self._arrays(inputs), "torch")
        return _entry(torch_error(self._output, *inputs, self._dtype))


def _on_sets(run: Any, sets: Sequence[tuple[Any, ...]]) -> Any:
    return lambda i: run(*sets[i])
