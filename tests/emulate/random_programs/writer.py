"""Draws random programs that compute: what :mod:`tests.emulate.random_programs.values` runs."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

from tests.emulate.random_programs.arithmetic import BITS, rounded, wrap
from warploom.core.dtypes import DType, f32, s32, u32, u64

Register = tuple[str, int]
Statement = tuple[Any, ...]
TYPES: dict[str, DType] = {"u32": u32, "s32": s32, "u64": u64, "f32": f32}
COUNTS = {"u32": 4, "s32": 3, "u64": 2, "f32": 3}
INTEGERS = ("add", "sub", "mul", "and", "or", "xor", "min", "max", "shl", "shr", "div", "rem")
FLOATS = ("add", "sub", "mul", "min", "max")


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


class Writer:
    """Draws statements. ``together`` says that all lanes of all warps execute them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def register(self, kind: str) -> Register:
        """Any register of a type."""
        return kind, self.rng.randrange(COUNTS[kind])

    def operand(self, kind: str) -> Any:
        """A register or a constant."""
        if self.rng.random() < 0.7:
            return self.register(kind)
        if kind == "f32":
            return rounded(self.rng.choice((0.0, -0.0, 1.0, 3.0, -0.1, 1e38, 1e-38, self.rng.uniform(-9, 9))))
        return wrap(kind, self.rng.choice((0, 1, 2, 31, -1, 1 << 31, self.rng.getrandbits(BITS[kind]))))

    def block(self, size: int, depth: int, together: bool) -> list[Statement]:
        """Some statements."""
        return [self.statement(depth, together) for _ in range(self.rng.randint(1, size))]

    def statement(self, depth: int, together: bool) -> Statement:
        """One statement; some only where all lanes come, some only while not too deep."""
        rng = self.rng
        words = ["compute"] * 6 + ["unary", "convert", "select", "own", "fma"]
        if depth < 3:
            words += ["when", "when", "loop"]
        if together:
            words += ["shuffle", "vote", "exchange", "add"]
        word = rng.choice(words)
        kind = rng.choice(("u32", "u32", "s32", "u64", "f32"))
        if word == "compute":
            op = rng.choice(FLOATS if kind == "f32" else INTEGERS)
            if kind == "s32" and op in ("div", "rem", "shl"):
                op = "mul"
            return word, kind, op, self.register(kind), self.operand(kind), self.operand(kind)
        if word == "unary":
            kind = rng.choice(("u32", "s32", "u64"))
            op = rng.choice(("popc", "clz", "brev", "not"))
            return (
                word,
                kind,
                op,
                self.register("u32" if op in ("popc", "clz") or (op, kind) == ("brev", "s32") else kind),
                self.register(kind),
            )
        if word == "convert":
            to = rng.choice([other for other in TYPES if other != kind])
            return word, kind, self.register(to), self.register(kind)
        if word in ("select", "when"):
            test = (rng.choice(list(COMPARISONS)), kind, self.register(kind), self.operand(kind))
            if word == "select":
                to = rng.choice(list(TYPES))
                return word, test, self.register(to), self.operand(to), self.operand(to)
            return word, test, self.block(3, depth + 1, False), self.block(2, depth + 1, False)
        if word == "loop":
            if together and rng.random() < 0.5:
                return word, rng.randrange(4), self.register("u32"), self.block(3, depth + 1, True)
            return word, self.register("u32"), self.register("u32"), self.block(3, depth + 1, False)
        if word == "own":
            return word, self.register("u32"), self.register("u32"), rng.randrange(2)
        if word == "fma":
            return word, self.register("f32"), *(self.operand("f32") for _ in range(3))
        return self.of_lanes(word)

    def of_lanes(self, word: str) -> Statement:
        """One statement that lanes execute together."""
        rng = self.rng
        if word == "shuffle":
            kind = rng.choice(("u32", "f32", "s32"))
            return (
                word,
                rng.choice(("xor", "idx", "up", "down")),
                self.register(kind),
                self.register(kind),
                rng.randrange(32),
            )
        if word == "vote":
            return (
                word,
                rng.choice(("any", "all", "ballot")),
                self.register("u32"),
                self.register("u32"),
                rng.randrange(4),
            )
        if word == "exchange":
            return word, self.register("u32"), self.register("u32"), rng.randrange(32), rng.random() < 0.5
        return "add", rng.choice(("add", "min", "max", "xor", "or")), self.register("u32"), self.register("u32")
