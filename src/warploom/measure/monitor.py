"""The state of a GPU while it is measured: clocks, power, temperature. Reads only; settings are left alone."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from typing import Any

State = dict[str, float | str]

_SMI_FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "driver_version": "driver",
}


class GpuMonitor:
    """Reads one GPU through NVML (package ``nvidia-ml-py``), or through ``nvidia-smi`` where that is missing.

    ``bus_id`` is the GPU's PCI bus address, which CUDA and NVML agree on (their indices need not).
    """

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id
        self._nvml: Any = None
        self._handle: Any = None
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            self._nvml = nvml
        except Exception:  # NVML's own errors have no common base that exists without it
            self._nvml = None

    @classmethod
    def of(cls, device: int) -> GpuMonitor:
        """Open the monitor of GPU ``device``, in CUDA's numbering."""
        from warploom.cuda.device import cuda_core

        return cls(cuda_core().Device(device).pci_bus_id)

    def state(self) -> State:
        """``sm_mhz``, ``memory_mhz``, ``watts`` (the driver's average), ``celsius``, ``driver``; {} if unreadable."""
        if self._nvml is None:
            return _from_nvidia_smi(self._bus_id)
        nvml, handle = self._nvml, self._handle
        readers = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        }
        found: State = {}
        for name, read in readers.items():
            try:
                found[name] = read()
            except nvml.NVMLError:
                continue
        return found

    def sm_clock(self) -> float | None:
        """The multiprocessors' clock in MHz; None where only ``nvidia-smi`` could tell, which is too slow to ask."""
        return self._read(lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

    def watts(self) -> float | None:
        """The board's power in W, the driver's average over up to a second; None without NVML."""
        return self._read(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)

    def joules(self) -> float | None:
        """The board's energy since the driver was loaded, in J; None without NVML or on a GPU without the counter."""
        return self._read(lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)

    def power_limit(self) -> float | None:
        """The power in W at which the driver lowers the clock; None where it cannot be read."""
        return self._read(lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)

    def _read(self, read: Callable[[Any, Any], float]) -> float | None:
        if self._nvml is None:
            return None
        try:
            return float(read(self._nvml, self._handle))
        except self._nvml.NVMLError:
            return None


def parse_nvidia_smi(line: str) -> State:
    """One line of ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits`` in the order of the fields asked for."""
    found: State = {}
    for name, text in zip(_SMI_FIELDS.values(), (part.strip() for part in line.split(",")), strict=False):
        if name == "driver":
            found[name] = text
            continue
        try:
            found[name] = float(text)
        except ValueError:  # "[N/A]"
            continue
    return found


def _from_nvidia_smi(bus_id: str) -> State:
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    command = ["nvidia-smi", "-i", bus_id, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_nvidia_smi(done.stdout.splitlines()[0] if done.stdout else "")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
