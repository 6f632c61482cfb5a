"""Every barrier, wait and commit of every rung is needed, and every stage index matters: the emulator sees each mutant.

A mutant counts as caught when the emulator reports a finding or the result leaves its error bound.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.gemm_cases import RUNGS, problem_of, run, traced
from tests.kernels.mutate import Mutant, deletions, located_ops, rewritten, shifts
from warploom.core.dtypes import f32, u32
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, Register
from warploom.isa.alu import Binary
from warploom.isa.async_copy import WaitCopies
from warploom.isa.conversion import Move
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.problem import GemmProblem

EVERY = 24
"""Of the instructions that address shared memory, each so-many-th is also shifted alone."""

CASES = {key: config for key, config in RUNGS.items() if not key.startswith("best")}
CASES["two stages"] = replace(RUNGS["06"], stages=2)
CASES["four stages, unpipelined"] = replace(RUNGS["03"], stages=4, tile_k=32)
CASES["fragments that roll"] = replace(RUNGS["04"], accumulate=f32, lead=4)
CASES["f32 from registers"] = replace(RUNGS["06"], accumulate=f32)


def small(config: GemmConfig) -> GemmConfig:
    """The same kernel on a quarter of the tile: four warps still share both operands."""
    return replace(config, tile_m=64, tile_n=64, warp_m=32, warp_n=32, tile_k=32)


def case(key: str) -> tuple[GemmConfig, GemmProblem]:
    """A product whose ring of stages wraps twice."""
    config = small(CASES[key])
    out = f32 if key == "f32 from registers" else None
    return config, problem_of(config, 64, 64, 32 * (2 * config.stages + 1), out=out)


def escapes(key: str, mutants: list[Mutant]) -> list[str]:
    """The mutants that nothing objects to."""
    config, problem = case(key)
    return [m.what for m in mutants if run(config, problem, program=m.program).fine]


def original(key: str) -> Program:
    return traced(*case(key))


@pytest.mark.parametrize("key", CASES)
def test_each_barrier_wait_and_commit_is_needed(key):
    mutants = deletions(original(key))
    assert len(mutants) >= 4, "the kernel synchronises"
    assert escapes(key, mutants) == []


@pytest.mark.parametrize("key", CASES)
def test_each_tile_matters(key):
    """Accesses to A's tile go to B's and the other way round; C's to A's stages and beyond."""
    mutants = shifts(original(key), CASES[key].stages, EVERY)
    assert len(mutants) >= 4
    assert escapes(key, mutants) == []


def _rewritten_one(program: Program, what: str, applies, change) -> list[Mutant]:
    """One mutant for each instruction that ``applies``, with it changed."""
    return [
        Mutant(f"{what} #{number}", rewritten(program, lambda at, op, t=target: change(op) if at == t else op))
        for number, target in enumerate(path for path, op in located_ops(program.body) if applies(op))
    ]


def stage_mutants(program: Program, stages: int) -> list[Mutant]:
    """The reading or the writing begins at another stage; the ring closes too early or too late; a wait is too weak."""

    def begins(op: Op) -> bool:
        register = op.results[0] if op.results else None
        named = isinstance(register, Register) and register.name in ("read_stage", "write_stage")
        return named and isinstance(op.instruction, Move) and isinstance(op.operands[0], Const)

    def elsewhere(op: Op) -> Op:
        value = op.operands[0]
        assert isinstance(value, Const)
        return replace(op, operands=(Const(u32, (int(value.value) + 1) % stages),))

    def closes(op: Op) -> bool:
        last = op.operands[-1] if op.operands else None
        return op.instruction == Binary("eq", u32) and isinstance(last, Const) and last.value == stages

    def at(distance: int):
        return lambda op: replace(op, operands=(op.operands[0], Const(u32, stages + distance)))

    def weaker(op: Op) -> Op:
        assert isinstance(op.instruction, WaitCopies)
        return replace(op, instruction=WaitCopies(op.instruction.pending + 1))

    found = _rewritten_one(program, "begins elsewhere", begins, elsewhere)
    found += _rewritten_one(program, "ring too short", closes, at(-1))
    found += _rewritten_one(program, "ring too long", closes, at(1))
    return found + _rewritten_one(program, "wait too weak", lambda op: isinstance(op.instruction, WaitCopies), weaker)


@pytest.mark.parametrize("key", [key for key in CASES if CASES[key].stages > 1])
def test_each_stage_index_and_count_matters(key):
    mutants = stage_mutants(original(key), CASES[key].stages)
    assert len(mutants) == 6 + (2 if CASES[key].pipelined else 1)
    assert escapes(key, mutants) == []


@pytest.mark.parametrize("key", CASES)
def test_the_unchanged_program_is_fine(key):
    """So that what the mutants are caught by is their defect; also under adversarial orders of the warps."""
    config, problem = case(key)
    for seed in (None, 0, 1):
        outcome = run(config, problem, seed=seed)
        assert outcome.fine, (seed, outcome.error, *map(str, outcome.emulation.findings))
