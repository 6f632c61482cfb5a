"""Every barrier, wait and commit of every rung is needed, and every stage index matters: the emulator sees each mutant.

A mutant counts as caught when the emulator reports a finding or the result leaves its error bound. Those that are
neither must be listed here with the reason why they are equivalent, and the list must be exact.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import RUNGS, launch, run, traced
from tests.kernels.mutate import Mutant, deletions, regions_moved, shifts
from warploom.emulate import emulate
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.problem import AttentionProblem
from warploom.lang import Global, Kernel, f32, kernel

EVERY = 48
"""Of the instructions that address shared memory, each so-many-th is also shifted alone."""


def steps(config: AttentionConfig) -> int:
    """K/V blocks that make every ring of buffers wrap twice."""
    return 2 * config.stages + 1


def escapes(config: AttentionConfig, mutants: list[Mutant]) -> list[str]:
    """The mutants that nothing objects to."""
    return [m.what for m in mutants if not _caught(config, m)]


def _caught(config: AttentionConfig, mutant: Mutant) -> bool:
    return not run(config, steps(config), program=mutant.program).fine


def equivalent(config: AttentionConfig) -> dict[str, str]:
    """Deletions that change nothing, with the reason."""
    found: dict[str, str] = {}
    commit = "without cp.async.commit_group #{} in _start_copy"
    if config.async_copy and config.load_q:
        found[commit.format(1)] = (
            "Q is first read after K's wait, which is for all groups: Q's copies then belong to K's group"
        )
    if config.stages == 2:
        found[commit.format(2)] = (
            "the first K and V are waited for together: K's copies then belong to V's group, committed next"
        )
    return found


@pytest.mark.parametrize("key", RUNGS)
def test_each_barrier_wait_and_commit_is_needed(key):
    config = RUNGS[key]
    mutants = deletions(traced(config))
    assert len(mutants) >= 6, "the kernel synchronises"
    assert sorted(escapes(config, mutants)) == sorted(equivalent(config))


@pytest.mark.parametrize("key", RUNGS)
def test_each_stage_and_tile_index_matters(key):
    config = RUNGS[key]
    if not config.head_dim_panels:  # the same lines with half the instructions
        config = replace(config, head_dim=64)
    mutants = shifts(traced(config), config.stages, EVERY)
    assert len(mutants) >= 6, "Q, K and V are written and read"
    assert escapes(config, mutants) == []


@pytest.mark.parametrize("key", RUNGS)
def test_the_unchanged_program_is_fine(key):
    """So that what the mutants are caught by is their defect; also under adversarial orders of the warps."""
    config = RUNGS[key]
    for seed in (None, 0, 1):
        outcome = run(config, steps(config), seed=seed)
        assert outcome.fine, (seed, outcome.error, *map(str, outcome.emulation.findings))


MASKED: dict[str, dict[str, Any]] = {
    "causal": {"window": (None, 0)},
    "window and ragged lengths": {"window": (40, 8), "short": 8},
}
"""Masks whose blocks are skipped or cut; ``short``: so many positions less than whole tiles."""


@pytest.mark.parametrize("key", ["2", "10", "best"])
@pytest.mark.parametrize("mask", MASKED)
def test_the_mutants_of_masked_kernels(key, mask):
    """Loops over fewer blocks, and blocks of their own for the masked ones, synchronise as well."""
    config, options = RUNGS[key], dict(MASKED[mask])
    short = options.pop("short", 0)
    lengths = config.tile_m - short, max(config.tile_m, config.tile_n * steps(config)) - short
    problem = AttentionProblem(1, 1, 1, *lengths, config.head_dim, config.dtype, **options)
    program = traced(config, problem.features(config))
    emulation, expected, _ = launch(config, problem, program)
    assert emulation.findings == ()
    assert np.isfinite(expected.astype(np.float32)).all()
    escaped: list[str] = []
    for mutant in [*deletions(program), *shifts(program, config.stages)]:
        emulation, out, _ = launch(config, problem, mutant.program)
        if not emulation.findings and out.tobytes() == expected.tobytes():
            escaped.append(mutant.what)
    assert sorted(escaped) == sorted(equivalent(config))


def test_the_aliased_tiles_of_the_published_listing_race():
    """Its shared-memory plan gives Q, K and V one region: ``smem_K = smem_Q; smem_V = smem_K``."""
    config = RUNGS["1"]
    program = traced(config)
    offsets = {region.name: region.offset for region in program.shared}
    distances = {name: offsets["q_tile"] - offset for name, offset in offsets.items()}
    aliased = _onto_q(config, distances)
    assert [m.what for m in aliased if not _caught(config, m)] == []
    kinds = {f.kind for f in run(config, steps(config), program=aliased[-1].program).emulation.findings}
    assert kinds & {"race", "in_flight"}, kinds


def _onto_q(config: AttentionConfig, distances: dict[str, int]) -> list[Mutant]:
    """K on Q; V on Q; both, as the listing has it."""
    program = traced(config)
    choices: tuple[tuple[str, ...], ...] = (("k_tile",), ("v_tile",), ("k_tile", "v_tile"))
    return [regions_moved(program, {name: distances[name] for name in names}) for names in choices]


@kernel(threads=64)
def reversed_through_alias(k: Kernel, source: Global[f32], out: Global[f32], *, barrier: bool) -> None:
    """Two tiles on one region: the second is written while another warp may still read the first."""
    first = k.shared(f32, 64, name="first")
    second = k.shared(f32, 64, name="second", alias=first)
    first.store(source.load(k.thread), 0, k.thread)
    k.syncthreads()
    (mirrored,) = first.load(0, 63 - k.thread)
    if barrier:
        k.syncthreads()
    second.store(mirrored * 2.0, 0, k.thread)
    k.syncthreads()
    out.store(second.load(0, k.thread), k.thread)


def test_a_planted_race_on_aliased_tiles_names_both_lines():
    source, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    clean = emulate(reversed_through_alias.trace(barrier=True), 1, [source, out])
    assert clean.findings == ()
    assert np.array_equal(out, source[::-1] * 2)
    found = emulate(reversed_through_alias.trace(barrier=False), 1, [source, out]).findings
    assert [f.kind for f in found] == ["race"]
    lines = {f.line for f in (found[0].where, found[0].other) if f is not None}
    start = reversed_through_alias.function.__code__.co_firstlineno
    source_lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    texts = {source_lines[line - 1].strip() for line in lines}
    assert all(line > start for line in lines)
    assert texts == {"(mirrored,) = first.load(0, 63 - k.thread)", "second.store(mirrored * 2.0, 0, k.thread)"}
