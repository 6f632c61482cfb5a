# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Bulk copies of the TMA: bytes on an mbarrier, fences between the proxies, groups of stores, tensor maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emulate.defects.base import Launch, planted
from warploom.lang import Global, Kernel, TensorMap, f32, kernel
from warploom.layout.tensor_map import TensorMapSpec

GROUP = "TMA"
ROWS, COLS = 8, 32
BYTES = 4 * ROWS * COLS


def mapped(array: np.ndarray[Any, Any], box: tuple[int, int] = (COLS, ROWS), swizzle: int = 0) -> Any:
    """An argument for a tensor map over a row-major matrix."""
    return array, TensorMapSpec(f32, array.shape[::-1], (array.strides[0],), box, swizzle)


def matrix(rows: int, cols: int = COLS) -> np.ndarray[Any, Any]:
    """1, 2, 3 …"""
    return np.arange(1, rows * cols + 1, dtype=np.float32).reshape(rows, cols)


@planted(
    GROUP,
    "RL-Align/RL-Kernel#189",
    {
        "too many bytes expected": ("deadlock|mbarrier", r"full|tma_load"),
        "too few bytes expected": ("mbarrier|deadlock", r"full|tma_load", "tile-ai/tilelang#2644"),
        "no bytes expected": (
            "mbarrier|deadlock|in_flight|race|refused",
            r"full|tma_load|tile\.",
            "facebookexperimental/triton#972",
        ),
        "elements expected, not bytes": ("mbarrier|deadlock", r"full|tma_load", "flashinfer-ai/flashinfer#4638"),
        "every lane issues it": ("mbarrier|refused", r"full|tma_load", "triton-lang/triton#9498"),
        "one of each warp issues it": ("mbarrier", r"full|tma_load", "triton-lang/triton#9498"),
        "not waited for": ("in_flight|leak|refused|race", r"tile\.|tma_load", "tile-ai/tilelang#2182"),
        "waited for by the issuer alone": ("in_flight|race", r"tile\.|tma_load", "NVIDIA/cudnn-frontend#1049"),
        "waited for with the other parity": (
            "in_flight|mbarrier|race",
            r"tile\.|tma_load|full",
            "tile-ai/tilelang#3087",
        ),
        "no fence after the initialisation": ("mbarrier|refused", r"full|tma_load|init", "NVIDIA/cutlass#1438"),
        "no barrier after the initialisation": ("mbarrier", r"full", "facebookexperimental/triton#1105"),
        "another mbarrier completes": ("mbarrier|deadlock", r"full|tma_load", "NVIDIA/cutlass#1438"),
        "the tile is cleared meanwhile": ("in_flight|race", r"tile\.|tma_load", "NVIDIA/cutlass#2162"),
        "into the middle of a row": ("misaligned|bounds", r"tma_load", "triton-lang/triton#7385"),
        "beyond the tile": ("bounds|refused", r"tma_load", "Modular/mojo-gpu-puzzles#33"),
        "a larger box than the tile": ("bounds|layout|mbarrier", r"tma_load|full", "flashinfer-ai/flashinfer#1078"),
        "a smaller box than expected": ("deadlock|mbarrier", r"full|tma_load", "tile-ai/tilelang#2644"),
        "a swizzled box for a plain tile": ("layout", r"tma_load", "tile-ai/tilelang#813"),
        "a base off 16 bytes": ("refused", r"", "triton-lang/triton#7385"),
        "rows off 16 bytes": ("refused", r"", "tile-ai/tilelang#1931"),
        "a box of 512 rows": ("refused", r"", "tile-ai/tilelang#3106"),
        "rows beyond the swizzle": ("refused", r"", "triton-lang/triton#8378"),
    },
)
@planted(
    GROUP,
    "RL-Align/RL-Kernel#189",
    {
        "too many bytes expected": ("deadlock|mbarrier", r"full|tma_load"),
        "too few bytes expected": ("mbarrier|deadlock", r"full|tma_load", "tile-ai/tilelang#2644"),
        "waited for by the issuer alone": ("in_flight|race", r"tile\.|tma_load", "NVIDIA/cudnn-frontend#1049"),
        "the tile is cleared meanwhile": ("in_flight|race", r"tile\.|tma_load", "NVIDIA/cutlass#2162"),
        "a plain box for a swizzled tile": ("layout", r"tma_load", "triton-lang/triton#8378"),
        "another mbarrier completes": ("mbarrier|deadlock", r"full|tma_load", "NVIDIA/cutlass#1438"),
    },
    [{"swizzled": True}],
)
def load(defect: str, *, swizzled: bool = False) -> Launch:
    """One thread loads a box, all read it."""

    @kernel(threads=128, requires="sm_90a")
    def run(k: Kernel, source: TensorMap, out: Global[f32]) -> None:
        tile = k.shared(f32, (ROWS, COLS), swizzle="auto" if swizzled else None)
        k.shared(f32, (ROWS, COLS), name="spare")
        full = k.mbarriers(2)
        leader = k.thread == 0
        with k.when(leader):
            full.init(1)
            if defect != "no fence after the initialisation":
                k.mbarrier_fence()
        if defect != "no barrier after the initialisation":
            k.syncthreads()
        issuer = k.thread == 0
        if defect == "every lane issues it":
            issuer = k.warp == 0
        if defect == "one of each warp issues it":
            issuer = k.lane == 0
        count = BYTES + {"too many bytes expected": 128, "too few bytes expected": -128}.get(defect, 0)
        if defect == "elements expected, not bytes":
            count = BYTES // 4
        if defect == "no bytes expected":
            full.arrive(when=issuer)
        else:
            full.expect(count, when=issuer)
        offset = {"into the middle of a row": 16, "beyond the tile": BYTES // 2}.get(defect, 0)
        k.tma_load(
            tile, source, (0, 0), full, 1 if defect == "another mbarrier completes" else 0, when=issuer, offset=offset
        )
        if defect == "the tile is cleared meanwhile":
            tile.store([k.value(0.0, f32)] * 2, k.thread >> 4, (k.thread & 15) * 2)
        if defect == "waited for by the issuer alone":
            with k.when(leader):
                full.wait(0)
        elif defect != "not waited for":
            full.wait(1 if defect == "waited for with the other parity" else 0)
        row, col = k.thread >> 4, (k.thread & 15) * 2
        out.store(tile.load(row, col, 2), row * COLS + col)

    data = matrix(ROWS)
    box, swizzle = (COLS, ROWS), 128 if swizzled else 0
    if defect in ("a swizzled box for a plain tile", "a plain box for a swizzled tile"):
        swizzle = 128 - swizzle
    if defect == "a larger box than the tile":
        box = (COLS, 2 * ROWS)
    if defect == "a smaller box than expected":
        box = (COLS, ROWS // 2)
    if defect == "a base off 16 bytes":
        room = np.zeros(ROWS * COLS + 32, np.float32)
        start = (-room.ctypes.data // 4) % 32 + 1
        data = room[start : start + ROWS * COLS].reshape(ROWS, COLS)
    if defect == "rows off 16 bytes":
        data = matrix(ROWS, COLS + 1)
    if defect == "a box of 512 rows":
        box = (COLS, 512)
    if defect == "rows beyond the swizzle":
        data, box, swizzle = matrix(ROWS, 64), (64, ROWS), 128
    out = np.zeros((ROWS, COLS), np.float32)
    return Launch(run.trace(), 1, [mapped(data, box, swizzle), out], {1: matrix(ROWS)})


@planted(
    GROUP,
    "MoonshotAI/FlashKDA#24",
    {
        "no proxy fence": ("proxy", r"tma_store|tile\."),
        "fenced by the issuer alone": ("proxy", r"tma_store|tile\.", "inclusionAI/cuLA#114"),
        "fenced before the stores": ("proxy", r"tma_store|tile\.", "facebookexperimental/triton#368"),
        "fenced for global memory": ("proxy", r"tma_store|tile\.", "deepseek-ai/DeepEP#642"),
        "no barrier after the fence": ("race|proxy", r"tma_store|tile\.", "NVIDIA/cutlass#2960"),
        "a __syncwarp for a barrier": ("race|proxy", r"tma_store|tile\.", "NVIDIA/cutlass#2960"),
        "never committed": ("race|leak|refused", r"tma_store|tile\.|wait_bulk", "NVIDIA/cutlass#2162"),
        "not waited for before reuse": ("race|leak|refused", r"tma_store|tile\.", "NVIDIA/cutlass#2162"),
        "waited for one group too few": ("race|leak", r"tma_store|tile\.", "deepseek-ai/DeepEP#657"),
        "waited for by another thread": ("race|leak", r"tma_store|tile\.|wait_bulk", "NVIDIA/cutlass#2002"),
        "no barrier after the wait": ("race", r"tma_store|tile\.", "NVIDIA/cutlass#2002"),
        "read back before it has landed": ("in_flight|race|proxy", r"tma_store|back", "deepseek-ai/DeepEP#657"),
        "part of the tile is empty": ("uninitialised", r"tma_store", "Modular/mojo-gpu-puzzles#9"),
        "two threads issue it": ("race|refused|in_flight", r"tma_store", "triton-lang/triton#9498"),
        "the kernel ends first": ("leak|refused", r"tma_store", "NVIDIA/cutlass#2162"),
    },
    [{"turns": 1}, {"turns": 2}],
)
def store(defect: str, *, turns: int) -> Launch:
    """All threads fill a tile, one stores it by the TMA, and the tile is used again."""

    @kernel(threads=64, requires="sm_90a")
    def run(k: Kernel, target: TensorMap, back: Global[f32], copy: Global[f32]) -> None:
        tile = k.shared(f32, (ROWS, COLS))
        leader = k.thread == 0
        row, col = k.thread >> 3, (k.thread & 7) * 4
        filling = k.thread < (48 if defect == "part of the tile is empty" else 64)
        for turn in range(turns):
            if defect == "fenced before the stores":
                k.fence_async()
            with k.when(filling):
                tile.store([k.convert(k.thread + turn, f32)] * 4, row, col)
            if defect == "fenced by the issuer alone":
                with k.when(leader):
                    k.fence_async()
            elif defect == "fenced for global memory":
                k.fence_async("global")
            elif defect not in ("no proxy fence", "fenced before the stores"):
                k.fence_async()
            if defect == "a __syncwarp for a barrier":
                k.syncwarp()
            elif defect != "no barrier after the fence":
                k.syncthreads()
            k.tma_store(
                target, (0, ROWS * turn), tile, when=k.thread < 2 if defect == "two threads issue it" else leader
            )
            if defect != "never committed":
                k.commit_bulk()
            if defect == "waited for one group too few":
                k.wait_bulk(1)
            elif defect == "waited for by another thread":
                with k.when(k.thread == 32):
                    k.wait_bulk(0)
            elif defect == "read back before it has landed":
                k.wait_bulk(0, reads_only=True)
            elif defect not in ("not waited for before reuse", "the kernel ends first"):
                k.wait_bulk(0)
            if defect == "the kernel ends first":
                if turn == turns - 1:
                    return
                k.wait_bulk(0)
            if defect != "no barrier after the wait":
                k.syncthreads()
            if defect == "read back before it has landed":
                with k.when(leader):
                    copy.store(back.load(0), 0)
        tile.store([k.value(0.0, f32)] * 4, row, col)

    out = np.zeros((ROWS * turns, COLS), np.float32)
    right = np.concatenate([np.repeat(np.arange(64) + turn, 4).reshape(ROWS, COLS) for turn in range(turns)])
    return Launch(run.trace(), 1, [mapped(out), out, np.zeros(4, np.float32)], {1: right})


@planted(
    GROUP,
    "facebookexperimental/triton#972",
    {
        "free is not waited for": ("race|in_flight|mbarrier|refused", r"tma_load|tile\.|f(ull|ree)"),
        "full is not waited for": (
            "race|in_flight|mbarrier|uninitialised|refused",
            r"tma_load|tile\.|f(ull|ree)",
            "tile-ai/tilelang#2182",
        ),
        "read and given back without a fence": ("proxy", r"tma_load|tile\.", "NVIDIA/TransformerEngine#2695"),
        "free is told too early": ("race", r"tma_load|tile\.", "triton-lang/triton#10035"),
        "no __syncwarp before free is told": ("race", r"tma_load|tile\.", "NVIDIA/cudnn-frontend#426"),
        "the producer begins with phase 0": ("deadlock|mbarrier", r"free|full", "tile-ai/tilelang#3087"),
        "expected after the last round": (
            "deadlock|mbarrier|leak",
            r"free|full|tma_load",
            "Dao-AILab/flash-attention#2761",
        ),
        "expected once for two loads": ("mbarrier|deadlock|in_flight", r"full|tma_load", "tile-ai/tilelang#2644"),
        "loads into one stage": ("race|in_flight", r"tma_load|tile\.", "ggml-org/llama.cpp#26434"),
        "the last loads are left alone": ("leak|mbarrier", r"tma_load|full", "deepseek-ai/DeepGEMM#343"),
    },
    [{"stages": 2}, {"stages": 4}],
)
def ring(defect: str, *, stages: int) -> Launch:
    """A producer warp loads boxes into a ring; another warp reads them."""
    steps = stages + 2

    @kernel(threads=64, requires="sm_90a")
    def run(k: Kernel, source: TensorMap, out: Global[f32]) -> None:
        tile = k.shared(f32, (ROWS, COLS), stages=stages)
        full, free = k.mbarriers(stages, "full"), k.mbarriers(stages, "free")
        with k.when(k.thread == 0):
            full.init(1)
            free.init(1)
            k.mbarrier_fence()
        k.syncthreads()
        one = k.lane == 0
        with k.warps(0, 1):
            load = k.ring(stages, "load", phase=0 if defect == "the producer begins with phase 0" else 1)
            with k.loop(
                steps + (1 if defect in ("expected after the last round", "the last loads are left alone") else 0)
            ) as step:
                if defect != "free is not waited for":
                    free.wait(load.phase, load.stage)
                full.expect(BYTES, load.stage, when=one)
                to = tile.stage(load.stage if defect != "loads into one stage" else 0)
                if defect == "expected after the last round":
                    with k.when(step < steps, uniform=True):
                        k.tma_load(to, source, (0, ROWS * step), full, load.stage, when=one)
                else:
                    k.tma_load(to, source, (0, ROWS * step), full, load.stage, when=one)
                if defect == "expected once for two loads":
                    k.tma_load(to, source, (0, ROWS * step), full, load.stage, when=one)
                load.advance()
        with k.warps(1, 2):
            use = k.ring(stages, "use")
            total = k.register(f32, 0.0)
            with k.loop(steps):
                if defect != "full is not waited for":
                    full.wait(use.phase, use.stage)
                if defect == "free is told too early":
                    free.arrive(use.stage, when=one)
                for row in range(ROWS):
                    total += tile.stage(use.stage).load(row, k.lane)
                if defect != "read and given back without a fence":
                    k.fence_async()
                if defect != "no __syncwarp before free is told":
                    k.syncwarp()
                if defect != "free is told too early":
                    free.arrive(use.stage, when=one)
                use.advance()
            out.store(total, k.lane)

    data = matrix(ROWS * steps) % 97
    return Launch(run.trace(), 1, [mapped(data), np.zeros(COLS, np.float32)], {1: data.sum(axis=0)})


@planted(
    GROUP,
    "deepseek-ai/DeepEP#642",
    {
        "no fence for global memory": ("proxy", r"tma_load|data"),
        "fenced for shared memory": ("proxy", r"tma_load|data"),
        "fenced by the loader alone": ("proxy", r"tma_load|data", "inclusionAI/cuLA#114"),
        "no barrier after the fence": ("race|proxy", r"tma_load|data", "NVIDIA/cutlass#2960"),
    },
    [{"threads": 64}, {"threads": 128}],
)
def written_then_loaded(defect: str, *, threads: int) -> Launch:
    """The kernel writes an array with ordinary stores, then loads it through the TMA."""

    @kernel(threads=threads, requires="sm_90a")
    def run(k: Kernel, data: Global[f32], source: TensorMap, out: Global[f32]) -> None:
        tile = k.shared(f32, (ROWS, COLS))
        full = k.mbarriers(1)
        leader = k.thread == 0
        with k.when(leader):
            full.init(1)
            k.mbarrier_fence()
        for part in range(ROWS * COLS // threads):
            data.store(k.convert(k.thread, f32), k.thread + threads * part)
        if defect == "fenced by the loader alone":
            with k.when(leader):
                k.fence_async("global")
        elif defect != "no fence for global memory":
            k.fence_async("shared" if defect == "fenced for shared memory" else "global")
        if defect != "no barrier after the fence":
            k.syncthreads()
        full.expect(BYTES, when=leader)
        k.tma_load(tile, source, (0, 0), full, when=leader)
        if defect == "no barrier after the fence":
            k.syncthreads()
        full.wait(0)
        with k.when(k.thread < 64):
            out.store(tile.load(k.thread >> 3, (k.thread & 7) * 4, 4), k.thread * 4)

    data, out = np.zeros((ROWS, COLS), np.float32), np.zeros(ROWS * COLS, np.float32)
    return Launch(run.trace(), 1, [data, mapped(data), out], {2: np.arange(ROWS * COLS) % threads})
