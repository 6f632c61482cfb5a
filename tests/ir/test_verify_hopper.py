# pyright: reportInvalidTypeForm=false
"""What ptxas would serialise or get wrong in silence is refused while tracing, with the author's line."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import numpy as np
import pytest

from warploom.core.errors import LayoutError, TraceError, VerifyError
from warploom.emulate import emulate
from warploom.isa.instruction import named
from warploom.lang import Fragment, Global, Kernel, KernelFunction, TensorMap, bf16, f32, kernel, u32
from warploom.layout.wgmma import MatrixDescriptor

SHAPE = MatrixDescriptor(128, stride=1024)


def product(k: Kernel, into: Fragment, *, accumulate: bool = True) -> None:
    """One step of A·B over the first bytes of shared memory."""
    k.wgmma(into, k.descriptor(k.shared_base, SHAPE), k.descriptor(k.shared_base, SHAPE), accumulate=accumulate)


@kernel(threads=128, requires="sm_90a")
def products(k: Kernel, out: Global[f32], steps: u32, *, mistake: str) -> None:
    """Two accumulators, the second of which runs on while the first is used."""
    k.shared(bf16, (64, 64), name="tile", swizzle="auto")
    first, second = k.warpgroup_accumulator(8, "first"), k.warpgroup_accumulator(8, "second")
    if mistake != "no fence":
        k.wgmma_fence()
    product(k, first, accumulate=False)
    if mistake != "no commit":
        k.wgmma_commit()
    product(k, second, accumulate=False)
    k.wgmma_commit()
    if mistake == "used before the wait":
        out.store(first.registers[0], 0)
    k.wgmma_wait(2 if mistake == "wait count" else 1, first)
    if mistake == "other accumulator used":
        second.scale(0, 2.0)
    if mistake != "not named":
        first.scale(0, 2.0)
    if mistake == "not fenced again":
        product(k, first)
        k.wgmma_commit()
        k.wgmma_wait(0, first, second)
    elif mistake == "carried around a loop":
        with k.loop(steps):
            first.scale(1, 0.5)
            k.wgmma_fence()
            product(k, first)
            k.wgmma_commit()
    elif mistake == "last one not waited for":
        pass
    elif mistake == "in a role":
        with k.warps(0, 4):
            k.wgmma_fence()
            product(k, first)
            k.wgmma_commit()
            k.wgmma_wait(1, second)
    elif mistake == "on both sides":
        with k.when(steps > 1, uniform=True):
            k.wgmma_wait(1)
        with k.otherwise():
            first.scale(1, 2.0)
        second.scale(1, 2.0)
    if mistake == "not named":
        k.wgmma_wait(0, second)
        product(k, first)  # its wait names nothing
        k.wgmma_commit()
        k.wgmma_wait(0)
    elif mistake != "last one not waited for":
        k.wgmma_wait(0, first, second)
    out.store(first.registers[0], k.thread)
    out.store(second.registers[0] if mistake == "" else first.registers[1], k.thread + 128)


WGMMA = {
    "no fence": (r"wgmma without a k.wgmma_fence\(\) before it", "k.wgmma(into"),
    "not fenced again": (r"k.wgmma_fence\(\) since 'first\d*' was last accessed", "k.wgmma(into"),
    "no commit": (r"leaves pending|was not committed", "k.wgmma_wait(2"),
    "wait count": (r"in one of the 2 newest groups, which this wait leaves pending", "k.wgmma_wait(2"),
    "used before the wait": (r"accesses 'first\d*', which the wgmma of test_.*:\d+ has in flight", "out.store(first"),
    "other accumulator used": (r"accesses 'second\d*', which the wgmma", "second.scale(0"),
    "carried around a loop": (r"accesses 'first\d*', which the wgmma", "first.scale(1, 0.5)"),
    "last one not waited for": (r"this wgmma is never waited for", "k.wgmma(into"),
    "on both sides": (r"accesses 'second\d*', which the wgmma", "second.scale(1"),
    "not named": (r"which the wait of test_.*:\d+ completes without naming it", "out.store(first"),
    "in a role": (r"never waited for", "k.wgmma(into"),
}


def refused(function: KernelFunction, mistake: str, message: str, source: str) -> None:
    """The error says so, at a line of this file that holds ``source``."""
    with pytest.raises(VerifyError) as error:
        function.trace(mistake=mistake)
    assert str(error.value).startswith("test_verify_hopper.py:")
    head, *listed = str(error.value).splitlines()
    lines = [line for line in listed or [head] if re.search(message, line)]
    assert lines, str(error.value)
    found = [re.match(r"\s*test_verify_hopper\.py:(\d+)\b", line) for line in lines]
    assert all(found)
    assert any(source in linecache.getline(__file__, int(m[1])) for m in found if m is not None), str(error.value)


def test_overlapping_products_are_accepted() -> None:
    products.trace(mistake="")


@pytest.mark.parametrize("mistake", WGMMA)
def test_wgmma_mistakes_name_the_authors_line(mistake: str) -> None:
    refused(products, mistake, *WGMMA[mistake])


@kernel(threads=160, requires="sm_90a")
def wrong_values(k: Kernel, *, mistake: str) -> None:
    """What layouts and instructions refuse gets the line it was asked for at."""
    tile = k.shared(bf16, (64, 64), name="tile", swizzle=None if mistake == "swizzle" else "auto")
    into = k.warpgroup_accumulator(12 if mistake == "width" else 16)
    with k.warps(0, 3 if mistake == "three warps" else 4):
        k.wgmma_fence()
        if mistake == "tiles":
            k.wgmma(into, tile, tile)  # type: ignore[arg-type]
        kind = f32 if mistake == "type" else bf16
        operand = k.wgmma_operand(tile, col=8 if mistake == "column" else 0)
        k.wgmma(into, operand, operand, inputs=kind, accumulate=False)
        k.wgmma_commit()
        k.wgmma_wait(0, into)


VALUES = {
    "width": (LayoutError, "wgmma takes n = 8, 16, … 256, not 12", "k.warpgroup_accumulator("),
    "type": (VerifyError, "wgmma here takes f16 or bf16, not f32", "k.wgmma(into, operand"),
    "three warps": (VerifyError, "the role of warps 0..3 executes wgmma, which is for whole warpgroups", "k.warps(0"),
    "tiles": (TraceError, r"k.wgmma_operand\(tile, row, col\) makes one", "k.wgmma(into, tile"),
    "swizzle": (TraceError, 'make the tile with swizzle="auto"', "k.wgmma_operand("),
    "column": (TraceError, "a column that is one of 16 within 64×64, not at \\(0, 8\\)", "k.wgmma_operand("),
}


@pytest.mark.parametrize("mistake", VALUES)
def test_impossible_operands_name_the_authors_line(mistake: str) -> None:
    kind, message, source = VALUES[mistake]
    with pytest.raises(kind, match=message) as error:
        wrong_values.trace(mistake=mistake)
    line = re.search(r"test_verify_hopper\.py:(\d+)", str(error.value))
    assert line is not None
    assert source in linecache.getline(__file__, int(line[1]))


def test_possible_operands_are_accepted() -> None:
    wrong_values.trace(mistake="")


@kernel(threads=256, requires="sm_90a")
def copies(k: Kernel, source: TensorMap, target: TensorMap, *, mistake: str) -> None:
    """A box in by one role, and out again by the other."""
    tile = k.shared(bf16, (64, 64), name="tile", swizzle="auto")
    full, free = k.mbarriers(2, "full"), k.mbarriers(2, "free")
    leader = k.thread == 0
    with k.when(leader):
        if mistake != "not initialised":
            full.init(0 if mistake == "no arrivals" else 1)
        free.init(4)
        k.mbarrier_fence()
    k.syncthreads()
    with k.warps(0, 4):
        ring = k.ring(2, phase=1)
        if mistake != "nobody arrives":
            free.wait(2 if mistake == "parity" else ring.phase, ring.stage)
        if mistake == "bytes":
            full.expect(tile.layout.bytes - 8, ring.stage, when=leader)
        elif mistake == "too many bytes":
            full.expect(1 << 20, ring.stage, when=leader)
        elif mistake == "not expected":
            full.arrive(ring.stage, when=leader)
        elif mistake == "all expect":
            full.expect(tile.layout.bytes, ring.stage)
        else:
            full.expect(tile.layout.bytes, ring.stage, when=leader)
        k.tma_load(tile, source, (0, 0), free if mistake == "wrong mbarrier" else full, ring.stage, when=leader)
    with k.warps(4, 8):
        ring = k.ring(2)
        full.wait(ring.phase, ring.stage)
        k.fence_async()
        k.tma_store(target, (0, 0), tile, when=k.thread == 128)
        if mistake != "store not committed":
            k.commit_bulk()
        if mistake == "all arrive":
            free.arrive(ring.stage)
        elif mistake != "nobody arrives":
            free.arrive(ring.stage, when=k.lane == 0)
        if mistake == "nobody arrives":
            free.wait(0, 1)
        if mistake not in ("store not waited for", "store not committed"):
            k.wait_bulk(reads_only=True)


MBARRIERS = {
    "not initialised": (r"uses the mbarriers 'full', which nothing initialises", "full.expect("),
    "parity": (r"waits for parity 2", "free.wait(2"),
    "bytes": (r"expects 8184 bytes: boxes are multiples of 16", "full.expect("),
    "too many bytes": (r"expects 1048576 bytes", "full.expect(1 << 20"),
    "not expected": (r"copies to complete on 'full', which never expects any bytes", "k.tma_load("),
    "wrong mbarrier": (r"expects bytes at 'full', on which no copy completes", "full.expect("),
    "all expect": (r"all 128 threads arrive at 'full', which is initialised for 1 arrivals", "full.expect("),
    "all arrive": (r"all 128 threads arrive at 'free', which is initialised for 4 arrivals", "free.arrive("),
    "nobody arrives": (r"waits for 'free', at which nothing ever arrives", "free.wait("),
    "store not committed": (r"this bulk store is never committed to a group", "k.tma_store("),
    "store not waited for": (r"nothing waits for this bulk store", "k.tma_store("),
}


def test_a_ring_is_accepted() -> None:
    copies.trace(mistake="")


@pytest.mark.parametrize("mistake", MBARRIERS)
def test_mbarrier_mistakes_name_the_authors_line(mistake: str) -> None:
    refused(copies, mistake, *MBARRIERS[mistake])


def test_an_mbarrier_of_no_arrivals_is_refused_where_it_is_initialised() -> None:
    with pytest.raises(VerifyError, match=rf"{Path(__file__).name}:\d+: .*1 to 1048575"):
        copies.trace(mistake="no arrivals")


@kernel(threads=256, requires="sm_90a")
def numbered(k: Kernel, *, beyond: int) -> None:
    """Each warpgroup of a role has an mbarrier, numbered from a value that only the run knows."""
    k.shared(f32, 64, name="tile")
    full, other = k.mbarriers(2, "full"), k.mbarriers(2, "other")
    with k.when(k.thread == 0):
        full.init(128)
        other.init(128)
        k.mbarrier_fence()
    k.syncthreads()
    with k.warps(4, 8):
        mine = k.warpgroup - 1 + beyond
        full.arrive(mine)
        full.wait(0, mine)
        other.arrive()
        other.wait(0)


@pytest.mark.parametrize("seed", [None, 1])
def test_an_mbarrier_of_a_traced_number_belongs_to_its_array(seed: int | None) -> None:
    assert emulate(numbered.trace(beyond=0), 1, [], seed=seed).findings == ()
    found = emulate(numbered.trace(beyond=2), 1, [], seed=seed).findings
    assert {f.kind for f in found} >= {"bounds"}
    assert "outside full" in found[0].message


@kernel(threads=128, requires="sm_90a")
def initialised_twice(k: Kernel, count: u32) -> None:
    """One mbarrier, for as many arrivals as a number says."""
    full = k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        with k.when(count == 1):
            full.init(1)
        with k.otherwise():
            full.init(128)
        k.mbarrier_fence()
    k.syncthreads()
    full.arrive()


def test_of_several_initialisations_the_largest_counts() -> None:
    initialised_twice.trace()


@pytest.mark.parametrize("arrives", [True, False])
def test_arrivals_of_copies_are_arrivals(arrives: bool) -> None:
    @kernel(threads=32, requires="sm_90a")
    def run(k: Kernel) -> None:
        full = k.mbarriers(1, "full")
        with k.when(k.lane == 0):
            full.init(32)
        k.syncwarp()
        if arrives:
            k.issue(named("cp.async.mbarrier.arrive.noinc.shared::cta.b64"), full.address(0))
        full.wait(0)

    if arrives:
        assert emulate(run.trace(), 1, []).findings == ()
        return
    with pytest.raises(VerifyError, match="at which nothing ever arrives"):
        run.trace()


@pytest.mark.parametrize("into", [True, False])
def test_a_product_whose_result_nobody_uses_is_refused(into: bool) -> None:
    @kernel(threads=32)
    def run(k: Kernel, out: Global[f32]) -> None:
        sums = k.registers(f32, 4, 0.0, "sums")
        ones = [k.pack(1.0, 1.0, bf16)] * 6
        k.mma(ones[:4], ones[4:], sums, into=sums if into else None)
        out.store(sums[0].get(), k.lane)

    if into:
        assert emulate(run.trace(), 1, [np.zeros(32, np.float32)]).findings == ()
        return
    with pytest.raises(VerifyError, match="nothing uses the result of mma"):
        run.trace()
