# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Lanes of a warp: what they exchange in registers and through shared memory, and which of them are there."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from tests.emulate.defects.base import Launch, planted, zeros
from warploom.isa.conversion import FULL_MASK
from warploom.lang import Global, Kernel, bf16, f32, kernel, u32

GROUP = "lanes of a warp"
LANES = np.arange(32, dtype=np.uint32)


@planted(
    GROUP,
    "ORNL/HeCBench#221",
    {
        "no __syncwarp": ("race", r"tile\.", "kokkos/kokkos#4855"),
        "halves meet, all read": ("race", r"tile\.", "torch/cutorch#739"),
        "the mask forgets its own lane": ("member_mask", r"syncwarp"),
        "masks that differ": ("member_mask", r"syncwarp", "NVIDIA/cccl#854"),
        "__syncwarp in a branch with all lanes in its mask": (
            "member_mask|divergence",
            r"syncwarp",
            "ComputationalRadiationPhysics/picongpu#2514",
        ),
        "a shuffle instead": ("race", r"tile\.", "kokkos/kokkos#6630"),
        "a vote instead": ("race", r"tile\.", "JustVugg/colibri#1099"),
        "overwritten while neighbours read": ("race", r"tile\.", "JustVugg/colibri#1099"),
    },
    [{"distance": 16}, {"distance": 17}],
)
def talk(defect: str, *, distance: int) -> Launch:
    """Lanes of one warp exchange words through shared memory."""

    @kernel(threads=64)
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, (2, 32))
        tile.store(k.thread, k.warp, k.lane)
        if defect == "halves meet, all read":
            k.syncwarp(k.select(k.lane < 16, k.value(0xFFFF, u32), 0xFFFF0000))
        elif defect == "the mask forgets its own lane":
            k.syncwarp(0xFFFFFFFE)
        elif defect == "masks that differ":
            k.syncwarp(k.select(k.lane == 3, k.value(0xFFFF, u32), FULL_MASK))
        elif defect == "__syncwarp in a branch with all lanes in its mask":
            with k.when(k.lane < 20):
                k.syncwarp()
        elif defect == "a shuffle instead":
            out.store(k.shfl_xor(k.thread, 1), k.thread)
        elif defect == "a vote instead":
            out.store(k.ballot(k.lane < 7), k.thread)
        elif defect != "no __syncwarp":
            k.syncwarp()
        word = tile.load(k.warp, (k.lane + distance) & 31)
        if defect == "overwritten while neighbours read":
            tile.store(word, k.warp, k.lane)
        out.store(word, k.thread)

    right = np.concatenate([np.roll(LANES, -distance), 32 + np.roll(LANES, -distance)])
    return Launch(run.trace(), 1, [zeros(64)], {0: right})


@planted(
    GROUP,
    "NVIDIA/cccl#854",
    {
        "all lanes named, some there": ("member_mask|divergence|uninitialised", r"shfl", "gunrock/gunrock#324"),
        "from a lane that is not there": ("uninitialised|member_mask", r"shfl|out\.", "uzh-rpg/vilib#5"),
        "from a lane beyond the mask": ("uninitialised|member_mask", r"shfl|out\.", "brucefan1983/CUDA-Programming#51"),
        "a mask without the lane itself": ("member_mask", r"shfl", "NVlabs/moderngpu#36"),
        "a lane above 31": ("undefined|uninitialised", r"shfl", "kokkos/kokkos#3208"),
        "the partner of another half": (
            "member_mask|uninitialised",
            r"shfl|out\.",
            "ComputationalRadiationPhysics/picongpu#2514",
        ),
    },
    [{"mode": "xor"}, {"mode": "idx"}, {"mode": "down"}],
)
def reduce_part(defect: str, *, mode: str) -> Launch:
    """Half of a warp sums its numbers by shuffles."""

    @kernel(threads=32)
    def run(k: Kernel, out: Global[u32]) -> None:
        total = k.register(u32, 0)
        total.set(k.thread + 0)
        limit = {"from a lane that is not there": 12}.get(defect, 16)
        mask = {
            "all lanes named, some there": FULL_MASK,
            "from a lane that is not there": 0xFFF,
            "from a lane beyond the mask": 0xFF,
            "a mask without the lane itself": 0xFFFE,
        }.get(defect, 0xFFFF)
        with k.when(k.lane < limit):
            if defect == "from a lane beyond the mask":
                mask = k.select(k.lane < 8, k.value(0xFF, u32), 0xFF00)
            for step in (8, 4, 2, 1):
                if defect == "the partner of another half" and step == 8:
                    step = 16
                far = k.lane * 0 + (step if defect != "a lane above 31" else step + 24)
                if mode == "xor":
                    other = k.shfl_xor(total, far, mask)
                elif mode == "down":
                    other = k.shfl_down(total, far, mask)
                else:
                    other = k.shfl_idx(
                        total, (k.lane & ~15 & 31) + ((k.lane ^ step) if defect == "" else (k.lane + far)), mask
                    )
                total += other
        with k.when(k.lane == 0):
            out.store(total, 0)

    return Launch(run.trace(), 1, [zeros(1)], {0: np.array([120])})


@planted(
    GROUP,
    "brucefan1983/CUDA-Programming#51",
    {
        "from the other half": ("uninitialised|member_mask", r"shfl|out\."),
        "masks of quarters": ("uninitialised|member_mask", r"shfl|out\."),
        "a lane names another half": ("member_mask", r"shfl"),
    },
    [{"mode": "xor"}, {"mode": "down"}],
)
def reduce_halves(defect: str, *, mode: str) -> Launch:
    """Both halves of a warp, each with a mask of its own, sum their numbers by one instruction."""

    @kernel(threads=32)
    def run(k: Kernel, out: Global[u32]) -> None:
        total, half = k.register(u32, 0), k.lane >> 4
        total.set(k.thread + 0)
        mask = k.value(0xFFFF, u32) << (half * 16)
        if defect == "masks of quarters":
            mask = k.value(0xFF, u32) << ((k.lane >> 3) * 8)
        if defect == "a lane names another half":
            mask = k.select(k.lane == 5, k.value(0xFFFF0000, u32), mask)
        for step in (8, 4, 2, 1):
            far = 16 if defect == "from the other half" and step == 8 else step
            inside = k.lane if mode == "down" and far != 16 else k.lane * 0
            other = k.shfl_xor(total, far, mask) if mode == "xor" else k.shfl_down(total, far, mask)
            if mode == "down" and far != 16:
                other = k.select((inside & 15) + step < 16, other, k.value(0, u32))
            total += other
        with k.when((k.lane & 15) == 0):
            out.store(total, half)

    return Launch(run.trace(), 1, [zeros(2)], {0: np.array([120, 376])})


@planted(
    GROUP,
    "NVIDIA/cccl#854",
    {
        "vote with lanes that left": ("member_mask|divergence", r"vote|ballot"),
        "vote without its own lane": ("member_mask", r"vote|ballot", "NVlabs/moderngpu#36"),
        "vote on what was never written": ("uninitialised", r"vote|ballot|tile", "triton-lang/triton#10308"),
        "masks that disagree": ("member_mask", r"vote|ballot", "gunrock/gunrock#324"),
    },
    [{"kind": "vote_any"}, {"kind": "vote_all"}, {"kind": "ballot"}],
)
def votes(defect: str, *, kind: str) -> Launch:
    """The lanes of a branch vote."""

    @kernel(threads=32)
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, 32)
        if defect != "vote on what was never written":
            tile.store(k.lane, 0, k.lane)
        word = tile.load(0, k.lane)
        vote = getattr(k, kind)
        with k.when(k.lane < 24):
            mask = k.value(
                {"vote with lanes that left": FULL_MASK, "vote without its own lane": 0xFFFFFE}.get(defect, 0xFFFFFF),
                u32,
            )
            if defect == "masks that disagree":
                mask = k.select(k.lane < 12, k.value(0xFFFFFF, u32), 0xFFF000)
            said = vote(word < 30, mask)
            out.store(said if kind == "ballot" else k.select(said, k.value(1, u32), 0), k.lane)

    right = np.where(LANES < 24, 0xFFFFFF if kind == "ballot" else 1, 0)
    return Launch(run.trace(), 1, [zeros(32)], {0: right})


@planted(
    GROUP,
    "NVIDIA/cutlass#3316",
    {
        "no __syncwarp before ldmatrix": ("race", r"tile\.|ldmatrix", "JustVugg/colibri#1099"),
        "a row of 8 bytes off": ("misaligned|bounds", r"ldmatrix", "triton-lang/triton#2836"),
        "rows beyond the tile": ("bounds", r"ldmatrix", "openmm/openmm#2825"),
        "part of the tile is empty": ("uninitialised", r"ldmatrix|out\.", "Modular/mojo-gpu-puzzles#9"),
        "in a branch of some lanes": ("divergence", r"ldmatrix|mma"),
        "product of lanes that disagree": ("divergence", r"mma"),
        "sums that nobody cleared": ("uninitialised|refused", r"mma|out\.|store"),
        "written again before all have read": ("race", r"tile\.|ldmatrix", "NVIDIA/cutlass#1326"),
    },
    [{"transposed": False}, {"transposed": True}],
)
def matrices(defect: str, *, transposed: bool) -> Launch:
    """A warp stores a tile, loads it with ldmatrix and multiplies."""

    @kernel(threads=32)
    def run(k: Kernel, out: Global[f32]) -> None:
        tile = k.shared(bf16, (16, 16), name="tile")
        one = k.value(0x3F803F80, u32)
        rows = 15 if defect == "part of the tile is empty" else 16
        with k.when(k.lane < rows):  # one row each
            for col in range(0, 16, 8):
                tile.store([one] * 4, k.lane, col, dtype=u32)
        if defect != "no __syncwarp before ldmatrix":
            k.syncwarp()
        col = (k.lane >> 4) * 8
        address = tile.address(k.lane & 15, col)
        if defect == "a row of 8 bytes off":
            address = address + 8
        if defect == "rows beyond the tile":
            address = address + 32
        a = [k.register(u32, 0) for _ in range(4)]
        with k.when(k.lane < 16) if defect == "in a branch of some lanes" else nullcontext():
            for register, value in zip(a, k.ldmatrix(address, 4, transposed=transposed), strict=True):
                register.set(value)
        if defect == "written again before all have read":
            tile.store([one] * 4, k.lane & 15, 0, dtype=u32)
        sums = k.registers(f32, 4, None if defect == "sums that nobody cleared" else 0.0)
        with k.when(k.lane < 31) if defect == "product of lanes that disagree" else nullcontext():
            done = k.mma(a, a[:2], sums, inputs=bf16)
            for register, value in zip(sums, done, strict=True):
                register.set(value)
        out.store([sums[0], sums[1]], k.lane * 4)
        out.store([sums[2], sums[3]], k.lane * 4 + 2)

    return Launch(run.trace(), 1, [np.zeros(128, np.float32)], {0: np.full(128, 16)})
