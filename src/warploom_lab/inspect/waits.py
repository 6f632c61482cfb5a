"""Who an instruction waits for: the instruction that holds a counter it needs, and how many stand between the two.

An instruction of variable latency (a load, ldmatrix, a special function, a shuffle) holds a counter until it is done;
what needs its result waits for the counter. The distance between the two is what part 8 of the seeds reads from SASS
to explain a stall: an LDSM right before the HMMA that reads it hides none of its latency.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from warploom_lab.inspect.flow import SassFlow, predecessors_of
from warploom_lab.inspect.sass import SassInstruction

_REGISTER = re.compile(r"-?\|?(U?)R(\d+)(?:\.(64|128))?\b")
_SCOREBOARD = re.compile(r"SB(\d)")
_OPERANDS_OF_HMMA = {"16816": (4, 2), "1688": (2, 1)}
"""Registers of A and B by shape."""
_WIDTHS = {"64": 2, "128": 4}
_GLOBAL = "LDG STG LDL STL LD ST LDGSTS LDGDEPBAR ATOM ATOMG RED REDG TEX TLD SULD SUST CCTL UTMALDG UTMASTG"
_LONG = frozenset(_GLOBAL.split())
_NO_RESULT = frozenset({"STS", "STG", "STL", "ST", "STSM", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "RED", "REDG"})


@dataclass(frozen=True, slots=True)
class ScoreboardWait:
    """``producer`` holds a counter that an instruction waits for; ``between`` instructions stand between the two.

    ``by_register``: the instruction reads what the producer writes (else it waits because they share a counter, or to
    overwrite what the producer still reads).
    """

    producer: SassInstruction
    between: int
    by_register: bool

    @property
    def is_long(self) -> bool:
        """Whether the producer goes to global or local memory: a wait for it counts as long_scoreboard."""
        return self.producer.mnemonic in _LONG


def waits(flow: SassFlow) -> dict[int, tuple[ScoreboardWait, ...]]:
    """Address → what a reachable instruction may wait for: every holder of the counters it needs.

    First those whose result is read, then the nearest; loops are followed backwards. Empty for a listing without
    encodings.
    """
    predecessors = predecessors_of(flow.blocks, flow.reachable)
    found: dict[int, tuple[ScoreboardWait, ...]] = {}
    for block in flow.reachable:
        for index, instruction in enumerate(flow.blocks[block].instructions):
            holders = {
                holder.address: ScoreboardWait(holder, between, bool(written(holder) & read(instruction)))
                for counter in awaited(instruction)
                for holder, between in _holders(flow, predecessors, block, index, counter)
            }
            if holders:
                ordered = sorted(holders.values(), key=lambda wait: (not wait.by_register, wait.between))
                found[instruction.address] = tuple(ordered)
    return found


def load_use_distances(loop: Sequence[SassInstruction], load: str = "LDSM", use: str = "HMMA") -> tuple[int, ...]:
    """For each ``load`` of a loop's instructions, how many stand before the first ``use`` of what it loads.

    The loop is followed around its end once; a load whose result no ``use`` reads has no distance.
    """
    found: list[int] = []
    for index, instruction in enumerate(loop):
        if instruction.mnemonic != load:
            continue
        loaded = written(instruction)
        after = (*loop[index + 1 :], *loop[:index])
        users = (n for n, other in enumerate(after) if other.mnemonic == use and loaded & read(other))
        found += islice(users, 1)
    return tuple(found)


def awaited(instruction: SassInstruction) -> tuple[int, ...]:
    """The counters an instruction waits for; those that DEPBAR names are among them."""
    if instruction.control is None:
        return ()
    named = [int(n) for operand in instruction.operands for n in _SCOREBOARD.findall(operand)]
    return tuple(dict.fromkeys([*instruction.control.waits, *(named if instruction.mnemonic == "DEPBAR" else [])]))


def _holders(
    flow: SassFlow, predecessors: dict[int, list[int]], block: int, index: int, counter: int
) -> Iterator[tuple[SassInstruction, int]]:
    """(instruction, instructions between) of those that may hold ``counter``, on every way back from the place.

    A way ends where an instruction waited for the counter: earlier holders are done by then.
    """
    todo = deque([(block, index, 0)])
    seen: set[int] = set()
    while todo:
        at, end, between = todo.popleft()
        for instruction in reversed(flow.blocks[at].instructions[:end]):
            if instruction.control is not None and counter in instruction.control.holds:
                yield instruction, between
            if counter in awaited(instruction):
                break
            between += 1
        else:
            for before in predecessors[at]:
                if before not in seen:
                    seen.add(before)
                    todo.append((before, len(flow.blocks[before].instructions), between))


def written(instruction: SassInstruction) -> frozenset[str]:
    """The registers an instruction of variable latency (or HMMA) writes."""
    if instruction.mnemonic in _NO_RESULT or not instruction.operands:
        return frozenset()
    first = next((o for o in instruction.operands if _REGISTER.fullmatch(o)), "")
    return _named(first, _width(instruction))


def _width(instruction: SassInstruction) -> int:
    """32-bit registers of the result, or of what is stored."""
    if instruction.mnemonic == "HMMA":
        return _accumulator(instruction)
    last = instruction.modifiers[-1] if instruction.modifiers else ""
    if instruction.mnemonic == "LDSM":
        return int(last) if last in ("2", "4") else 1
    return max((_WIDTHS.get(modifier, 1) for modifier in instruction.modifiers), default=1)


def _accumulator(instruction: SassInstruction) -> int:
    """Registers of an HMMA's accumulator: four of f32, two of f16 pairs."""
    return 4 if "F32" in instruction.modifiers else 2


def read(instruction: SassInstruction) -> frozenset[str]:
    """The registers an instruction reads, as far as its text tells: operand widths of HMMA and of stores are known."""
    operands = instruction.operands
    if instruction.mnemonic == "HMMA":
        shape = next((m for m in instruction.modifiers if m in _OPERANDS_OF_HMMA), "16816")
        widths = (*_OPERANDS_OF_HMMA[shape], _accumulator(instruction))
        return frozenset().union(*(_named(o, w) for o, w in zip(operands[1:4], widths, strict=False)))
    if instruction.mnemonic in _NO_RESULT:
        return frozenset().union(*(_named(operand, _width(instruction)) for operand in operands))
    return frozenset().union(*(_named(operand, 1) for operand in operands[1:]))


def _named(operand: str, width: int) -> frozenset[str]:
    """The registers an operand names: ``width`` consecutive ones for each (or as many as its suffix says)."""
    return frozenset(
        f"{uniform}R{int(first) + offset}"
        for uniform, first, suffix in _REGISTER.findall(operand)
        for offset in range(max(width, _WIDTHS.get(suffix, 1)))
    )
