"""One problem of an operation on a GPU: its inputs, and what queues, checks and judges a configuration's call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from warploom.core.dtypes import DType
from warploom.measure.pytorch import torch_module
from warploom.measure.timing import input_sets


class OnGpu(ABC):
    """Inputs of a problem, held by PyTorch: ``sets`` of them, of so many bytes each, rotate past the L2.

    PyTorch's current stream is the one that calls are queued on. ``margin``: what results may be off by, in what their
    types allow.
    """

    margin = 1.0

    def __init__(self, device: int, bytes_per_set: int, seed: int = 0) -> None:
        torch = self._torch = torch_module()
        self._index, self._device = device, torch.device("cuda", device)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.sets = input_sets(bytes_per_set, int(torch.cuda.get_device_properties(self._device).L2_cache_size))

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)

    def kind(self, dtype: DType) -> Any:
        """Return the PyTorch dtype of an element type."""
        return {"bf16": self._torch.bfloat16, "f16": self._torch.float16, "f32": self._torch.float32}[dtype.name]

    @abstractmethod
    def prepare(self, config: Any) -> Callable[[int], object]:
        """Make a function that queues one call on an input set without allocating. Raises ConfigError for a misfit."""

    @abstractmethod
    def error(self, config: Any, problem: Any = None) -> Any:
        """Compare results with float64 on fresh inputs and a poisoned output, of another problem if given."""

    @abstractmethod
    def checked(self, config: Any) -> Any:
        """A small problem that the kernel of a configuration runs."""

    def fault(self, config: Any) -> str | None:
        """Return the fault of the results on a small problem of the same kernel, or None. Waits for the GPU."""
        error = self.error(config, self.checked(config)).value / self.margin
        return None if error <= 1.0 else f"computes wrong results (error {error:.3g} of what the types allow)"

    def answers(self) -> bool:
        """Whether the GPU still runs anything in this process: after an illegal access it does not."""
        try:
            self._torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True
