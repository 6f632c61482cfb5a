"""Every barrier, wait and commit of the rungs is needed, and every stage index matters: the emulator sees each mutant.

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

from tests.kernels.attention_cases import RUNGS, Case
from tests.kernels.mutate import Mutant, deletions, regions_moved, shifts
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.problem import AttentionConfig
from warploom.lang import Global, Kernel, f32, kernel
from warploom_lab.kernels.attention.ladder_config import RungSm80


def _small(config: AttentionConfig) -> AttentionConfig:
    """The same lines with fewer instructions; panels of 64 columns are told apart where there are two."""
    assert isinstance(config, RungSm80 | ForwardSm80)
    head_dim = 128 if isinstance(config, RungSm80) and config.head_dim_panels else 64
    return replace(config, tile_m=2 * config.warp_rows, tile_n=32, num_warps=2, head_dim=head_dim)


AS_BEFORE = ("6", "12", "14", "16")
"""Rungs that synchronise and address shared memory as the one before: they change the scale, and global accesses."""
KERNELS = {key: _small(config) for key, config in RUNGS.items() if key not in AS_BEFORE}

EVERY = 96
"""Of the instructions that address shared memory, each so-many-th is also shifted alone."""


def stages_of(config: AttentionConfig) -> int:
    """Of K and V; a rung has one."""
    return getattr(config, "stages", 1)


def case(config: AttentionConfig) -> Case:
    """K/V blocks that make every ring of buffers wrap twice."""
    return Case.of_blocks(config, 2 * stages_of(config) + 1)


def escapes(of: Case, mutants: list[Mutant]) -> list[str]:
    """The mutants that nothing objects to."""
    return [m.what for m in mutants if of.survives(m.program)]


def equivalent(config: AttentionConfig) -> dict[str, str]:
    """Deletions that change nothing, with the reason."""
    found: dict[str, str] = {}
    if isinstance(config, RungSm80) and config.async_copy and config.load_q:
        found["without cp.async.commit_group #1 in _start_copy"] = (
            "Q is first read after K's wait, which is for all groups: Q's copies then belong to K's group"
        )
    if isinstance(config, ForwardSm80):
        found["without cp.async.commit_group #1 in attention_sm80"] = (
            "Q is waited for with the first K and V: its copies then belong to their group"
        )
    return found


@pytest.mark.parametrize("key", KERNELS)
def test_each_barrier_wait_and_commit_is_needed(key: str) -> None:
    of = case(KERNELS[key])
    mutants = deletions(of.program)
    assert len(mutants) >= 6, "the kernel synchronises"
    assert sorted(escapes(of, mutants)) == sorted(equivalent(of.config))


@pytest.mark.parametrize("key", KERNELS)
def test_each_stage_and_tile_index_matters(key: str) -> None:
    of = case(KERNELS[key])
    mutants = shifts(of.program, stages_of(of.config), EVERY)
    assert len(mutants) >= 6, "Q, K and V are written and read"
    assert escapes(of, mutants) == []


@pytest.mark.parametrize("key", KERNELS)
def test_the_unchanged_program_is_fine(key: str) -> None:
    """So that what the mutants are caught by is their defect; also under adversarial orders of the warps."""
    for seed in (None, 0):
        assert (outcome := case(KERNELS[key]).run(seed=seed)).fine, (seed, str(outcome))


MASKED: dict[str, dict[str, Any]] = {
    "causal": {"window": (None, 0)},
    "window and ragged lengths": {"window": (40, 8), "short": 8},
}
"""Masks whose blocks are skipped or cut; ``short``: so many positions less than whole tiles."""


@pytest.mark.parametrize("key", [pytest.param("10", marks=pytest.mark.mutation), "best"])
@pytest.mark.parametrize("mask", MASKED)
def test_the_mutants_of_masked_kernels(key: str, mask: str) -> None:
    """Loops over fewer blocks, and blocks of their own for the masked ones, synchronise as well."""
    options = dict(MASKED[mask])
    short, whole = options.pop("short", 0), case(KERNELS[key])
    of = Case(whole.config, whole.q_len - short, max(whole.q_len, whole.kv_len) - short, **options)
    assert (outcome := of.run()).fine, outcome
    mutants = [*deletions(of.program), *shifts(of.program, stages_of(of.config))]
    assert sorted(escapes(of, mutants)) == sorted(equivalent(of.config))


def test_the_aliased_tiles_of_the_published_listing_race() -> None:
    """Its shared-memory plan gives Q, K and V one region: ``smem_K = smem_Q; smem_V = smem_K``."""
    of = case(RUNGS["1"])
    aliased = _onto_q(of.program)
    assert escapes(of, aliased) == []
    kinds = {f.kind for f in of.run(program=aliased[-1].program).emulation.findings}
    assert kinds & {"race", "in_flight"}, kinds


def _onto_q(program: Program) -> list[Mutant]:
    """K on Q; V on Q; both, as the listing has it."""
    offsets = {region.name: region.offset for region in program.shared}
    distances = {name: offsets["q_tile"] - offset for name, offset in offsets.items()}
    choices: tuple[tuple[str, ...], ...] = (("k_tile",), ("v_tile",), ("k_tile", "v_tile"))
    return [regions_moved(program, {name: distances[name] for name in names}) for names in choices]


@kernel(threads=64)
def reversed_through_alias(k: Kernel, source: Global[f32], out: Global[f32], *, barrier: bool) -> None:
    """Two tiles on one region: the second is written while another warp may still read the first."""
    first = k.shared(f32, 64, name="first")
    second = k.shared(f32, 64, name="second", alias=first)
    first.store(source.load(k.thread), 0, k.thread)
    k.syncthreads()
    mirrored = first.load(0, 63 - k.thread)
    if barrier:
        k.syncthreads()
    second.store(mirrored * 2.0, 0, k.thread)
    k.syncthreads()
    out.store(second.load(0, k.thread), k.thread)


def test_a_planted_race_on_aliased_tiles_names_both_lines() -> None:
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
    assert texts == {"mirrored = first.load(0, 63 - k.thread)", "second.store(mirrored * 2.0, 0, k.thread)"}
