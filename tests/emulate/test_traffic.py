"""What is moved is counted: boxes of the TMA, shared operands of wgmma, sectors of global memory."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.attention_cases import Case
from warploom.emulate import EngineTraffic, emulate
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.lang import Global, Kernel, f32, kernel

HEAD_DIM, TILE_N = 64, 64
CONFIG = ForwardSm90(head_dim=HEAD_DIM, tile_n=TILE_N, persistent=False, turns=False)


@pytest.mark.parametrize("q_in_registers", [False, True])
def test_attention_moves_what_its_tiles_say(q_in_registers: bool) -> None:
    length, tile = 256, TILE_N * HEAD_DIM * 2
    config = replace(CONFIG, q_in_registers=q_in_registers)
    found = Case(config, length, length).run().emulation.traffic.engines
    tiles, steps = length // 128, length // TILE_N
    loads = tiles * (2 + 2 * steps)  # two boxes of Q, and K and V of each step
    assert found["tma.load"] == EngineTraffic(loads, loads * tile, loads * tile)
    assert found["tma.store"] == EngineTraffic(2 * tiles, 2 * tiles * tile, length * HEAD_DIM * 2)
    products = 2 * tiles * steps * (HEAD_DIM + TILE_N) // 16  # by each of two warpgroups: Q·Kᵀ and P·V
    assert found["wgmma.b"].operations == products
    assert found["wgmma.b"].shared_bytes == products * 64 * 16 * 2
    if q_in_registers:
        assert "wgmma.a" not in found, "Q and P come from registers"
    else:
        assert found["wgmma.a"].shared_bytes == found["wgmma.b"].shared_bytes // 2, "Q, of half of the products"


def test_boxes_count_whole_in_shared_memory_and_as_far_as_they_exist_in_global_memory() -> None:
    found = Case(CONFIG, 200, 200).run().emulation.traffic.engines
    assert found["tma.store"].shared_bytes == 4 * 64 * HEAD_DIM * 2
    assert found["tma.store"].global_bytes == 200 * HEAD_DIM * 2
    assert found["tma.load"].shared_bytes > found["tma.load"].global_bytes


@kernel(threads=64)
def strided_copy(k: Kernel, x: Global[f32], y: Global[f32], *, step: int) -> None:
    with k.when(k.thread < 40):
        y.store(x.load(k.thread * step), k.thread)


@pytest.mark.parametrize("step", [1, 2, 8, 16])
def test_global_accesses_count_the_sectors_that_they_touch(step: int) -> None:
    """40 threads: a whole warp, and 8 lanes of another."""
    run = emulate(strided_copy.trace(step=step), 1, [np.zeros(40 * step, np.float32), np.zeros(40, np.float32)])
    loads, stores = (run.traffic.global_memory[name] for name in ("ld.global", "st.global"))
    assert (loads.requests, loads.bytes, loads.ideal) == (2, 160, 5)
    assert loads.sectors == 5 * min(step, 8)  # of 32 bytes: 8 floats, or one of them from 8 apart on
    assert (stores.requests, stores.sectors, stores.bytes) == (2, 5, 160)


@kernel(threads=32)
def partial_copies(k: Kernel, x: Global[f32], *, reading: int) -> None:
    tile = k.shared(f32, 128)
    k.cp_async(tile.address(0, 4 * k.thread), x + 4 * k.thread, valid_bytes=k.select(k.thread < reading, 16, 0))
    k.commit_group()
    k.wait_group()


@pytest.mark.parametrize("reading", [32, 5, 0])
def test_copies_that_read_nothing_touch_no_sector(reading: int) -> None:
    run = emulate(partial_copies.trace(reading=reading), 1, [np.zeros(128, np.float32)])
    (found,) = run.traffic.global_memory.values()
    assert (found.sectors, found.bytes) == (-(-reading // 2), 16 * reading)
