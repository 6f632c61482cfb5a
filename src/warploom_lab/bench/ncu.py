"""Nsight Compute's command line, ``ncu``: where it is, what it can count, and a run of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from warploom.core.errors import UnsupportedDeviceError

SAMPLED = "SourceCounters"
"""The section with the samples of warp states, instruction by instruction."""

_AS_IT_IS = "--clock-control", "none", "--target-processes", "all"
_VERSION = re.compile(r"Version (\d[\d.]*)")
_BASE_NAME = re.compile(r"^([a-z][a-z0-9]*__\w+)", re.MULTILINE)


def find_ncu() -> str:
    """The path of ``ncu``: on PATH, else the newest below /usr/local/cuda or /opt/nvidia.

    Raises UnsupportedDeviceError where there is none.
    """
    if (found := shutil.which("ncu")) is not None:
        return found
    for folder, pattern in (("/usr/local", "cuda*/bin/ncu"), ("/opt/nvidia/nsight-compute", "*/ncu")):
        if places := sorted(Path(folder).glob(pattern)):
            return str(places[-1])
    raise UnsupportedDeviceError(
        "hardware counters need Nsight Compute's ncu, which is neither on PATH nor in /usr/local/cuda*/bin or "
        "/opt/nvidia/nsight-compute: install the package nsight-compute of the CUDA toolkit. Without it, "
        "`warploom inspect` and `warploom ladder` count instructions and bank conflicts without a GPU"
    )


def ncu_version() -> str:
    """``2025.3.1.0``, or "" where ncu does not say. Raises UnsupportedDeviceError where there is none."""
    found = _VERSION.search(run([find_ncu(), "--version"], 30).stdout)
    return found[1] if found else ""


def available_metrics(ncu: str) -> frozenset[str]:
    """Base names of the metrics that this machine's GPU has; empty where ncu does not tell."""
    return frozenset(_BASE_NAME.findall(run([ncu, "--query-metrics"], 60).stdout))


def record(
    ncu: str, metrics: Sequence[str], driver: Sequence[str], *, samples: bool, seconds: float, kernels: str = ""
) -> tuple[str, str]:
    """(page "raw", page "source") as CSV of every kernel that the process ``driver`` launches; clocks as they are.

    With ``kernels``, a regular expression, only of those whose name it matches. Without ``samples`` the second is
    empty. Raises UnsupportedDeviceError where ncu refuses, sees no kernel, or takes longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory(prefix="warploom-") as folder:
        file = str(Path(folder) / "report.ncu-rep")
        section = ["--section", SAMPLED] if samples else []
        named = ["--kernel-name", f"regex:{kernels}"] if kernels else []
        done = run(
            [ncu, *_AS_IT_IS, "-f", "-o", file, *section, *named, "--metrics", ",".join(metrics), *driver], seconds
        )
        if done.returncode != 0 or not Path(file).exists():
            raise UnsupportedDeviceError(refusal(done.stdout + done.stderr))
        shown = [ncu, "--import", file, "--csv", "--print-units", "base"]
        raw = run([*shown, "--page", "raw", "--print-metric-instances", "details"], seconds).stdout
        source = run([*shown, "--page", "source", "--print-source", "sass"], seconds).stdout if samples else ""
    if '"ID"' not in raw:
        raise UnsupportedDeviceError(refusal(raw))
    return raw, source


def run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """A command's output, as text. Raises UnsupportedDeviceError if it takes longer than ``seconds``."""
    try:
        return subprocess.run(list(command), capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise UnsupportedDeviceError(f"ncu did not end within {seconds:.0f} s: {' '.join(command[:3])} …") from None


def refusal(output: str) -> str:
    """What to do about output of ncu that holds no counters."""
    tail = "\n".join(output.strip().splitlines()[-6:])
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM): run as root (in a "
            "container with --cap-add SYS_ADMIN), or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "No kernels were profiled" in output:
        return f"ncu saw no kernel: the process that launches it failed, or found no GPU.\n{tail}"
    return f"ncu gave no counters here (a driver, virtual machine or GPU it cannot profile):\n{tail}"
