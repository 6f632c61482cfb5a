"""Find the accumulators of ``wgmma`` that a wait completes.

PTX's ``wgmma.wait_group`` names no registers; a Program's does, so that no compiler moves their uses above it. They are
followed here along the control-flow graph: a group is a set of registers, and where ways meet, what is under way on any
of them counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from warploom.ptx.blocks import BasicBlock
from warploom.ptx.syntax import Integer, PtxInstruction, PtxVector
from warploom.ptx.usage import registers

_MOST = 8  # groups that are told apart; older ones count as one
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class _ProductsUnderWay:
    """Registers of products that are not committed, and of groups, the newest first."""

    open: Names = frozenset()
    groups: tuple[Names, ...] = ()

    def joined(self, other: _ProductsUnderWay) -> _ProductsUnderWay:
        """The union of what is under way on two paths of the control flow."""
        count = max(len(self.groups), len(other.groups))
        mine, theirs = ((*g, *(frozenset[str](),) * (count - len(g))) for g in (self.groups, other.groups))
        return _ProductsUnderWay(self.open | other.open, tuple(a | b for a, b in zip(mine, theirs, strict=True)))

    def after(self, i: PtxInstruction) -> _ProductsUnderWay:
        """After an instruction."""
        if i.opcode != "wgmma":
            return self
        if "mma_async" in i.modifiers and isinstance(i.operands[0], PtxVector):
            return _ProductsUnderWay(self.open | frozenset(registers(i.operands[0])), self.groups)
        if "commit_group" in i.modifiers:
            newest = (self.open, *self.groups)
            older = frozenset[str]().union(*newest[_MOST:])
            return _ProductsUnderWay(
                frozenset(), (*newest[: _MOST - 1], newest[_MOST - 1] | older) if older else newest[:_MOST]
            )
        if "wait_group" in i.modifiers:
            return _ProductsUnderWay(self.open, self.groups[: _pending(i)])
        return self


def _pending(i: PtxInstruction) -> int:
    return i.operands[0].value if i.operands and isinstance(i.operands[0], Integer) else 0


def completed_registers(blocks: list[BasicBlock]) -> dict[int, tuple[str, ...]]:
    """id of each ``wgmma.wait_group`` → the registers that are under way before it and not after it."""
    starts: dict[int, _ProductsUnderWay] = {0: _ProductsUnderWay()}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        state = _through(blocks[number].body, starts[number])
        for target in blocks[number].targets:
            joined = starts[target].joined(state) if target in starts else state
            if joined != starts.get(target):
                starts[target] = joined
                waiting.append(target)
    found: dict[int, tuple[str, ...]] = {}
    for number, block in enumerate(blocks):
        state = starts[number]
        for i in block.body:
            if i.opcode == "wgmma" and "wait_group" in i.modifiers:
                pending = _pending(i)
                done = frozenset[str]().union(*state.groups[pending:])
                still = frozenset[str]().union(*state.groups[:pending], state.open)
                found[id(i)] = tuple(sorted(done - still, key=lambda name: (len(name), name)))
            state = state.after(i)
    return found


def _through(body: Iterable[PtxInstruction], state: _ProductsUnderWay) -> _ProductsUnderWay:
    for i in body:
        state = state.after(i)
    return state
