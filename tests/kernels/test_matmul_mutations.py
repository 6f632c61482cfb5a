"""Every barrier, wait and commit of every matmul kernel is needed, and every stage index matters.

A mutant counts as caught when the emulator reports a finding or the result leaves its error bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.hopper.mutants import Rewrite, edits, index_edits, rewritten
from tests.kernels.matmul_cases import RUNGS, SMALL, TOGETHER, TURNS, Case
from tests.kernels.mutate import Mutant, deletions, shifts
from warploom.core.dtypes import f16, f32, u32
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, Register
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom_lab.kernels.matmul.ladder_config import RungGemm

EVERY = 24
"""Of the instructions that address shared memory, each so-many-th is also shifted alone."""

SMALLER = {"tile_m": 64, "tile_n": 64, "tile_k": 32, "warp_m": 32, "warp_n": 32}
"""Of a rung's kernel a quarter of the tile: four warps still share both operands."""
STEPS = {key: replace(config, **SMALLER) for key, config in RUNGS.items() if isinstance(config, RungGemm)}
KERNELS: dict[str, RungGemm | MatmulSm80] = {
    **STEPS,
    "four stages, unpipelined": replace(STEPS["03"], stages=4),
    "fragments that roll": replace(STEPS["04"], accumulate=f32, lead=4),
    "sm80": SMALL,
    "sm80, f16 sums": replace(SMALL, accumulate=f16),
    "sm80, two stages": replace(SMALL, stages=2),
    "sm80, a split K": replace(SMALL, split_k=2),
}
CASES = {key: Case.of_tiles(config, 1, 1) for key, config in KERNELS.items()}
"""Products whose ring of stages wraps twice."""
CASES["sm80, f32 from registers"] = Case.of_tiles(SMALL, 1, 1, out=f32)
CASES["sm80, a split K"] = Case.of_tiles(KERNELS["sm80, a split K"], 1, 1, 12)


def pipelined(config: RungGemm | MatmulSm80) -> bool:
    """Whether fragments of the next tile load before the loop begins, behind a wait of their own."""
    return not isinstance(config, RungGemm) or config.pipelined


def escapes(key: str, mutants: list[Mutant]) -> list[str]:
    """The mutants that nothing objects to."""
    return [m.what for m in mutants if CASES[key].survives(m.program)]


@pytest.mark.parametrize("key", CASES)
def test_each_barrier_wait_and_commit_is_needed(key: str) -> None:
    mutants = deletions(CASES[key].program)
    assert len(mutants) >= 4, "the kernel synchronises"
    assert escapes(key, mutants) == []


@pytest.mark.parametrize("key", CASES)
def test_each_tile_matters(key: str) -> None:
    """Accesses to A's tile go to B's and the other way round; C's to A's stages and beyond."""
    mutants = shifts(CASES[key].program, 1, EVERY)
    assert len(mutants) >= 4
    assert escapes(key, mutants) == []


def _rewritten_one(
    program: Program, what: str, applies: Callable[[Op], bool], change: Callable[[Op], Op]
) -> list[Mutant]:
    """One mutant for each instruction that ``applies``, with it changed."""
    numbers = [number for number, op in enumerate(program.ops()) if applies(op)]
    return [Mutant(f"{what} #{n}", rewritten(program, n, lambda op: [change(op)])) for n in numbers]


def stage_mutants(program: Program, stages: int) -> list[Mutant]:
    """The reading or the writing begins at another stage; the ring closes too early or too late; a wait is too weak."""

    def begins(op: Op) -> bool:
        register = op.results[0] if op.results else None
        named = isinstance(register, Register) and register.name in ("read_stage", "write_stage")
        return named and op.instruction.copies and isinstance(op.operands[0], Const)

    def elsewhere(op: Op) -> Op:
        value = op.operands[0]
        assert isinstance(value, Const)
        return replace(op, operands=(Const(u32, (int(value.value) + 1) % stages),))

    def closes(op: Op) -> bool:
        last = op.operands[-1] if op.operands else None
        return op.instruction == binary("eq", u32) and isinstance(last, Const) and last.value == stages

    def at(distance: int) -> Callable[[Op], Op]:
        return lambda op: replace(op, operands=(op.operands[0], Const(u32, stages + distance)))

    def weaker(op: Op) -> Op:
        assert isinstance(op.instruction, Instruction)
        return replace(op, instruction=op.instruction.at(pending=op.instruction.pending + 1))

    found = _rewritten_one(program, "begins elsewhere", begins, elsewhere)
    found += _rewritten_one(program, "ring too short", closes, at(-1))
    found += _rewritten_one(program, "ring too long", closes, at(1))
    return found + _rewritten_one(program, "wait too weak", lambda op: "wait_group" in op.instruction.mnemonic, weaker)


@pytest.mark.parametrize("key", [key for key, case in CASES.items() if case.config.stages > 1])  # type: ignore[attr-defined]
def test_each_stage_index_and_count_matters(key: str) -> None:
    config = CASES[key].config
    assert isinstance(config, RungGemm | MatmulSm80)
    mutants = stage_mutants(CASES[key].program, config.stages)
    assert len(mutants) == 6 + (2 if pipelined(config) else 1)
    assert escapes(key, mutants) == []


@pytest.mark.parametrize("key", CASES)
def test_the_unchanged_program_is_fine(key: str) -> None:
    """So that what the mutants are caught by is their defect; also under adversarial orders of the warps."""
    for seed in (None, 0, 1):
        assert (outcome := CASES[key].run(seed=seed)).fine, (seed, str(outcome))


# -- wgmma
ROUNDS = (None, 0, 1, 2)
REDUNDANT = {
    # Between k-tiles nothing touches the accumulators; ptxas wants the fence there all the same (C7519).
    "without wgmma.fence.sync.aligned in _start",
    # The cursor that only releases has a phase that nobody waits for.
    "parity kept in _multiply",
}


def without_meeting(op: Op) -> Iterator[tuple[str, Rewrite]]:
    """Lanes of a warp that do not meet."""
    return (edit for edit in index_edits(op) if op.instruction is named("bar.warp.sync"))


@pytest.mark.parametrize("config", [TOGETHER, TURNS], ids=str)
def test_every_mutant_of_wgmma_is_caught_or_redundant(config: MatmulSm90) -> None:
    """Three tiles by one CTA, with five k-tiles each, which wrap the ring of two stages twice."""
    case = Case.of_tiles(config, 3, 1, 5, ctas=1)
    assert (outcome := case.run()).fine, outcome
    survivors: set[str] = set()
    count = 0
    for number, op in enumerate(case.program.ops()):
        for what, rewrite in (*edits(op), *without_meeting(op)):
            count += 1
            mutant = rewritten(case.program, number, rewrite)
            if all(case.survives(mutant, seed) for seed in ROUNDS):
                survivors.add(f"{what} in {op.where.function}")
    assert count > 30
    assert survivors <= REDUNDANT, survivors
