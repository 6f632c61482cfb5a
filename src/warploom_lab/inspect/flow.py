"""Control flow of a listing: basic blocks, which of them can be reached, and natural loops."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from warploom_lab.inspect.sass import Listing, SassInstruction

_JUMPS = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL", "BSYNC"})
_INDIRECT = frozenset({"BRX", "BRXU", "JMX", "JMXU"})
_ENDS = frozenset({"EXIT", "RET", "KILL"})
_LABEL = re.compile(r"(?:\.L_|\$)[\w$.]+")
_ADDRESS = re.compile(r"^0x[0-9a-f]+$")


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other; ``successors`` are indices of blocks."""

    instructions: tuple[SassInstruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class SassLoop:
    """A natural loop: the blocks that lead back to ``header`` without leaving it."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class SassFlow:
    """The blocks of one kernel in address order, of which block 0 is the entry, and its loops, outermost first."""

    blocks: tuple[Block, ...]
    reachable: frozenset[int]
    loops: tuple[SassLoop, ...]

    def depth(self, block: int) -> int:
        """Return the number of loops around a block."""
        return sum(block in loop.blocks for loop in self.loops)

    @cached_property
    def instructions(self) -> tuple[SassInstruction, ...]:
        """Every instruction that can be reached: what pads the end of a kernel is not among them."""
        return self._of(self.reachable)

    def of_loop(self, loop: SassLoop) -> tuple[SassInstruction, ...]:
        """The instructions of a loop with all loops inside it, in address order."""
        return self._of(loop.blocks)

    def _of(self, blocks: Iterable[int]) -> tuple[SassInstruction, ...]:
        return tuple(i for b in sorted(blocks) for i in self.blocks[b].instructions)

    def main_loop(self, is_tensor: Callable[[SassInstruction], bool]) -> SassLoop | None:
        """The loop in which the kernel does its work, None if it has no loop.

        The one with most tensor instructions among the loops that hold no smaller loop with any; without tensor
        instructions, the longest of the innermost.
        """
        if not self.loops:
            return None
        weight = {loop: sum(map(is_tensor, self.of_loop(loop))) for loop in self.loops}
        heavy = [loop for loop in self.loops if weight[loop]] or list(self.loops)
        innermost = [a for a in heavy if not any(b.blocks < a.blocks for b in heavy)]
        return max(innermost, key=lambda loop: (weight[loop], len(self.of_loop(loop))))


def control_flow(listing: Listing) -> SassFlow:
    """The :class:`SassFlow` of a listing.

    A ``CALL`` is a jump that may return (ptxas uses it for far branches, too). Where an indirect jump names no targets,
    every block counts as reachable.
    """
    blocks, all_known = _blocks(listing)
    reachable = _reach(blocks, 0, without=None) if all_known else frozenset(range(len(blocks)))
    return SassFlow(blocks, reachable, _loops(blocks, reachable))


def _targets(listing: Listing) -> dict[int, tuple[int, ...]]:
    """For each jump's address, the addresses of instructions it may go to."""
    known = {i.address for i in listing.instructions}
    found: dict[int, tuple[int, ...]] = {}
    reconverge: dict[str, tuple[int, ...]] = {}  # barrier register → where BSYNC sends the threads that meet there
    for instruction in listing.instructions:
        text = " ".join(instruction.operands)
        targets = [listing.labels[label] for label in _LABEL.findall(text) if label in listing.labels]
        targets += [int(o, 16) for o in instruction.operands if _ADDRESS.match(o)]
        inside = tuple(t for t in targets if t in known)
        if instruction.mnemonic == "BSSY" and instruction.operands:
            reconverge[instruction.operands[0]] = inside
        elif instruction.mnemonic == "BSYNC" and instruction.operands:
            found[instruction.address] = reconverge.get(instruction.operands[0], ())
        elif instruction.mnemonic in _JUMPS:
            found[instruction.address] = inside
    return found


def _falls_through(instruction: SassInstruction) -> bool:
    """Whether the next instruction may run after this one."""
    if instruction.mnemonic in ("CALL", "BSYNC") or instruction.mnemonic not in _JUMPS | _ENDS:
        return True
    if instruction.predicate not in ("", "PT", "UPT"):
        return True
    conditional = any(re.fullmatch(r"!?U?P\d", operand) for operand in instruction.operands)
    return conditional or "DIV" in instruction.modifiers or "CONV" in instruction.modifiers


def _blocks(listing: Listing) -> tuple[tuple[Block, ...], bool]:
    """The blocks, and whether the targets of every jump are known."""
    instructions, targets = listing.instructions, _targets(listing)
    starts = {instructions[0].address}.union(*targets.values())
    for before, after in pairwise(instructions):
        if before.mnemonic in _JUMPS | _ENDS:
            starts.add(after.address)
    ordered = sorted(starts)
    index = {start: number for number, start in enumerate(ordered)}
    parts: list[list[SassInstruction]] = [[] for _ in ordered]
    for instruction in instructions:
        parts[bisect_right(ordered, instruction.address) - 1].append(instruction)
    blocks: list[Block] = []
    all_known = True
    for number, part in enumerate(parts):
        last = part[-1]
        onward = [number + 1] if _falls_through(last) and number + 1 < len(parts) else []
        jumps = targets.get(last.address, ())
        all_known &= bool(jumps) or last.mnemonic not in _INDIRECT
        blocks.append(Block(tuple(part), tuple(dict.fromkeys([*onward, *(index[t] for t in jumps)]))))
    return tuple(blocks), all_known


def _reach(blocks: tuple[Block, ...], start: int, *, without: int | None) -> frozenset[int]:
    """The blocks that can be reached from ``start`` without passing ``without``."""
    seen: set[int] = set()
    todo = [start] if start != without else []
    while todo:
        block = todo.pop()
        if block not in seen:
            seen.add(block)
            todo += [s for s in blocks[block].successors if s != without]
    return frozenset(seen)


def predecessors_of(blocks: tuple[Block, ...], reachable: frozenset[int]) -> dict[int, list[int]]:
    """The reachable blocks from which each one is reached at once."""
    found: dict[int, list[int]] = {block: [] for block in reachable}
    for block in reachable:
        for successor in blocks[block].successors:
            found[successor].append(block)
    return found


def _loops(blocks: tuple[Block, ...], reachable: frozenset[int]) -> tuple[SassLoop, ...]:
    """Natural loops of the edges that go back to a block which dominates their start, merged by header."""
    back_edges: dict[int, set[int]] = {}
    for header in reachable:
        sources = {b for b in reachable if header in blocks[b].successors}
        # A header dominates what cannot be reached around it.
        if sources and (ends := sources - _reach(blocks, 0, without=header)):
            back_edges[header] = ends
    predecessors = predecessors_of(blocks, reachable)
    loops: list[SassLoop] = []
    for header, ends in back_edges.items():
        body, todo = {header}, list(ends)
        while todo:
            block = todo.pop()
            if block not in body:
                body.add(block)
                todo += predecessors[block]
        loops.append(SassLoop(header, frozenset(body)))
    return tuple(sorted(loops, key=lambda loop: (-len(loop.blocks), loop.header)))
