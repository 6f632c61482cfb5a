"""Launches whose arguments are packed once: the short way of a call that repeats an earlier one.

``cuda.core.launch`` reads a configuration and packs the arguments anew in every launch. Both change as rarely as the
addresses of a caller's arrays, so they are kept as the driver takes them: the packing is ``cuda.core``'s own, the
launch ``cuLaunchKernelEx``. Where a version of ``cuda.core`` does not let its packing be used, launches take its way.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from warploom.core.errors import ConfigError
from warploom.cuda.device import check
from warploom.cuda.launch import LoadedKernel, current_context
from warploom.cuda.tensor_maps import DriverMap

_STREAMS_KEPT = 64


@lru_cache(maxsize=1)
def _packing() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """(arguments → an object whose ``ptr`` is the driver's array of them, LaunchConfig → CUlaunchConfig)."""
    try:
        arguments: Any = importlib.import_module("cuda.core._kernel_arg_handler").ParamHolder
        configuration: Any = importlib.import_module("cuda.core._launch_config")._to_native_launch_config
    except (ImportError, AttributeError):
        return None
    return arguments, configuration


class _WithDriverMaps:
    """Arguments as ``cuda.core`` packs them, but those that are tensor maps of the driver's own."""

    def __init__(self, pack: Callable[[Any], Any], arguments: Sequence[Any]) -> None:
        self._kept = arguments
        self._packed = pack(tuple(0 if isinstance(x, DriverMap) else x for x in arguments))
        self.ptr = int(self._packed.ptr)
        places = (ctypes.c_void_p * len(arguments)).from_address(self.ptr)
        for place, x in enumerate(arguments):
            if isinstance(x, DriverMap):
                places[place] = x.address


class PackedLaunch:
    """A kernel on one device with one configuration. Safe to use from several threads."""

    def __init__(self, kernel: LoadedKernel, config: Any) -> None:
        self._kernel = kernel
        self._config = config
        self._device = kernel.device
        self._packing = _packing()
        self._natives: dict[int, Any] = {}
        self._overlaps = False
        self._driver = kernel.driver
        self._current = kernel.driver.cuCtxGetDevice
        self._launch = kernel.driver.cuLaunchKernelEx
        self._function = kernel.driver.CUfunction(int(kernel.kernel.handle))  # the driver takes a CUkernel for one

    def overlap(self) -> None:
        """Let launches begin before the launch before them in the stream ends: the kernel waits for it itself.

        Where launches take ``cuda.core``'s way they do not, which is as right.
        """
        self._overlaps = True
        self._natives.clear()

    def _overlap_attribute(self) -> Any:
        """Programmatic stream serialization (CUDA C++ Programming Guide, "Programmatic Dependent Launch")."""
        found = self._driver.CUlaunchAttribute()
        names = self._driver.CUlaunchAttributeID
        found.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        found.value.programmaticStreamSerializationAllowed = 1
        return found

    def pack(self, arguments: Sequence[Any]) -> Any:
        """The arguments for :meth:`queue`, any number of times; each is what :meth:`LoadedKernel.launch` takes.

        Raises ProblemError where they do not fit the kernel's parameters.
        """
        self._kernel.check_arguments(arguments)
        if any(isinstance(x, DriverMap) for x in arguments):
            if self._packing is None:
                raise ConfigError("this cuda.core does not say how it launches: pip install a newer one (>= 1.2)")
            return _WithDriverMaps(self._packing[0], arguments)
        return tuple(arguments) if self._packing is None else self._packing[0](tuple(arguments))

    def queue(self, stream: int, packed: Any) -> None:
        """Queue the kernel on the stream with this handle. Raises RuntimeError with the driver's reason if refused."""
        if self._packing is None:
            self._kernel.launch(stream, self._config, packed)
            return
        native = self._natives.get(stream) or self._native(stream)
        status, device = self._current()
        if status == 0 and int(device) == self._device:
            result = self._launch(native, self._function, packed.ptr, 0)
        else:
            with current_context(self._device):
                result = self._launch(native, self._function, packed.ptr, 0)
        if result[0] != 0:
            check(self._driver, (*result, None))

    def _native(self, stream: int) -> Any:
        """The driver's form of the configuration on a stream."""
        assert self._packing is not None
        made = self._packing[1](self._config)
        made.hStream = self._driver.CUstream(stream)
        if self._overlaps:
            made.attrs = [*made.attrs, self._overlap_attribute()]
            made.numAttrs = len(made.attrs)
        if len(self._natives) >= _STREAMS_KEPT:
            self._natives.clear()
        self._natives[stream] = made
        return made
