"""What a run of a kernel did not exercise: a defect there is no finding, whatever the order of the warps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.arguments import grid_of
from warploom.emulate import Decision, Emulation
from warploom.emulate.launch.arguments import written_parameters
from warploom.ir.program import Program
from warploom.ir.statements import Loop, Op, Operand, SourceLine, TileRegion, Value, When, operands_of, results_of
from warploom.isa.effects import Access, AsyncCopy, BulkTensorCopy, ReadSpecial
from warploom.lang import Launch
from warploom.layout.tensor_map import TensorMapSpec

_AXES = "xyz"


@dataclass(frozen=True)
class Uncovered:
    """A line that an example leaves unexercised in some way, and what to change in the example."""

    kind: str
    where: SourceLine
    message: str
    cure: str

    def __str__(self) -> str:
        return f"{self.message}: {self.cure}"


def uncovered(program: Program, emulation: Emulation, launch: Launch) -> list[Uncovered]:
    """Return what a run of a launch left unexercised and another example can exercise: each line and kind once."""
    origins = _Origins(program)
    found = [
        *(x for decision in emulation.decisions for x in _of_decision(decision, origins)),
        *_stages(program, emulation, launch),
        *_grid(program, launch),
        *_inputs(program, launch),
    ]
    return list({(x.kind, x.where): x for x in found}.values())


class _Origins:
    """Whether values depend on what a launch gives: numbers, data and the grid."""

    def __init__(self, program: Program) -> None:
        self._given: set[Operand] = {p.value for p in program.parameters if p.kind == "scalar"}
        self._made: dict[Operand, list[Sequence[Operand]]] = {}
        for statement in program.statements():
            for result in results_of(statement):
                self._made.setdefault(result, []).append(operands_of(statement))
                if isinstance(statement, Op) and any(_is_given(e) for e in statement.instruction.effects()):
                    self._given.add(result)

    def vary(self, *operands: Operand) -> bool:
        """Whether another launch may give other values."""
        todo, seen = list(operands), set[Operand]()
        while todo:
            x = todo.pop()
            if x in self._given:
                return True
            if isinstance(x, Value) and x not in seen:
                seen.add(x)
                todo += [operand for operands in self._made.get(x, ()) for operand in operands]
        return False


def _is_given(effect: object) -> bool:
    if isinstance(effect, ReadSpecial):
        return "ctaid" in effect.register
    return isinstance(effect, Access) and effect.mode == "load"


def _of_decision(decision: Decision, origins: _Origins) -> Iterator[Uncovered]:
    s = decision.statement
    if isinstance(s, Loop):
        if decision.rounds <= 1 and origins.vary(s.start, s.stop, s.step):
            ran = "runs once at most" if decision.rounds else "never runs"
            yield Uncovered("loop", s.where, f"a loop of this line {ran}", "give sizes for which it runs several times")
    elif isinstance(s, When):
        if not decision.held:
            if decision.failed or origins.vary(s.condition):
                yield Uncovered(
                    "branch", s.where, "a condition of this line never holds", "give sizes or data for which it does"
                )
        elif not decision.failed and origins.vary(s.condition):
            cure = "give sizes that are no multiples of the tile, or data for which it does not"
            yield Uncovered("mask", s.where, "a condition of this line holds for every thread, each time", cure)
    elif isinstance(s, Op) and decision.held and not decision.failed:
        cure = "give sizes that are no multiples of the tile"
        yield Uncovered("mask", s.where, "a copy of this line is never cut short, all its bytes exist each time", cure)


def _stages(program: Program, emulation: Emulation, launch: Launch) -> Iterator[Uncovered]:
    """Tiles of several stages of which some are filled once: a stage that is given back too early does not show."""
    maps = _maps(program, launch)
    brought, lines = dict[TileRegion, float](), dict[TileRegion, SourceLine]()
    for op, count in emulation.counts:
        for tile, size in _copies(op, maps):
            if tile.stage_bytes and tile.bytes >= 2 * tile.stage_bytes and count:
                brought[tile] = brought.get(tile, 0.0) + size * count
                lines.setdefault(tile, op.where)
    ctas = math.prod(grid_of(launch.grid))
    for tile, size in brought.items():
        stages, fills = tile.bytes // tile.stage_bytes, size / tile.stage_bytes / ctas
        if fills < 2 * stages:
            message = f"the {stages} stages of {tile.name} are filled {fills:.3g} times in all, so that one given back "
            yield Uncovered(
                "stages", lines[tile], message + "too early may not show", f"take at least {2 * stages} steps"
            )


def _copies(op: Op, maps: Mapping[Value, TensorMapSpec]) -> Iterator[tuple[TileRegion, float]]:
    """The tiles that a warp's copy fills, and its bytes (of unknown maps: without end)."""
    for effect in op.instruction.effects():
        if isinstance(effect, AsyncCopy):
            tile, size = op.tile(effect.shared), 32.0 * effect.bytes
        elif isinstance(effect, BulkTensorCopy) and effect.direction == "load":
            source = op.operands[effect.tensor_map]
            spec = maps.get(source) if isinstance(source, Value) else None
            tile, size = op.tile(effect.shared), math.inf if spec is None else float(spec.box_bytes)
        elif isinstance(effect, Access) and effect.space == "shared" and effect.mode == "store":
            tile, size = op.tile(effect.address), 32.0 * effect.bytes
        else:
            continue
        if tile is not None:
            yield tile, size


def _maps(program: Program, launch: Launch) -> dict[Value, TensorMapSpec]:
    found = dict[Value, TensorMapSpec]()
    for parameter, argument in zip(program.parameters, launch.arguments, strict=False):
        spec: Any = argument[1] if isinstance(argument, tuple) else getattr(argument, "spec", None)
        if parameter.kind == "tensor_map" and isinstance(spec, TensorMapSpec):
            found[parameter.value] = spec
    return found


def _grid(program: Program, launch: Launch) -> Iterator[Uncovered]:
    """Numbers of CTAs that a kernel reads, along which its grid has one CTA."""
    grid = (*grid_of(launch.grid), 1, 1)
    for op, effect in program.effects:
        if isinstance(effect, ReadSpecial) and effect.register.startswith("ctaid."):
            axis = effect.register[-1]
            if grid[_AXES.index(axis)] == 1:
                yield Uncovered("grid", op.where, f"the grid has one CTA along {axis}", "launch two or more along it")


def _inputs(program: Program, launch: Launch) -> Iterator[Uncovered]:
    """Arrays that a kernel reads and whose elements are all alike: exchanged ones give equal results."""
    written = written_parameters(program)
    for parameter, argument in zip(program.parameters, launch.arguments, strict=False):
        array: Any = argument[0] if isinstance(argument, tuple) else getattr(argument, "array", argument)
        if written is None or parameter.name in {*written, *launch.expect} or not isinstance(array, np.ndarray):
            continue
        if array.size > 1 and bool((array == array.flat[0]).all()):
            message = f"all elements of {parameter.name} are alike, so that exchanged ones do not show"
            yield Uncovered("data", program.where, message, "draw them at random")
