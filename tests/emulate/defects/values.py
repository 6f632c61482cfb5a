# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Integers that wrap, operations without a result, loops that do not end, values that nobody has set."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, numbers, planted, zeros
from warploom.isa.lanewise import binary
from warploom.lang import Global, Kernel, kernel, s32, u32, u64

GROUP = "integers and values"


@planted(
    GROUP,
    "microsoft/onnxruntime#32494",
    {
        "the divisor is 0": ("undefined", r"divide|emit"),
        "the remainder of 0": ("undefined", r"divide|emit", "microsoft/onnxruntime#32494"),
        "the divisor is 0 in one lane": ("undefined", r"divide|emit", "vllm-project/vllm#26528"),
        "a constant divisor of 0": ("refused|undefined", r"divide|emit"),
    },
    [{"signed": False}, {"signed": True}],
)
@planted(
    GROUP,
    "microsoft/onnxruntime#32494",
    {"the least integer by -1": ("undefined|refused", r"divide|emit")},
    [{"signed": True}],
)
def quotients(defect: str, *, signed: bool) -> Launch:
    """Heads of queries over heads of keys."""
    dtype = s32 if signed else u32

    @kernel(threads=32)
    def run(k: Kernel, out: Global[u32], by: u32) -> None:
        low, mine = k.convert(by, dtype), k.convert(k.thread, dtype)
        if defect == "the divisor is 0 in one lane":
            low = low + mine - 7
        elif defect in ("the divisor is 0", "the remainder of 0"):
            low = low - 3
        elif defect == "the least integer by -1":
            low, mine = low - 4, mine * 0 - 2147483647 - 1
        elif defect == "a constant divisor of 0":
            low = k.value(0, dtype)
        divide = binary("rem" if defect == "the remainder of 0" else "div", dtype)
        (result,) = k.emit(divide, (mine, low))
        out.store(k.convert(result, u32), k.thread)

    return Launch(run.trace(), 1, [zeros(32), 3], {0: numbers(32) // 3})


@planted(
    GROUP,
    "deepseek-ai/DeepEP#701",
    {
        "left by 32": ("undefined", r"<<|by"),
        "right by 32": ("undefined", r">>|by", "NVIDIA/cub#626"),
        "by less than nothing": ("undefined", r"<<|by", "hemelb-codes/hemelb#727"),
        "by a constant of 32": ("refused", r"<<"),
        "by 32 in the last lane": ("undefined", r"<<|by"),
    },
    [{"wide": False}, {"wide": True}],
)
def shifts(defect: str, *, wide: bool) -> Launch:
    """A mask of the lanes below."""

    @kernel(threads=32)
    def run(k: Kernel, out: Global[u32], base: u32) -> None:
        dtype, bits = (u64, 64) if wide else (u32, 32)
        one, by = k.value(1, dtype), k.thread
        if defect in ("left by 32", "right by 32"):
            by = base + bits
        elif defect == "by less than nothing":
            by = base - 1
        elif defect == "by 32 in the last lane":
            by = k.thread + bits - 31
        if defect == "by a constant of 32":
            mask = one << bits
        elif defect == "right by 32":
            mask = one >> by
        else:
            mask = one << by
        out.store(k.convert(mask - 1, u32), k.thread)

    return Launch(run.trace(), 1, [zeros(32), 0], {0: (np.uint64(1) << numbers(32).astype(np.uint64)) - np.uint64(1)})


@planted(
    GROUP,
    "inducer/loopy#808",
    {
        "a bound below 0": ("overflow", r"loop"),
        "a step of 0": ("overflow|refused", r"loop", "csmith-project/csmith#40"),
        "a counter that wraps": ("overflow", r"loop", "csmith-project/csmith#40"),
        "a bound below 0 in one lane": ("overflow", r"loop", "llvm/llvm-project#116748"),
        "a bound that nobody set": ("uninitialised", r"loop", "ROCm/rocm-systems#1795"),
    },
    [{"unit": 1}, {"unit": 32}],
)
def rounds(defect: str, *, unit: int) -> Launch:
    """As many rounds as there are whole tiles, but the last."""

    @kernel(threads=32)
    def run(k: Kernel, out: Global[u32], n: u32, none: u32) -> None:
        spare = k.shared(u32, 4)
        stop, step = n // unit - 1, k.value(1, u32)
        if defect == "a bound below 0":
            stop = none // unit - 1
        if defect == "a step of 0":
            step = none * 1
        if defect == "a counter that wraps":
            stop, step = none - 1, (none - 1) >> (2 if unit == 1 else 3)
        if defect == "a bound below 0 in one lane":
            stop = k.thread - 4
        if defect == "a bound that nobody set":
            stop = spare.load(0, 0) & 3
        total = k.register(u32, 0)
        with k.loop(stop, step=step) as i:
            total += i
        out.store(total, k.thread)

    return Launch(run.trace(), 1, [zeros(32), 6 * unit, 0], {0: np.full(32, 10)})


@planted(
    GROUP,
    "triton-lang/triton#6748",
    {
        "the offset of a row in 32 bits": ("overflow|bounds", r"data\.", "databricks/megablocks#185"),
        "a signed row before the array": ("bounds|overflow", r"data\.", "sgl-project/sglang#20389"),
        "the offset of a batch in 32 bits": ("overflow|bounds", r"data\.", "fla-org/flash-linear-attention#1080"),
    },
    [{"large": True}, {"large": False}],
)
def offsets(defect: str, *, large: bool) -> Launch:
    """A row of a large array, of 64-bit elements: its offset does not fit 32 bits."""
    rows, pitch = ((1 << 16) + 4, 1 << 16) if large else (8, 1 << 16)

    @kernel(threads=32)
    def run(k: Kernel, data: Global[u32], out: Global[u32], row: u32, width: u32) -> None:
        if defect == "the offset of a row in 32 bits":
            at = row * width * (1 if large else 1 << 14) + k.thread
        elif defect == "a signed row before the array":
            at = k.convert(row, s32) * -1 * k.convert(width, s32) + k.convert(k.thread, s32)
        elif defect == "the offset of a batch in 32 bits":
            at = (row * 2) * (width >> 1) * (1 if large else 1 << 14) + k.thread
        else:
            at = k.mul_wide(row, width) + k.convert(k.thread, u64)
        out.store(data.load(at), k.thread)

    data = np.zeros(rows * pitch, np.uint32)
    last = rows - 2
    data[last * pitch : last * pitch + 32] = numbers(32)
    data.flags.writeable = False
    return Launch(run.trace(), 1, [data, zeros(32), last, pitch], {1: numbers(32)})


@planted(
    GROUP,
    "triton-lang/triton#10308",
    {
        "a sum that nobody cleared": ("uninitialised|refused", r"total|out\."),
        "set in one branch alone": ("uninitialised", r"chosen|out\."),
        "set in some lanes": ("uninitialised", r"chosen|out\."),
        "set by a loop without rounds": ("uninitialised", r"chosen|out\."),
        "an index that nobody set": ("uninitialised", r"out\.|index|data\."),
        "a condition that nobody set": ("uninitialised|refused", r"flag|when|out\."),
        "a sum across lanes that nobody set": ("uninitialised", r"shfl|out\.", "uzh-rpg/vilib#5"),
    },
)
def unset(defect: str) -> Launch:
    """Registers that are set on every way, or not."""

    @kernel(threads=32)
    def run(k: Kernel, data: Global[u32], out: Global[u32], n: u32) -> None:
        total = k.register(u32, None if defect == "a sum that nobody cleared" else 0, name="total")
        chosen = k.register(u32, None, name="chosen")
        index = k.register(u32, None, name="index")
        if defect != "set by a loop without rounds":
            with k.when(k.lane < 16 if defect == "set in some lanes" else n > 5):
                chosen.set(data.load(k.thread))
        else:
            with k.loop(n // 64):
                chosen.set(data.load(k.thread))
        if defect not in ("set in one branch alone", "set in some lanes", "set by a loop without rounds"):
            with k.when(n <= 5):
                chosen.set(data.load(0))
        if defect == "set in one branch alone":
            chosen = k.register(u32, None, name="chosen")
            with k.when(n > 50):
                chosen.set(data.load(k.thread))
        if defect == "an index that nobody set":
            with k.when(k.lane < 31):
                index.set(k.thread)
        else:
            index.set(k.thread)
        if defect == "a condition that nobody set":
            flag = k.register(u32, None, name="flag")
            with k.when(flag.get() == 0):
                out.store(data.load(0), k.thread)
        if defect == "a sum across lanes that nobody set":
            part = k.register(u32, None, name="part")
            with k.when(k.lane < 20):
                part.set(chosen.get())
            total += k.shfl_xor(part.get(), 16)
        total += chosen.get()
        out.store(total, index.get())

    return Launch(run.trace(), 1, [numbers(32), zeros(32), 10], {1: numbers(32)})
