# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Threads of a CTA that meet at barriers: what they exchange through shared memory, and who comes to the barrier."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, numbers, planted, zeros
from warploom.isa.memory import atomic
from warploom.lang import Global, Kernel, f32, kernel, u32

GROUP = "barriers of a CTA"


@planted(
    GROUP,
    "NVIDIA/cutlass#1326",
    {
        "no barrier": ("race", r"tile\."),
        "a __syncwarp instead": ("race", r"tile\.", "ggml-org/llama.cpp#13438"),
        "barrier too early": ("race", r"tile\.", "NVIDIA/Fuser#678"),
        "barrier too late": ("race", r"tile\.", "NVIDIA/Fuser#678"),
        "barrier of half the threads": ("race", r"tile\.(load|store)|bar_sync", "deepseek-ai/FlashMLA#57"),
        "only one warp meets": ("deadlock|barrier", r"syncthreads", "ggml-org/llama.cpp#27870"),
        "only some lanes meet": ("divergence", r"syncthreads", "ggml-org/llama.cpp#27955"),
    },
    [{"apart": 32, "wide": 1}, {"apart": 96, "wide": 1}, {"apart": 64, "wide": 4}],
)
def exchange(defect: str, *, apart: int, wide: int) -> Launch:
    """Each thread reads what a thread of another warp wrote."""

    @kernel(threads=128)
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, 128 * wide)
        if defect == "barrier too early":
            k.syncthreads()
        tile.store([k.thread * wide + i for i in range(wide)], 0, k.thread * wide)
        if defect == "a __syncwarp instead":
            k.syncwarp()
        elif defect == "barrier of half the threads":
            with k.warps(0, 2):
                k.bar_sync(1, 64)
            with k.warps(2, 4):
                k.bar_sync(2, 64)
        elif defect == "only one warp meets":
            with k.when(k.warp == 0):
                k.syncthreads()
        elif defect == "only some lanes meet":
            with k.when(k.lane < 16):
                k.syncthreads()
        elif defect not in ("no barrier", "barrier too early", "barrier too late"):
            k.syncthreads()
        words = tile.load(0, ((k.thread + apart) & 127) * wide, wide)
        if defect == "barrier too late":
            k.syncthreads()
        out.store(words, k.thread * wide)

    return Launch(run.trace(), 1, [zeros(128 * wide)], {0: np.roll(numbers(128 * wide), -apart * wide)})


@planted(
    GROUP,
    "NVIDIA/cutlass#3597",
    {
        "no barrier before the next round": ("race", r"tile\.", "vernamlab/cuFHE#4"),
        "barrier behind the loop": ("race", r"tile\.", "warpfront/hipfire#575"),
    },
    [{"rounds": 3, "double": False}],
)
@planted(
    GROUP,
    "NVIDIA/cutlass#3597",
    {
        "no barrier after the store": ("race", r"tile\."),
        "barrier in odd rounds alone": ("race", r"tile\.", "csarofeen/pytorch#380"),
    },
    [{"rounds": 3, "double": False}, {"rounds": 4, "double": True}],
)
@planted(
    GROUP,
    "ggml-org/llama.cpp#26434",
    {
        "one buffer where two were meant": ("race", r"tile\."),
        "the stage written is the stage read": ("race|uninitialised", r"tile\.|out\."),
    },
    [{"rounds": 4, "double": True}],
)
def rounds_of_reuse(defect: str, *, rounds: int, double: bool) -> Launch:
    """A tile is filled and read in turn; with two of them one barrier a round is enough."""

    @kernel(threads=64)
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, 64, stages=2 if double else 1)
        total = k.register(u32, 0)
        with k.loop(rounds) as i:
            where = i & 1 if double and defect != "one buffer where two were meant" else k.value(0, u32)
            tile.stage(where).store(k.thread * (i + 1), 0, k.thread)
            if defect == "barrier in odd rounds alone":
                with k.when(i & 1 == 1, uniform=True):
                    k.syncthreads()
            elif defect != "no barrier after the store":
                k.syncthreads()
            other = where ^ 1 if defect == "the stage written is the stage read" else where
            total += tile.stage(other).load(0, k.thread ^ 32)
            if not double and defect not in ("no barrier before the next round", "barrier behind the loop"):
                k.syncthreads()
        if defect == "barrier behind the loop":
            k.syncthreads()
        out.store(total, k.thread)

    right = (numbers(64) ^ 32) * sum(range(1, rounds + 1))
    return Launch(run.trace(), 1, [zeros(64)], {0: right})


@planted(
    GROUP,
    "torch/cutorch#739",
    {
        "no barrier between steps": ("race", r"part\."),
        "none before the first step": ("race", r"part\."),
        "warp steps without __syncwarp": ("race", r"part\."),
        "barrier inside the branch": (
            "deadlock|divergence|barrier|race",
            r"syncthreads|part\.",
            "NervanaSystems/neon#171",
        ),
        "sum read by all at once": ("race", r"part\.", "kokkos/kokkos#1520"),
        "first step too wide": ("bounds|uninitialised", r"part\.", "Modular/mojo-gpu-puzzles#33"),
    },
    [{"threads": 64}, {"threads": 256}],
)
def tree_sum(defect: str, *, threads: int) -> Launch:
    """The sum of a CTA's numbers in shared memory, halving the threads from step to step."""

    @kernel(threads=threads)
    def run(k: Kernel, out: Global[f32]) -> None:
        part = k.shared(f32, threads)
        part.store(k.convert(k.thread, f32), 0, k.thread)
        if defect != "none before the first step":
            k.syncthreads()
        step = threads // 2
        while step:
            extra = threads // 2 if defect == "first step too wide" and step == threads // 2 else 0
            with k.when(k.thread < step + extra):
                part.store(part.load(0, k.thread) + part.load(0, k.thread + step), 0, k.thread)
                if defect == "barrier inside the branch" and step >= 32:
                    k.syncthreads()
            if step > 16 and defect not in ("no barrier between steps", "barrier inside the branch"):
                k.syncthreads()
            elif step <= 16 and defect != "warp steps without __syncwarp":
                k.syncwarp()
            step //= 2
        if defect != "sum read by all at once":
            k.syncthreads()
        out.store(part.load(0, 0), k.thread)

    return Launch(run.trace(), 1, [np.zeros(threads, np.float32)], {0: np.full(threads, threads * (threads - 1) / 2)})


@planted(
    GROUP,
    "alicevision/popsift#82",
    {
        "counts are not cleared": ("uninitialised", r"atomic|counts"),
        "no barrier after clearing": ("race", r"atomic|counts"),
        "no barrier before reading": ("race", r"counts|atomic"),
        "cleared by one warp for more bins than lanes": ("uninitialised", r"atomic|counts", "NVIDIA/cccl#854"),
        "counted without atomics": ("race", r"counts", "NVIDIA/cuCollections#539"),
        "reset while others count": ("race", r"counts|atomic", "alicevision/popsift#82"),
    },
    [{"bins": 64}, {"bins": 128}],
)
def histogram(defect: str, *, bins: int) -> Launch:
    """Counts in shared memory, by atomics."""

    @kernel(threads=128)
    def run(k: Kernel, data: Global[u32], out: Global[u32]) -> None:
        counts = k.shared(u32, bins)
        if defect == "cleared by one warp for more bins than lanes":
            with k.when(k.thread < 32):
                counts.store(k.value(0, u32), 0, k.thread)
        elif defect != "counts are not cleared":
            with k.when(k.thread < bins):
                counts.store(k.value(0, u32), 0, k.thread)
        if defect != "no barrier after clearing":
            k.syncthreads()
        bin_ = data.load(k.thread) % bins
        if defect == "counted without atomics":
            counts.store(counts.load(0, bin_) + 1, 0, bin_)
        else:
            k.emit(atomic("shared", "add", u32, scope="cta"), (counts.address(0, bin_), k.value(1, u32)))
        if defect == "reset while others count":
            with k.when(k.thread == 0):
                counts.store(k.value(0, u32), 0, 0)
        if defect != "no barrier before reading":
            k.syncthreads()
        with k.when(k.thread < bins):
            out.store(counts.load(0, k.thread), k.thread)

    data = numbers(128) * 7 % 96
    return Launch(run.trace(), 1, [data, zeros(bins)], {1: np.bincount(data % bins, minlength=bins)})


@planted(
    GROUP,
    "Modular/mojo-gpu-puzzles#9",
    {
        "the rest is not filled": ("uninitialised", r"tile\.|out\.store"),
        "a row too few": ("uninitialised", r"tile\.|out\.store", "Modular/mojo-gpu-puzzles#53"),
        "a row too many": ("bounds", r"tile\.", "openmm/openmm#2825"),
        "the margin is not filled": ("uninitialised", r"tile\.|out\.", "triton-lang/triton#10308"),
        "a vector off its bounds": ("misaligned|bounds", r"tile\.load", "kokkos/kokkos#686"),
        "no barrier": ("race", r"tile\.", "kokkos/kokkos#4855"),
    },
    [{"rows": 3}, {"rows": 6}],
)
def ragged_tile(defect: str, *, rows: int) -> Launch:
    """A tile of 8 rows of which the input has some: the rest is zero."""

    @kernel(threads=64)
    def run(k: Kernel, data: Global[u32], out: Global[u32], limit: u32) -> None:
        tile = k.shared(u32, (8, 32))
        height = 7 if defect == "a row too few" else 8
        wide = 28 if defect == "the margin is not filled" else 32
        with k.loop(height) as row, k.when(k.thread < wide):
            with k.when(row < limit):
                value = data.load(row * 32 + k.thread)
                tile.store(value, row + (1 if defect == "a row too many" else 0), k.thread)
            if defect != "the rest is not filled":
                with k.otherwise():
                    tile.store(k.value(0, u32), row, k.thread)
        if defect != "no barrier":
            k.syncthreads()
        columns = (k.thread & 7) * 4 + (1 if defect == "a vector off its bounds" else 0)
        out.store(tile.load(k.thread >> 3, columns, 4), k.thread * 4)

    limit = 8 if defect in ("a row too many", "a row too few") else rows
    data = np.arange(8 * 32, dtype=np.uint32) + 1
    right = np.where(np.arange(8)[:, None] < limit, data.reshape(8, 32), 0).reshape(-1)
    return Launch(run.trace(), 1, [data, zeros(256), limit], {1: right})
