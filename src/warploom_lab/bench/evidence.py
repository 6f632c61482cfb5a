"""What a result was measured on: the machine, the commit, and every kernel that ran with the digest of its Program.

Each kernel is named by what it is traced from, so that a page can trace it again (``stale.py``).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import warploom
from warploom.core.dtypes import DTYPES, DType
from warploom.kernels.source import KernelSource, traced
from warploom.measure.monitor import GpuMonitor

HERE = Path(__file__).resolve()
_PACKAGES = ("numpy", "ml_dtypes", "cuda-core", "cuda-bindings", "torch", "nvidia-cudnn-cu13", "triton")
COMMIT = "WARPLOOM_COMMIT"
"""The environment variable that says which commit a copy without a ``.git`` folder is of."""


# -- the machine


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


# -- what a kernel is traced from, as JSON


def encoded(value: Any) -> Any:
    """An argument of a kernel as JSON. Raises TypeError for what no other process could build again."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, DType) and DTYPES.get(value.name) is value:
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [encoded(x) for x in cast("tuple[Any, ...]", value)]
    if isinstance(value, Enum):
        return {"class": _place(type(value)), "member": value.name}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "class": _place(type(value)),
            "fields": {f.name: encoded(getattr(value, f.name)) for f in fields(value) if f.init},
        }
    if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == "warploom" and _named(value) is value:
        return {"function": _place(value)}
    raise TypeError(f"{value!r:.80} cannot be built again from a text")


def decoded(found: Any) -> Any:
    """The argument that :func:`encoded` has written."""
    if isinstance(found, list):
        return tuple(decoded(x) for x in found)
    if not isinstance(found, dict):
        return found
    if "dtype" in found:
        return DTYPES[found["dtype"]]
    if "function" in found:
        return _found(found["function"])
    made = _found(found["class"])
    if "member" in found:
        return made[found["member"]]
    return made(**{name: decoded(value) for name, value in found["fields"].items()})


def _place(of: Any) -> str:
    return f"{of.__module__}:{of.__qualname__}"


def _named(of: Any) -> Any:
    """What stands where a function says that it does; None where nothing does, as for one made in another."""
    try:
        return _found(_place(of))
    except AttributeError:
        return None


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(module))


def recipe(source: KernelSource) -> dict[str, Any] | None:
    """What a kernel is traced from, as JSON; None where that is known to this process alone."""
    try:
        return encoded(source)
    except TypeError:
        return None


# -- what a run writes


def kernels_that_ran(configs: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Name, digest and recipe of every kernel of this package that this process has traced, compiled or loaded.

    ``configs``: of kernels that have a configuration only these.
    """
    from warploom.ops.backends import built, compiled

    at_hand = {source for (source,) in traced.known()}
    found: dict[str, dict[str, Any] | None] = {}
    for source in at_hand | {source for source, _ in built.known()}:
        config = dict(source.arguments).get("config")
        wanted = configs is None or config is None or str(config) in configs
        if wanted or source in at_hand:  # tracing what nobody asks for would take long
            found[source.program.digest] = {"name": source.name, "recipe": recipe(source)} if wanted else None
    for program, _ in compiled.known():
        found.setdefault(program.digest, {"name": program.name, "recipe": None})
    rows = ({"digest": digest, **of} for digest, of in found.items() if of is not None)
    return sorted(rows, key=lambda row: (row["name"], row["digest"]))


def commit() -> str | None:
    """The commit that runs here, "+" behind it where files differ from it; None where nothing tells.

    A copy without its history is told by the environment variable WARPLOOM_COMMIT.
    """
    return os.environ.get(COMMIT) or _history()


@cache
def _history() -> str | None:
    try:
        _git("ls-files", "--error-unmatch", HERE.name)  # an installed package may lie in another project's history
        changed = _git("status", "--porcelain", "--untracked-files=no", ":/src", ":/benchmarks")
        return _git("rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        print(f"no git history here: results name no commit; set {COMMIT} to that of these files")
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE.parent, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def made_by(configs: Collection[str] | None = None) -> dict[str, Any]:
    """``commit`` and ``kernels`` for the environment of a result; ``configs`` as for :func:`kernels_that_ran`."""
    return {"commit": commit(), "kernels": kernels_that_ran(configs)}


def write(
    file: Path,
    result: Mapping[str, Any],
    configs: Collection[str] | None = None,
    kernels: list[dict[str, Any]] | None = None,
) -> None:
    """Write a result as JSON; its environment says the commit, and the kernels that ran with their digests.

    ``configs``: only kernels of these configurations, where a search has run others too. ``kernels``: those that ran in
    other processes, as :func:`kernels_that_ran` returned them there.
    """
    made = {**(result.get("environment") or environment()), **made_by(configs)}
    if kernels is not None:
        made["kernels"] = kernels
    result = {"environment": None, **result} | {"environment": made}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
