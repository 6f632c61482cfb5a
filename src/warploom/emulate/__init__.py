"""Run a Program on a CPU: all lanes real, every access ordered by what synchronises it, defects as findings."""

from warploom.emulate.control.context import Decision
from warploom.emulate.findings.findings import Finding
from warploom.emulate.findings.traffic import EngineTraffic, Sectors, Traffic, Wavefronts
from warploom.emulate.launch.machine import Emulation, emulate
from warploom.emulate.launch.recording import Recording, recorded
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.emulate.transactions.tensor_maps import TensorMapArgument

__all__ = [
    "Decision",
    "Emulation",
    "EngineTraffic",
    "Finding",
    "GlobalBuffer",
    "Recording",
    "Sectors",
    "TensorMapArgument",
    "Traffic",
    "Wavefronts",
    "emulate",
    "recorded",
]
