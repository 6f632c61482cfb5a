"""Limits of the GPU architectures warploom prints for.

Source: CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per compute capability).
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture: sizes in bytes, counts per streaming multiprocessor (SM)."""

    name: str
    compute_capability: tuple[int, int]
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    shared_reserved_per_block: int = 1024

    @property
    def has_wgmma(self) -> bool:
        """Whether ``wgmma`` and ``setmaxnreg`` assemble: only the architecture-specific sm_90a has wgmma."""
        return self.name == "sm_90a"

    @property
    def has_tma(self) -> bool:
        """Whether bulk tensor copies and transaction mbarriers exist (sm_90 and later)."""
        return self.compute_capability >= (9, 0)


_KIB = 1024
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_80", (8, 0), 163 * _KIB, 164 * _KIB, 2048, 32),
        Target("sm_86", (8, 6), 99 * _KIB, 100 * _KIB, 1536, 16),
        Target("sm_89", (8, 9), 99 * _KIB, 100 * _KIB, 1536, 24),
        Target("sm_90a", (9, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Target("sm_100a", (10, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Target("sm_120a", (12, 0), 99 * _KIB, 100 * _KIB, 1536, 24),
    )
}


@dataclass(frozen=True, slots=True)
class GpuRates:
    """A GPU's published rates: its clock in Hz, bytes of memory a second, FLOP of an SM's tensor cores in a cycle.

    ``tensor_flops_per_cycle`` are those of dense products of 16-bit inputs; the clock is the one that the published
    rates of tensor cores are of.
    """

    name: str
    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float
    tensor_flops_per_cycle: int


GPUS: dict[str, GpuRates] = {
    g.name: g
    for g in (
        GpuRates("A100", "sm_80", 108, 1.41e9, 2.039e12, 2048),  # of 80 GB: 312 TFLOP/s
        GpuRates("H100", "sm_90a", 132, 1.83e9, 3.35e12, 4096),  # SXM: 989 TFLOP/s
        GpuRates("H200", "sm_90a", 132, 1.83e9, 4.8e12, 4096),
    )
}
"""NVIDIA's "A100 Tensor Core GPU Architecture", "H100 Tensor Core GPU Architecture", and the datasheet of the H200."""
ISSUED_PER_CYCLE, SPECIAL_PER_CYCLE, SHARED_BYTES_PER_CYCLE = 4, 16, 128
"""Instructions of warps, results of special functions, bytes of shared memory: of an SM (compute capability 8.0, 9.0).

CUDA C++ Programming Guide, "Hardware Multithreading", "Arithmetic Instructions", "Shared Memory".
"""


def target(name: str) -> Target:
    """The limits of architecture ``name`` (``"sm_80"`` … ``"sm_120a"``). Raises ConfigError for an unknown name."""
    found = TARGETS.get(name) or TARGETS.get(name + "a")
    if found is None:
        raise ConfigError(f"unknown architecture {name!r}; warploom compiles for {', '.join(TARGETS)}")
    return found


def target_for(major: int, minor: int) -> Target:
    """The target whose code runs on a device of compute capability ``major.minor``.

    Raises ConfigError below 8.0: the kernels need ``cp.async`` and ``mma.sync.m16n8k16``.
    """
    if (major, minor) < (8, 0):
        raise ConfigError(
            f"this GPU has compute capability {major}.{minor}; warploom's kernels need 8.0 (Ampere) or newer"
        )
    exact = [t for t in TARGETS.values() if t.compute_capability == (major, minor)]
    if exact:
        return exact[0]
    # Architecture-specific ('a') code runs on its own compute capability alone, plain code on later minors too.
    plain = [t for t in TARGETS.values() if not t.name.endswith("a")]
    same = [t for t in plain if t.compute_capability[0] == major and t.compute_capability[1] <= minor]
    if same:
        return same[-1]
    raise ConfigError(f"no target for compute capability {major}.{minor}; warploom compiles for {', '.join(TARGETS)}")
