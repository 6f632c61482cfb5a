# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Launches in a row: programmatic dependent launch, streams and events, what one launch leaves for the next."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, QueuedLaunch, numbers, planted, zeros
from tests.emulate.defects.tma import BYTES, COLS, ROWS, mapped, matrix
from warploom.lang import Global, Kernel, TensorMap, f32, kernel, u32

GROUP = "launches in a row"


@planted(
    GROUP,
    "flashinfer-ai/flashinfer#2708",
    {
        "not waited for": ("race", r"source\."),
        "waited for after the first read": ("race", r"source\.", "flashinfer-ai/flashinfer#5081"),
        "waited for by one lane": ("race", r"source\."),
        "waited for by the other CTA": ("race", r"source\."),
        "the next is allowed in place of a wait": ("race", r"source\.", "NVIDIA/cutlass#2760"),
        "a read through the cache is not waited for": ("race", r"source\.", "NVIDIA/cccl#5456"),
        "written before the wait": ("race", r"out\."),
    },
    [{"launches": 2}, {"launches": 3}],
)
def chain(defect: str, *, launches: int) -> Launch:
    """Each launch adds one to what the launch before has left, and may begin while that one runs."""

    @kernel(threads=64, requires="sm_90a")
    def step(k: Kernel, source: Global[u32], out: Global[u32], *, last: bool) -> None:
        at, planted = k.cta_x * 64 + k.thread, defect if last else ""
        if planted == "written before the wait":
            out.store(0, at)
        if planted == "waited for by one lane":
            with k.when(k.lane == 0):
                k.await_launch_before()
        elif planted == "waited for by the other CTA":
            with k.when(k.cta_x == 0):
                k.await_launch_before()
        elif planted == "the next is allowed in place of a wait":
            k.allow_next_launch()
        elif planted not in ("not waited for", "waited for after the first read") and "cache" not in planted:
            k.await_launch_before()
        k.allow_next_launch()
        value = source.load(at, cache="nc" if "cache" in planted else "")
        if planted == "waited for after the first read":
            k.await_launch_before()
        out.store(value + 1, at)

    arrays = [numbers(128), *(zeros(128) for _ in range(launches - 1))]
    arrays.append(arrays[launches - 2])  # the last launch overwrites what the one before has read
    queued = [
        QueuedLaunch(step.trace(last=i == launches - 1), 2, arrays[i : i + 2], programmatic=True)
        for i in range(launches)
    ]
    *earlier, last = queued
    return Launch(last.program, 2, last.arguments, {1: numbers(128) + launches}, earlier, programmatic=True)


@planted(
    GROUP,
    "ggml-org/llama.cpp#22522",
    {
        "the one before does not wait": ("race", r"out\.|source\."),
        "the last does not wait": ("race", r"out\.|source\."),
    },
)
def over(defect: str) -> Launch:
    """A launch is over for the one after the next only where the one between has waited for it."""

    @kernel(threads=32, requires="sm_90a")
    def copy(k: Kernel, source: Global[u32], out: Global[u32], *, wait: bool) -> None:
        if wait:
            k.await_launch_before()
        k.allow_next_launch()
        out.store(source.load(k.thread), k.thread)

    first, second = copy.trace(wait=True), copy.trace(wait=defect != "the one before does not wait")
    x, y, unused, z = numbers(32), zeros(32), zeros(32), zeros(32)
    earlier = [QueuedLaunch(first, 1, [x, y]), QueuedLaunch(second, 1, [x, unused], programmatic=True)]
    last = copy.trace(wait=defect != "the last does not wait")
    return Launch(last, 1, [y, z], {1: numbers(32)}, earlier, programmatic=True)


@planted(GROUP, "flashinfer-ai/flashinfer#2708", {"not waited for": ("race", r"tma_load|source\.")})
def boxes(defect: str) -> Launch:
    """The TMA loads a box of what the launch before has stored: a wait is enough, without a fence of the proxies."""

    @kernel(threads=32)
    def double(k: Kernel, source: Global[f32]) -> None:
        source.store(source.load(k.thread) * 2.0, k.thread)

    @kernel(threads=32, requires="sm_90a")
    def load(k: Kernel, source: TensorMap, out: Global[f32]) -> None:
        tile, full = k.shared(f32, (ROWS, COLS), name="tile"), k.mbarriers(1)
        with k.when(k.lane == 0):
            full.init(1)
            k.mbarrier_fence()
        k.syncwarp()
        if not defect:
            k.await_launch_before()
        full.expect(BYTES, when=k.lane == 0)
        k.tma_load(tile, source, (0, 0), full, when=k.lane == 0)
        full.wait(0)
        out.store(tile.load(0, k.lane), k.lane)

    source, out = matrix(ROWS), np.zeros(COLS, np.float32)
    earlier = [QueuedLaunch(double.trace(), 1, [source])]
    return Launch(load.trace(), 1, [mapped(source), out], {1: 2 * matrix(1)[0]}, earlier, programmatic=True)


@planted(
    GROUP,
    "sony/nnabla-ext-cuda#188",
    {
        "no event": ("race", r"source\.|out\."),
        "the event of an earlier launch": ("race", r"source\.|out\."),
        "a wait of the kernel in place of the event": ("race", r"source\.|out\."),
    },
)
def streams(defect: str) -> Launch:
    """One stream fills an array twice, another one reads it after an event."""

    @kernel(threads=64, requires="sm_90a")
    def fill(k: Kernel, out: Global[u32], value: u32) -> None:
        out.store(k.thread + value, k.thread)

    @kernel(threads=64, requires="sm_90a")
    def copy(k: Kernel, source: Global[u32], out: Global[u32]) -> None:
        if defect == "a wait of the kernel in place of the event":
            k.await_launch_before()
        out.store(source.load(k.thread ^ 32), k.thread)

    x, y = zeros(64), zeros(64)
    earlier = [QueuedLaunch(fill.trace(), 1, [x, 0]), QueuedLaunch(fill.trace(), 1, [x, 7])]
    after = {"": [1], "the event of an earlier launch": [0]}.get(defect, [])
    return Launch(copy.trace(), 1, [x, y], {1: (numbers(64) ^ 32) + 7}, earlier, stream="copies", after=after)


@planted(
    GROUP,
    "ROCm/aiter#4494",
    {
        "the counter is as the first launch left it": ("race", r"parts\."),
        "the counter is cleared beside the kernel": ("race", r"count|wait_at_least", "ROCm/aiter#3288"),
    },
)
def counters(defect: str) -> Launch:
    """All CTAs meet at a counter, which another kernel clears between two launches."""
    ctas = 3

    @kernel(threads=32)
    def meet(k: Kernel, parts: Global[u32], count: Global[u32], out: Global[u32], value: u32) -> None:
        parts.store(k.thread + value, k.cta_x * 32 + k.thread)
        k.syncwarp()
        with k.when(k.lane == 0):
            k.atomic("add", count, 1, order="release")
            k.wait_at_least(count, k.grid_x)
        k.syncwarp()
        out.store(parts.load((k.grid_x - 1 - k.cta_x) * 32 + k.thread), k.cta_x * 32 + k.thread)

    @kernel(threads=32)
    def clear(k: Kernel, count: Global[u32]) -> None:
        with k.when(k.lane == 0):
            count.store(0, 0)

    program, parts, count, out = meet.trace(), zeros(32 * ctas), zeros(1), zeros(32 * ctas)
    earlier = [QueuedLaunch(program, ctas, [parts, count, out, 0])]
    if not defect.startswith("the counter is as"):
        stream = "beside" if defect else 0
        earlier.append(QueuedLaunch(clear.trace(), 1, [count], stream, after=[0]))
    return Launch(program, ctas, [parts, count, out, 5], {2: np.tile(numbers(32) + 5, ctas)}, earlier)
