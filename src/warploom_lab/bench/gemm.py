"""The ladder of matrix products: its problems on the emulator and on a GPU, and cuBLAS (``torch.mm``) beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, f16, f32
from warploom.core.errors import ConfigError
from warploom.interop.arrays import describe
from warploom.kernels.matmul.problem import MatmulConfig, contiguous_problem
from warploom.kernels.matmul.reference import GemmError, gemm_error, gemm_reference
from warploom.kernels.settings import refuse
from warploom.measure.matmul import MatmulOnGpu
from warploom.measure.pytorch import torch_module
from warploom.measure.timing import Candidate
from warploom.ops.backends import EMULATION_OVERHEAD, SECONDS_PER_FLOP, emulator_arguments
from warploom.ops.matmul import plan_matmul
from warploom_lab.bench.ladder import EmulatorCase, ErrorEntry, GpuCase
from warploom_lab.kernels.ladder import Rung
from warploom_lab.kernels.matmul.ladder import BEST, summed_in

ACCUMULATORS = {"f16": f16, "f32": f32}
"""What ``--accumulate`` may be."""
_SHARED_OVERHEAD = 2.0  # of the emulator's estimate: shared-memory traffic per flop is higher than attention's


def settled(
    rungs: Sequence[Rung[MatmulConfig]], accumulate: DType | None, settings: Mapping[str, str]
) -> list[Rung[MatmulConfig]]:
    """The rungs with flags overridden; the best for one accumulator is left out where the other's is meant.

    Beside portable rungs, ones for sm_90a that the flags do not suit are left out too. Raises ConfigError for flags
    that are not valid.
    """
    found: list[Rung[MatmulConfig]] = []
    own = {rung.config for rung in rungs}
    general = any(config.requires == PORTABLE for config in own)
    meant = None if accumulate is None else BEST.get(accumulate)
    for rung in rungs:
        config = rung.config
        if meant in own and config != meant and config in BEST.values():
            continue
        if config.requires != PORTABLE and accumulate not in (None, config.accumulate):
            if not general:
                raise ConfigError(f"rung {rung.key} is wgmma's, which accumulates in f32")
            continue
        try:
            config = config if accumulate is None else summed_in(config, accumulate)
            config = config.with_settings(settings)
            refuse(f"rung {rung.key} with these flags is not valid", config.check())
        except ConfigError:
            if general and config.requires != PORTABLE:
                continue
            raise
        found.append(dataclasses.replace(rung, config=config))
    return found


PORTABLE = "sm_80"
"""What ``mma.sync`` rungs need."""
LOADS = {"rested": 0.02, "sustained": 0.0}
"""Seconds of rest before each sample. Products alone hold a GPU at its power limit, where no two runs have one clock; a
rest as long as two samples spares them that.
"""


@dataclass(frozen=True)
class Square:
    """A size of the bench: (n, n) matrices, what they hold (:data:`DATA`), and under which of :data:`LOADS`.

    ``tuned``: the rungs have the tiles of a search.
    """

    n: int
    data: str = "normal"
    load: str = "rested"
    tuned: bool = False

    @property
    def label(self) -> dict[str, Any]:
        """What a cell says of it."""
        return {"n": self.n, "data": self.data, "load": self.load} | ({"tuned": True} if self.tuned else {})

    def __str__(self) -> str:
        return f"{self.n}, {self.data}, {self.load}"


@dataclass(frozen=True)
class GemmFamily:
    """C = A·B, all row-major, C of the inputs' type.

    (m, n, k) is the emulator's problem; a GPU's is square, of inputs of type ``dtype``.
    """

    m: int = 256
    n: int = 256
    k: int = 512
    dtype: DType = f16
    name: str = "gemm"

    def emulator_case(self, config: MatmulConfig, seed: int) -> EmulatorCase:
        """a (m, k) and b (k, n) ~ N(0, 1), and an output full of NaN; of a split K the f32 parts."""
        rng = np.random.default_rng(seed)
        a, b = (
            rng.standard_normal(shape, np.float32).astype(config.dtype.numpy)
            for shape in ((self.m, self.k), (self.k, self.n))
        )
        made = plan_matmul(a, b, accumulate=config.accumulate, config=config)
        call = made.calls[0]
        own = {name: np.full(words, np.nan, np.float32) for name, words in call.workspace.items()}
        arrays = {"a": a, "b": b, "out": np.full((self.m, self.n), np.nan, config.dtype.numpy)}
        arrays |= {name: x.view(np.uint32) for name, x in own.items()}
        if call.zeroed:
            arrays[call.zeroed][:] = 0

        def errors() -> ErrorEntry:
            whole = arrays["out"]
            if config.split_k > 1:
                whole = own["parts"].reshape(config.split_k, self.m, self.n).sum(axis=0).astype(config.dtype.numpy)
            return _entry(gemm_error(whole, gemm_reference(a, b), config.dtype, config.accumulate))

        views = [describe(arrays[name]) for name in call.arrays]
        arguments = emulator_arguments(made.program, views, call.scalars, call.maps)
        return EmulatorCase(made.program, made.grid, arguments, errors)

    def expected_seconds(self, config: MatmulConfig) -> float:
        """From the floating-point operations of the tiles, ragged ones whole."""
        rows, cols = (-(-x // tile) * tile for x, tile in ((self.m, config.tile_m), (self.n, config.tile_n)))
        return EMULATION_OVERHEAD + _SHARED_OVERHEAD * SECONDS_PER_FLOP * 2 * rows * cols * self.k

    def gpu_case(self, size: Square, device: int, seed: int) -> GpuCase[MatmulConfig]:
        """The product of two square matrices, beside cuBLAS."""
        problem = contiguous_problem(size.n, size.n, size.n, self.dtype)
        work = MatmulOnGpu(problem, device, size.data, seed)
        mm = torch_module().mm
        baselines = [Candidate("cublas", lambda i: mm(*work.inputs[i], out=work.output))]
        return GpuCase(
            size.label, problem.flops, work, baselines, lambda config: _entry(work.error(config)), LOADS[size.load]
        )


def _entry(found: GemmError) -> ErrorEntry:
    """NaN in the output counts as very far (a finite number: JSON has no infinity)."""
    return ErrorEntry(found.metric, min(found.value, float(np.finfo(np.float64).max)), found.bound)
