# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""``cp.async``: groups, waits, stages of a pipeline, sizes."""

from __future__ import annotations

import numpy as np

from tests.emulate.defects.base import Launch, numbers, planted, zeros
from warploom.isa.instruction import named
from warploom.lang import Global, Kernel, Traced, kernel, u32

GROUP = "cp.async"


@planted(
    GROUP,
    "Dao-AILab/flash-attention#359",
    {
        "never waited for": ("in_flight|leak", r"cp_async|tile\.", "JustVugg/colibri#1099"),
        "never committed": ("refused", r"wait_group"),
        "committed before the copy": ("in_flight|leak", r"cp_async|tile\."),
        "waited for one group too few": ("in_flight|leak", r"cp_async|tile\.", "tile-ai/tilelang#2505"),
        "waited for, no barrier": ("race|in_flight", r"cp_async|tile\.", "sheikhlimon/ninfer-3090#49"),
        "barrier before the wait": ("race|in_flight", r"cp_async|tile\.", "sheikhlimon/ninfer-3090#49"),
        "waited for by one warp": ("in_flight|race|divergence", r"cp_async|tile\.|wait_group", "NVIDIA/cutlass#1326"),
        "waited for by one lane of each warp": ("in_flight|race|leak|divergence", r"cp_async|tile\.|wait_group"),
        "more bytes valid than copied": ("undefined", r"cp_async", "paddle/paddock#6"),
        "source off its bounds": ("misaligned|bounds", r"cp_async", "kokkos/kokkos#686"),
        "target off its bounds": ("misaligned|bounds", r"cp_async", "apache/tvm#8540"),
        "past the end of the input": ("bounds", r"cp_async", "openmm/openmm#2825"),
        "past the end of the tile": ("bounds", r"cp_async", "Modular/mojo-gpu-puzzles#33"),
        "a negative count of groups": ("refused", r"wait_copies|wait_group", "tile-ai/tilelang#2505"),
        "written by a thread while it arrives": ("in_flight|race", r"cp_async|tile\.", "NVIDIA/cutlass#1326"),
    },
    [{"size": 4}, {"size": 16}],
)
def one_copy(defect: str, *, size: int) -> Launch:
    """Each thread copies some words, another one reads them."""
    words = size // 4

    @kernel(threads=64)
    def run(k: Kernel, data: Global[u32], out: Global[u32]) -> None:
        tile = k.shared(u32, 64 * words)
        if defect == "committed before the copy":
            k.commit_group()
        at = k.thread * words
        source = at + {"source off its bounds": 0, "past the end of the input": 4 * words}.get(defect, 0)
        pointer = (data + source).bytes(2) if defect == "source off its bounds" else data + source
        target = tile.address(0, at)
        if defect == "target off its bounds":
            target = target + 2
        if defect == "past the end of the tile":
            target = target + size
        valid = size + 4 if defect == "more bytes valid than copied" else size
        k.cp_async(target, pointer, size, valid_bytes=k.thread * 0 + valid)
        if defect == "written by a thread while it arrives":
            tile.store(k.thread, 0, at)
        if defect not in ("never committed", "committed before the copy"):
            k.commit_group()
        if defect == "barrier before the wait":
            k.syncthreads()
        if defect == "waited for one group too few":
            k.wait_group(1)
        elif defect == "waited for by one warp":
            with k.when(k.warp == 0, uniform=True):
                k.wait_group(0)
        elif defect == "waited for by one lane of each warp":
            with k.when(k.lane == 0):
                k.wait_group(0)
        elif defect == "a negative count of groups":
            k.emit(named("cp.async.wait_group", numbers=(("pending", -1),)), ())
        elif defect != "never waited for":
            k.wait_group(0)
        if defect not in ("waited for, no barrier", "barrier before the wait"):
            k.syncthreads()
        out.store(tile.load(0, (k.thread ^ 33) * words, words), at)

    data = numbers(64 * words)
    right = data.reshape(64, words)[numbers(64) ^ 33].reshape(-1)
    return Launch(run.trace(), 1, [data, zeros(64 * words)], {1: right})


@planted(
    GROUP,
    "tile-ai/tilelang#2505",
    {"no empty groups at the end": ("in_flight", r"cp_async|tile\.")},
    [{"stages": 3}, {"stages": 4}],
)
@planted(
    GROUP,
    "NVIDIA/cutlass#1326",
    {
        "one group too many in flight": ("in_flight", r"cp_async|tile\.", "tile-ai/tilelang#2505"),
        "copied before all have read": ("race|in_flight", r"cp_async|tile\."),
        "no barrier after the wait": ("race|in_flight", r"cp_async|tile\.", "sheikhlimon/ninfer-3090#49"),
        "one stage too few": ("race|in_flight|bounds", r"cp_async|tile\.|stage"),
        "the stage of the next round": ("in_flight|race|uninitialised", r"cp_async|tile\.|out\."),
        "the prologue fills one stage too few": ("in_flight|uninitialised|race", r"cp_async|tile\.|out\."),
        "a stage beyond the last": ("bounds", r"cp_async|tile\.", "openmm/openmm#2825"),
        "not waited for before the end": ("leak", r"cp_async", "JustVugg/colibri#1099"),
    },
    [{"stages": 2}, {"stages": 3}, {"stages": 4}],
)
def pipeline(defect: str, *, stages: int) -> Launch:
    """A multistage pipeline of copies, as in every tensor-core kernel of sm_80."""
    steps = stages + 3

    @kernel(threads=64)
    def run(k: Kernel, data: Global[u32], out: Global[u32]) -> None:
        tile = k.shared(u32, 64, stages=stages)
        ring = stages - 1 if defect == "one stage too few" and stages > 2 else stages
        if defect == "one stage too few" and stages == 2:
            ring = 1

        def copy(step: Traced, stage: Traced) -> None:
            k.cp_async(tile.stage(stage).address(0, k.thread), data + step * 64 + k.thread, 4)

        filled = stages - 1 if defect != "the prologue fills one stage too few" else stages - 2
        for step in range(filled):
            copy(k.value(step, u32), k.value(step % ring, u32))
            k.commit_group()
        if filled < stages - 1:
            k.commit_group()
        total = k.register(u32, 0)
        with k.loop(steps) as step:
            k.wait_group(stages - 2 if defect != "one group too many in flight" else stages - 1)
            if defect != "no barrier after the wait":
                k.syncthreads()
            ahead = step + stages - 1
            stage = step % ring
            if defect == "the stage of the next round":
                stage = (step + 1) % ring
            ahead_stage = ahead % (ring + 1 if defect == "a stage beyond the last" else ring)
            if defect == "copied before all have read":
                ahead_stage = step % ring
            with k.when(ahead < steps, uniform=True):
                copy(ahead, ahead_stage)
                if defect == "no empty groups at the end":
                    k.commit_group()
            if defect != "no empty groups at the end":
                k.commit_group()
            total += tile.stage(stage).load(0, k.thread ^ 32)
        if defect == "not waited for before the end":
            k.syncthreads()
            copy(k.value(0, u32), k.value(0, u32))
            k.commit_group()
        out.store(total, k.thread)

    data = numbers(64 * steps)
    return Launch(run.trace(), 1, [data, zeros(64)], {1: data.reshape(steps, 64).sum(axis=0)[np.arange(64) ^ 32]})


@planted(
    GROUP,
    "Dao-AILab/flash-attention#359",
    {
        "the rest of the row is not filled": ("uninitialised", r"tile\.|out\."),
        "the rest is read": ("bounds", r"cp_async", "openmm/openmm#2825"),
        "rows beyond the last are read": ("bounds", r"cp_async", "Modular/mojo-gpu-puzzles#33"),
        "written with stores while copies arrive": ("in_flight|race", r"tile\.|cp_async"),
        "zeros stored, no barrier": ("race", r"tile\.|cp_async", "NVIDIA/Fuser#678"),
    },
    [{"rows": 3}, {"rows": 7}],
)
def ragged(defect: str, *, rows: int) -> Launch:
    """The last tile of an input: what is beyond its end is zero."""

    @kernel(threads=32)
    def run(k: Kernel, data: Global[u32], out: Global[u32], limit: u32) -> None:
        tile = k.shared(u32, (8, 16))
        row, col = k.thread >> 2, (k.thread & 3) * 4
        valid = k.select(row < limit, k.value(16, u32), 0)
        if defect == "the rest is read":
            valid = k.select(row < limit + 1, k.value(16, u32), 0)
        if defect in (
            "the rest of the row is not filled",
            "written with stores while copies arrive",
            "zeros stored, no barrier",
        ):
            with k.when(row < limit):
                k.cp_async(tile.address(row, col), data + row * 16 + col)
            if defect == "zeros stored, no barrier":
                with k.when(row >= limit):
                    tile.store([k.value(0, u32)] * 4, row, col)
        elif defect == "rows beyond the last are read":
            k.cp_async(tile.address(row, col), data + row * 16 + col)
        else:
            k.cp_async(tile.address(row, col), data + row * 16 + col, valid_bytes=valid)
        if defect == "written with stores while copies arrive":
            tile.store([k.value(0, u32)] * 4, row, col)
        k.commit_group()
        k.wait_group(0)
        if defect != "zeros stored, no barrier":
            k.syncthreads()
        out.store(tile.load(row ^ 1, col, 4), k.thread * 4)

    data = np.arange(rows * 16, dtype=np.uint32) + 1
    right = np.zeros((8, 16), np.uint32)
    right[:rows] = data.reshape(rows, 16)
    return Launch(run.trace(), 1, [data, zeros(128), rows], {1: right[np.arange(8) ^ 1].reshape(-1)})
