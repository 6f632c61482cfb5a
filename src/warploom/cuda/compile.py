"""Compile CUDA C++ to a cubin with NVRTC, without a GPU or a driver, and keep the results on disk.

``cuda.core`` brings the compiler, :mod:`warploom.cuda.store` keeps what it made: by source and options, and by what the
source was traced from (:func:`find_traced`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from warploom.core.settings import cache_folder, pack_files
from warploom.core.targets import target
from warploom.cuda.cubin import resources
from warploom.cuda.device import compiler_generation, cuda_core, nvrtc_version
from warploom.cuda.store import CompiledKernel, KernelStore

T = TypeVar("T")

_ENTRY_FORMAT = b"warploom kernel entry 2"
_POINTER_FORMAT = "warploom traced kernel 2"


@dataclass(frozen=True)
class _Job:
    """One source to compile; the fields are :func:`compile_source`'s."""

    source: str
    name: str
    arch: str
    opt_level: int = 3
    max_registers: int | None = None
    line_info: bool = False


_compiled: dict[_Job, CompiledKernel] = {}


def compile_source(
    source: str,
    name: str,
    *,
    arch: str,
    opt_level: int = 3,
    max_registers: int | None = None,
    line_info: bool = False,
    cache: bool = True,
) -> CompiledKernel:
    """Compile ``source``, which defines ``extern "C" __global__ void name(...)``, for ``arch`` ("sm_80", "sm_90a", …).

    ``opt_level`` is ptxas's (0 … 3). ``max_registers`` caps registers per thread; ptxas ignores it for a kernel with
    ``__launch_bounds__``. ``line_info`` puts source lines into the cubin. ``cache=False`` reads and writes no cache,
    neither in memory nor on disk.

    Multiplications and additions are not contracted (``-fmad=false``): what is fused is written as ``fmaf``, so that
    the emulator and the GPU round at the same places.

    Raises CompileError with the log and the lines it names (also when ptxas reports that it serialises ``wgmma``),
    ConfigError for an unknown ``arch``, UnsupportedDeviceError where cuda.core or NVRTC is missing.
    """
    start = time.perf_counter()
    job, arch = _Job(source, name, arch, opt_level, max_registers, line_info), target(arch).name
    if cache and (known := _compiled.get(job)) is not None:
        return replace(known, from_cache=True, seconds=time.perf_counter() - start)
    if job.opt_level not in (0, 1, 2, 3):
        raise ValueError(f"opt_level is ptxas's -O level, 0 to 3, not {job.opt_level}")
    job_for_target = replace(job, arch=arch)
    nvrtc_version()  # says what to install where the compiler is missing
    options = _options(job_for_target)
    store = _store() if cache else None
    key = _key(job, options) if store else b""
    kernel = store.load(key, job.name, arch) if store else None
    if kernel is None:
        cubin, log = _run_nvrtc(job_for_target, options)
        kernel = CompiledKernel(job.name, arch, cubin, log, resources(cubin, job.name, log=log), False, 0.0)
        if store:
            kernel = store.save(key, kernel)
    if cache:
        _compiled[job] = kernel
    return replace(kernel, seconds=time.perf_counter() - start)


def find_traced(origin: str, arch: str, read: Callable[[Any], T]) -> tuple[CompiledKernel, T] | None:
    """The kernel that :func:`keep_traced` kept for ``origin`` and ``arch``, and its facts; None if there is none.

    ``read`` turns the facts into what the caller wants, and raises ValueError for what it did not write. Needs neither
    the kernel's source nor NVRTC. Packs come first, whatever compiler they were made with.
    """
    if pack_files():
        from warploom.cuda.pack import find_packed

        if (packed := find_packed(origin, arch, read)) is not None:
            return packed
    store = _store()
    return store.load_pointer(_pointer_key(origin, arch), arch, read) if store else None


def keep_traced(origin: str, kernel: CompiledKernel, facts: Any) -> None:
    """Remember on disk that ``kernel`` is what ``origin`` gives.

    ``origin`` is a text that determines the source and the compiler's settings; ``facts`` (JSON-able) are for who finds
    it. Nothing is kept of a kernel that could not be written itself.
    """
    store = _store()
    if store and kernel.key:
        store.save_pointer(_pointer_key(origin, kernel.arch), kernel, facts)


def available_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def forget_compiled() -> None:
    """Drop the kernels remembered in this process (those on disk stay)."""
    _compiled.clear()


def _options(job: _Job) -> Any:
    ptxas = ["-v"] if job.opt_level == 3 else ["-v", f"-O{job.opt_level}"]
    return cuda_core().ProgramOptions(
        name=f"{job.name}.cu",
        arch=job.arch,  # without it cuda.core would ask the driver
        ptxas_options=ptxas,
        max_register_count=job.max_registers,
        lineinfo=job.line_info or None,
        fma=False,
        # NVRTC's own cache (since 12.9) returns an empty log, and with it no spills and no wgmma advisories.
        no_cache=True if nvrtc_version() >= (12, 9) else None,
    )


def _run_nvrtc(job: _Job, options: Any) -> tuple[bytes, str]:
    """(cubin, log). Raises CompileError."""
    from warploom.cuda import diagnostics

    core = cuda_core()
    log = io.StringIO()
    program = None
    try:
        program = core.Program(job.source, "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        if type(error).__name__ not in ("NVRTCError", "CUDAError"):
            raise
        raise diagnostics.compile_error(str(error), job.source, job.name, job.arch) from error
    finally:
        del program  # not left to the traceback's cycle: cuda.core's destructor complains when collected there
    text = log.getvalue().replace("\0", "").strip()
    diagnostics.refuse_serialised_wgmma(text, job.source, job.name, job.arch)
    return cubin, text


def _store() -> KernelStore | None:
    return KernelStore.open(cache_folder() / "kernels")


def _wheel_versions() -> list[str]:
    """Versions of the NVRTC wheels that are installed."""
    versions: list[str] = []
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            versions.append(importlib.metadata.version(wheel))
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@lru_cache(maxsize=1)
def _compiler_identity() -> bytes:
    """Return the full version of the NVRTC wheel: cuda.core's cache key has its major and minor version only."""
    return "|".join(["{}.{}".format(*nvrtc_version()), *_wheel_versions()]).encode()


@lru_cache(maxsize=1)
def _compiler_unloaded() -> str:
    """The compiler as far as it can be told without loading NVRTC (20 ms), which only an NVRTC from no wheel needs."""
    wheels = [version for version in _wheel_versions() if version.startswith(f"{compiler_generation()}.")]
    versions = wheels or ["{}.{}".format(*nvrtc_version())]
    bindings: Any = importlib.import_module("cuda.bindings")
    return "|".join([*versions, bindings.__version__, cuda_core().__version__])


def _pointer_key(origin: str, arch: str) -> bytes:
    parts = "\0".join((_POINTER_FORMAT, _compiler_unloaded(), arch, origin))
    return hashlib.sha256(parts.encode()).digest()


def _key(job: _Job, options: Any) -> bytes:
    utils: Any = importlib.import_module("cuda.core.utils")
    return utils.make_program_cache_key(
        code=job.source,
        code_type="c++",
        options=options,
        target_type="cubin",
        extra_digest=_ENTRY_FORMAT + _compiler_identity(),
    )
