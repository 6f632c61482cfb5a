"""Hopper Programs with one defect: an instruction deleted, or one of its numbers changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from tests.kernels.mutate import rewritten as rewritten_everywhere
from warploom.core.dtypes import u32
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, Register, Value
from warploom.isa.instruction import Instruction
from warploom.isa.lanewise import binary

Rewrite = Callable[[Op], list[Op]]


def rewritten(program: Program, chosen: int, rewrite: Rewrite) -> Program:
    """The program with its instruction number ``chosen`` replaced by what ``rewrite`` returns."""
    number = count()
    return rewritten_everywhere(program, lambda _, op: rewrite(op) if next(number) == chosen else [op])


def position(program: Program, matches: Callable[[Op], bool], number: int = 0) -> int:
    """The number of the ``number``-th instruction that matches (negative: from the end)."""
    found = [i for i, op in enumerate(program.ops()) if matches(op)]
    assert found, "no such instruction"
    return found[number]


def named(kind: type | str, **fields: object) -> Callable[[Op], bool]:
    """Matches instructions of a class, or whose name begins so, with these field values."""
    return lambda op: (
        (op.instruction.mnemonic.startswith(kind) if isinstance(kind, str) else isinstance(op.instruction, kind))
        and all(getattr(op.instruction, k) == v for k, v in fields.items())
    )


def deleted(program: Program, matches: Callable[[Op], bool], number: int = 0) -> Program:
    """Without that instruction."""
    return rewritten(program, position(program, matches, number), lambda op: [])


def with_fields(instruction: Instruction, **fields: Any) -> Instruction:
    """With other values of fields or immediates."""
    if isinstance(instruction, Instruction):
        return instruction.at(**fields)
    return replace(instruction, **fields)  # type: ignore[type-var]


def changed(program: Program, matches: Callable[[Op], bool], number: int = 0, /, **fields: object) -> Program:
    """With other field values in that instruction."""
    change: Rewrite = lambda op: [replace(op, instruction=with_fields(op.instruction, **fields))]  # noqa: E731
    return rewritten(program, position(program, matches, number), change)


def swapped(program: Program, first: Callable[[Op], bool], second: Callable[[Op], bool]) -> Program:
    """With the first instruction that ``first`` matches put right behind the first that ``second`` matches."""
    op = next(o for o in program.ops() if first(o))
    without = deleted(program, first)
    return rewritten(without, position(without, second), lambda other: [other, op])


def without_flip(program: Program, number: int = 0) -> Program:
    """A ring whose parity does not flip when it wraps."""

    def flips(op: Op) -> bool:
        return op.instruction.operator == "xor" and op.operands[1] == Const(u32, 1)

    return rewritten(
        program, position(program, flips, number), lambda op: [replace(op, operands=(op.operands[0], Const(u32, 0)))]
    )


DELETED = (
    "fence.mbarrier_init",
    "fence.proxy.async",
    "bar.sync",
    "bar.arrive",
    "barrier.cluster",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "mbarrier.init",
    "mbarrier.arrive",
    "mbarrier.try_wait",
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
)


def edits(op: Op) -> Iterator[tuple[str, Rewrite]]:
    """What is done to one instruction."""

    def fields_changed(**fields: Any) -> Rewrite:
        return lambda x: [replace(x, instruction=with_fields(x.instruction, **fields))]

    i: Any = op.instruction
    if i.mnemonic.startswith(DELETED):
        yield f"without {i.mnemonic}", lambda _: []
    if i.mnemonic.startswith("cp.async.bulk.tensor") and ".load" in i.mnemonic:
        yield f"without {i.mnemonic}", lambda _: []
    if i.mnemonic.startswith("wgmma.wait"):
        yield "one more group pending", fields_changed(pending=i.pending + 1)
    if i.mnemonic.startswith("mbarrier.init"):
        yield "one arrival more expected", fields_changed(count=i.count + 1)
        if i.count > 1:
            yield "one arrival less expected", fields_changed(count=i.count - 1)
    if ".expect_tx" in i.mnemonic:
        yield "more bytes expected", fields_changed(expected_bytes=i.expected_bytes + 128)
        yield "fewer bytes expected", fields_changed(expected_bytes=i.expected_bytes - 128)
    if i.operator == "xor" and op.operands[1] == Const(u32, 1):
        yield "parity kept", lambda x: [replace(x, operands=(x.operands[0], Const(u32, 0)))]


def index_edits(op: Op) -> Iterator[tuple[str, Rewrite]]:
    """Stage indices, buffers and phases shifted, and lanes of a warp that do not meet."""
    i = op.instruction
    if i.mnemonic == "bar.warp.sync":
        yield f"without {i.mnemonic}", lambda _: []
    if i.operator == "and" and op.operands[1] == Const(u32, 1):
        yield "buffer or parity inverted", _inverted
    if i.copies or i.operator in ("shl", "mul", "sub"):
        for place, operand in enumerate(op.operands):
            if isinstance(operand, Register) and (operand.name or "").endswith(("_stage", "_get")):
                yield "another stage", _other(place)
            if isinstance(operand, Register) and (operand.name or "").endswith("_phase"):
                yield "the other phase", _other(place)
    first = op.operands[0] if i.copies else None
    if isinstance(first, Const) and (op.results[0].name or "").endswith("_phase"):
        yield "the first phase inverted", lambda x: [replace(x, operands=(Const(u32, 1 - first.value),))]


_FLIPPED = 1 << 30  # the number of a value that no program has


def _other(place: int) -> Rewrite:
    """The operand that is a stage index or a phase is the other one."""

    def rewrite(op: Op) -> list[Op]:
        flipped = Value(_FLIPPED, u32)
        operands = tuple(flipped if i == place else x for i, x in enumerate(op.operands))
        return [
            Op(binary("xor", u32), (op.operands[place], Const(u32, 1)), (flipped,), op.where),
            replace(op, operands=operands),
        ]

    return rewrite


def _inverted(op: Op) -> list[Op]:
    """A buffer's number or a parity made from a counter, the other way."""
    kept = Value(_FLIPPED, u32)
    flip = Op(binary("xor", u32), (kept, Const(u32, 1)), op.results, op.where)
    return [replace(op, results=(kept,)), flip]
