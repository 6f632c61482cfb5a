"""Which values are printed inside the statement that uses them instead of on a line of their own."""

from __future__ import annotations

from collections import Counter

from warploom.cuda.expressions import inlinable, registers_read
from warploom.ir.program import Program
from warploom.ir.statements import Loop, Op, Register, Statement, Value, blocks, operands_of, results_of, walk


def _registers_written(statement: Statement) -> set[Value]:
    return {r for s in walk((statement,)) for r in results_of(s) if isinstance(r, Register)}


def inlined_values(program: Program) -> dict[Value, Op]:
    """Values used once, by a later statement of the same block, and unchanged until then: value → what computes it."""
    uses = Counter(x for s in program.statements() for x in operands_of(s) if isinstance(x, Value))
    chosen: dict[Value, Op] = {}
    _block(program.body, uses, chosen)
    return chosen


def _block(body: tuple[Statement, ...], uses: Counter[Value], chosen: dict[Value, Op]) -> None:
    # Candidates on the way to their use, with the mutable registers that they read, directly or through inlined values.
    waiting: dict[Value, tuple[Op, frozenset[Value]]] = {}
    for statement in body:
        operands = operands_of(statement)
        reads = registers_read(operands)
        for position, x in enumerate(operands):
            if not isinstance(x, Value) or x not in waiting:
                continue
            op, through = waiting.pop(x)
            # C++ evaluates a loop's bound and step again in every iteration.
            if isinstance(statement, Loop) and position > 0 and through:
                continue
            chosen[x] = op
            reads |= through
        written = _registers_written(statement)
        waiting = {v: entry for v, entry in waiting.items() if not entry[1] & written}
        if isinstance(statement, Op) and inlinable(statement) and uses[statement.results[0]] == 1:
            waiting[statement.results[0]] = (statement, reads)
        for block in blocks(statement):
            _block(block, uses, chosen)
