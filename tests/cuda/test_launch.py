"""Limits and arguments are checked before the driver sees them."""

import ctypes

import pytest

from warploom.core.dtypes import f16, f32, pred, s32, u32, u64
from warploom.core.errors import ConfigError, ProblemError, UnsupportedDeviceError
from warploom.core.targets import target
from warploom.cuda import device
from warploom.cuda.cubin import Parameter, Resources
from warploom.cuda.launch import _triple, launch_problems, load, scalar
from warploom.cuda.store import CompiledKernel


def compiled(*, registers=64, static_shared=0, parameters=(8,), cluster=(1, 1, 1)) -> CompiledKernel:
    needs = Resources(registers, 0, static_shared, 1, tuple(Parameter(0, size) for size in parameters), 0, 0, cluster)
    return CompiledKernel("kernel", "sm_80", b"", "", needs, False, 0.0)


def problems(kernel=None, grid=(1, 1, 1), block=(128, 1, 1), shared=0, arch="sm_80") -> list[str]:
    return launch_problems(kernel or compiled(), target(arch), grid, block, shared)


def test_a_launch_that_fits():
    assert problems(shared=163 * 1024) == []
    assert problems(grid=(2**31 - 1, 65535, 65535), block=(32, 8, 4)) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shared": 163 * 1024 + 1}, "sm_80 has 166912"),
        ({"shared": 100 * 1024, "arch": "sm_89"}, "sm_89 has 101376"),
        ({"kernel": compiled(static_shared=4096), "shared": 160 * 1024}, "167936 bytes of shared memory"),
        ({"grid": (1, 65536, 1)}, "grid"),
        ({"grid": (0, 1, 1)}, "grid"),
        ({"kernel": compiled(registers=32), "block": (32, 32, 2)}, "2048 threads"),
        ({"block": (1, 1, 65)}, "block"),
        ({"kernel": compiled(registers=255), "block": (512, 1, 1)}, "255 registers each"),
        (
            {"kernel": compiled(cluster=(2, 1, 1)), "grid": (3, 1, 1)},
            "(3, 1, 1) is not a multiple of the cluster (2, 1, 1)",
        ),
    ],
)
def test_each_limit_has_its_words(options, says):
    (reason,) = problems(**options)
    assert says in reason


def test_registers_are_granted_in_units():
    assert problems(compiled(registers=128), block=(512, 1, 1)) == []
    assert problems(compiled(registers=129), block=(512, 1, 1)) != []


def test_scalars():
    assert isinstance(scalar(u32, 7), ctypes.c_uint32)
    assert scalar(f32, 0.5).value == 0.5
    assert scalar(s32, -1).value == -1
    assert scalar(u64, 2**63).value == 2**63
    assert scalar(pred, True).value is True
    for dtype, value in ((u32, -1), (u32, 2**32), (s32, 2**31), (u32, 1.5)):
        with pytest.raises(ProblemError, match="does not fit"):
            scalar(dtype, value)
    with pytest.raises(ProblemError, match="f16 is not"):
        scalar(f16, 1.0)


def test_extents():
    assert _triple(5) == (5, 1, 1)
    assert _triple((5, 2)) == (5, 2, 1)
    with pytest.raises(ConfigError):
        _triple((1, 2, 3, 4))


@pytest.mark.skipif(device.has_gpu(), reason="there is a GPU")
def test_loading_without_a_gpu_says_so():
    with pytest.raises(UnsupportedDeviceError):
        load(compiled(), 0)
