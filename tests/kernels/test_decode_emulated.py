# pyright: reportInvalidTypeForm=false
"""The decode kernels: every synchronisation is needed, any shares give right results, and splits equal bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.kernels.decode_cases import DecodeCase
from tests.kernels.mutate import deletions, shifts
from tests.ops.paged_cases import Step
from warploom.core.dtypes import bf16, s32, u32
from warploom.core.targets import target
from warploom.emulate import emulate
from warploom.kernels.attention.decode import Decode, decode_configuration
from warploom.kernels.attention.device.decode import EarlyLengths
from warploom.kernels.attention.problem import AttentionProblem, Cached
from warploom.kernels.source import named
from warploom.lang import Global, Kernel, kernel

SMALL = Decode(tile_m=16, keys=16, num_warps=4, stages=2, head_dim=16, dtype=bf16, ctas=1, heads=2)
STEP = Step((70, 33), page=16, capacity=80, head_dim=16, kv_heads=2, group=10)


def test_every_barrier_wait_and_commit_is_needed() -> None:
    case = DecodeCase(SMALL, STEP)
    mutants = deletions(case.program)
    assert len(mutants) >= 6
    assert case.escapes({m.what: m.program for m in mutants}) == []


def test_every_stage_index_matters() -> None:
    case = DecodeCase(SMALL, STEP)
    mutants = shifts(case.program, SMALL.stages)
    assert len(mutants) >= 6
    assert case.escapes({m.what: m.program for m in mutants}) == []


@pytest.mark.parametrize(("stages", "warps"), [(2, 1), (3, 2), (4, 4)])
def test_shares_of_any_size_give_the_same_result(stages: int, warps: int) -> None:
    config = Decode(tile_m=16, keys=16, num_warps=warps, stages=stages, head_dim=16, dtype=bf16, ctas=1)
    outs: list[tuple[Any, Any]] = []
    for multiprocessors in (1, 3, 40):
        findings, out, lse = DecodeCase(config, STEP, multiprocessors).run(seed=multiprocessors)
        assert findings == []
        outs.append((out.astype(np.float32), lse))
    for out, lse in outs[1:]:
        assert np.abs(out - outs[0][0]).max() <= 2.0**-7
        assert np.abs(lse - outs[0][1]).max() <= 1e-5


def test_kernels_that_begin_early_wait_for_what_may_not_be_there() -> None:
    case = DecodeCase(replace(SMALL, overlap=True), STEP, 3)
    assert [call.overlaps for call in case.calls] == [True, True]
    first, second = ([op.instruction.mnemonic for op in call.source.program.ops()] for call in case.calls)
    for names in (first, second):
        early = {name for name in names[: names.index("griddepcontrol.wait")] if "global" in name}
        assert {x for x in early if not x.startswith("prefetch")} == {"ld.relaxed.gpu.global.b32"}  # lengths, pages
    early = first[: first.index("griddepcontrol.wait")]
    assert early.count("prefetch.global.L2") == 4  # lengths and pages, and then keys and values
    assert first.index("griddepcontrol.wait") < first.index("griddepcontrol.launch_dependents")
    findings, out, lse = case.run()
    assert findings == []
    plain = DecodeCase(SMALL, STEP, 3).run()
    assert np.array_equal(out.view(np.uint16), plain[1].view(np.uint16))
    assert np.array_equal(lse, plain[2])


def test_copies_by_lengths_that_are_true_no_more_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = DecodeCase(replace(SMALL, overlap=True, stages=3), STEP, 3)

    def others(early: EarlyLengths) -> None:
        k = early._k
        with k.when(k.thread < early._batch):
            early._own[0].set(early._lengths.load(early._batch - 1 - k.thread))
        early._keep()

    source = case.main.source
    with monkeypatch.context() as changed:
        changed.setattr(EarlyLengths, "read", others)
        program = named(source.function).trace(source.name, **dict(source.arguments))
    again = [m for m in deletions(program) if "cp.async.wait_group" in m.what and "begin_share" in m.what]
    assert len(again) == 1
    assert case.escapes({"the same": program, **{m.what: m.program for m in again}}) == ["the same"]


@kernel(threads=64)
def lengths_that_change(k: Kernel, lengths: Global[s32], near: Global[s32], batch: u32, changes: u32) -> None:
    """What is known of lengths of which one ``changes``; the last entry of ``near`` says whether that was seen."""
    early = EarlyLengths(k, lengths, batch, 64)
    with k.when(early.few, uniform=True):
        early.read()
    with k.when((k.thread == 0) & (changes != 0)):
        lengths.store(k.value(7, s32), 2)
    k.syncthreads()
    early.read_again()
    seen = early.changed()
    with k.when(k.thread == 0):
        near.store(k.select(seen, k.value(1, s32), 0), batch)
    with k.loop(batch, start=k.thread, step=64) as number:
        near.store(early.of(batch - 1 - number), batch - 1 - number)


@pytest.mark.parametrize(("batch", "changes"), [(64, 0), (64, 1), (3, 1), (65, 0)])
def test_lengths_read_early_are_read_again_where_they_have_changed(batch: int, changes: int) -> None:
    lengths, near = np.arange(batch, dtype=np.int32), np.full(batch + 1, -1, np.int32)
    assert emulate(lengths_that_change.trace(), 1, [lengths, near, batch, changes]).findings == ()
    expected = np.arange(batch)
    if changes:
        expected[2] = 7
    assert near[:-1].tolist() == expected.tolist()
    assert near[-1] == (changes or batch > 64)


def test_every_barrier_of_early_lengths_is_needed() -> None:
    mutants = deletions(lengths_that_change.trace())
    assert len(mutants) == 4  # three barriers, and the one that reduces a predicate
    for mutant in mutants:
        lengths, near = np.arange(64, dtype=np.int32), np.full(65, -1, np.int32)
        assert emulate(mutant.program, 1, [lengths, near, 64, 1]).findings, mutant.what


def test_a_given_split_gives_equal_bits_on_any_number_of_ctas() -> None:
    step = replace(STEP, options={"fixed_split": 32})
    found = [DecodeCase(SMALL, step, multiprocessors).run() for multiprocessors in (1, 4)]
    assert all(findings == [] for findings, _, _ in found)
    assert all(np.array_equal(found[0][1].view(np.uint16), out.view(np.uint16)) for _, out, _ in found[1:])
    assert all(np.array_equal(found[0][2], lse) for _, _, lse in found[1:])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_problem_has_a_configuration_that_divides_a_given_split(arch: str, fp8: bool) -> None:
    head_dims = 64, 80, 128, 144, 192, 256, *(() if fp8 else (8, 16))
    for head_dim, kv_heads, group, packed in product(head_dims, (1, 2), (1, 32), (False, True)):
        cached = Cached(4 if packed else 1, 4096, 16, 9, 9, packed=packed, split=128, fp8=fp8)
        problem = AttentionProblem(4, group * kv_heads, kv_heads, cached, head_dim, bf16)
        config = decode_configuration(problem, target(arch))
        problems = config.check(target(arch)) + config.violations(problem)
        assert problems == (["fp8 needs compute capability 9.0"] if fp8 and arch != "sm_90a" else [])
