# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Numbered barriers (``bar.sync``, ``bar.arrive``): counts, numbers, who may come again."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, numbers, planted, zeros
from warploom.lang import Global, Kernel, Traced, kernel, u32

GROUP = "numbered barriers"


@planted(
    GROUP,
    "deepseek-ai/FlashMLA#57",
    {
        "a count too high": ("refused", r"bar_(sync|arrive)"),
        "a count too low": ("barrier|race", r"bar_(sync|arrive)|tile\.", "deepseek-ai/FlashMLA#41"),
        "counts that differ": ("barrier", r"bar_(sync|arrive)", "deepseek-ai/FlashMLA#57"),
        "numbers that differ": ("deadlock", r"bar_(sync|arrive)", "flashinfer-ai/flashinfer#4533"),
        "nobody waits": ("race", r"tile\.|bar_arrive", "vllm-project/vllm#26026"),
        "arrival before the store": ("race", r"tile\."),
        "arrival left out": ("deadlock", r"bar_sync", "facebookexperimental/triton#1040"),
        "arrival of one warp left out": ("deadlock", r"bar_sync", "facebookexperimental/triton#1040"),
        "arrival in a branch of some lanes": ("divergence", r"bar_arrive", "ggml-org/llama.cpp#27955"),
        "wait in a branch of some lanes": ("divergence", r"bar_sync", "ggml-org/llama.cpp#27955"),
        "a number from memory that is no barrier's": ("barrier", r"bar_(sync|arrive)", "flashinfer-ai/flashinfer#4533"),
        "a number that was never written": ("uninitialised", r"bar_sync", "triton-lang/triton#10308"),
        "number 0 beside __syncthreads": (
            "barrier|deadlock|race",
            r"bar_|syncthreads|tile\.",
            "flashinfer-ai/flashinfer#4533",
        ),
        "arrives, and waits as well": ("barrier|deadlock", r"bar_(sync|arrive)", "vllm-project/vllm#26026"),
    },
    [{"producers": 2}, {"producers": 3}],
)
def hand_over(defect: str, *, producers: int) -> Launch:
    """Some warps write a tile and arrive; the last one waits and reads."""
    threads = 32 * (producers + 1)

    @kernel(threads=threads)
    def run(k: Kernel, out: Global[u32], which: u32) -> None:
        tile, spare = k.shared(u32, threads), k.shared(u32, 4)
        number = 0 if defect == "number 0 beside __syncthreads" else 1
        count = threads + {"a count too high": 32, "a count too low": -32}.get(defect, 0)
        with k.warps(0, producers):
            if defect == "arrival before the store":
                k.bar_arrive(number, count)
            tile.store(k.thread, 0, k.thread)
            if defect == "arrival of one warp left out":
                with k.when(k.warp == 0, uniform=True):
                    k.bar_arrive(number, count)
            elif defect == "arrival in a branch of some lanes":
                with k.when(k.lane < 31):
                    k.bar_arrive(number, count)
            elif defect not in ("arrival left out", "arrival before the store"):
                k.bar_arrive(number, count - 32 if defect == "counts that differ" else count)
            if defect == "arrives, and waits as well":
                k.bar_sync(number, count)
        with k.warps(producers, producers + 1):
            if defect == "nobody waits":
                k.bar_arrive(number, count)
            elif defect == "wait in a branch of some lanes":
                with k.when(k.lane < 31):
                    k.bar_sync(number, count)
            elif defect == "a number from memory that is no barrier's":
                k.bar_sync(which + 16, count)
            elif defect == "a number that was never written":
                k.bar_sync(spare.load(0, 0) & 15, count)
            elif defect == "numbers that differ":
                k.bar_sync(2, count)
            else:
                k.bar_sync(number, count)
            for warp in range(producers):
                out.store(tile.load(0, 32 * warp + k.lane), 32 * warp + k.lane)
        if defect == "number 0 beside __syncthreads":
            k.syncthreads()

    return Launch(run.trace(), 1, [zeros(32 * producers), 1], {0: numbers(32 * producers)})


@planted(
    GROUP,
    "vllm-project/vllm#26026",
    {
        "free is not waited for": ("race|barrier", r"tile\.|bar_"),
        "full is not waited for": ("race|barrier", r"tile\.|bar_"),
        "free is not told": ("deadlock", r"bar_sync", "facebookexperimental/triton#1040"),
        "full is not told": ("deadlock", r"bar_sync", "facebookexperimental/triton#1040"),
        "free is told too early": ("race", r"tile\."),
        "full is told too early": ("race", r"tile\."),
        "one number for both": ("barrier|deadlock|race", r"bar_|tile\.", "flashinfer-ai/flashinfer#4533"),
        "one number for both stages": ("barrier|race", r"bar_|tile\.", "flashinfer-ai/flashinfer#4533"),
        "free is told once too often": ("barrier", r"bar_", "vllm-project/vllm#26026"),
    },
    [{"steps": 4}, {"steps": 6}],
)
def ring_of_barriers(defect: str, *, steps: int) -> Launch:
    """A producer and a consumer warp hand two stages to and fro, as FlashAttention-3's schedulers do."""

    @kernel(threads=64)
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, 32, stages=2)

        def number(name: str, step: Traced) -> Traced:
            full, free = (1, 1) if defect == "one number for both" else (1, 3)
            stage = step & 0 if defect == "one number for both stages" else step & 1
            return (full if name == "full" else free) + stage

        with k.warps(0, 1), k.loop(steps) as step:
            if defect != "free is not waited for":
                k.bar_sync(number("free", step), 64)
            if defect == "full is told too early":
                k.bar_arrive(number("full", step), 64)
            tile.stage(step & 1).store(k.lane + step, 0, k.lane)
            if defect not in ("full is told too early", "full is not told"):
                k.bar_arrive(number("full", step), 64)
        with k.warps(1, 2):
            total = k.register(u32, 0)
            for stage in range(2):
                k.bar_arrive(number("free", k.value(stage, u32)), 64)
            with k.loop(steps) as step:
                if defect != "full is not waited for":
                    k.bar_sync(number("full", step), 64)
                more = step < (steps if defect == "free is told once too often" else steps - 2)
                if defect == "free is told too early":
                    with k.when(more, uniform=True):
                        k.bar_arrive(number("free", step), 64)
                total += tile.stage(step & 1).load(0, k.lane ^ 1)
                if defect not in ("free is told too early", "free is not told"):
                    with k.when(more, uniform=True):
                        k.bar_arrive(number("free", step), 64)
            out.store(total, k.lane)

    right = (np.arange(32) ^ 1) * steps + steps * (steps - 1) // 2
    return Launch(run.trace(), 1, [zeros(32)], {0: right})


@planted(
    GROUP,
    "flashinfer-ai/flashinfer#4533",
    {
        "two groups share a number": ("barrier|race|deadlock", r"bar_sync|tile\."),
        "the second group comes a round early": ("barrier|race|deadlock", r"bar_sync|tile\."),
        "one group meets once more": ("deadlock|barrier", r"bar_sync", "facebookexperimental/triton#1040"),
        "the groups read each other's": ("race|uninitialised", r"tile\.", "ggml-org/llama.cpp#26434"),
    },
    [{"groups": 2}, {"groups": 3}],
)
def groups_apart(defect: str, *, groups: int) -> Launch:
    """Groups of two warps meet at barriers of their own."""

    @kernel(threads=64 * groups)
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, 64 * groups)
        for group in range(groups):
            with k.warps(2 * group, 2 * group + 2):
                mine = k.thread - 64 * group
                for turn in range(2):
                    tile.store(k.thread + turn, 0, k.thread)
                    number = 1 if defect == "two groups share a number" else 1 + group
                    if defect == "the second group comes a round early":
                        number = 1 + (group + turn) % groups
                    k.bar_sync(number, 64)
                    far = 64 * ((group + 1) % groups) if defect == "the groups read each other's" else 64 * group
                    out.store(tile.load(0, (mine ^ 32) + far), k.thread)
                    k.bar_sync(number, 64)
                if defect == "one group meets once more" and group == 1:
                    with k.when(k.warp == 2, uniform=True):
                        k.bar_sync(1 + group, 64)

    return Launch(run.trace(), 1, [zeros(64 * groups)], {0: (numbers(64 * groups) ^ 32) + 1})
