"""Compile CUDA C++ to a cubin with NVRTC, without a GPU or a driver, and keep the results on disk.

``cuda.core`` brings the compiler and the cache. An entry of the cache is the raw cubin (nvdisasm reads it as it is)
and, beside it under a second key, ptxas's log and the cubin's checksum: so a hit still tells the spills, and a damaged
entry is noticed, removed and compiled anew. Files appear by an atomic rename, so any number of processes may share a
folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom.core.errors import CompileError
from warploom.core.settings import cache_folder
from warploom.core.targets import target
from warploom.cuda import diagnostics
from warploom.cuda.cubin import Resources, resources
from warploom.cuda.device import cuda_core, nvrtc_version

_CACHE_LIMIT_BYTES = 1 << 30  # least recently read entries go first
_ENTRY_FORMAT = b"warploom kernel entry 1"


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One source to compile; the fields are :func:`compile_source`'s."""

    source: str = field(repr=False)
    name: str
    arch: str
    opt_level: int = 3
    max_registers: int | None = None
    line_info: bool = False


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One compiled kernel.

    ``log`` is what NVRTC and ptxas said when it was compiled (on a cache hit too); ``seconds`` is what this call took;
    ``from_cache`` tells whether it came from memory or disk.
    """

    name: str
    arch: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    resources: Resources
    from_cache: bool
    seconds: float


_compiled: dict[CompileJob, CompiledKernel] = {}


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
    return compile_job(CompileJob(source, name, arch, opt_level, max_registers, line_info), cache=cache)


def compile_job(job: CompileJob, *, cache: bool = True) -> CompiledKernel:
    """:func:`compile_source` for a :class:`CompileJob`."""
    start = time.perf_counter()
    arch = target(job.arch).name
    if cache and (known := _compiled.get(job)) is not None:
        return replace(known, from_cache=True, seconds=time.perf_counter() - start)
    if job.opt_level not in (0, 1, 2, 3):
        raise ValueError(f"opt_level is ptxas's -O level, 0 to 3, not {job.opt_level}")
    job_for_target = replace(job, arch=arch)
    nvrtc_version()  # says what to install where the compiler is missing
    options = _options(job_for_target)
    store = _Store.open(cache_folder() / "kernels") if cache else None
    key = _key(job, options) if store else b""
    kernel = store.load(key, job_for_target) if store else None
    if kernel is None:
        cubin, log = _run_nvrtc(job_for_target, options)
        kernel = CompiledKernel(job.name, arch, cubin, log, resources(cubin, job.name, log=log), False, 0.0)
        if store:
            store.save(key, kernel)
    if cache:
        _compiled[job] = kernel
    return replace(kernel, seconds=time.perf_counter() - start)


def compile_many(
    jobs: Iterable[CompileJob],
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
    keep_errors: bool = False,
    cache: bool = True,
) -> list[CompiledKernel | CompileError]:
    """Compile ``jobs`` on all cores (NVRTC runs outside the interpreter's lock); results in the order of ``jobs``.

    ``progress(done, total)`` is called in this thread after each. The first CompileError is raised once running
    compilations have ended, or, with ``keep_errors``, each stands in its job's place.
    """
    todo = list(jobs)
    results: list[CompiledKernel | CompileError | None] = [None] * len(todo)
    if not todo:
        return []
    nvrtc_version()  # load the library once, before the threads
    with ThreadPoolExecutor(workers or available_cores(), thread_name_prefix="warploom-compile") as pool:
        running = {pool.submit(compile_job, job, cache=cache): index for index, job in enumerate(todo)}
        try:
            for done, future in enumerate(as_completed(running), start=1):
                try:
                    results[running[future]] = future.result()
                except CompileError as error:
                    if not keep_errors:
                        raise
                    results[running[future]] = error
                if progress:
                    progress(done, len(todo))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [result for result in results if result is not None]


def available_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def forget_compiled() -> None:
    """Drop the kernels remembered in this process (those on disk stay)."""
    _compiled.clear()


def _options(job: CompileJob) -> Any:
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


def _run_nvrtc(job: CompileJob, options: Any) -> tuple[bytes, str]:
    """(cubin, log). Raises CompileError."""
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


@lru_cache(maxsize=1)
def _compiler_identity() -> bytes:
    """What the cache's key must hold beside cuda.core's own NVRTC major.minor: the wheel's full version."""
    versions = ["{}.{}".format(*nvrtc_version())]
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            versions.append(importlib.metadata.version(wheel))
        except importlib.metadata.PackageNotFoundError:
            continue
    return "|".join(versions).encode()


def _key(job: CompileJob, options: Any) -> bytes:
    utils: Any = importlib.import_module("cuda.core.utils")
    return utils.make_program_cache_key(
        code=job.source,
        code_type="c++",
        options=options,
        target_type="cubin",
        extra_digest=_ENTRY_FORMAT + _compiler_identity(),
    )


class _Store:
    """The disk cache of one folder. Whatever is wrong with the folder costs speed, never a result."""

    _opened: dict[Path, _Store | None] = {}  # noqa: RUF012 - shared by all instances on purpose
    _lock = threading.Lock()

    def __init__(self, folder: Path) -> None:
        utils: Any = importlib.import_module("cuda.core.utils")
        self._folder = folder
        self._entries = utils.FileStreamProgramCache(folder, max_size_bytes=_CACHE_LIMIT_BYTES)
        self._warned = False

    @classmethod
    def open(cls, folder: Path) -> _Store | None:
        """The store of ``folder``, or None after one warning where it cannot be made."""
        with cls._lock:
            if folder not in cls._opened:
                try:
                    cls._opened[folder] = cls(folder)
                except OSError as error:
                    cls._opened[folder] = None
                    _warn(folder, error)
            return cls._opened[folder]

    def load(self, key: bytes, job: CompileJob) -> CompiledKernel | None:
        """The kernel under ``key``; an entry that is not whole is removed and counts as absent."""
        try:
            cubin: bytes = self._entries.get(key) or b""
            note: bytes = self._entries.get(_note_key(key)) or b""
        except OSError as error:
            self._warn_once(error)
            return None
        if not cubin and not note:
            return None
        try:
            facts = json.loads(note)
            if facts["sha256"] != hashlib.sha256(cubin).hexdigest():
                raise ValueError("checksum differs")
            log = str(facts["log"])
            return CompiledKernel(job.name, job.arch, cubin, log, resources(cubin, job.name, log=log), True, 0.0)
        except (ValueError, KeyError, TypeError):
            self._remove(key)
            return None

    def save(self, key: bytes, kernel: CompiledKernel) -> None:
        note = {"sha256": hashlib.sha256(kernel.cubin).hexdigest(), "log": kernel.log}
        try:
            self._entries[key] = kernel.cubin
            self._entries[_note_key(key)] = json.dumps(note).encode()
        except OSError as error:
            self._warn_once(error)

    def _remove(self, key: bytes) -> None:
        for part in (key, _note_key(key)):
            try:
                del self._entries[part]
            except KeyError:
                continue
            except OSError as error:
                self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _warn(self._folder, error)


def _note_key(key: bytes) -> bytes:
    return key + b"/note"


def _warn(folder: Path, error: OSError) -> None:
    warnings.warn(
        f"the kernel cache {folder} cannot be used ({error.strerror or error}): kernels are compiled anew in every "
        "process. Free some room there or set WARPLOOM_CACHE to a folder you can write.",
        RuntimeWarning,
        stacklevel=4,
    )
