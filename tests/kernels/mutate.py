"""Programs with one defect: rewriting the frozen tree of a Program, one instruction or one group of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from warploom.core.errors import EmulationError
from warploom.emulate import Emulation, Finding
from warploom.emulate.launch.machine import emulate_launches
from warploom.emulate.order.launches import QueuedLaunch
from warploom.interop.arrays import describe
from warploom.ir.program import Program
from warploom.ir.statements import Op, SharedRegion, Statement, blocks, with_blocks
from warploom.isa.instruction import Instruction
from warploom.kernels.source import KernelCall
from warploom.ops.backends import emulator_arguments

Body = tuple[Statement, ...]
Path = tuple[int, ...]
"""Where a statement stands: its position in each block from the outermost in, with the branch number between them."""


class Outcome(Protocol):
    """What a run of a case says."""

    @property
    def fine(self) -> bool:
        """No finding, and every element within its bound."""
        ...


def objection(run: Callable[[], Outcome]) -> str | None:
    """What a run that stops at its first finding says: the kind of finding, or None."""
    try:
        return None if run().fine else "a wrong result alone"
    except EmulationError as error:
        (first, *_) = error.findings
        assert isinstance(first, Finding)
        return first.kind


def run_calls(
    calls: Sequence[KernelCall],
    arrays: dict[str, Any],
    seed: int | None = None,
    program: Program | None = None,
    *,
    of: int = 0,
    stop: bool = False,
) -> tuple[Emulation, ...]:
    """Emulate kernels in a row on arrays by name, ``program`` in place of that of call ``of``.

    Those that overlap with the launch before are judged so. Workspace, which ``arrays`` gets too, starts as NaN, or as
    0 where a call asks for it.
    """
    queued: list[QueuedLaunch] = []
    own: set[str] = set()
    for number, call in enumerate(calls):
        own |= {*call.workspace}
        arrays |= {name: np.full(words, np.nan, np.float32) for name, words in call.workspace.items()}
        if call.zeroed:
            arrays[call.zeroed][:] = 0
        used = program if program is not None and number == of else call.source.program
        kinds = [x.dtype for x in call.maps] + [p.dtype for p in used.parameters if p.kind == "pointer"]
        named = zip(call.arrays, kinds, strict=True)
        views = [describe(arrays[name].view(kind.numpy) if name in own else arrays[name]) for name, kind in named]
        arguments = emulator_arguments(used, views, call.scalars, call.maps)
        queued.append(QueuedLaunch(used, call.grid, arguments, programmatic=call.overlaps))
    return tuple(emulate_launches(queued, seed=seed, stop=stop))


def synchronises(op: Op) -> bool:
    """Whether an operation is a barrier, ``__syncwarp``, a wait or a commit."""
    name = op.instruction.mnemonic
    return name.startswith("bar.") or (name.startswith("cp.async") and "_group" in name)


@dataclass(frozen=True)
class Mutant:
    """A Program with one defect. ``what`` describes it by function and order, so that it outlives moved lines."""

    what: str
    program: Program


def located_ops(body: Body, path: Path = ()) -> Iterator[tuple[Path, Op]]:
    """Every instruction with its path, depth first."""
    for position, statement in enumerate(body):
        at = (*path, position)
        if isinstance(statement, Op):
            yield at, statement
        for number, block in enumerate(blocks(statement)):
            yield from located_ops(block, (*at, number))


def rewritten(program: Program, rewrite: Callable[[Path, Op], Sequence[Op]]) -> Program:
    """The Program with each instruction replaced by those that ``rewrite`` gives."""

    def block(body: Body, path: Path) -> Body:
        kept: list[Statement] = []
        for position, s in enumerate(body):
            at = (*path, position)
            if isinstance(s, Op):
                kept.extend(rewrite(at, s))
            else:
                kept.append(with_blocks(s, [block(b, (*at, n)) for n, b in enumerate(blocks(s))]))
        return tuple(kept)

    return replace(program, body=block(program.body, ()))


def _labels(program: Program, matches: Callable[[Op], bool]) -> list[tuple[str, Path]]:
    """``mnemonic #n in function`` for every instruction that matches, numbered per mnemonic and function."""
    seen: dict[tuple[str, str], int] = {}
    found: list[tuple[str, Path]] = []
    for path, op in located_ops(program.body):
        if matches(op):
            key = op.instruction.mnemonic, op.where.function
            seen[key] = seen.get(key, 0) + 1
            found.append((f"{key[0]} #{seen[key]} in {key[1]}", path))
    return found


def deletions(program: Program) -> list[Mutant]:
    """One mutant without each barrier, ``__syncwarp``, wait and commit."""
    mutants: list[Mutant] = []
    for label, target in _labels(program, synchronises):
        mutants.append(Mutant(f"without {label}", rewritten(program, lambda at, op, t=target: [] if at == t else [op])))
    return mutants


def _shared_offset(op: Op) -> int | None:
    """The immediate part of the shared address, where the instruction has one."""
    instruction = op.instruction
    if isinstance(instruction, Instruction) and instruction.mnemonic.startswith(("cp.async.ca", "cp.async.cg")):
        return instruction.shared_offset
    if isinstance(instruction, Instruction) and instruction.op in ("ldmatrix", "ld", "st"):
        return instruction.offset if instruction.fields.get("space") == "shared" else None
    return None


def moved(op: Op, distance: int) -> Op:
    """The instruction with its address moved by ``distance`` bytes; that it leaves its tile is not said of it."""
    instruction = op.instruction
    assert isinstance(instruction, Instruction)
    place = instruction.addresses[0]
    return replace(op, instruction=instruction.at(**{place: instruction.fields[place] + distance}), within=())


def shifts(program: Program, stages: int, single_every: int = 0) -> list[Mutant]:
    """Mutants whose accesses to a shared tile go to another stage (or, with one stage, to another tile).

    All accesses of one kind to one stage of one region within a block are moved together: what a wrong stage index in
    one line of the source does. With ``single_every``, every so many instructions one is moved alone as well.
    """
    groups: dict[tuple[Path, str, str, int], list[Path]] = {}
    distances: dict[Path, int] = {}
    for path, op in located_ops(program.body):
        offset = _shared_offset(op)
        if offset is None:
            continue
        region = next(r for r in program.shared if r.offset <= offset < r.offset + r.bytes)
        stage, distances[path] = _other_place(program, region, offset, stages)
        groups.setdefault((path[:-1], op.instruction.mnemonic.split(".")[0], region.name, stage), []).append(path)
    chosen = [
        (f"{kind} of {name}, stage {stage}, block {list(block)}", paths)
        for (block, kind, name, stage), paths in groups.items()
    ]
    if single_every:
        alone = list(distances)[::single_every]
        chosen += [(f"the instruction at {list(path)} alone", [path]) for path in alone]
    return [_moved_together(program, what, frozenset(paths), distances) for what, paths in chosen]


def _other_place(program: Program, region: SharedRegion, offset: int, stages: int) -> tuple[int, int]:
    """(stage of the region that ``offset`` lies in, distance to another stage or, without stages, another region)."""
    staged = stages if region.name in ("k_tile", "v_tile", "K", "V") else 1
    size = region.bytes // staged
    stage = (offset - region.offset) // size
    if staged > 1:
        return stage, size if stage + 1 < staged else -size
    place = program.shared.index(region)
    neighbour = program.shared[place + 1 if place + 1 < len(program.shared) else place - 1]
    return stage, neighbour.offset - region.offset


def _moved_together(program: Program, what: str, paths: frozenset[Path], distances: dict[Path, int]) -> Mutant:
    def rewrite(at: Path, op: Op) -> list[Op]:
        return [moved(op, distances[at]) if at in paths else op]

    return Mutant(f"shifted {what}", rewritten(program, rewrite))


def regions_moved(program: Program, distances: dict[str, int]) -> Mutant:
    """Every access to the named shared regions moved by so many bytes: tiles placed where they do not belong."""

    def rewrite(_: Path, op: Op) -> list[Op]:
        offset = _shared_offset(op)
        if offset is None:
            return [op]
        region = next(r for r in program.shared if r.offset <= offset < r.offset + r.bytes)
        return [moved(op, distances[region.name]) if region.name in distances else op]

    return Mutant(f"{', '.join(distances)} moved", rewritten(program, rewrite))
