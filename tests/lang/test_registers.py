"""Mutable registers: a read is a snapshot, whatever is written later; the classic aliasing bugs."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import numpy as np

from tests.lang.support import loops, mnemonics, run
from warploom.ir.statements import Op, Register
from warploom.lang import Global, Kernel, f32, kernel, u32


def test_an_old_value_outlives_a_write():
    @kernel(threads=32)
    def old(k: Kernel, out: Global[u32]) -> None:
        x = k.register(u32, k.lane, "x")
        before = x.get()
        x.set(100)
        out.store(before, k.lane)
        out.store(x.get(), k.lane + 32)

    out = np.zeros(64, np.uint32)
    run(old, out)
    assert out.tolist() == [*range(32), *[100] * 32]


def test_a_value_computed_from_an_old_one_outlives_a_write():
    @kernel(threads=32)
    def old(k: Kernel, out: Global[u32]) -> None:
        x = k.register(u32, 5, "x")
        doubled = x * 2
        x += 1
        out.store(doubled + x, k.lane)

    out = np.zeros(32, np.uint32)
    run(old, out)
    assert set(out.tolist()) == {16}


def test_a_swap_carried_by_a_loop():
    @kernel(threads=32)
    def fibonacci(k: Kernel, out: Global[u32], n: u32) -> None:
        a, b = k.register(u32, 0, "a"), k.register(u32, 1, "b")
        with k.loop(n):
            old_a, old_b = a.get(), b.get()
            a.set(old_b)
            b.set(old_a + old_b)
        out.store(a.get(), k.lane)

    for n, expected in ((0, 0), (1, 1), (2, 1), (10, 55), (20, 6765)):
        out = np.zeros(32, np.uint32)
        run(fibonacci, out, np.uint32(n))
        assert set(out.tolist()) == {expected}


def test_a_swap_without_names():
    @kernel(threads=32)
    def swap(k: Kernel, out: Global[u32], n: u32) -> None:
        a, b = k.register(u32, 1), k.register(u32, 2)
        with k.loop(n):
            kept = a.get()
            a.set(b)
            b.set(kept)
        out.store([a.get(), b.get()], k.lane * 2)

    for n in (0, 1, 2, 3):
        out = np.zeros(64, np.uint32)
        run(swap, out, np.uint32(n))
        assert out[:2].tolist() == ([1, 2] if n % 2 == 0 else [2, 1])


def test_a_read_before_a_loop_that_writes():
    """The body uses the value from before the loop in every iteration, not what the last one left."""

    @kernel(threads=32)
    def before(k: Kernel, out: Global[u32], n: u32) -> None:
        x = k.register(u32, 3, "x")
        start = x.get()
        with k.loop(n):
            x.set(x + start)
        out.store(x.get(), k.lane)

    out = np.zeros(32, np.uint32)
    run(before, out, np.uint32(4))
    assert set(out.tolist()) == {15}


def test_a_read_in_a_loop_before_its_write():
    @kernel(threads=32)
    def last(k: Kernel, out: Global[u32], n: u32) -> None:
        x, previous = k.register(u32, 7, "x"), k.register(u32, 0, "previous")
        with k.loop(n) as i:
            seen = x.get()
            x.set(i)
            previous.set(seen)
        out.store([x.get(), previous.get()], k.lane * 2)

    out = np.zeros(64, np.uint32)
    run(last, out, np.uint32(5))
    assert out[:2].tolist() == [4, 3]


def test_writes_in_branches_do_not_change_earlier_reads():
    @kernel(threads=32)
    def branches(k: Kernel, out: Global[u32]) -> None:
        x = k.register(u32, 1, "x")
        seen = x.get()
        with k.when(k.lane < 16):
            x.set(2)
            with k.when(k.lane < 8):
                out.store(seen + 10, k.lane)
        with k.otherwise():
            out.store(seen + x, k.lane)
            x.set(3)
        out.store(seen * 100 + x, k.lane + 32)

    out = np.zeros(64, np.uint32)
    run(branches, out)
    assert out[:8].tolist() == [11] * 8
    assert out[16:32].tolist() == [2] * 16
    assert out[32:].tolist() == [102] * 16 + [103] * 16


def test_a_condition_is_read_once():
    """What the body writes does not move the lanes to the other branch."""

    @kernel(threads=32)
    def once(k: Kernel, out: Global[u32]) -> None:
        x = k.register(u32, k.lane, "x")
        with k.when(x < 16):
            x.set(99)
            out.store(1, k.lane)
        with k.otherwise():
            out.store(2, k.lane)

    out = np.zeros(32, np.uint32)
    run(once, out)
    assert out.tolist() == [1] * 16 + [2] * 16


def test_loop_bounds_are_read_before_the_loop():
    @kernel(threads=32)
    def bounds(k: Kernel, out: Global[u32], n: u32) -> None:
        stop, count = k.register(u32, n, "stop"), k.register(u32, 0, "count")
        with k.loop(stop):
            stop.set(0)
            count += 1
        out.store(count.get(), k.lane)

    out = np.zeros(32, np.uint32)
    run(bounds, out, np.uint32(6))
    assert set(out.tolist()) == {6}


def test_a_stored_address_is_a_snapshot_too():
    @kernel(threads=32)
    def advance(k: Kernel, out: Global[u32], n: u32) -> None:
        place = k.register(u32, k.lane, "place")
        pointer = out + place
        place.set(place + 32)
        (out + place).store(2)
        pointer.store(1)

    out = np.zeros(64, np.uint32)
    run(advance, out, np.uint32(0))
    assert out.tolist() == [1] * 32 + [2] * 32


def test_no_copies_are_left_where_nothing_was_written_between():
    @kernel(threads=32)
    def plain(k: Kernel, out: Global[f32], n: u32) -> None:
        total = k.register(f32, 0.0, "total")
        with k.loop(n):
            total.set(k.fma(total, 2.0, 1.0))
        out.store(total.get(), k.lane)

    program = plain.trace()
    (loop,) = loops(program)
    assert [op.instruction.mnemonic for op in loop.body if isinstance(op, Op)] == ["fma.rn.f32"]
    (fma,) = (op for op in loop.body if isinstance(op, Op))
    assert isinstance(fma.results[0], Register)
    assert fma.operands[0] is fma.results[0]
    assert mnemonics(program).count("mov.f32") == 1, "the initial value"
    out = np.zeros(32, np.float32)
    run(plain, out, np.uint32(3))
    assert set(out.tolist()) == {7.0}


def test_in_place_operators():
    @kernel(threads=32)
    def operators(k: Kernel, out: Global[u32]) -> None:
        x = k.register(u32, 10)
        x += 5
        x -= 1
        x *= 3
        x ^= 1
        out.store(x.get(), k.lane)

    out = np.zeros(32, np.uint32)
    run(operators, out)
    assert set(out.tolist()) == {((10 + 5 - 1) * 3) ^ 1}


def test_two_snapshots_of_one_register():
    @kernel(threads=32)
    def snapshots(k: Kernel, out: Global[u32]) -> None:
        x = k.register(u32, 1, "x")
        values = []
        for step in range(4):
            values.append(x.get())
            x.set(x * 10 + step)
        for i, value in enumerate(values):
            out.store(value, k.lane * 4 + i)

    out = np.zeros(128, np.uint32)
    run(snapshots, out)
    assert out[:4].tolist() == [1, 10, 101, 1012]
