"""Occupancy against NVIDIA's occupancy calculator's arithmetic, by hand."""

import pytest

from warploom.core.errors import ConfigError
from warploom.core.targets import target
from warploom.cuda.occupancy import occupancy

KIB = 1024


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "ctas", "limited_by"),
    [
        ("sm_80", 128, 128, 0, 4, ("registers",)),  # 16384 / (128·32) = 4 warps per partition
        ("sm_80", 128, 129, 0, 3, ("registers",)),  # 129 → 136 registers: 3 warps per partition
        ("sm_80", 128, 232, 48 * KIB, 2, ("registers",)),  # the seeds' kernel 2: two CTAs of 4 warps
        ("sm_80", 128, 168, 48 * KIB, 3, ("registers", "shared memory")),  # 164 KiB / (48 + 1) KiB = 3
        ("sm_80", 128, 96, 48 * KIB, 3, ("shared memory",)),
        ("sm_80", 96, 40, 0, 16, ("registers",)),  # 12 warps per partition are 48; all registers together held 51
        ("sm_80", 1024, 32, 0, 2, ("warps", "registers")),
        ("sm_80", 32, 16, 0, 32, ("CTAs",)),
        ("sm_86", 1024, 32, 0, 1, ("warps",)),  # 48 warps per SM
        ("sm_90a", 128, 64, 227 * KIB, 1, ("shared memory",)),
        ("sm_90a", 128, 64, 227 * KIB + 1, 0, ("shared memory",)),
        ("sm_90a", 1024, 72, 0, 0, ("registers",)),  # 7 warps per partition are 28, a CTA has 32
    ],
)
def test_limits(arch, threads, registers, shared, ctas, limited_by):
    found = occupancy(target(arch), threads=threads, registers=registers, shared_bytes=shared)
    assert found.ctas_per_sm == ctas
    assert found.limited_by == limited_by
    assert found.warps_per_sm == ctas * threads // 32
    assert found.fraction == found.warps_per_sm / (target(arch).threads_per_sm // 32)


@pytest.mark.parametrize("threads", [0, 1025])
def test_impossible_ctas(threads):
    with pytest.raises(ConfigError, match="1 to 1024"):
        occupancy(target("sm_80"), threads=threads, registers=32, shared_bytes=0)
