"""The control-flow graph of a PTX function: basic blocks, in the order of the text.

A predicated instruction that needs the other lanes of its warp (a barrier, a shuffle) becomes a block of its own under
a branch, so that lanes meet before it as they do before any other; so does a predicated end.

Source: PTX ISA, "Control Flow Instructions".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from warploom.ir.statements import SourceLine
from warploom.isa.form import is_for_warps
from warploom.ptx.syntax import Function, Guard, Operand, PtxInstruction, PtxLabel, Symbol

_ENDS = ("ret", "exit")
_JUMPS = {"bra": (1, {"uni"}), "brx": (2, {"idx", "uni"}), "ret": (0, {"uni"}), "exit": (0, set[str]())}
"""Opcodes that end a block → how many operands they have, and their modifiers."""
_TRAPS = ("trap", "brkpt")  # a breakpoint that no debugger takes stops the launch as a trap does
_ALONE = ("activemask", *_ENDS, *_TRAPS)
"""Opcodes that get a block of their own under a predicate, beside those for the lanes of a warp together."""


@dataclass(slots=True)
class BasicBlock:
    """Instructions, then where the threads go: ``targets`` are numbers of blocks, none for their end.

    ``guard`` chooses the first of two targets where it holds, ``index`` one of several.
    """

    body: list[PtxInstruction] = field(default_factory=list[PtxInstruction])
    targets: tuple[int, ...] = ()
    guard: Guard | None = None
    index: Operand | None = None
    uniform: bool = False
    where: SourceLine = field(default_factory=lambda: SourceLine("", 0))


def basic_blocks(function: Function) -> list[BasicBlock]:
    """The blocks of a function that can be reached, block 0 first. Raises PtxError for labels that are not there."""
    items = _spread(function.body)
    starts, labels = _starts(items, function)
    number = {start: i for i, start in enumerate(starts)}
    blocks: list[BasicBlock] = []
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(items)
        code = [x for x in items[start:end] if isinstance(x, PtxInstruction)]
        after = i + 1 if end < len(items) else None
        blocks.append(_block(code, after, function, labels, number))
    return _reachable(blocks)


def _spread(body: list[PtxInstruction | PtxLabel]) -> list[PtxInstruction | PtxLabel]:
    """Predicated instructions that need their warp, and predicated ends, under branches."""
    items: list[PtxInstruction | PtxLabel] = []
    for item in body:
        guard = None if isinstance(item, PtxLabel) else item.guard
        if isinstance(item, PtxLabel) or guard is None or not (item.opcode in _ALONE or is_for_warps(item.opcode)):
            items += _ended(item)
            continue
        beyond = PtxLabel(f"after {len(items)}")
        around = Guard(guard.register, not guard.negated)
        items.append(PtxInstruction("bra", (), (Symbol(beyond.name),), around, item.where))
        items += [*_ended(replace(item, guard=None)), beyond]
    return items


def _ended(item: PtxInstruction | PtxLabel) -> list[PtxInstruction | PtxLabel]:
    """``trap`` and ``brkpt`` with the end of their threads."""
    if isinstance(item, PtxInstruction) and item.opcode in _TRAPS:
        return [item, PtxInstruction("exit", (), (), None, item.where)]
    return [item]


def _starts(items: list[PtxInstruction | PtxLabel], function: Function) -> tuple[list[int], dict[str, int]]:
    """Where blocks start, and each label's place among these."""
    starts, labels = {0}, dict[str, int]()
    named = {
        x.name for item in items if isinstance(item, PtxInstruction) for x in item.operands if isinstance(x, Symbol)
    }
    named |= {label for listed in function.targets.values() for label in listed}
    for i, item in enumerate(items):
        if isinstance(item, PtxLabel) and item.name in named:  # most others tell where lines of the source begin
            labels[item.name] = i
            starts.add(i)
        elif isinstance(item, PtxInstruction) and item.opcode in _JUMPS and i + 1 < len(items):
            starts.add(i + 1)
    return sorted(starts), labels


def _block(
    code: list[PtxInstruction], after: int | None, function: Function, labels: dict[str, int], number: dict[int, int]
) -> BasicBlock:
    last = code[-1] if code else None
    beyond = () if after is None else (after,)
    if last is None or last.opcode not in _JUMPS:
        return BasicBlock(code, beyond, where=last.where if last is not None else function.where)
    count, modifiers = _JUMPS[last.opcode]
    if len(last.operands) != count:
        raise last.refusal(f"it has {len(last.operands)} operands")
    for word in last.modifiers:
        if word not in modifiers:
            raise last.refusal(f".{word} is not supported")
    block = BasicBlock(code[:-1], where=last.where, uniform="uni" in last.modifiers)

    def place(label: object) -> int:
        name = label.name if isinstance(label, Symbol) else str(label)
        if name not in labels:
            raise last.refusal(f"there is no label {name}")
        return number[labels[name]]

    if last.opcode == "bra":
        block.targets = (place(last.operands[0]),)
    elif last.opcode == "brx":
        block.index, table = last.operands
        listed = function.targets.get(table.name) if isinstance(table, Symbol) else None
        if listed is None:
            raise last.refusal("it names no list of .branchtargets")
        block.targets = tuple(place(label) for label in listed)
    if last.guard is None:
        return block
    if last.opcode == "brx":
        raise last.refusal("it is not supported under a predicate")
    block.guard, block.targets = last.guard, (*block.targets, *beyond)
    return block


def _reachable(blocks: list[BasicBlock]) -> list[BasicBlock]:
    found, waiting = {0}, [0]
    while waiting:
        for target in blocks[waiting.pop()].targets:
            if target not in found:
                found.add(target)
                waiting.append(target)
    kept = sorted(found)
    renumbered = {old: new for new, old in enumerate(kept)}
    for old in kept:
        blocks[old].targets = tuple(renumbered[t] for t in blocks[old].targets)
    return [blocks[old] for old in kept]
