"""A kernel of the user's own in show, bench, profile, tune and check: what needs a GPU runs on the emulator here."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.clock import SimulatedClock

from warploom.checking.kernel_file import compared, one_kernel
from warploom.core.errors import ProblemError, TraceError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, f32, kernel
from warploom.measure import kernel_file
from warploom.ops import launch, tuned
from warploom.ops.launch import CopiedLaunch

KERNELS = """
import numpy as np
from warploom.lang import Global, Kernel, Launch, f32, kernel


@kernel(threads=lambda tile: tile)
def scaled(k: Kernel, x: Global[f32], y: Global[f32], *, tile: int = 64, factor: float = 2.0) -> None:
    i = k.cta_x * tile + k.thread
    y.store(x.load(i) * factor, i)


@scaled.example
def ones(rng: np.random.Generator, tile: int = 64) -> Launch:
    x = rng.standard_normal(256).astype(np.float32)
    return Launch(256 // tile, [x, np.full(256, np.nan, np.float32)], expect={"y": (2.0 * x, 0)})


@kernel(threads=32)
def unused(k: Kernel, y: Global[f32]) -> None:
    y.store(1.0, k.lane)
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return f"{path}:scaled"


@pytest.fixture
def emulated_gpu(monkeypatch):
    """Launches run on the emulator; of a clock that the test owns a launch of 64 threads takes 1 ms, of others 2."""
    clock = SimulatedClock()

    def copied(program, grid, arguments):
        ran = []

        def queue(stream):
            if not ran:
                ran.append(emulate(program, grid, arguments))
            clock.spend(1e-3 if program.threads == 64 else 2e-3)

        return CopiedLaunch(queue, ())

    monkeypatch.setattr(kernel_file, "copied_launch", copied)
    monkeypatch.setattr(kernel_file, "require_driver", lambda: None)
    monkeypatch.setattr(kernel_file, "EventClock", lambda _: clock)


def test_show_prints_what_a_configuration_compiles_to(invoke, target):
    assert "* 2.0f" in invoke("show", target).stdout
    assert "* 3.0f" in invoke("show", target, "--set", "factor=3.0").stdout
    assert invoke("show", target, "--what", "program").stdout.startswith("kernel scaled")


def test_bench_checks_and_times_the_example(invoke, target, emulated_gpu):
    result = invoke("bench", target, "--set", "tile=128", "--json", "-")
    found = json.loads(result.stdout)
    assert found["configuration"] == {"tile": "128"}
    assert found["microseconds"]["median"] == pytest.approx(2000)
    assert found["array_gigabytes_per_second"] == pytest.approx(2 * 256 * 4 / 2e-3 / 1e9)
    assert "scaled: as it is: 1000 µs" in invoke("bench", target).stdout


def test_bench_times_nothing_that_is_wrong(invoke, target, emulated_gpu):
    result = invoke("bench", target, "--set", "factor=3.0")
    assert result.exit_code == 2
    assert "wrong on the GPU (y)" in result.stderr


def test_tune_times_every_right_combination_the_fastest_first(invoke, target, emulated_gpu):
    result = invoke("tune", target, "--try", "tile=32,64,128", "--try", "factor=2.0,3.0")
    first, *others = result.stdout.splitlines()
    assert first.startswith("tile=64, factor=2.0: 1000 µs")
    assert [line.partition(":")[0] for line in others] == ["tile=32, factor=2.0", "tile=128, factor=2.0"]
    assert result.stderr.count("wrong on the GPU") == 3


TUNED = KERNELS.replace("lambda tile: tile)", "lambda tile: tile, tune={'tile': (32, 64, 128)})").replace(
    "tile: int = 64, factor", "tile: int = 128, factor"
)


def test_what_a_kernel_declares_is_tuned_and_launches_take_the_fastest(invoke, tmp_path, emulated_gpu, monkeypatch):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))  # what an earlier run tuned is not there
    file = tmp_path / "tuned_kernels.py"
    file.write_text(TUNED)
    function, x, y = one_kernel(f"{file}:scaled"), np.ones(256, np.float32), np.zeros(256, np.float32)
    ran = []

    def copied(program, grid, *_):
        ran.append((program.threads, grid))
        return CopiedLaunch(lambda _: None, ())

    with monkeypatch.context() as gpu:
        for module in (launch, tuned, kernel_file):
            gpu.setattr(module, "gpu_name", lambda _: "NVIDIA Test", raising=False)
        gpu.setattr(launch, "gpu_present", lambda: True)
        gpu.setattr(launch, "_copied", copied)
        function[lambda tile: 256 // tile](x, y)
        result = invoke("tune", f"{file}:scaled")
        assert result.stdout.startswith("tile=64: 1000 µs")
        function[lambda tile: 256 // tile](x, y)
        function[8](x, y, tile=32)
        function[lambda tile: 256 // tile](x, y, factor=3.0)  # another kernel, which nobody has tuned
        assert ran == [(128, (2, 1, 1)), (64, (4, 1, 1)), (32, (8, 1, 1)), (128, (2, 1, 1))]
        assert invoke("tune", f"{file}:scaled", "--try", "tile=32").exit_code == 0
        function[lambda tile: 256 // tile](x, y)
        assert ran[-1][0] == 64
    assert "tile=64" in invoke("tune", "show").stdout
    function[lambda tile: 256 // tile](x, y)  # the emulator runs the defaults
    assert (y == 2).all()


def test_a_grid_in_numbers_is_refused_where_tuning_chooses_what_it_depends_on(tmp_path):
    file = tmp_path / "tuned_kernels.py"
    file.write_text(TUNED)
    x = np.ones(256, np.float32)
    with pytest.raises(ProblemError, match=r"lambda tile: …"):
        one_kernel(f"{file}:scaled")[2](x, x.copy())


@pytest.mark.parametrize("tune", [{"tile": (64, 128)}, {"width": (1, 2)}])
def test_a_tuned_parameter_has_its_default_among_its_values(tune):
    with pytest.raises(TraceError, match=next(iter(tune))):

        @kernel(threads=32, tune=tune)
        def copy(k: Kernel, x: Global[f32], *, tile: int = 32) -> None: ...


@pytest.mark.parametrize("bits", [0x7FA00001, 0x7FC00000, 0x7F800000])
@pytest.mark.filterwarnings("error")
def test_what_is_no_number_is_compared_without_a_warning(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    assert compared("y", x, x, 0).ok
    assert not compared("y", x, np.zeros(1), 0).ok


@pytest.mark.parametrize(
    ("shape", "where", "pattern"),
    [
        ((128, 64), np.s_[64:], "row 64 to 127"),
        ((128, 64), np.s_[3, 5], "row 3, column 5"),
        ((128, 64), np.s_[:, 1::2], "column 1 of every 2"),
        ((128, 64), np.s_[:, np.arange(64) % 16 >= 8], "column 8 to 15 of every 16"),
        ((128, 64), np.s_[::32, 32:], "row 0 of every 32, column 32 to 63"),
        ((96,), np.s_[90:], "index 90 to 95"),
        ((4, 4, 4), np.s_[2, :, :], "index 0 2"),
        ((128, 64), np.s_[[1, 4, 9], [2, 3, 7]], ""),
        ((128, 64), np.s_[:], ""),
    ],
)
def test_a_pattern_of_wrong_elements_is_named(shape, where, pattern):
    got = np.zeros(shape)
    got[where] = 1
    assert compared("y", got, np.zeros(shape), 0).pattern == pattern


def test_a_transposed_result_is_named():
    wanted = np.arange(64.0).reshape(8, 8)
    assert compared("y", wanted.T, wanted, 0).pattern == "the transpose of what is expected"


def test_check_shows_which_elements_are_wrong_and_which_kernels_it_left_out(invoke, target):
    result = invoke("check", target, "--set", "factor=3.0", "--seed", "1")
    assert result.exit_code == 1
    assert "256 of 256 elements are wrong" in result.stdout
    assert "y[0] is" in result.stdout
    whole = invoke("check", target.removesuffix(":scaled"), "--seed", "1")
    assert whole.exit_code == 0
    assert "unused" in whole.stderr


@pytest.mark.gpu
def test_on_a_gpu_it_is_checked_and_timed(invoke, target):
    found = json.loads(invoke("bench", target, "--rounds", "3", "--json", "-").stdout)
    assert found["microseconds"]["median"] > 0
    assert found["results"] == [{"name": "y", "error": 0.0, "tolerance": 0.0}]
    assert "wrong on the GPU (y)" in invoke("bench", target, "--set", "factor=3.0").stderr
    tuned = invoke("tune", target, "--try", "tile=32,64", "--rounds", "3")
    assert sorted(line.partition(":")[0] for line in tuned.stdout.splitlines()) == ["tile=32", "tile=64"]
