"""Bytes that an mbarrier expects and the boxes that are to bring them, compared before a launch runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, SharedRegion, Statement, TileRegion, Value, blocks, walk
from warploom.isa.effects import BulkTensorCopy, MbarrierArrive
from warploom.layout.tensor_map import TensorMapSpec

Maps = Mapping[Value, tuple[str, TensorMapSpec]]
"""The name of a parameter that is a tensor map, and what the launch gives for it."""


@dataclass
class _Phase:
    """A statement that expects bytes at an mbarrier, with the loads that follow it in its block."""

    expects: Op
    expected: int
    loads: list[tuple[Op, BulkTensorCopy]] = field(default_factory=lambda: list[tuple[Op, BulkTensorCopy]]())


def wrong_boxes(program: Program, maps: Maps) -> Iterator[tuple[Op, str]]:
    """The statements that expect other bytes than the boxes of this launch bring, each with what is wrong.

    Phases are compared of which all loads follow in the block of the statement that expects them, in one CTA and
    unconditionally; of others nothing is claimed.
    """
    phases, apart = list[tuple[SharedRegion, _Phase]](), set[SharedRegion]()
    for block in (program.body, *(inner for s in walk(program.body) for inner in blocks(s))):
        open_phases: dict[SharedRegion, _Phase] = {}
        for statement in block:
            for op, effect, always in _effects(statement):
                if isinstance(effect, MbarrierArrive):
                    region = op.tile(effect.address)
                    if region is not None and effect.expected_bytes is not None and always:
                        open_phases[region] = _Phase(op, effect.expected_bytes)
                        phases.append((region, open_phases[region]))
                elif effect.barrier is not None and (region := op.tile(effect.barrier)) is not None:
                    if region in open_phases and always and effect.multicast is None:
                        open_phases[region].loads.append((op, effect))
                    else:
                        apart.add(region)
    for region, phase in phases:
        if region not in apart and phase.loads and (said := _wrong(phase, maps)):
            yield phase.expects, said


def _effects(statement: Statement) -> Iterator[tuple[Op, MbarrierArrive | BulkTensorCopy, bool]]:
    """Arrivals and copies of a statement itself, and whether every thread that comes by executes them."""
    if isinstance(statement, Op):
        for effect in statement.instruction.effects():
            if isinstance(effect, MbarrierArrive | BulkTensorCopy):
                guard = None if effect.guard is None else statement.operands[effect.guard]
                yield statement, effect, guard is None or (isinstance(guard, Const) and bool(guard.value))


def _wrong(phase: _Phase, maps: Maps) -> str:
    """Say what is wrong with the bytes of a phase; empty if nothing is, or some map is not known before the run."""
    tiles: dict[TileRegion, list[tuple[str, TensorMapSpec]]] = {}
    brought = 0
    for op, copy in phase.loads:
        source, tile = op.operands[copy.tensor_map], op.tile(copy.shared)
        found = maps.get(source) if isinstance(source, Value) else None
        if found is None or tile is None or tile.layout is None:
            return ""
        brought += found[1].box_bytes
        tiles.setdefault(tile, []).append(found)
    if brought == phase.expected:
        return ""
    said = f"expects {phase.expected} bytes of boxes that bring {brought}, so that the wait for them never ends"
    for tile, boxes in tiles.items():
        (name, spec), size = boxes[0], sum(spec.box_bytes for _, spec in boxes)
        layout = tile.layout
        if layout is not None and size != layout.bytes:
            panel = layout.panels[0].cols
            said += f". {tile.name} has {layout.rows} rows of {layout.cols} columns, the box of {name} is {spec.box}, "
            said += f"innermost first: make it ({panel}, {layout.rows}), or the tile as large as its boxes"
    return said
