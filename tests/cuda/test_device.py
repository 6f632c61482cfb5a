"""What is missing is said in words that help; looking never fails."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from warploom.core.errors import UnsupportedDeviceError
from warploom.cuda import device
from warploom.cuda.device import Gpu, probe


def forget_what_was_seen() -> None:
    for function in (device._initialised_driver, device.gpus, device.has_gpu, device.target_of, device.require_driver):
        function.cache_clear()


@pytest.fixture(autouse=True)
def forget():
    """Each test asks anew, and leaves no fake behind."""
    forget_what_was_seen()
    yield
    forget_what_was_seen()


def driver(*, version=13000, capability=(9, 0), init: Any = lambda: (0,)) -> SimpleNamespace:
    """The few calls of the driver that looking around makes."""
    names = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT"
    attributes = {f"CU_DEVICE_ATTRIBUTE_{n}": value for n, value in zip(names, (*capability, 132), strict=True)}
    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_ERROR_NO_DEVICE=100),
        CUdevice_attribute=SimpleNamespace(**{name: name for name in attributes}),
        cuInit=lambda _: init(),
        cuGetErrorString=lambda _: (0, b"a reason"),
        cuDriverGetVersion=lambda: (0, version),
        cuDeviceGetCount=lambda: (0, 1),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetName=lambda *_: (0, b"A GPU\0\0\0"),
        cuDeviceTotalMem=lambda _: (0, 1 << 30),
        cuDeviceGetAttribute=lambda name, _: (0, attributes[name]),
    )


def missing() -> None:
    raise RuntimeError('"cuda" is a driver library')


def use(monkeypatch, driver, nvrtc=(13, 0)) -> None:
    real = device.importlib.import_module
    fakes = {"cuda.bindings.driver": driver, "cuda.core": object()}
    monkeypatch.setattr(device.importlib, "import_module", lambda name, *rest: fakes.get(name) or real(name, *rest))
    monkeypatch.setattr(device, "installed_version", lambda *names: "1.2.3")
    monkeypatch.setattr(device, "nvrtc_version", lambda: nvrtc)
    monkeypatch.setattr(device, "compiler_generation", lambda: nvrtc[0])


def test_a_gpu_is_described(monkeypatch):
    use(monkeypatch, driver())
    assert device.gpus() == (Gpu(0, "A GPU", (9, 0), 1 << 30, 132, "sm_90a"),)
    assert device.has_gpu()
    assert device.target_of(0).name == "sm_90a"
    with pytest.raises(UnsupportedDeviceError, match="there is no GPU 1"):
        device.target_of(1)


@pytest.mark.parametrize(("version", "nvrtc"), [(14010, (13, 0)), (12040, (12, 8))])
def test_a_driver_that_is_newer_than_the_compiler_or_as_old_is_fine(monkeypatch, version, nvrtc):
    use(monkeypatch, driver(version=version), nvrtc)
    assert device.has_gpu()


@pytest.mark.parametrize(
    ("there", "gpus", "says"),
    [
        (driver(capability=(7, 5)), 1, r"A GPU.*7\.5.*8\.0"),
        (driver(version=12040), 1, r"CUDA 12\.4.*580 or newer.*extra cu12"),
        (driver(init=lambda: (100,)), 0, "sees no GPU"),
        (driver(init=lambda: (999,)), 0, "a reason"),
        (driver(init=missing), 0, "no NVIDIA driver"),
    ],
)
def test_what_cannot_run_kernels_says_why(monkeypatch, there, gpus, says):
    use(monkeypatch, there)
    assert not device.has_gpu()
    with pytest.raises(UnsupportedDeviceError, match=says):
        device.target_of(0)
    report = probe()
    assert any(re.search(says, problem) for problem in report.problems)
    assert (len(report.gpus), report.driver is None) == (gpus, gpus == 0)


def test_nothing_installed_at_all(monkeypatch, tmp_path):
    def nothing(name, *rest):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(device.importlib, "import_module", nothing)
    monkeypatch.setattr(device, "installed_version", lambda *names: None)
    monkeypatch.setattr(device, "find_nvdisasm", lambda: None)
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("not a folder")
    report = probe()
    assert (report.nvrtc, report.driver, report.cuda_core, report.nvdisasm) == (None, None, None, None)
    assert not report.cache_writable
    text = "\n".join(report.problems)
    for part in ("install the extra cu13", "no nvdisasm", "WARPLOOM_CACHE", "emulator work without"):
        assert part in text


def test_the_report_counts_the_cache_and_creates_nothing(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("WARPLOOM_CACHE", str(folder))
    report = probe()
    assert not folder.exists()
    assert (report.cache_folder, report.cache_writable, report.cache_bytes) == (folder, True, 0)
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "one").write_bytes(b"x" * 321)
    assert probe().cache_bytes == 321
    assert report.packages["numpy"]


@pytest.mark.skipif(sys.platform == "win32", reason="permission bits")
@pytest.mark.parametrize("open_to_others", [".", "kernels"])
def test_a_cache_that_others_can_write_to_is_a_problem(monkeypatch, tmp_path, open_to_others):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    assert probe().cache_writable
    (tmp_path / "cache" / open_to_others).chmod(0o777)
    report = probe()
    assert not report.cache_writable
    assert any("other users can write to it" in problem for problem in report.problems)


def test_looking_imports_no_framework():
    script = (
        "import sys; import warploom.cuda.launch, warploom.interop.arrays; from warploom.cuda.device import probe; "
        "assert 'cuda' not in sys.modules; probe(); "
        "print([name for name in ('torch', 'cupy', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_the_gpu_here():
    report = probe()
    assert report.problems == () or report.nvdisasm is None
    assert report.driver
    assert device.target_of(0).name == report.gpus[0].target
