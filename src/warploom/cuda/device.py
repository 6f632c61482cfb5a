"""What this machine has for the CUDA side, and clear words for what it lacks.

Nothing here raises at import: without ``cuda.core``, a driver or a GPU the functions say what is missing and how to get
it. This module is the one gate to ``cuda.core`` and ``cuda.bindings`` for the rest of the package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom.core.files import require_private_folder
from warploom.core.settings import cache_folder
from warploom.core.targets import Target, target_for
from warploom.cuda.cubin import NO_NVDISASM, find_nvdisasm

_INSTALL = 'install the extra cu13 (drivers 580 and newer) or cu12 (older ones), as in pip install -e ".[cu13]"'
_WITHOUT_CUDA = "Layouts, the language and the emulator work without it."
_FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "cupy", "jax")
_CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``target`` is the architecture warploom compiles for it, None where it has none."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    target: str | None


@dataclass(frozen=True)
class DeviceReport:
    """The result of :func:`probe`. Versions are text as their owners write them; None means missing.

    ``driver`` is the newest CUDA version the driver supports ("13.0"); ``problems`` names each missing part with what
    to do and what works without it.
    """

    driver: str | None
    gpus: tuple[Gpu, ...]
    nvrtc: str | None
    nvdisasm: Path | None
    cuda_core: str | None
    cache_folder: Path
    cache_writable: bool
    cache_bytes: int
    packages: dict[str, str | None]
    problems: tuple[str, ...] = field(default=())


_IMPORTING = threading.Lock()


def cuda_core() -> Any:
    """The module ``cuda.core``. Raises UnsupportedDeviceError with the command that installs it."""
    try:
        with _IMPORTING:  # cuda.core overwrites its own __spec__: the lock of imports no longer holds a second thread
            return importlib.import_module("cuda.core")
    except ImportError as error:
        raise UnsupportedDeviceError(
            f"compiling for a GPU needs cuda.core, which is missing ({error}): {_INSTALL}. {_WITHOUT_CUDA}"
        ) from error


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's (major, minor). Raises UnsupportedDeviceError where cuda.core or NVRTC is missing."""
    cuda_core()
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedDeviceError(
            f"the compiler library NVRTC is missing ({error}): {_INSTALL}. {_WITHOUT_CUDA}"
        ) from error
    if int(status) != 0:
        raise UnsupportedDeviceError(f"NVRTC does not answer ({status}): {_INSTALL}")
    return int(major), int(minor)


def compiler_generation() -> int:
    """The major version of CUDA that ``cuda.bindings`` is made for, hence of the NVRTC it loads; loads nothing itself.

    Raises UnsupportedDeviceError where cuda.core is missing.
    """
    cuda_core()
    bindings: Any = importlib.import_module("cuda.bindings")
    return int(bindings.__version__.split(".")[0])


@lru_cache(maxsize=1)
def _initialised_driver() -> Any:
    """``cuda.bindings.driver`` after ``cuInit``; the module is kept, a failure is tried again on the next call."""
    cuda_core()
    driver: Any = importlib.import_module("cuda.bindings.driver")
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the driver's library is not there
        raise UnsupportedDeviceError(
            "no NVIDIA driver found: running on a GPU needs one (580 or newer for CUDA 13). Compiling for a GPU and "
            "running on the emulator work without."
        ) from error
    if int(status) == int(driver.CUresult.CUDA_ERROR_NO_DEVICE):
        raise UnsupportedDeviceError(
            "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?). Compiling and the emulator work without."
        )
    if int(status) != 0:
        raise UnsupportedDeviceError(f"the NVIDIA driver cannot start ({_reason(driver, status)}): reinstall or reboot")
    return driver


def _reason(driver: Any, status: Any) -> str:
    try:
        _, text = driver.cuGetErrorString(status)
        return f"{getattr(status, 'name', status)}: {text.decode()}"
    except Exception:
        return str(status)


def check(driver: Any, result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or RuntimeError with the driver's reason."""
    if int(result[0]) != 0:
        raise RuntimeError(f"the CUDA driver refused a call: {_reason(driver, result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def driver_version() -> tuple[int, int]:
    """The newest CUDA version (major, minor) the driver supports. Raises UnsupportedDeviceError without a driver."""
    driver = _initialised_driver()
    number = int(check(driver, driver.cuDriverGetVersion()))
    return number // 1000, number % 1000 // 10


@lru_cache(maxsize=1)
def require_driver() -> Any:
    """``cuda.bindings.driver``, initialised and checked against the compiler's generation.

    Raises UnsupportedDeviceError without driver or GPU, or if the driver's CUDA generation is older than the
    compiler's: a cubin loads on a driver of the same major version or a newer one.
    """
    driver = _initialised_driver()
    _check_generation(driver_version(), compiler_generation())
    return driver


def _check_generation(driver: tuple[int, int], compiler: int) -> None:
    if driver[0] < compiler:
        raise UnsupportedDeviceError(
            f"the NVIDIA driver supports CUDA {driver[0]}.{driver[1]}, but the installed compiler is that of CUDA "
            f"{compiler}, whose code it cannot load: update the driver to 580 or newer, or install the extra cu12"
        )


def _gpu(driver: Any, index: int) -> Gpu:
    device = check(driver, driver.cuDeviceGet(index))
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(
            check(driver, driver.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device))
        )

    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    try:
        fitting = target_for(*capability).name
    except ConfigError:
        fitting = None
    name = check(driver, driver.cuDeviceGetName(128, device)).split(b"\0", 1)[0].decode()
    memory = int(check(driver, driver.cuDeviceTotalMem(device)))
    return Gpu(index, name, capability, memory, attribute("MULTIPROCESSOR_COUNT"), fitting)


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Every GPU the driver shows to this process. Raises UnsupportedDeviceError without a driver or GPU."""
    driver = _initialised_driver()
    count = int(check(driver, driver.cuDeviceGetCount()))
    return tuple(_gpu(driver, index) for index in range(count))


@lru_cache(maxsize=1)
def has_gpu() -> bool:
    """Whether kernels can run here: a compiler, a driver new enough and a GPU that warploom compiles for."""
    try:
        require_driver()
        nvrtc_version()
        return any(gpu.target is not None for gpu in gpus())
    except RuntimeError:  # UnsupportedDeviceError is one; so is a driver that refuses a call
        return False


@lru_cache(maxsize=16)
def target_of(index: int) -> Target:
    """The target of GPU ``index``.

    Raises UnsupportedDeviceError for an index that is not there, a GPU below compute capability 8.0, or one newer than
    warploom's targets.
    """
    require_driver()
    found = gpus()
    if not 0 <= index < len(found):
        raise UnsupportedDeviceError(f"there is no GPU {index}: the driver shows {len(found)}")
    try:
        return target_for(*found[index].compute_capability)
    except ConfigError as error:
        raise UnsupportedDeviceError(f"GPU {index} ({found[index].name}): {error}") from error


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; None where none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _folder_state(folder: Path) -> tuple[str, int]:
    """(why kernels cannot be kept there, "" if they can; bytes in it); creates nothing."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    problem = "" if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"
    try:
        require_private_folder(folder / "kernels")
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    size = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                size += os.stat(os.path.join(root, file)).st_size
            except OSError:  # a file another process just removed
                continue
    return problem, size


def probe() -> DeviceReport:
    """Everything ``warploom doctor`` shows. Never raises and imports no framework."""
    problems: list[str] = []
    nvrtc: str | None = None
    driver: str | None = None
    found: tuple[Gpu, ...] = ()
    try:
        nvrtc = "{}.{}".format(*nvrtc_version())
    except Exception as error:
        problems.append(str(error))
    if installed_version("cuda-core"):
        try:
            driver = "{}.{}".format(*driver_version())
            found = gpus()
            require_driver()
        except Exception as error:
            if str(error) not in problems:
                problems.append(str(error))
    problems += [
        f"GPU {gpu.index} ({gpu.name}, compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}) is "
        "not one warploom compiles for: it needs 8.0 (Ampere) or newer"
        for gpu in found
        if gpu.target is None
    ]
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        problems.append(NO_NVDISASM)
    folder = cache_folder()
    unusable, size = _folder_state(folder)
    if unusable:
        problems.append(
            f"the cache cannot be used ({unusable}): kernels are compiled anew in every process; "
            "set WARPLOOM_CACHE to a folder of yours"
        )
    packages = {name: installed_version(*(_CUPY_WHEELS if name == "cupy" else (name,))) for name in _FRAMEWORKS}
    return DeviceReport(
        driver=driver,
        gpus=found,
        nvrtc=nvrtc,
        nvdisasm=nvdisasm,
        cuda_core=installed_version("cuda-core"),
        cache_folder=folder,
        cache_writable=not unusable,
        cache_bytes=size,
        packages=packages,
        problems=tuple(problems),
    )
