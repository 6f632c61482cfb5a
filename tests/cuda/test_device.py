"""What is missing is said in words that help; looking never fails."""
# ruff: noqa: N802 - the fake driver's methods have the driver's names

import subprocess
import sys

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


class FakeDriver:
    """The few driver calls that looking around makes."""

    class CUresult:
        CUDA_ERROR_NO_DEVICE = 100

    class CUdevice_attribute:  # noqa: N801 - the driver's name
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16

    def __init__(self, *, version=13000, capability=(9, 0), init=0) -> None:
        self.version, self.capability, self.init = version, capability, init

    def cuInit(self, flags):
        return (self.init,)

    def cuGetErrorString(self, status):
        return 0, b"a reason"

    def cuDriverGetVersion(self):
        return 0, self.version

    def cuDeviceGetCount(self):
        return 0, 1

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetName(self, size, index):
        return 0, b"A GPU\0\0\0"

    def cuDeviceTotalMem(self, index):
        return 0, 1 << 30

    def cuDeviceGetAttribute(self, attribute, index):
        return 0, {75: self.capability[0], 76: self.capability[1], 16: 132}[attribute]

    def cuCtxGetDevice(self):
        return 201, None  # no context is current


def use(monkeypatch, driver, nvrtc=(13, 0)) -> None:
    forget_what_was_seen()
    real = device.importlib.import_module
    fakes = {"cuda.bindings.driver": driver, "cuda.core": object()}
    monkeypatch.setattr(device.importlib, "import_module", lambda name, *rest: fakes.get(name) or real(name, *rest))
    monkeypatch.setattr(device, "installed_version", lambda *names: "1.2.3")
    monkeypatch.setattr(device, "nvrtc_version", lambda: nvrtc)
    monkeypatch.setattr(device, "compiler_generation", lambda: nvrtc[0])


def test_a_gpu_is_described(monkeypatch):
    use(monkeypatch, FakeDriver())
    assert device.gpus() == (Gpu(0, "A GPU", (9, 0), 1 << 30, 132, "sm_90a"),)
    assert device.has_gpu()
    assert device.target_of(0).name == "sm_90a"
    with pytest.raises(UnsupportedDeviceError, match="there is no GPU 1"):
        device.target_of(1)


def test_a_gpu_that_is_too_old(monkeypatch):
    use(monkeypatch, FakeDriver(capability=(7, 5)))
    assert not device.has_gpu()
    with pytest.raises(UnsupportedDeviceError, match=r"A GPU.*7\.5.*8\.0"):
        device.target_of(0)
    assert any("8.0 (Ampere)" in problem for problem in probe().problems)


def test_a_driver_that_is_too_old_for_the_compiler(monkeypatch):
    use(monkeypatch, FakeDriver(version=12040))
    assert not device.has_gpu()
    with pytest.raises(UnsupportedDeviceError, match=r"CUDA 12\.4.*580 or newer.*extra cu12"):
        device.target_of(0)
    use(monkeypatch, FakeDriver(version=12040), nvrtc=(12, 8))
    assert device.has_gpu()


def test_a_newer_driver_is_fine(monkeypatch):
    use(monkeypatch, FakeDriver(version=14010))
    assert device.has_gpu()


def test_a_driver_without_a_gpu(monkeypatch):
    use(monkeypatch, FakeDriver(init=100))
    with pytest.raises(UnsupportedDeviceError, match="sees no GPU"):
        device.target_of(0)
    use(monkeypatch, FakeDriver(init=999))
    with pytest.raises(UnsupportedDeviceError, match="a reason"):
        device.target_of(0)


def test_no_driver(monkeypatch):
    class Missing(FakeDriver):
        def cuInit(self, flags):
            raise RuntimeError('"cuda" is a driver library')

    use(monkeypatch, Missing())
    assert not device.has_gpu()
    with pytest.raises(UnsupportedDeviceError, match="no NVIDIA driver"):
        device.require_driver()
    report = probe()
    assert report.driver is None
    assert report.gpus == ()
    assert any("no NVIDIA driver" in problem for problem in report.problems)


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
