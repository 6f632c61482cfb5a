"""Simplify a traced body before it becomes a Program: needless snapshots, dead pure values and copies go.

Nothing is reordered. Three passes over the tree:

1. a read of a mutable register is a snapshot; where the register is not written between the read and a use, the use
   names the register itself. Results get the author's names in the same walk.
2. pure instructions whose results nobody uses are dropped.
3. ``v = op …; register = v`` with no other use of v becomes ``register = op …``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from warploom.ir.statements import (
    Loop,
    Op,
    Operand,
    Register,
    Roles,
    SourceLine,
    Statement,
    Value,
    When,
    blocks,
    operands_of,
    results_of,
    walk,
    with_blocks,
)

Body = tuple[Statement, ...]
NameAt = Callable[[SourceLine], str]


def simplify(body: Body, name_at: NameAt) -> Body:
    """The body after the three passes."""
    forwarded = _Forward(name_at).block(body)
    uses = Counter(x for s in walk(forwarded) for x in operands_of(s) if isinstance(x, Value))
    return _fuse(_drop_dead(forwarded, uses), uses)


def written_registers(body: Body) -> set[Register]:
    """Every mutable register that some statement of ``body`` writes."""
    return {r for s in walk(body) for r in results_of(s) if isinstance(r, Register)}


class _Forward:
    """Pass 1. ``versions`` counts writes along the path; a snapshot remembers the count at its read."""

    def __init__(self, name_at: NameAt) -> None:
        self._name_at = name_at
        self._versions: Counter[Register] = Counter()
        self._snapshots: dict[Value, tuple[Register, int]] = {}
        self._renamed: dict[Value, Value] = {}

    def block(self, body: Body) -> Body:
        out: list[Statement] = []
        for position, statement in enumerate(body):
            following = body[position + 1] if position + 1 < len(body) else None
            out.append(self._statement(statement, following))
        return tuple(out)

    def _statement(self, s: Statement, following: Statement | None) -> Statement:
        if isinstance(s, Op):
            return self._op(s, following)
        if isinstance(s, Loop):
            written = written_registers(s.body)
            start, stop, step = (self._kept(x) for x in (s.start, s.stop, s.step))
            self._bump(written)
            index = self._named(s.index, s.where)
            body = self.block(s.body)
            self._bump(written)
            return Loop(index, start, stop, step, body, s.where)
        if isinstance(s, When):
            condition = self._forwarded(s.condition)
            body, otherwise = (self._branch(b) for b in (s.body, s.otherwise))
            self._bump(written_registers(s.body) | written_registers(s.otherwise))
            return When(condition, body, otherwise, s.uniform, s.where)
        assert isinstance(s, Roles)  # nothing that is traced has a flow
        branches = tuple(replace(r, body=self._branch(r.body)) for r in s.branches)
        for r in s.branches:
            self._bump(written_registers(r.body))
        return Roles(branches, s.where)

    def _branch(self, body: Body) -> Body:
        saved = self._versions.copy()
        out = self.block(body)
        self._versions = saved
        return out

    def _op(self, op: Op, following: Statement | None) -> Op:
        operands = tuple(self._forwarded(x) for x in op.operands)
        source = op.operands[0] if op.operands else None
        if op.instruction.copies and isinstance(source, Register) and not isinstance(op.results[0], Register):
            self._snapshots[op.results[0]] = (source, self._versions[source])
        last_of_line = following is None or following.where != op.where
        results = tuple(self._named(r, op.where if last_of_line else None) for r in op.results)
        self._bump(r for r in op.results if isinstance(r, Register))
        return replace(op, operands=operands, results=results)

    def _bump(self, registers: Iterable[Register]) -> None:
        for r in registers:
            self._versions[r] += 1

    def _named(self, value: Value, where: SourceLine | None) -> Value:
        if isinstance(value, Register) or value.name or where is None:
            return value
        name = self._name_at(where)
        if not name:
            return value
        named = self._renamed[value] = Value(value.number, value.dtype, name)
        return named

    def _kept(self, operand: Operand) -> Operand:
        return self._renamed.get(operand, operand) if isinstance(operand, Value) else operand

    def _forwarded(self, operand: Operand) -> Operand:
        if isinstance(operand, Value):
            snapshot = self._snapshots.get(operand)
            if snapshot is not None and self._versions[snapshot[0]] == snapshot[1]:
                return snapshot[0]
        return self._kept(operand)


def _drop_dead(body: Body, uses: Counter[Value]) -> Body:
    """Pass 2, from the last statement to the first, so that chains of dead values go together; counts what is left."""

    def block(statements: Body) -> Body:
        kept: list[Statement] = []
        for s in reversed(statements):
            if (
                isinstance(s, Op)
                and s.instruction.pure
                and not any(isinstance(r, Register) or uses[r] for r in s.results)
            ):
                uses.subtract(x for x in s.operands if isinstance(x, Value))
                continue
            nested = [block(body) for body in reversed(blocks(s))]
            kept.append(with_blocks(s, nested[::-1]))
        return tuple(reversed(kept))

    return block(body)


def _fuse(body: Body, uses: Counter[Value]) -> Body:
    """Pass 3: an instruction whose result is only copied to a register writes the register itself."""

    def block(statements: Body) -> Body:
        out: list[Statement] = []
        for s in statements:
            previous = out[-1] if out else None
            if (
                isinstance(s, Op)
                and s.instruction.copies
                and isinstance(s.results[0], Register)
                and isinstance(previous, Op)
                and len(previous.results) == 1
                and previous.results[0] == s.operands[0]
                and not isinstance(previous.results[0], Register)
                and uses[previous.results[0]] == 1
            ):
                out[-1] = replace(previous, results=s.results)
            else:
                out.append(with_blocks(s, [*map(block, blocks(s))]))
        return tuple(out)

    return block(body)
