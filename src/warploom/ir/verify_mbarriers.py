"""Rules of mbarriers that need no run: that they are initialised, and that what is waited for can ever come.

Which array of mbarriers an instruction means is what its author formed the address from (``Op.within``). Where that is
not known of one of them, nothing is claimed about any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from warploom.core.targets import Target
from warploom.ir.program import Program
from warploom.ir.statements import Const, Loop, Op, Operand, Roles, SharedRegion, Statement, Value, Violation
from warploom.isa.conversion import special
from warploom.isa.effects import BulkTensorCopy, CopyArrival, MbarrierArrive, MbarrierInit, MbarrierWait

_MOST_BYTES = (1 << 20) - 1  # PTX ISA, "mbarrier": transaction counts have 20 bits
_TENSOR_UNIT = 16  # bytes; boxes are multiples of it


@dataclass
class _Uses:
    """Instructions that name the mbarriers of one region."""

    inits: list[tuple[Op, int]] = field(default_factory=lambda: list[tuple[Op, int]]())
    arrivals: list[Op] = field(default_factory=lambda: list[Op]())
    expects: list[Op] = field(default_factory=lambda: list[Op]())
    copies: list[Op] = field(default_factory=lambda: list[Op]())
    waits: list[Op] = field(default_factory=lambda: list[Op]())


class _Threads:
    """Finds values on which all threads agree."""

    def __init__(self, program: Program) -> None:
        self.made: dict[Value, list[Op]] = {}
        for op in program.ops():
            for result in op.results:
                self.made.setdefault(result, []).append(op)

    def differs(self, x: Operand) -> bool:
        """Whether a value may depend on the thread."""
        seen: set[Operand] = set()
        todo = [x]
        while todo:
            x = todo.pop()
            if isinstance(x, Const) or x in seen:
                continue
            seen.add(x)
            for op in self.made.get(x, []):
                if not op.instruction.lanewise or op.instruction == special("tid.x"):
                    return True
                todo += op.operands
        return False


def mbarrier_rules(program: Program, _: Target | None) -> Iterator[Violation]:
    """Counts, bytes, parities; uses without initialisation; waits for what nobody brings about."""
    uses: dict[SharedRegion, _Uses] = {}
    known = True
    for op, effect in program.effects:
        if isinstance(effect, (MbarrierInit, MbarrierArrive, MbarrierWait)):
            yield from _numbers(op, effect)
            region = op.tile(effect.address)
        elif isinstance(effect, CopyArrival):
            region = op.tile(effect.address)
        elif isinstance(effect, BulkTensorCopy) and effect.barrier is not None:
            region = op.tile(effect.barrier)
        else:
            continue
        if region is None:
            known = False
        else:
            _sort(op, effect, uses.setdefault(region, _Uses()))
    if known and uses:
        for region, found in uses.items():
            yield from _missing(region, found)
        yield from _too_many(program, uses)


def _sort(op: Op, effect: object, uses: _Uses) -> None:
    if isinstance(effect, MbarrierInit):
        uses.inits.append((op, effect.count))
    elif isinstance(effect, MbarrierWait):
        uses.waits.append(op)
    elif isinstance(effect, BulkTensorCopy):
        uses.copies.append(op)
    elif isinstance(effect, CopyArrival):
        uses.arrivals.append(op)
    elif isinstance(effect, MbarrierArrive):
        (uses.arrivals if effect.expected_bytes is None else uses.expects).append(op)


def _numbers(op: Op, effect: MbarrierInit | MbarrierArrive | MbarrierWait) -> Iterator[Violation]:
    if isinstance(effect, MbarrierArrive) and effect.expected_bytes is not None:
        size = abs(effect.expected_bytes)
        if size % _TENSOR_UNIT or not 0 < size <= _MOST_BYTES:
            yield (
                op.where,
                f"expects {size} bytes: boxes are multiples of {_TENSOR_UNIT} bytes, and a phase counts at most "
                f"{_MOST_BYTES}",
            )
    if isinstance(effect, MbarrierWait):
        parity = op.operands[effect.parity]
        if isinstance(parity, Const) and parity.value not in (0, 1):
            yield op.where, f"waits for parity {parity.value}: phases alternate between 0, the first, and 1"


def _missing(region: SharedRegion, uses: _Uses) -> Iterator[Violation]:
    name = region.name
    others = (*uses.arrivals, *uses.expects, *uses.copies, *uses.waits)
    if others and not uses.inits:
        yield (
            others[0].where,
            f"uses the mbarriers {name!r}, which nothing initialises: one thread calls init, then "
            "k.mbarrier_fence(), and all meet at a barrier",
        )
    if uses.copies and not uses.expects:
        yield (
            uses.copies[0].where,
            f"copies to complete on {name!r}, which never expects any bytes: the phase ends "
            "without them. Call expect with the bytes of the boxes, once a phase",
        )
    if uses.expects and not uses.copies:
        yield (
            uses.expects[0].where,
            f"expects bytes at {name!r}, on which no copy completes: its phase never ends. "
            "Let the loads name it, or arrive without bytes",
        )
    if uses.waits and not (uses.arrivals or uses.expects or uses.copies):
        yield uses.waits[0].where, f"waits for {name!r}, at which nothing ever arrives: it waits for ever"


def _too_many(program: Program, uses: dict[SharedRegion, _Uses]) -> Iterator[Violation]:
    """Threads that all arrive at once at an mbarrier that was initialised for fewer."""
    together = dict(_acting_together(program.body, program.threads))
    values = _Threads(program)
    for region, found in uses.items():
        most = max((count for _, count in found.inits), default=None)
        for op in (*found.arrivals, *found.expects):
            threads = together.get(id(op))
            for effect in op.instruction.effects():
                if not isinstance(effect, MbarrierArrive) or effect.guard is None or threads is None or most is None:
                    continue
                always = isinstance(guard := op.operands[effect.guard], Const) and bool(guard.value)
                if always and threads > most and not values.differs(op.operands[effect.address]):
                    yield (
                        op.where,
                        f"all {threads} threads arrive at {region.name!r}, which is initialised for {most} arrivals a "
                        f"phase: let one of each warp arrive (when=…), or initialise it for {threads}",
                    )


def _acting_together(body: tuple[Statement, ...], threads: int) -> Iterator[tuple[int, int]]:
    """The instructions that all threads of the CTA, or of a role, execute, and how many these are."""
    for s in body:
        if isinstance(s, Op):
            yield id(s), threads
        elif isinstance(s, Loop):
            yield from _acting_together(s.body, threads)
        elif isinstance(s, Roles):
            for role in s.branches:
                yield from _acting_together(role.body, 32 * (role.last - role.first))
        # Who takes a condition, or goes to a block of a flow, is not known.
