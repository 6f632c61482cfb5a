# pyright: reportInvalidTypeForm=false
"""Three first Hopper kernels (a copy, a product, a ring) with the mistakes of a beginner, and what is said of each."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulate.findings import every
from warploom.core.errors import WarploomError
from warploom.emulate import Emulation, emulate
from warploom.lang import Global, Kernel, TensorMap, bf16, f32, kernel, u32
from warploom.layout import SharedLayout, Swizzle

STEPS, SIZE = 4, 64
LAYOUT = SharedLayout(SIZE, SIZE, 2, Swizzle.for_row_bytes(128))


@kernel(threads=256, requires="sm_90a")
def ring(k: Kernel, a_map: TensorMap, out: Global[f32], *, mistake: str) -> None:
    """A·Aᵀ, 64×64 of depth 256, through a ring of two stages: one warpgroup loads, one multiplies."""
    tile = k.shared(bf16, (SIZE, SIZE), swizzle="auto", stages=2)
    full = k.mbarriers(2)
    free = k.mbarriers(2)
    with k.when(k.thread == 0):
        full.init(1)
        free.init(4)
        k.mbarrier_fence()
    if mistake != "no barrier":
        k.syncthreads()
    with k.warps(0, 4, registers=40):
        load = k.ring(2, "load", phase=0 if mistake == "phase" else 1)
        one = k.elect() if mistake == "one of each warp" else k.thread == 0
        loaders = 4 if mistake == "one of each warp" else 1
        with k.when(k.warp < loaders), k.loop(STEPS) as step:
            free.wait(load.phase, load.stage)
            full.expect(tile.layout.bytes, load.stage, when=one)
            to = tile if mistake == "no stage" else tile.stage(load.stage)
            k.tma_load(to, a_map, (step * SIZE, 0), full, load.stage, when=one)
            if mistake != "not advanced":
                load.advance()
    with k.warps(4, 8, registers=232):
        use = k.ring(2, "use")
        product = k.warpgroup_accumulator(SIZE)
        with k.loop(STEPS) as step:
            full.wait(use.phase, use.stage)
            k.wgmma_fence()
            for depth in range(0, SIZE, 16):
                a = k.wgmma_operand(tile.stage(use.stage), col=depth)
                k.wgmma(product, a, a, accumulate=True if depth else step != 0)
            k.wgmma_commit()
            k.wgmma_wait(0, product)
            free.arrive(0 if mistake == "stage 0 given back" else use.stage, when=k.lane == 0)
            use.advance()
        product.store_global(out, SIZE)


@kernel(threads=128, requires="sm_90a")
def product(k: Kernel, a: Global[u32], out: Global[f32], *, mistake: str) -> None:
    """A·Aᵀ of a tile that ordinary stores have filled."""
    tile = k.shared(bf16, (SIZE, SIZE), swizzle="auto")
    for i in range(SIZE * SIZE // 2 // 128):
        at = i * 128 + k.thread
        tile.store(a.load(at), at >> 5, (at & 31) * 2, dtype=u32)
    if mistake != "no proxy fence":
        k.fence_async()
    if mistake != "no barrier":
        k.syncthreads()
    result = k.warpgroup_accumulator(SIZE)
    k.wgmma_fence()
    for depth in range(0, SIZE, 16):
        operand = k.wgmma_operand(tile, col=depth)
        k.wgmma(result, operand, operand, accumulate=mistake == "always added" or depth > 0)
    k.wgmma_commit()
    k.wgmma_wait(0, *([] if mistake == "nothing named" else [result]))
    result.store_global(out, SIZE)


def run(name: str, mistake: str, seed: int | None) -> tuple[Emulation, float]:
    """The emulation and the largest error."""
    a = np.random.default_rng(1).standard_normal((SIZE, STEPS * SIZE)).astype(ml_dtypes.bfloat16)
    out = np.full((SIZE, SIZE), np.nan, np.float32)
    if name == "ring":
        spec = LAYOUT.tensor_map(bf16, (STEPS * SIZE, SIZE), (2 * STEPS * SIZE,))
        emulation = emulate(ring.trace(mistake=mistake), 1, [(a, spec), out], seed=seed)
    else:
        a = np.ascontiguousarray(a[:, :SIZE])
        emulation = emulate(product.trace(mistake=mistake), 1, [a.view(np.uint32), out], seed=seed)
    x = a.astype(np.float64)
    return emulation, float(np.abs(out - x @ x.T).max())


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", ["ring", "product"])
def test_without_mistakes_they_are_right(name: str, seed: int | None) -> None:
    emulation, error = run(name, "", seed)
    assert emulation.findings == ()
    assert error < 1e-3


RING = {
    "no barrier": ("mbarrier", "and nothing orders its initialisation before: put a barrier"),
    "phase": ("deadlock", "free[0] is in phase 0 (parity 0), 4 of 4 arrivals missing (nothing has arrived"),
    "one of each warp": ("mbarrier", "arrives at full[0] in a phase that has its 1 arrival"),
    "no stage": ("refused", "tile has 2 stages: choose one with tile.stage(ring.stage)"),
    "not advanced": ("mbarrier", "full[0]"),
    "stage 0 given back": ("mbarrier", "free[0]"),
}
PRODUCT = {
    "no proxy fence": ("proxy", "fence (fence.proxy.async) in the writing threads before they signal"),
    "no barrier": ("race", "put a barrier"),
    "always added": ("uninitialised", "that was never written"),
    "nothing named": ("refused", "completes without naming it"),
}
CASES = [("ring", m, *said) for m, said in RING.items()] + [("product", m, *said) for m, said in PRODUCT.items()]


@pytest.mark.parametrize(("name", "mistake", "kind", "message"), CASES)
def test_a_mistake_is_named(name: str, mistake: str, kind: str, message: str) -> None:
    message = message.replace("\\", "")
    if kind == "refused":
        with pytest.raises(WarploomError) as error:
            run(name, mistake, None)
        assert message in str(error.value)
        assert str(error.value).startswith("test_first_kernels.py:")
        return
    for seed in (None, 0):
        found = every(run(name, mistake, seed)[0])
        assert any(f.kind == kind and message in f.message for f in found), [str(f) for f in found]
        assert all(str(f.where).startswith("test_first_kernels.py:") for f in found)


def test_a_ring_that_begins_wrong_is_told_how() -> None:
    found = [f for f in every(run("ring", "phase", None)[0]) if f.kind == "deadlock"]
    assert all("who waits for empty stages begins with phase=1" in f.message for f in found)


def test_tiles_and_mbarriers_are_called_as_their_variables() -> None:
    assert [r.name for r in ring.trace(mistake="").shared] == ["tile", "full", "free"]


@kernel(threads=64, requires="sm_90a")
def two_on_a_line(k: Kernel) -> None:
    first, second = k.mbarriers(1), k.mbarriers(1)
    with k.when(k.thread == 0):
        first.init(1)
        second.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    first.arrive(when=k.thread == 0)
    second.arrive(when=k.thread == 0)
    first.wait(0)
    second.wait(0)


def test_two_on_a_line_do_not_share_a_name() -> None:
    assert [r.name for r in two_on_a_line.trace().shared] == ["mbarriers", "mbarriers1"]
