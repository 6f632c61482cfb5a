# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Clusters: CTAs that meet, arrive at each other's mbarriers and load for each other."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, planted
from tests.emulate.defects.tma import BYTES, COLS, ROWS, mapped, matrix
from warploom.lang import Global, Kernel, TensorMap, f32, kernel

GROUP = "clusters"


@planted(
    GROUP,
    "facebookexperimental/triton#1105",
    {
        "no meeting before the first arrival": ("mbarrier", r"told|cluster", "facebookexperimental/triton#2146"),
        "the CTAs meet apart": ("mbarrier", r"told|cluster", "facebookexperimental/triton#2146"),
        "a CTA exits before the last arrival": ("cluster", r"late|cluster", "triton-lang/triton#9413"),
        "arrival for the CTA alone": ("race", r"out\.|told", "apache/tvm#20074"),
        "wait for the CTA alone": ("race", r"out\.|told", "triton-lang/triton#10926"),
        "arrival at home": ("race|deadlock|mbarrier", r"out\.|told", "apache/tvm#20074"),
        "not waited for": ("race|mbarrier|refused", r"out\.|told", "inclusionAI/humming#56"),
        "arrival before the store": ("race", r"out\.|told", "triton-lang/triton#11411"),
        "no __syncwarp before the arrival": ("race", r"out\.|told"),
        "one warp arrives": ("race|deadlock|mbarrier", r"out\.|told", "Dao-AILab/flash-attention#1315"),
        "a count too high": ("deadlock", r"told", "tile-ai/tilelang#2644"),
        "a rank beyond the cluster": ("bounds|refused", r"told"),
    },
    [{"ctas": 2}, {"ctas": 4}],
)
def pass_on(defect: str, *, ctas: int) -> Launch:
    """Each CTA writes 64 numbers to global memory; the one before it reads them."""

    @kernel(threads=64, requires="sm_90a", cluster=ctas)
    def run(k: Kernel, out: Global[f32], copy: Global[f32], beyond: f32) -> None:
        told, late = k.mbarriers(1, "told"), k.mbarriers(1, "late")
        with k.when(k.thread == 0):
            late.init(2)
            told.init(3 if defect == "a count too high" else 1 if defect == "one warp arrives" else 2)
            k.mbarrier_fence()
        if defect == "the CTAs meet apart":
            k.syncthreads()
        elif defect != "no meeting before the first arrival":
            k.cluster_sync()
        mine, following = k.cluster_rank * 64, (k.cluster_rank + 1) & (ctas - 1)
        before = (k.cluster_rank + ctas - 1) & (ctas - 1)
        if defect == "arrival at home":
            before = k.cluster_rank
        if defect == "a rank beyond the cluster":
            before = k.cluster_rank + ctas - 1
        scope = "cta" if defect == "arrival for the CTA alone" else "cluster"

        def arrive() -> None:
            who = k.thread == 0 if defect == "one warp arrives" else k.lane == 0
            told.arrive(cta=before, when=who, scope=scope)

        if defect == "arrival before the store":
            arrive()
        out.store(k.convert(k.thread + mine, f32), mine + k.thread)
        if defect != "no __syncwarp before the arrival":
            k.syncwarp()
        if defect != "arrival before the store":
            arrive()
        if defect != "not waited for":
            told.wait(0, scope="cta" if defect == "wait for the CTA alone" else "cluster")
        copy.store(out.load(following * 64 + k.thread), mine + k.thread)
        if defect == "a CTA exits before the last arrival":
            late.arrive(cta=before, when=k.lane == 0, scope=scope)
        else:
            late.arrive(when=k.lane == 0)
            k.cluster_sync()

    out, copy = np.zeros(64 * ctas, np.float32), np.zeros(64 * ctas, np.float32)
    return Launch(run.trace(), ctas, [out, copy, 0.0], {1: np.roll(np.arange(64 * ctas), -64)})


@planted(
    GROUP,
    "triton-lang/triton#10656",
    {
        "arrives twice": ("barrier", r"cluster_"),
        "arrives and does not wait": ("barrier|race", r"cluster_|out\."),
        "one warp waits": ("barrier|race", r"cluster_|out\."),
        "some lanes wait": ("divergence", r"cluster_"),
        "one warp arrives": ("barrier|deadlock", r"cluster_"),
        "one CTA does not come": ("deadlock", r"cluster_|told"),
        "read between the halves": ("race", r"out\.|cluster_", "triton-lang/triton#9413"),
        "written between the halves": ("race", r"out\.|cluster_", "triton-lang/triton#11411"),
        "met in the CTA alone": ("race", r"out\.", "triton-lang/triton#9413"),
    },
    [{"warps": 2}, {"warps": 3}],
)
def halves(defect: str, *, warps: int) -> Launch:
    """Two CTAs write, arrive, wait and read what the other has written."""
    threads = 32 * warps

    @kernel(threads=threads, requires="sm_90a", cluster=2)
    def run(k: Kernel, out: Global[f32], copy: Global[f32]) -> None:
        told = k.mbarriers(1, "told")
        with k.when(k.thread == 0):
            told.init(1)
            k.mbarrier_fence()
        k.syncthreads()
        at, other = k.cluster_rank * threads + k.thread, (k.cluster_rank ^ 1) * threads + k.thread

        def write() -> None:
            out.store(k.convert(at, f32), at)

        if defect != "written between the halves":
            write()
        if defect == "met in the CTA alone":
            k.syncthreads()
        elif defect == "one warp arrives":
            with k.when(k.warp == 0, uniform=True):
                k.cluster_arrive()
            k.cluster_wait()
        elif defect == "one CTA does not come":
            with k.when(k.cluster_rank == 1, uniform=True):
                told.arrive(when=k.thread == 4096)
                told.wait(0)
            k.cluster_sync()
        else:
            k.cluster_arrive()
            if defect == "arrives twice":
                k.cluster_arrive()
            if defect == "read between the halves":
                copy.store(out.load(other), at)
            if defect == "written between the halves":
                write()
            if defect == "one warp waits":
                with k.when(k.warp == 0, uniform=True):
                    k.cluster_wait()
            elif defect == "some lanes wait":
                with k.when(k.lane < 16):
                    k.cluster_wait()
            elif defect != "arrives and does not wait":
                k.cluster_wait()
        copy.store(out.load(other), at)

    out, copy = np.zeros(2 * threads, np.float32), np.zeros(2 * threads, np.float32)
    return Launch(run.trace(), 2, [out, copy], {1: np.roll(np.arange(2 * threads), threads)})


@planted(
    GROUP,
    "inclusionAI/humming#56",
    {
        "its own bytes alone are expected": (
            "mbarrier|deadlock|in_flight|race",
            r"full|tma_load|tile",
            "facebookexperimental/triton#908",
        ),
        "one CTA expects nothing": (
            "mbarrier|deadlock|in_flight",
            r"full|tma_load|tile",
            "facebookexperimental/triton#908",
        ),
        "the copy goes to one CTA": ("deadlock|mbarrier", r"full|tma_load", "inclusionAI/humming#53"),
        "a CTA beyond the cluster": ("bounds|refused", r"tma_load"),
        "free is told at home alone": ("race|in_flight|mbarrier|deadlock", r"tile|free|full|tma_load"),
        "free counts the own CTA": ("race|in_flight|mbarrier", r"tile|free|full|tma_load", "inclusionAI/humming#56"),
        "free is not waited for": ("race|in_flight|mbarrier", r"tile|free|full|tma_load"),
        "full is not waited for": ("in_flight|uninitialised|race|mbarrier|refused", r"tile|free|full|tma_load"),
        "read and given back without a fence": ("proxy", r"tile|tma_load", "NVIDIA/TransformerEngine#2695"),
        "both halves to one place": ("in_flight|race|uninitialised", r"tma_load|tile"),
        "no meeting before the first copy": ("mbarrier", r"full|free|tma_load", "facebookexperimental/triton#2146"),
        "no meeting at the end": ("cluster", r"free|full", "facebookexperimental/triton#1105"),
    },
    [{"stages": 1}, {"stages": 2}],
)
def multicast(defect: str, *, stages: int) -> Launch:
    """Each CTA loads half of a box for both; all read the whole of it."""
    steps = stages + 2
    half = BYTES // 2

    @kernel(threads=64, requires="sm_90a", cluster=2)
    def run(k: Kernel, source: TensorMap, out: Global[f32]) -> None:
        tile = k.shared(f32, (ROWS, COLS), stages=stages, name="tile")
        full, free = k.mbarriers(stages, "full"), k.mbarriers(stages, "free")
        with k.when(k.thread == 0):
            full.init(1)
            free.init(1 if defect in ("free counts the own CTA", "free is told at home alone") else 2)
            k.mbarrier_fence()
        if defect == "no meeting before the first copy":
            k.syncthreads()
        else:
            k.cluster_sync()
        with k.warps(0, 1):
            load = k.ring(stages, "load", phase=1)
            one = k.lane == 0
            with k.loop(steps) as step:
                if defect != "free is not waited for":
                    free.wait(load.phase, load.stage)
                if defect == "one CTA expects nothing":
                    with k.when(k.cluster_rank == 0, uniform=True):
                        full.expect(BYTES, load.stage, when=one)
                    with k.otherwise():
                        full.arrive(load.stage, when=one)
                else:
                    expected = half if defect == "its own bytes alone are expected" else BYTES
                    full.expect(expected, load.stage, when=one)
                part = k.cluster_rank * (ROWS // 2)
                offset = part * (4 * COLS) if defect != "both halves to one place" else 0
                masks = {"the copy goes to one CTA": 0b01, "a CTA beyond the cluster": 0b111}
                k.tma_load(
                    tile.stage(load.stage),
                    source,
                    (0, ROWS * step + part),
                    full,
                    load.stage,
                    when=one,
                    offset=offset,
                    multicast=masks.get(defect, 0b11),
                )
                load.advance()
        with k.warps(1, 2):
            use = k.ring(stages, "use")
            total = k.register(f32, 0.0)
            with k.loop(steps):
                if defect != "full is not waited for":
                    full.wait(use.phase, use.stage)
                for row in range(ROWS):
                    total += tile.stage(use.stage).load(row, k.lane)
                if defect != "read and given back without a fence":
                    k.fence_async()
                k.syncwarp()
                if defect == "free is told at home alone":
                    free.arrive(use.stage, when=k.lane == 0)
                else:
                    free.arrive_cluster(use.stage)
                use.advance()
            out.store(total, k.cluster_rank * 32 + k.lane)
        if defect != "no meeting at the end":
            k.cluster_sync()

    data = matrix(ROWS * steps) % 97
    box = mapped(data, (COLS, ROWS // 2))
    return Launch(run.trace(), 2, [box, np.zeros(2 * COLS, np.float32)], {1: np.tile(data.sum(axis=0), 2)})
