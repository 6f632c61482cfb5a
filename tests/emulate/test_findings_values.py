# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Findings of copies under way and of poison: the defect planted, and its clean twin."""

from __future__ import annotations

import numpy as np

from tests.emulate.findings import every, kinds, numbers, without
from warploom.emulate import Emulation, emulate
from warploom.isa.matrix import mma
from warploom.lang import Global, Kernel, bf16, kernel
from warploom.lang import f32 as F32  # noqa: N812
from warploom.lang import u32 as U32  # noqa: N812


@kernel(threads=64)
def copied(k: Kernel, source: Global[U32], out: Global[U32], *, wait: int | None, barrier: bool) -> None:
    tile = k.shared(U32, 256)
    k.cp_async(tile.address(0, k.thread * 4), source + k.thread * 4)
    k.commit_group()
    if wait is not None:
        k.wait_group(wait)
    if barrier:
        k.syncthreads()
    out.store(tile.load(0, k.thread ^ 32), k.thread)


def test_copies_are_poison_until_waited_for_and_ordered() -> None:
    def run(commit: bool = True, wait: int | None = 0, barrier: bool = True) -> Emulation:
        out = numbers(64)
        program = copied.trace(wait=wait, barrier=barrier)
        if not commit:
            program = without(program, "cp.async.commit_group")
        result = emulate(program, 1, [numbers(256) * 5, out])
        if not result.findings:
            assert (out == (numbers(64) ^ 32) * 5).all()
        return result

    assert run().findings == ()
    assert kinds(run(wait=None)) >= {"in_flight", "leak"}
    assert "never waited for" in " ".join(str(f) for f in every(run(wait=None)))
    assert kinds(run(wait=1)) >= {"in_flight", "leak"}
    assert kinds(run(commit=False)) >= {"in_flight", "leak"}
    assert "never committed" in " ".join(str(f) for f in every(run(commit=False)))
    assert kinds(run(barrier=False)) == {"race"}


@kernel(threads=32)
def masked_poison(k: Kernel, out: Global[U32], *, mask: int) -> None:
    """Poison in bits that a mask clears does not show; nor does a select's other side."""
    tile = k.shared(U32, 64)
    tile.store([k.thread], 0, k.thread)
    k.syncwarp()
    word = tile.load(0, k.thread + 16)
    out.store([k.select(k.thread < 16, word, 0) | (tile.load(0, 63) & mask)], k.thread)


def test_poison_is_tracked_by_bits() -> None:
    assert emulate(masked_poison.trace(mask=0), 1, [numbers(32)]).findings == ()
    assert kinds(emulate(masked_poison.trace(mask=4), 1, [numbers(32)])) == {"uninitialised"}


@kernel(threads=32)
def unset_register(k: Kernel, out: Global[U32], *, initial: bool, lanes: int) -> None:
    total = k.register(U32, 0 if initial else None, name="total")
    with k.when(k.thread < lanes):
        total.set(k.thread)
    out.store([total.get()], k.thread)


def test_uninitialised_registers() -> None:
    assert emulate(unset_register.trace(initial=True, lanes=5), 1, [numbers(32)]).findings == ()
    assert emulate(unset_register.trace(initial=False, lanes=32), 1, [numbers(32)]).findings == ()
    (found,) = emulate(unset_register.trace(initial=False, lanes=5), 1, [numbers(32)]).findings
    assert found.kind == "uninitialised"
    assert found.count == 27
    assert found.lane == 5
    assert "total" in found.message


def test_a_copy_that_is_refused_altogether_is_not_under_way() -> None:
    @kernel(threads=32)
    def astray(k: Kernel, source: Global[U32]) -> None:
        tile = k.shared(U32, 128)
        k.cp_async(tile.address(0, k.thread * 4) + 4096, source + k.thread * 4)
        k.commit_group()
        k.wait_group(0)

    assert kinds(emulate(astray.trace(), 1, [numbers(128)])) == {"bounds"}


@kernel(threads=32)
def poisoned_matrix(k: Kernel, out: Global[F32], *, row: int) -> None:
    """The row of A that is never written spoils its row of D alone."""
    a = k.shared(U32, (16, 8))
    with k.loop(4) as i:
        place = k.thread + i * 32
        with k.when((place >> 3) != row):
            a.store([place & 0], 0, place)
    k.syncwarp()
    registers = k.ldmatrix(a.address(k.lane & 15, (k.lane >> 4) * 4), 4)
    zero = k.value(0, U32)
    nothing = k.value(0.0, F32)
    d = k.emit(mma("m16n8k16", bf16), (*registers, zero, zero, *[nothing] * 4))
    out.store([d[0]], k.thread)
    out.store([d[2]], k.thread + 32)


def test_a_poisoned_row_of_a_spoils_its_row_of_d() -> None:
    clean = emulate(poisoned_matrix.trace(row=99), 1, [np.zeros(64, np.float32)])
    assert clean.findings == ()
    (found,) = emulate(poisoned_matrix.trace(row=3), 1, [np.zeros(64, np.float32)]).findings
    assert found.kind == "uninitialised"
    assert (found.count, found.lane) == (4, 12)


@kernel(threads=64)
def source_changes(k: Kernel, data: Global[U32], *, wait_first: bool) -> None:
    """Warp 1 overwrites what warp 0 copies: fine after warp 0 has waited, not before."""
    tile = k.shared(U32, 128)
    with k.when(k.warp == 0):
        k.cp_async(tile.address(0, k.lane * 4), data + k.lane * 4)
    k.commit_group()
    if wait_first:
        k.wait_group(0)
    k.syncthreads()
    with k.when(k.warp == 1):
        data.store([k.lane], k.lane)
    if not wait_first:
        k.wait_group(0)


def test_the_source_of_a_copy_must_not_change_under_way() -> None:
    assert emulate(source_changes.trace(wait_first=True), 1, [numbers(128)]).findings == ()
    (race,) = emulate(source_changes.trace(wait_first=False), 1, [numbers(128)]).findings
    assert race.kind == "race"
    assert "cp.async" in race.message
