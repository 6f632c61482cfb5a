# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""CTAs that talk through global memory: fences, atomics, counters, ends of arrays, who writes what."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, numbers, planted, zeros
from warploom.isa.instruction import named
from warploom.isa.memory import load
from warploom.lang import Global, Kernel, f32, kernel, u32

GROUP = "global memory"


@planted(
    GROUP,
    "NVIDIA/Fuser#2391",
    {
        "no fence before the count": ("race", r"parts\.", "NVIDIA/Fuser#2391"),
        "no fence after the count": ("race", r"parts\.", "flashinfer-ai/flashinfer#4742"),
        "fenced for the CTA alone": ("race", r"parts\.|fence", "NVIDIA/cub#356"),
        "counted for the CTA alone": ("race", r"parts\.|atomic", "NVIDIA/cub#356"),
        "no barrier before the count": ("race", r"parts\.", "NVIDIA/cuml#4157"),
        "no barrier after the count": ("race|uninitialised", r"flag|parts\."),
        "counted with a load and a store": ("race", r"count", "kaldi-asr/kaldi#3036"),
        "one part too many is read": ("bounds|race|uninitialised", r"parts\.", "Modular/mojo-gpu-puzzles#33"),
        "the last but one adds": ("race", r"parts\.", "kokkos/kokkos#2681"),
    },
    [{"way": "fence"}, {"way": "acq_rel"}],
)
def last_cta(defect: str, *, way: str) -> Launch:
    """Every CTA leaves its part; the last one to count adds them up."""
    ctas = 3

    @kernel(threads=64)
    def run(k: Kernel, parts: Global[u32], count: Global[u32], out: Global[u32]) -> None:
        flag = k.shared(u32, 4, name="flag")
        parts.store(k.thread + 100 * k.cta_x, k.cta_x * 64 + k.thread)
        if defect != "no barrier before the count":
            k.syncthreads()
        before_scope = "cta" if defect == "fenced for the CTA alone" else "gpu"
        order = {"no fence before the count": "acquire", "no fence after the count": "release"}.get(defect, "acq_rel")
        with k.when(k.thread == 0):
            if way == "fence" and defect != "no fence before the count":
                k.fence(before_scope)
            scope = (
                "cta" if defect == "counted for the CTA alone" or (way != "fence" and before_scope == "cta") else "gpu"
            )
            if defect == "counted with a load and a store":
                before = count.load(0)
                count.store(before + 1, 0)
            else:
                before = k.atomic("add", count, 1, order="relaxed" if way == "fence" else order, scope=scope)
            if way == "fence" and defect != "no fence after the count":
                k.fence(before_scope)
            flag.store(before, 0, 0)
        if defect != "no barrier after the count":
            k.syncthreads()
        last = k.grid_x - (2 if defect == "the last but one adds" else 1)
        with k.when(flag.load(0, 0) == last):
            total = k.register(u32, 0)
            with k.loop(k.grid_x + (1 if defect == "one part too many is read" else 0)) as i:
                total += parts.load(i * 64 + k.thread)
            out.store(total, k.thread)

    right = numbers(64) * ctas + 100 * (ctas * (ctas - 1) // 2)
    return Launch(run.trace(), ctas, [zeros(64 * ctas), zeros(1), zeros(64)], {2: right})


@planted(
    GROUP,
    "ROCm/pytorch#2553",
    {
        "no fence before the count": ("race", r"parts\."),
        "no fence after the count": ("race", r"parts\."),
        "a fence without order among fences": ("race", r"parts\."),
        "fenced for the CTA alone": ("race", r"parts\."),
        "no barrier before the count": ("race", r"parts\."),
        "fenced after the barrier by another warp": ("race", r"parts\."),
        "no barrier after the count": ("race|uninitialised", r"flag|parts\."),
        "fenced by another warp as it counts": ("race", r"parts\."),
    },
    [{"warps": 2}, {"warps": 4}],
)
def fenced_by_all(defect: str, *, warps: int) -> Launch:
    """Every thread fences its part (`__threadfence()`), one thread counts for the CTA; the last CTA adds them up."""
    ctas, threads = 3, 32 * warps

    @kernel(threads=threads)
    def run(k: Kernel, parts: Global[u32], count: Global[u32], out: Global[u32]) -> None:
        flag = k.shared(u32, 4, name="flag")
        parts.store(k.thread + 100 * k.cta_x, k.cta_x * threads + k.thread)
        late, unordered = defect == "fenced after the barrier by another warp", "a fence without order among fences"
        scope = "cta" if defect == "fenced for the CTA alone" else "gpu"
        if defect != "no fence before the count" and not late:
            k.issue(named(f"fence.{'acq_rel' if defect == unordered else 'sc'}.{scope}"))
        if defect != "no barrier before the count":
            k.syncthreads()
        if late:
            with k.when(k.warp == 1):
                k.issue(named("fence.sc.gpu"))
        with k.when(k.thread == 0):
            flag.store(k.atomic("add", count, 1, order="relaxed"), 0, 0)
        if defect == "fenced by another warp as it counts":
            with k.when(k.warp == 1):
                k.issue(named("fence.sc.gpu"))
        if defect != "no barrier after the count":
            k.syncthreads()
        with k.when(flag.load(0, 0) == k.grid_x - 1):
            if defect not in ("no fence after the count", "fenced by another warp as it counts"):
                k.issue(named(f"fence.sc.{scope}"))
            total = k.register(u32, 0)
            with k.loop(k.grid_x) as i:
                total += parts.load(i * threads + (k.thread ^ 32))
            out.store(total, k.thread)

    right = (numbers(threads) ^ 32) * ctas + 100 * (ctas * (ctas - 1) // 2)
    return Launch(run.trace(), ctas, [zeros(threads * ctas), zeros(1), zeros(threads)], {2: right})


@planted(
    GROUP,
    "NVIDIA/cutlass#2775",
    {
        "no barrier before the turn is told": ("race", r"out\."),
        "no barrier after the turn has come": ("race", r"out\."),
        "the turn is not waited for": ("race", r"out\.", "NVIDIA/cutlass#1296"),
        "the turn is not told": ("deadlock", r"wait_at_least", "NVIDIA/cutlass#1296"),
        "the turn is told before the sum": ("race", r"out\.", "NVIDIA/cutlass#2775"),
        "told without a fence": ("race", r"out\.", "NVIDIA/cutlass#2775"),
        "waits for a turn too late": ("deadlock", r"wait_at_least", "NVIDIA/cutlass#1296"),
        "counted per thread, waited for per CTA": ("race", r"out\.", "NVIDIA/cub#356"),
    },
    [{"split": 2}, {"split": 4}],
)
def turns(defect: str, *, split: int) -> Launch:
    """Serial split K: the CTAs add to one tile in turns that a counter gives."""

    @kernel(threads=64)
    def run(k: Kernel, turn: Global[u32], out: Global[f32]) -> None:
        mine = k.cta_x
        if defect == "waits for a turn too late":
            mine = k.cta_x + 1
        if defect == "counted per thread, waited for per CTA":
            mine = k.select(k.cta_x == 0, k.value(0, u32), 1)
        if defect != "the turn is not waited for":
            with k.when(k.thread == 0):
                k.wait_at_least(turn, mine)
        if defect != "no barrier after the turn has come":
            k.syncthreads()
        order = "relaxed" if defect == "told without a fence" else "release"
        if defect == "the turn is told before the sum":
            with k.when(k.thread == 0):
                k.atomic("add", turn, 1, order=order)
        out.store(out.load(k.thread) + 1.0, k.thread)
        if defect not in ("no barrier before the turn is told", "counted per thread, waited for per CTA"):
            k.syncthreads()
        if defect == "counted per thread, waited for per CTA":
            k.atomic("add", turn, 1, order=order)
        elif defect not in ("the turn is not told", "the turn is told before the sum"):
            with k.when(k.thread == 0):
                k.atomic("add", turn, 1, order=order)

    return Launch(run.trace(), split, [zeros(1), np.zeros(64, np.float32)], {1: np.full(64, split)})


@planted(
    GROUP,
    "tile-ai/tilelang#2505",
    {
        "the last row is read whole": ("bounds", r"data\.", "openmm/openmm#2825"),
        "the last row is written whole": ("bounds|uninitialised", r"out\.", "openmm/openmm#2825"),
        "a guard off by one": ("bounds", r"data\.|out\.", "Modular/mojo-gpu-puzzles#33"),
        "a guard of rows where columns are meant": ("bounds", r"data\.|out\."),
        "a vector beyond the end": ("bounds", r"data\.|out\.", "openmm/openmm#2825"),
        "a vector off its alignment": ("misaligned|bounds", r"data|out\.", "kokkos/kokkos#686"),
        "CTAs overlap": ("race", r"out\.", "triton-lang/triton#1058"),
        "before the beginning": ("bounds", r"data\.", "sgl-project/sglang#20389"),
        "an index of another array": ("bounds", r"data\.|out\."),
    },
    [{"wide": 1}, {"wide": 4}],
)
def ends(defect: str, *, wide: int) -> Launch:
    """Each thread copies one element or four; the last CTA has less to do."""
    count = 232

    @kernel(threads=32)
    def run(k: Kernel, data: Global[u32], out: Global[u32], limit: u32) -> None:
        at = (k.cta_x * 32 + k.thread) * wide
        bound = limit
        if defect == "a guard off by one":
            bound = limit + wide
        if defect == "a guard of rows where columns are meant":
            bound = k.grid_x * 32 * wide
        source, target = at, at
        if defect == "CTAs overlap":
            target = (k.cta_x * 31 + k.thread) * wide
        if defect == "a vector off its alignment":
            source = at + (1 if wide == 4 else 0)
        if defect == "before the beginning":
            source = at - wide
        if defect == "an index of another array":
            source = at + k.grid_x * 32 * wide
        if defect == "a vector beyond the end":
            source = at + 3 * wide
        values = None
        loads, stores = at < bound, at < bound
        everywhere = at < k.grid_x * 64 * wide
        with k.when(everywhere if defect == "the last row is read whole" else loads):
            if defect == "a vector off its alignment" and wide == 1:
                values = k.emit(load("global", u32, 1), ((data + source).bytes(2).address,))
            else:
                values = data.load(source, wide)
            held = k.registers(u32, wide, None)
            for register, value in zip(held, values, strict=True):
                register.set(value)
        with k.when(everywhere if defect == "the last row is written whole" else stores):
            out.store([register.get() for register in held], target)

    ctas = -(-count // (32 * wide))
    return Launch(run.trace(), ctas, [numbers(count), zeros(count), count], {1: numbers(count)})


@planted(
    GROUP,
    "flagos-ai/FlagTree#1030",
    {
        "in place, across CTAs": ("race", r"data\.|out\."),
        "in place, across warps": ("race", r"data\.|out\.", "kokkos/kokkos#4855"),
        "in place, through the read-only cache": ("race", r"data\.|load", "NVIDIA/cub#345"),
        "two names for one array": ("race", r"data\.|out\."),
        "atomics and plain stores": ("race", r"out\.|atomic", "NVIDIA/cuCollections#539"),
        "atomics and plain loads": ("race", r"out\.|atomic", "flagos-ai/FlagTree#1030"),
        "a read-only array is written": ("bounds|refused", r"out\."),
        "cleared by the first CTA": ("race", r"out\.|atomic", "vllm-project/vllm-xpu-kernels#586"),
    },
    [{"far": 1}, {"far": 64}],
)
def sharing(defect: str, *, far: int) -> Launch:
    """Each thread writes its element from that of another one."""
    ctas = 3
    size = 64 * ctas

    @kernel(threads=64)
    def run(k: Kernel, data: Global[u32], out: Global[u32]) -> None:
        at = k.cta_x * 64 + k.thread
        other = (at + far) % size
        if defect == "in place, across warps":
            other = k.cta_x * 64 + (k.thread ^ 32)
        if defect == "cleared by the first CTA":
            with k.when(k.cta_x == 0), k.loop(ctas) as i:
                out.store(k.value(0, u32), i * 64 + k.thread)
        if defect == "in place, through the read-only cache":
            data.store(k.thread, at)
            k.syncthreads()
            (value,) = k.emit(load("global", u32, 1, cache="nc"), ((data + at).address,))
        else:
            value = data.load(other)
        if defect in ("in place, across CTAs", "in place, across warps"):
            data.store(value, at)
        elif defect == "atomics and plain stores":
            k.atomic("add", out, value, at)
            out.store(value, other)
        elif defect == "atomics and plain loads":
            k.atomic("add", out, value, at)
            data.store(out.load(other), at)
        elif defect == "cleared by the first CTA":
            k.atomic("add", out, value, other)
        else:
            out.store(value, at)

    data, out = numbers(size), zeros(size)
    if defect == "two names for one array":
        out = data
    if defect == "a read-only array is written":
        out.flags.writeable = False
    return Launch(run.trace(), ctas, [data, out], {1: np.roll(numbers(size), -far)})
