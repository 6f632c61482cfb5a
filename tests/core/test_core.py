"""Types, targets, settings and errors."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from warploom.core import errors
from warploom.core.arguments import GRID_LIMITS, grid_of
from warploom.core.dtypes import DTYPES, bf16, dtype_of, f16, f32, pred, s32, s64, u16
from warploom.core.errors import ConfigError, WarploomError
from warploom.core.settings import cache_folder
from warploom.core.targets import TARGETS, target, target_for


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=repr)
def test_one_table_agrees_with_numpy(dtype):
    assert DTYPES[dtype.name] is dtype
    assert dtype.numpy.itemsize == dtype.bytes
    assert dtype.bytes == max(1, dtype.bits // 8)
    assert dtype_of(dtype) is dtype
    assert dtype_of(dtype.name) is dtype
    assert (dtype.is_float, dtype.is_integer) == (dtype.kind == "float", dtype.kind in ("signed", "unsigned"))


@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        (np.float16, f16),
        (np.dtype(ml_dtypes.bfloat16), bf16),
        ("torch.bfloat16", bf16),
        ("half", f16),
        ("FP16", f16),
        (np.int32, s32),
        (int, s64),
        ("float", f32),
        (np.bool_, pred),
        (np.uint16, u16),
        (np.dtype("f4"), f32),
    ],
)
def test_types_are_recognised_by_what_others_call_them(what, dtype):
    assert dtype_of(what) is dtype


@pytest.mark.parametrize("what", ["quaternion", "f8", "i4", np.complex64, "torch.complex64", object()])
def test_unknown_types_list_the_known_ones(what):
    with pytest.raises(ValueError, match="is not a type warploom knows; it knows pred, u8"):
        dtype_of(what)


def test_targets_are_found_with_and_without_their_suffix():
    assert target("sm_90") is target("sm_90a") is TARGETS["sm_90a"]
    assert target("sm_90a").has_wgmma
    assert not target("sm_100a").has_wgmma
    assert target("sm_120a").has_tma
    assert not target("sm_89").has_tma
    with pytest.raises(ConfigError, match="unknown architecture 'sm_70'; warploom compiles for sm_80"):
        target("sm_70")


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a")],
)
def test_devices_get_the_code_that_runs_on_them(capability, name):
    assert target_for(*capability).name == name


@pytest.mark.parametrize(("capability", "says"), [((7, 5), "8.0 .Ampere. or newer"), ((13, 0), "no target for")])
def test_devices_without_code_are_refused(capability, says):
    with pytest.raises(ConfigError, match=says):
        target_for(*capability)


@pytest.mark.parametrize("goal", TARGETS.values(), ids=lambda t: t.name)
def test_limits_are_consistent(goal):
    assert goal.shared_per_block + goal.shared_reserved_per_block == goal.shared_per_sm
    assert goal.threads_per_sm % 32 == 0
    assert goal.registers_per_thread == 255


def test_every_error_has_one_base_and_a_builtin_beside_it():
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, WarploomError)]
    assert len(kinds) >= 8
    for kind in kinds:
        assert kind.__doc__
        if kind is not WarploomError:
            assert issubclass(kind, (ValueError, TypeError, RuntimeError)), kind


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("WARPLOOM_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "warploom"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "warploom"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as if it were not set
    assert cache_folder() == Path.home() / ".cache" / "warploom"


def test_a_user_without_a_home_gets_no_cache_and_no_error(monkeypatch, tmp_path):
    """Containers run under numbers that no user has: kernels are then compiled anew, with a warning."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("WARPLOOM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "warploom"
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(OSError, match="directory"):
        cache_folder().mkdir(parents=True)
    monkeypatch.setenv("WARPLOOM_CACHE", "~a-user-there-is-not/kernels")
    with pytest.raises(OSError, match="directory"):
        cache_folder().mkdir(parents=True)


@pytest.mark.parametrize("axis", range(3))
def test_a_grid_may_be_as_large_as_a_gpu_takes(axis: int) -> None:
    most = tuple(limit if i == axis else 1 for i, limit in enumerate(GRID_LIMITS))
    assert grid_of(most) == most
    with pytest.raises(ConfigError, match="larger than any GPU takes"):
        grid_of(tuple(limit + (i == axis) if i == axis else 1 for i, limit in enumerate(GRID_LIMITS)))
