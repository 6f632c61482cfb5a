# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""``wgmma``: fences, groups, registers and tiles in flight, descriptors; registers of warpgroups."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import ml_dtypes
import numpy as np

from tests.emulate.defects.base import Launch, planted
from warploom.isa.barriers import set_max_registers
from warploom.lang import Fragment, Global, Kernel, Mutable, TensorMap, bf16, f32, kernel, u32
from warploom.layout import SharedLayout, Swizzle
from warploom.layout.wgmma import MatrixDescriptor

GROUP = "wgmma"
SIZE = 64
LAYOUT = SharedLayout(SIZE, SIZE, 2, Swizzle.for_row_bytes(128))


def operand(seed: int, rows: int = SIZE, cols: int = SIZE) -> np.ndarray[Any, Any]:
    """Small integers, whose products are exact."""
    return np.random.default_rng(seed).integers(-4, 5, (rows, cols)).astype(ml_dtypes.bfloat16)


def sums_of(product: Fragment) -> list[Mutable]:
    """Its registers, to be read and written one by one."""
    return cast("list[Mutable]", product.registers)


@planted(
    GROUP,
    "MoonshotAI/FlashKDA#24",
    {
        "no proxy fence": ("proxy", r"wgmma|tile\."),
        "fenced by one warp": ("proxy", r"wgmma|tile\.", "inclusionAI/cuLA#114"),
        "no barrier": ("race|proxy", r"wgmma|tile\.", "NVIDIA/cutlass#2960"),
        "no wgmma fence": ("refused|race|in_flight", r"wgmma", "triton-lang/triton#3106"),
        "never committed": ("refused|leak|in_flight", r"wgmma", "triton-lang/triton#8964"),
        "never waited for": ("refused|leak|in_flight", r"wgmma|out|store", "triton-lang/triton#8964"),
        "waited for one group too few": ("refused|in_flight", r"wgmma|out|store", "triton-lang/triton#9433"),
        "the wait names nothing": ("refused", r"wgmma|out|store", "triton-lang/triton#9514"),
        "sums are added to, never cleared": ("uninitialised|refused", r"wgmma|out|store", "triton-lang/triton#3106"),
        "sums touched while it runs": ("refused|in_flight", r"first|wgmma", "triton-lang/triton#9433"),
        "tile overwritten while it runs": ("race|in_flight", r"tile\.|wgmma", "NVIDIA/cutlass#2162"),
        "lanes disagree on whether it adds": ("divergence|refused", r"wgmma", "triton-lang/triton#3106"),
        "part of the tile is empty": ("uninitialised", r"wgmma|out|store", "Modular/mojo-gpu-puzzles#9"),
        "three warps of four": ("divergence|refused|deadlock", r"wgmma", "triton-lang/triton#9514"),
        "a branch of some lanes": ("divergence|refused", r"wgmma", "ggml-org/llama.cpp#27955"),
        "descriptor beyond the tile": ("bounds|refused", r"wgmma|descriptor", "tile-ai/tilelang#813"),
        "descriptor's stride of another tile": ("layout|bounds", r"wgmma|descriptor", "reed-lau/MatmulTutorial#10"),
        "descriptor of another swizzle": ("layout|refused", r"wgmma|descriptor", "triton-lang/triton#8378"),
        "descriptor off the swizzle's period": (
            "bounds|layout|refused|misaligned",
            r"wgmma|descriptor",
            "reed-lau/MatmulTutorial#14",
        ),
        "transposed in the descriptor alone": (
            "layout|bounds|refused",
            r"wgmma|descriptor",
            "flashinfer-ai/flashinfer#1078",
        ),
    },
    [{"n": 64}, {"n": 32}],
)
def stored(defect: str, *, n: int) -> Launch:
    """A product of a tile that ordinary stores have filled."""

    @kernel(threads=128, requires="sm_90a")
    def run(k: Kernel, a: Global[u32], out: Global[f32]) -> None:
        tile = k.shared(bf16, (SIZE, SIZE), swizzle="auto")
        k.shared(bf16, (SIZE, SIZE), name="spare", swizzle="auto")
        for i in range(SIZE * SIZE // 2 // 128):
            at = i * 128 + k.thread
            if defect != "part of the tile is empty" or i != 3:
                tile.store(a.load(at), at >> 5, (at & 31) * 2, dtype=u32)
        if defect == "fenced by one warp":
            with k.when(k.warp == 0, uniform=True):
                k.fence_async()
        elif defect != "no proxy fence":
            k.fence_async()
        if defect != "no barrier":
            k.syncthreads()
        result = k.warpgroup_accumulator(n)
        some = {"three warps of four": k.warp < 3, "a branch of some lanes": k.lane < 31}.get(defect)
        with k.when(some) if some is not None else nullcontext():
            if defect != "no wgmma fence":
                k.wgmma_fence()
            for depth in range(0, SIZE, 16):
                x, y = k.wgmma_operand(tile, col=depth), k.wgmma_operand(tile, col=depth)
                plain = {
                    "descriptor's stride of another tile": MatrixDescriptor(128, stride=512),
                    "descriptor of another swizzle": MatrixDescriptor(64, stride=1024),
                }.get(defect)
                if plain is not None:
                    x = k.descriptor(tile.at(2 * depth), plain)
                if defect == "descriptor beyond the tile":
                    x = k.descriptor(tile.at(2 * depth + 4096), MatrixDescriptor(128, stride=1024))
                if defect == "descriptor off the swizzle's period":
                    x = k.descriptor(tile.at(2 * depth + 128), MatrixDescriptor(128, stride=1024))
                if defect == "transposed in the descriptor alone":
                    x = k.wgmma_operand(tile, row=depth, transposed=True)
                adds = depth > 0 or defect == "sums are added to, never cleared"
                if defect == "lanes disagree on whether it adds":
                    adds = (k.lane > 0) | (k.value(depth, u32) > 0)
                k.wgmma(result, x, y, accumulate=adds)
            if defect != "never committed":
                k.wgmma_commit()
            if defect == "sums touched while it runs":
                first = sums_of(result)[0]
                first.set(first.get() * 2)
            if defect == "tile overwritten while it runs":
                tile.store(k.value(0, u32), k.thread >> 5, (k.thread & 31) * 2, dtype=u32)
            if defect == "waited for one group too few":
                k.wgmma_wait(1, result)
            elif defect == "the wait names nothing":
                k.wgmma_wait(0)
            elif defect != "never waited for":
                k.wgmma_wait(0, result)
        result.store_global(out, n)

    a, out = operand(1), np.zeros((SIZE, n), np.float32)
    x = a.astype(np.float32)
    return Launch(run.trace(), 1, [a.view(np.uint32), out], {1: x @ x[:n].T})


@planted(
    GROUP,
    "triton-lang/triton#9433",
    {
        "waited for with the next product in flight": (
            "refused|in_flight",
            r"wgmma|first|scores",
            "triton-lang/triton#8964",
        ),
        "K overwritten before its product": ("race|in_flight", r"wgmma|tile", "NVIDIA/cutlass#2162"),
    },
    [{"through": "registers"}, {"through": "shared"}],
)
@planted(
    GROUP,
    "triton-lang/triton#9433",
    {
        "P overwritten while it runs": ("refused|in_flight", r"wgmma|p\b|second|packed"),
        "P's fence left out": ("refused|race|in_flight", r"wgmma", "triton-lang/triton#3106"),
        "registers of P never set": ("uninitialised|refused", r"wgmma|store|out", "triton-lang/triton#3106"),
    },
    [{"through": "registers"}],
)
@planted(
    GROUP,
    "xlite-dev/FlashMLA-ETAP#3",
    {"P stored without a proxy fence": ("proxy", r"wgmma|tile")},
    [{"through": "shared"}],
)
def chained(defect: str, *, through: str) -> Launch:
    """S = A·Aᵀ, then S·A with S from registers or through shared memory, as attention's P·V."""

    @kernel(threads=128, requires="sm_90a")
    def run(k: Kernel, a_map: TensorMap, out: Global[f32]) -> None:
        tile = k.shared(bf16, (SIZE, SIZE), swizzle="auto")
        p_tile = k.shared(bf16, (SIZE, SIZE), swizzle="auto")
        full = k.mbarriers(1)
        leader = k.thread == 0
        with k.when(leader):
            full.init(1)
            k.mbarrier_fence()
        k.syncthreads()
        full.expect(LAYOUT.bytes, when=leader)
        k.tma_load(tile, a_map, (0, 0), full, when=leader)
        full.wait(0)
        scores, second = k.warpgroup_accumulator(SIZE), k.warpgroup_accumulator(SIZE)
        k.wgmma_fence()
        for depth in range(0, SIZE, 16):
            x = k.wgmma_operand(tile, col=depth)
            k.wgmma(scores, x, x, accumulate=depth > 0)
        k.wgmma_commit()
        if defect == "K overwritten before its product":
            tile.store(k.value(0, u32), k.thread >> 5, (k.thread & 31) * 2, dtype=u32)
        k.wgmma_wait(1 if defect == "waited for with the next product in flight" else 0, scores)
        sums = sums_of(scores)
        packed = [k.register(u32) for _ in range(16)]
        for i, register in enumerate(packed):
            if defect != "registers of P never set" or i:
                register.set(k.pack(sums[2 * i].get(), sums[2 * i + 1].get(), bf16))
        if through == "shared":
            row = (k.warp << 4) + (k.lane >> 2)
            for i in range(16):
                tile_row = row + 8 * (i & 1)
                p_tile.store(packed[i].get(), tile_row, (i >> 1) * 8 + 2 * (k.lane & 3), dtype=u32)
            if defect != "P stored without a proxy fence":
                k.fence_async()
            k.syncthreads()
        if defect != "P's fence left out":
            k.wgmma_fence()
        for step in range(4):
            v = k.wgmma_operand(tile, row=16 * step, transposed=True)
            if through == "shared":
                p = k.wgmma_operand(p_tile, col=16 * step)
            else:
                p = [packed[4 * step + j] for j in range(4)]
            k.wgmma(second, p, v, accumulate=step > 0, transposed_b=True)
            if defect == "P overwritten while it runs" and step == 1:
                packed[4].set(0)
        k.wgmma_commit()
        k.wgmma_wait(0, second)
        second.store_global(out, SIZE)

    a, out = operand(2), np.zeros((SIZE, SIZE), np.float32)
    x = a.astype(np.float32)
    s = (x @ x.T).astype(ml_dtypes.bfloat16).astype(np.float32)
    spec = LAYOUT.tensor_map(bf16, (SIZE, SIZE), (2 * SIZE,))
    return Launch(run.trace(), 1, [(a, spec), out], {1: s @ x})


@planted(
    "registers of warpgroups",
    "NVIDIA/cutlass#2007",
    {
        "more than the SM has": ("refused", r"warps|requires|kernel"),
        "a role without a budget": ("refused|deadlock", r"warps|kernel|run", "pytorch/helion#3620"),
        "two CTAs an SM": ("refused", r"warps|kernel|run", "tile-ai/tilelang#2559"),
        "no multiple of 8": ("refused", r"warps", "NVIDIA/cutlass#2007"),
        "two warps of a warpgroup": ("refused", r"warps|set_max", "triton-lang/triton#9786"),
        "nobody gives registers back": (
            "refused|deadlock|undefined",
            r"set_max|warps|kernel|run",
            "pytorch/helion#3620",
        ),
        "more given back than taken": ("undefined|refused", r"set_max|warps", "triton-lang/triton#9786"),
        "asked for in a branch": ("divergence|refused", r"set_max", "triton-lang/triton#9786"),
    },
)
def budgets(defect: str) -> Launch:
    """A producer gives registers to two consumers."""
    budget = {"more than the SM has": 256 - 8, "no multiple of 8": 236}.get(defect, 240)
    last = {"two warps of a warpgroup": 6}.get(defect, 8)
    threads = 384

    def body(k: Kernel, out: Global[f32]) -> None:
        with k.warps(0, 4, registers=None if defect == "a role without a budget" else 24):
            if defect == "more given back than taken":
                k.emit(set_max_registers(64, "dec"), ())
        with k.warps(4, last, registers=budget):
            out.store(k.value(1.0, f32), k.thread)
            if defect == "asked for in a branch":
                with k.when(k.lane < 16):
                    k.emit(set_max_registers(240, "inc"), ())
        with k.warps(last, 12, registers=budget):
            if defect == "nobody gives registers back":
                k.emit(set_max_registers(256 - 8, "inc"), ())
            out.store(k.value(1.0, f32), k.thread)

    run = kernel(threads=threads, requires="sm_90a", min_ctas=2 if defect == "two CTAs an SM" else 1)(body)
    right = np.concatenate([np.zeros(128), np.ones(256)])
    return Launch(run.trace(), 1, [np.zeros(threads, np.float32)], {0: right})
