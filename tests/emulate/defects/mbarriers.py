# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""mbarriers: their initialisation, arrivals, parities, and rings of stages between warps."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, numbers, planted, zeros
from warploom.lang import Global, Kernel, kernel, u32

GROUP = "mbarriers"


@planted(
    GROUP,
    "triton-lang/triton#8285",
    {
        "never initialised": ("mbarrier|refused", r"full"),
        "initialised, all go on at once": ("mbarrier", r"full", "facebookexperimental/triton#1105"),
        "initialised by every thread": ("mbarrier|race", r"full\.init", "triton-lang/triton#9498"),
        "initialised again in use": ("mbarrier", r"full", "NVIDIA/cutlass#1438"),
        "a count too high": ("deadlock|mbarrier", r"full", "NVIDIA/cutlass#2404"),
        "a count too low": ("race|mbarrier", r"full|tile\.", "NVIDIA/cudnn-frontend#426"),
        "every lane arrives": ("refused", r"full", "triton-lang/triton#9498"),
        "nobody arrives": ("deadlock|refused", r"full", "NVIDIA/cutlass#2404"),
        "the parity of the next phase": ("mbarrier|race|uninitialised", r"full|tile\.", "tile-ai/tilelang#3087"),
        "waited for by one lane": ("race|divergence", r"full|tile\.", "NVIDIA/cudnn-frontend#426"),
        "32 lanes store, one arrives": ("race", r"tile\.", "NVIDIA/cudnn-frontend#426"),
        "arrival before the store": ("race", r"tile\.", "NVIDIA/cudnn-frontend#1049"),
        "not waited for": ("race|uninitialised|refused|mbarrier", r"tile\.|out\.|full", "tile-ai/tilelang#2182"),
        "a number beyond the array": ("bounds|refused", r"full", "openmm/openmm#2825"),
        "another mbarrier than waited for": ("deadlock|race", r"full|tile\.", "NVIDIA/cutlass#1438"),
        "data stored over it": ("mbarrier|bounds", r"tile\.|store", "Modular/mojo-gpu-puzzles#33"),
        "read as data": ("mbarrier", r"load|full", "NVIDIA/cutlass#1438"),
        "waited for in a branch, arrived at by all": ("mbarrier|race", r"full|tile\.", "triton-lang/triton#8285"),
    },
    [{"warps": 1}, {"warps": 3}],
)
def signal(defect: str, *, warps: int) -> Launch:
    """Some warps fill a tile and arrive; another waits and reads."""
    from warploom.isa.memory import load, store

    threads = 32 * (warps + 1)

    @kernel(threads=threads, requires="sm_90a")
    def run(k: Kernel, out: Global[u32], number: u32) -> None:
        full = k.mbarriers(2)
        tile = k.shared(u32, 32 * warps)
        arrivals = warps + {"a count too high": 1, "a count too low": -1 if warps > 1 else 0}.get(defect, 0)
        if defect == "a count too low" and warps == 1:
            arrivals = 1
        if defect != "never initialised":
            with k.when(k.lane == 0 if defect == "initialised by every thread" else k.thread == 0):
                full.init(arrivals)
                k.mbarrier_fence()
        if defect != "initialised, all go on at once":
            k.syncthreads()
        with k.warps(0, warps):
            if defect == "arrival before the store" or (defect == "a count too low" and warps == 1):
                full.arrive(0, when=k.lane == 0)
            tile.store(k.thread, 0, k.thread)
            if defect not in ("32 lanes store, one arrives",):
                k.syncwarp()
            if defect == "data stored over it":
                k.emit(store("shared", u32, 1), (full.address(0), k.value(0, u32)))
            if defect == "read as data":
                (word,) = k.emit(load("shared", u32, 1), (full.address(0),))
                out.store(word, k.thread)
            if defect == "initialised again in use":
                with k.when(k.thread == 0):
                    full.init(arrivals, 0)
            if defect == "every lane arrives":
                full.arrive(0)
            elif defect == "a number beyond the array":
                full.arrive(number + 1, when=k.lane == 0)
            elif defect == "another mbarrier than waited for":
                full.arrive(1, when=k.lane == 0)
            elif defect not in ("nobody arrives", "arrival before the store"):
                full.arrive(0, when=k.lane == 0)
            if defect == "waited for in a branch, arrived at by all":
                full.arrive(0, when=k.lane == 0)
        with k.warps(warps, warps + 1):
            if defect == "waited for by one lane":
                with k.when(k.lane == 0):
                    full.wait(0)
            elif defect == "waited for in a branch, arrived at by all":
                full.wait(0)
                full.wait(1)
            elif defect != "not waited for":
                full.wait(1 if defect == "the parity of the next phase" else 0)
            for warp in range(warps):
                out.store(tile.load(0, 32 * warp + k.lane), 32 * warp + k.lane)

    return Launch(run.trace(), 1, [zeros(32 * warps), 1], {0: numbers(32 * warps)})


@planted(
    GROUP,
    "triton-lang/triton#8285",
    {
        "free is not waited for": ("race|mbarrier|refused", r"tile\.|free|full"),
        "full is not waited for": ("race|mbarrier|uninitialised|refused", r"tile\.|free|full", "tile-ai/tilelang#2182"),
        "free is not told": ("deadlock|refused", r"free|full", "NVIDIA/cutlass#2404"),
        "full is not told": ("deadlock|refused", r"free|full", "NVIDIA/cutlass#2404"),
        "free is told too early": ("race", r"tile\."),
        "full is told too early": ("race", r"tile\.", "NVIDIA/cudnn-frontend#1049"),
        "no __syncwarp before free is told": ("race", r"tile\.", "NVIDIA/cudnn-frontend#426"),
        "no __syncwarp before full is told": ("race", r"tile\.", "NVIDIA/cudnn-frontend#426"),
        "the parity never flips": (
            "mbarrier|race|deadlock|uninitialised",
            r"tile\.|free|full|ring",
            "tile-ai/tilelang#3087",
        ),
        "the producer begins with phase 0": ("deadlock|mbarrier", r"free|full", "tile-ai/tilelang#3087"),
        "the stage does not advance": ("mbarrier|race|deadlock", r"tile\.|free|full", "triton-lang/triton#8285"),
        "a phase behind": ("mbarrier|race|deadlock|uninitialised", r"tile\.|free|full", "tile-ai/tilelang#3087"),
        "the wrong stage is given back": ("mbarrier|race|deadlock", r"tile\.|free|full"),
        "the wrong stage is read": ("race|uninitialised", r"tile\.|out\."),
        "free counts lanes": ("deadlock|mbarrier", r"free|full", "triton-lang/triton#9498"),
        "free counts one consumer": ("race|mbarrier", r"tile\.|free|full", "NVIDIA/cutlass#2404"),
        "one leader frees for all consumers": ("race|mbarrier", r"tile\.|free|full", "triton-lang/triton#10035"),
        "a consumer leaves a step early": ("mbarrier", r"free|full", "Dao-AILab/flash-attention#2761"),
        "a step too many": ("deadlock", r"free|full", "Dao-AILab/flash-attention#2761"),
        "stages given back, not waited for": ("mbarrier", r"free|full"),
    },
    [{"stages": 2}, {"stages": 3}],
)
def ring(defect: str, *, stages: int) -> Launch:
    """One warp fills a ring of stages, two others read all of them."""
    steps = 2 * stages + 1

    @kernel(threads=96, requires="sm_90a")
    def run(k: Kernel, out: Global[u32]) -> None:
        tile = k.shared(u32, 32, stages=stages)
        full, free = k.mbarriers(stages, "full"), k.mbarriers(stages, "free")
        with k.when(k.thread == 0):
            full.init(1)
            free.init(
                {"free counts lanes": 64, "free counts one consumer": 1, "one leader frees for all consumers": 1}.get(
                    defect, 2
                )
            )
            k.mbarrier_fence()
        k.syncthreads()
        one = k.lane == 0
        with k.warps(0, 1):
            ring = k.ring(stages, "load", phase=0 if defect == "the producer begins with phase 0" else 1)
            with k.loop(steps) as step:
                if defect != "free is not waited for":
                    free.wait(ring.phase, ring.stage)
                if defect == "full is told too early":
                    full.arrive(ring.stage, when=one)
                tile.stage(ring.stage).store(k.lane + step, 0, k.lane)
                if defect != "no __syncwarp before full is told":
                    k.syncwarp()
                if defect not in ("full is told too early", "full is not told"):
                    full.arrive(ring.stage, when=one)
                if defect != "the stage does not advance":
                    ring.advance()
        with k.warps(1, 3):
            use = k.ring(stages, "use")
            total = k.register(u32, 0)
            fewer = {"a consumer leaves a step early": 1, "stages given back, not waited for": stages}.get(defect, 0)
            rounds = k.select(k.warp == 2, k.value(steps - fewer, u32), steps) if fewer else steps
            if defect == "stages given back, not waited for":
                with k.when(k.warp == 2, uniform=True), k.loop(stages):
                    free.arrive(use.stage, when=one)
                    use.advance()
            with k.loop(rounds + 1 if defect == "a step too many" else rounds) as step:
                phase = (
                    use.phase ^ 1
                    if defect == "a phase behind"
                    else use.phase & 0
                    if defect == "the parity never flips"
                    else use.phase
                )
                if defect != "full is not waited for":
                    full.wait(phase, use.stage)
                back = use.stage if defect != "the wrong stage is given back" else (use.stage + 1) % stages
                if defect == "free is told too early":
                    free.arrive(back, when=one)
                read = use.stage if defect != "the wrong stage is read" else (use.stage + 1) % stages
                total += tile.stage(read).load(0, k.lane ^ 1)
                if defect != "no __syncwarp before free is told":
                    k.syncwarp()
                if defect == "one leader frees for all consumers":
                    free.arrive(back, when=k.thread == 32)
                elif defect not in ("free is told too early", "free is not told"):
                    free.arrive(back, when=one)
                use.advance()
            out.store(total, k.thread - 32)

    right = np.tile((np.arange(32) ^ 1) * steps + steps * (steps - 1) // 2, 2)
    return Launch(run.trace(), 1, [zeros(64)], {0: right})
