"""Run a Program on a CPU: all lanes real, every access ordered by what synchronises it, defects as findings."""

from warploom.emulate.buffers import GlobalBuffer
from warploom.emulate.findings import Finding
from warploom.emulate.machine import Emulation, emulate
from warploom.emulate.tensor_maps import TensorMapArgument
from warploom.emulate.traffic import EngineTraffic, Sectors, Traffic, Wavefronts

__all__ = [
    "Emulation",
    "EngineTraffic",
    "Finding",
    "GlobalBuffer",
    "Sectors",
    "TensorMapArgument",
    "Traffic",
    "Wavefronts",
    "emulate",
]
