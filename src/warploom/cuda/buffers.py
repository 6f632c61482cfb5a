"""Device copies of host arrays, for callers whose arrays live on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from warploom.cuda.device import check, require_driver
from warploom.cuda.launch import current_context, synchronize


class DeviceCopy:
    """GPU memory with the contents of a C-contiguous NumPy array; freed with the object."""

    def __init__(self, host: np.ndarray[Any, Any], device: int, *, copy: bool = True) -> None:
        self._driver = require_driver()
        self.host, self.device = host, device
        with current_context(device):
            self.pointer = int(check(self._driver, self._driver.cuMemAlloc(max(1, host.nbytes))))
            if copy and host.nbytes:
                check(self._driver, self._driver.cuMemcpyHtoD(self.pointer, host.ctypes.data, host.nbytes))

    def download(self) -> None:
        """Copy the GPU's contents back into the NumPy array; waits for the kernels before it."""
        with current_context(self.device):
            check(self._driver, self._driver.cuMemcpyDtoH(self.host.ctypes.data, self.pointer, self.host.nbytes))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            with current_context(self.device):
                self._driver.cuMemFree(self.pointer)


def downloaded(pointer: int, count: int, dtype: type[np.generic], device: int, stream: int) -> np.ndarray[Any, Any]:
    """Copy ``count`` elements of GPU memory to a NumPy array after the work of ``stream``."""
    host, driver = np.empty(count, dtype), require_driver()
    synchronize(stream, device)
    if count:
        with current_context(device):
            check(driver, driver.cuMemcpyDtoH(host.ctypes.data, pointer, host.nbytes))
    return host
