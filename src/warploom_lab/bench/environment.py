"""What a measurement was made with: it stands at the head of every result file."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import warploom
from warploom.measure.monitor import GpuMonitor

_PACKAGES = ("numpy", "ml_dtypes", "cuda-core", "cuda-bindings", "torch", "nvidia-cudnn-cu13", "triton")


def environment(device: int | None = None) -> dict[str, Any]:
    """Versions, machine, date and, if there is one, the GPU ``device`` (default: the first). JSON-able.

    ``driver`` is the driver's own version ("580.65.06"), ``cuda_driver`` the newest CUDA it supports ("13.0").
    """
    from warploom.cuda.device import installed_version, probe

    report = probe()
    gpu = next((g for g in report.gpus if device is None or g.index == device), None)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "warploom": warploom.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        "nvrtc": report.nvrtc,
        "driver": GpuMonitor.of(gpu.index).state().get("driver") if gpu else None,
        "cuda_driver": report.driver,
        "gpu": asdict(gpu) if gpu else None,
    }


def gpu_slug(env: dict[str, Any]) -> str:
    """A folder name for the GPU of an :func:`environment`: ``"NVIDIA H200"`` → ``"h200"``; ``"cpu"`` without one."""
    if not env.get("gpu"):
        return "cpu"
    words = str(env["gpu"]["name"]).lower().replace("nvidia", "").replace("geforce", "").split()
    return "-".join("".join(c for c in word if c.isalnum()) for word in words) or "gpu"
