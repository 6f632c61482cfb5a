# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Random programs that compute: integers of 32 and 64 bits, f32, branches, loops, lanes and shared memory.

The reference runs every lane by itself, as a generator over Python's integers and floats. Lanes wait for each other
only where the program says so.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from tests.emulate.random_programs.arithmetic import (
    BITS,
    bits_of,
    converted,
    floating,
    fused,
    integer,
    rounded,
    unary,
    wrap,
)
from tests.emulate.random_programs.writer import COMPARISONS, TYPES, Register, Statement, Writer
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.isa import lanewise as operators
from warploom.isa.memory import atomic
from warploom.lang import Global, GlobalPointer, Kernel, Mutable, Traced, f32, kernel, s32, u32, u64

Lane = Generator[tuple[Any, ...], Any, None]


# -- the reference ----------------------------------------------------------------------------------------------------


class LaneState:
    """The registers of one lane, and how it executes."""

    def __init__(self, thread: int, cta: int, data: list[int]) -> None:
        self.thread, self.cta = thread, cta
        first = [thread, cta + 1, data[thread], data[thread] ^ 0xFFFF]
        self.registers: dict[Register, Any] = {("u32", i): first[i] for i in range(4)}
        self.registers |= {("s32", i): wrap("s32", data[thread] * (i + 1) - thread) for i in range(3)}
        self.registers |= {("u64", i): data[thread] << 20 * i for i in range(2)}
        self.registers |= {("f32", i): rounded(float(thread - 5 * i)) for i in range(3)}
        self.kept = [0, 0]

    def value(self, operand: Any) -> Any:
        """Of a register or a constant."""
        return self.registers[operand] if isinstance(operand, tuple) else operand

    def test(self, test: Statement) -> bool:
        """A comparison."""
        op, _, x, y = test
        return COMPARISONS[op](self.value(x), self.value(y))

    def run(self, block: list[Statement]) -> Lane:
        """A block; yields where it has to wait for other lanes."""
        for word, *rest in block:
            yield from getattr(self, word)(*rest)

    def compute(self, kind: str, op: str, to: Register, x: Any, y: Any) -> Lane:
        """A binary operation; shifts by what fits, divisors that are odd."""
        a, b = self.value(x), self.value(y)
        if kind == "f32":
            self.registers[to] = floating(op, a, b)
            return
        b = b & BITS[kind] - 1 if op in ("shl", "shr") else b | 1 if op in ("div", "rem") else b
        self.registers[to] = integer(op, kind, a, b)
        yield from ()

    def unary(self, kind: str, op: str, to: Register, x: Register) -> Lane:
        """Bits."""
        self.registers[to] = wrap(to[0], unary(op, kind, self.value(x)))
        yield from ()

    def convert(self, kind: str, to: Register, x: Register) -> Lane:
        """By value."""
        self.registers[to] = converted(self.value(x), kind, to[0])
        yield from ()

    def select(self, test: Statement, to: Register, x: Any, y: Any) -> Lane:
        """One of two."""
        self.registers[to] = self.value(x if self.test(test) else y)
        yield from ()

    def fma(self, to: Register, x: Any, y: Any, z: Any) -> Lane:
        """Rounded once."""
        self.registers[to] = fused(*map(self.value, (x, y, z)))
        yield from ()

    def when(self, test: Statement, body: list[Statement], otherwise: list[Statement]) -> Lane:
        """Either side."""
        yield from self.run(body if self.test(test) else otherwise)

    def loop(self, count: Any, to: Register, body: list[Statement]) -> Lane:
        """As often as a constant or the low bits of a register say."""
        for i in range(self.value(count) & 3):
            self.registers[to] = integer("add", "u32", self.registers[to], i)
            yield from self.run(body)

    def own(self, to: Register, x: Register, slot: int) -> Lane:
        """A load and a store of shared memory that only this lane uses."""
        self.kept[slot], self.registers[to] = self.value(x), self.kept[slot]
        yield from ()

    def shuffle(self, mode: str, to: Register, x: Register, distance: int) -> Lane:
        """The value of another lane; the own one where there is none."""
        values = yield "warp", self.value(x)
        lane = self.thread % 32
        source = {"xor": lane ^ distance, "idx": distance, "up": lane - distance, "down": lane + distance}[mode]
        self.registers[to] = values[source if 0 <= source < 32 else lane]

    def vote(self, mode: str, to: Register, x: Register, bit: int) -> Lane:
        """On a bit of a register."""
        votes = yield "warp", self.value(x) >> bit & 1
        ballot = sum(vote << lane for lane, vote in enumerate(votes))
        self.registers[to] = ballot if mode == "ballot" else int(all(votes) if mode == "all" else any(votes))

    def exchange(self, to: Register, x: Register, distance: int, whole: bool) -> Lane:
        """Through shared memory, in the CTA or in the warp."""
        values = yield "cta" if whole else "warp", self.value(x)
        self.registers[to] = values[(self.thread + distance) % len(values) if whole else self.thread % 32 ^ distance]

    def add(self, op: str, to: Register, x: Register) -> Lane:
        """One word that all threads of the CTA update."""
        total = 5
        for value in (yield "cta", self.value(x)):
            total = integer(op, "u32", total, value)
        self.registers[to] = total


def reference(block: list[Statement], threads: int, cta: int, data: list[int]) -> list[LaneState]:
    """The lanes of a CTA when all have ended."""
    states = [LaneState(thread, cta, data) for thread in range(threads)]
    lanes = [state.run(block) for state in states]
    asked = [next(lane, None) for lane in lanes]
    while asked[0] is not None:
        width = threads if asked[0][0] == "cta" else 32
        answers = [[one[1] for one in asked[first : first + width]] for first in range(0, threads, width)]  # type: ignore[index]
        asked = [_answered(lane, answers[i // width]) for i, lane in enumerate(lanes)]
    return states


def _answered(lane: Lane, answer: Sequence[Any]) -> tuple[Any, ...] | None:
    try:
        return lane.send(answer)
    except StopIteration:
        return None


# -- the same in the language -----------------------------------------------------------------------------------------


class Printed:
    """Writes statements in the language; a method for each word."""

    def __init__(self, k: Kernel, threads: int, data: GlobalPointer) -> None:
        self.k, self.threads = k, threads
        word = data.load(k.thread)
        first = [k.thread, k.cta_x + 1, word, word ^ 0xFFFF]
        self.registers: dict[Register, Mutable] = {("u32", i): k.register(u32, first[i]) for i in range(4)}
        for i in range(3):
            signed = k.bitcast(word, s32) * (i + 1) - k.bitcast(k.thread, s32)
            self.registers["s32", i] = k.register(s32, signed)
            self.registers["f32", i] = k.register(f32, k.convert(k.bitcast(k.thread, s32) - 5 * i, f32))
        for i in range(2):
            self.registers["u64", i] = k.register(u64, k.convert(word, u64) << 20 * i)
        self.slots, self.tile = k.shared(u32, (2, threads), name="slots"), k.shared(u32, threads, name="tile")
        self.count = k.shared(u32, 4, name="count")
        for slot in range(2):
            self.slots.store(k.value(0, u32), slot, k.thread)

    def value(self, operand: Any, kind: str = "f32") -> Traced:
        """Of a register or a constant."""
        return self.registers[operand].get() if isinstance(operand, tuple) else self.k.value(operand, TYPES[kind])

    def set(self, to: Register, x: Traced) -> None:
        """A register."""
        self.registers[to].set(x)

    def test(self, test: Statement) -> Any:
        """A comparison."""
        op, kind, x, y = test
        return COMPARISONS[op](self.value(x), self.value(y, kind))

    def run(self, block: list[Statement]) -> None:
        """A block."""
        for word, *rest in block:
            getattr(self, word)(*rest)

    def compute(self, kind: str, op: str, to: Register, x: Any, y: Any) -> None:
        """A binary operation; shifts by what fits, divisors that are odd."""
        k, a = self.k, self.value(x, kind)
        if op == "shl" or op == "shr":
            last = BITS[kind] - 1
            b = k.convert(self.value(y), u32) & last if isinstance(y, tuple) else k.value(y & last, u32)
        else:
            b = self.value(y, kind)
        if op in ("div", "rem"):
            b = b | 1
        self.set(to, k.emit(operators.binary(op, TYPES[kind]), (a, b))[0])

    def unary(self, kind: str, op: str, to: Register, x: Register) -> None:
        """Bits."""
        self.set(to, self.k.emit(operators.unary(op, TYPES[kind]), (self.value(x),))[0])

    def convert(self, kind: str, to: Register, x: Register) -> None:
        """By value."""
        self.set(to, self.k.convert(self.value(x), TYPES[to[0]]))

    def select(self, test: Statement, to: Register, x: Any, y: Any) -> None:
        """One of two."""
        self.set(to, self.k.select(self.test(test), self.value(x, to[0]), self.value(y, to[0])))

    def fma(self, to: Register, x: Any, y: Any, z: Any) -> None:
        """Rounded once."""
        self.set(to, self.k.fma(self.value(x), self.value(y), self.value(z)))

    def when(self, test: Statement, body: list[Statement], otherwise: list[Statement]) -> None:
        """Either side."""
        with self.k.when(self.test(test)):
            self.run(body)
        with self.k.otherwise():
            self.run(otherwise)

    def loop(self, count: Any, to: Register, body: list[Statement]) -> None:
        """As often as a constant or the low bits of a register say."""
        with self.k.loop(self.value(count) & 3 if isinstance(count, tuple) else count) as i:
            self.registers[to] += i
            self.run(body)

    def own(self, to: Register, x: Register, slot: int) -> None:
        """A load and a store of shared memory that only this lane uses."""
        old = self.slots.load(slot, self.k.thread)
        self.slots.store(self.value(x), slot, self.k.thread)
        self.set(to, old)

    def shuffle(self, mode: str, to: Register, x: Register, distance: int) -> None:
        """A shuffle."""
        self.set(to, getattr(self.k, f"shfl_{mode}")(self.value(x), distance))

    def vote(self, mode: str, to: Register, x: Register, bit: int) -> None:
        """On a bit of a register."""
        k, holds = self.k, (self.value(x) >> bit & 1) == 1
        if mode == "ballot":
            self.set(to, k.ballot(holds))
        else:
            agreed = k.vote_all(holds) if mode == "all" else k.vote_any(holds)
            self.set(to, k.select(agreed, k.value(1, u32), 0))

    def exchange(self, to: Register, x: Register, distance: int, whole: bool) -> None:
        """Through shared memory."""
        k = self.k
        meet = k.syncthreads if whole else k.syncwarp
        meet()
        self.tile.store(self.value(x), 0, k.thread)
        meet()
        other = (k.thread + distance) % self.threads if whole else k.thread ^ distance
        self.set(to, self.tile.load(0, other))
        k.syncthreads()

    def add(self, op: str, to: Register, x: Register) -> None:
        """One word that all threads of the CTA update."""
        k = self.k
        with k.when(k.thread == 0):
            self.count.store(k.value(5, u32), 0, 0)
        k.syncthreads()
        k.emit(atomic("shared", op, u32, scope="cta"), (self.count.address(0, 0), self.value(x)))
        k.syncthreads()
        self.set(to, self.count.load(0, 0))
        k.syncthreads()

    def words(self) -> list[Traced]:
        """All registers as u32."""
        k, found = self.k, list[Traced]()
        for (kind, _), register in sorted(self.registers.items(), key=lambda item: item[0]):
            x = register.get()
            if kind == "u64":
                found += [k.convert(x, u32), k.convert(x >> 32, u32)]
            else:
                found.append(k.bitcast(x, u32))
        return found


def program_of(block: list[Statement], threads: int) -> Program:
    """The statements in the language; every register is stored."""

    @kernel(threads=threads)
    def body(k: Kernel, data: Global[u32], out: Global[u32]) -> None:
        printed = Printed(k, threads, data)
        printed.run(block)
        for i, word in enumerate(printed.words()):
            out.store(word, (k.cta_x * WORDS + i) * threads + k.thread)

    return body.trace()


WORDS = 14


def _words(state: LaneState) -> list[int]:
    found: list[int] = []
    for (kind, _), x in sorted(state.registers.items()):
        if kind == "f32":
            found.append(bits_of(x))
        else:
            found += [x & 0xFFFFFFFF, x >> 32] if kind == "u64" else [x & 0xFFFFFFFF]
    return found


def difference(number: int) -> str:
    """Where the emulator and the reference differ on random program ``number``; empty if nowhere."""
    rng = random.Random(number)
    threads, ctas = rng.choice((32, 32, 64)), rng.choice((1, 1, 2))
    block = Writer(rng).block(6, 0, True)
    data = [rng.choice((rng.getrandbits(32), rng.randrange(8))) for _ in range(threads)]
    out = np.zeros((ctas, WORDS, threads), np.uint32)
    run = emulate(program_of(block, threads), ctas, [np.array(data, np.uint32), out], seed=rng.choice((None, number)))
    if run.findings:
        return f"values {number}: {run.findings[0]}"
    for cta in range(ctas):
        wanted = np.array([_words(state) for state in reference(block, threads, cta, data)], np.uint32).T
        got = out[cta]
        nan = np.isnan(got[:3].view(np.float32)) & np.isnan(wanted[:3].view(np.float32))
        same = got == wanted
        same[:3] |= nan
        if not same.all():
            word, thread = (int(x[0]) for x in np.nonzero(~same))
            values = f"{got[word, thread]:#x}, the reference says {wanted[word, thread]:#x}"
            return f"values {number}: word {word} of thread {thread}: {values}"
    return ""
