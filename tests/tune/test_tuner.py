"""The search on an operation whose answer is known: what is pruned, what wins, and what is kept."""

import errno
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.clock import SimulatedClock
from tests.tune.fakes import GPU, FakeConfig, FakeOperation, FakeProblem, fake_gpu
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.ops import tuned
from warploom.tune.tuner import Effort, GpuLostError, Tuner

QUICK = Effort(sample_seconds=5e-4, warm_up_seconds=2e-4, rounds=2, final_rounds=5)
BEST_LONG = FakeConfig(128, 8, 2, hint=True)
LONG, SHORT = FakeProblem(4096), FakeProblem(64)


def tuner(operation: Any = None, **options):
    operation = operation or FakeOperation()
    options = {"effort": QUICK, "build": operation.build} | options
    return Tuner(operation, fake_gpu(operation.clock), **options)


def found(outcome):
    assert outcome.found is not None
    return outcome.found


def config(outcome):
    return FakeConfig.parse(found(outcome).config)


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")


def test_the_fastest_wins_with_its_small_flags():
    operation = FakeOperation()
    outcome = tuner(operation).tune(LONG)
    assert config(outcome) == BEST_LONG
    assert outcome.complete
    kept = found(outcome)
    best, default = operation.cost(LONG.n, BEST_LONG), operation.cost(LONG.n, FakeConfig())
    assert (kept.seconds, kept.speedup) == (pytest.approx(best, rel=1e-3), pytest.approx(default / best, rel=1e-3))
    assert kept.timed == len(set(operation.ran))
    assert tuned.find(GPU, FakeProblem(5000).size_class) == kept
    assert tuned.find(GPU, SHORT.size_class) is None


def test_other_problems_have_other_configurations_and_begin_with_what_won_before():
    operation = FakeOperation()
    search = tuner(operation)
    assert config(search.tune(LONG)) == BEST_LONG
    operation.ran.clear()
    assert config(search.tune(SHORT)) == FakeConfig(32, 4, 2, hint=True)
    assert BEST_LONG in operation.ran, "its hint is in no configuration of the space"
    assert len(operation.compiled) == len(set(operation.compiled)), "each kernel is compiled once"


def test_drifting_clocks_do_not_decide():
    """Interleaved rounds: a GPU that slows down with every call still has the same winner."""
    assert config(tuner(FakeOperation(SimulatedClock(drift=1e-4))).tune(LONG)) == BEST_LONG


@pytest.mark.parametrize(
    ("defect", "reason", "is_compiled", "is_checked"),
    [
        ("wrong", "computes wrong results", True, True),
        ("spilling", "spills 4096 bytes", True, False),
        ("broken", "does not compile: a test", True, False),
        ("crashing", "does not run: the CUDA driver refused a call: a test", True, True),
    ],
)
def test_what_is_wrong_is_never_timed(defect, reason, is_compiled, is_checked):
    operation = FakeOperation()
    setattr(operation, defect, lambda config: config.tile == 128)
    outcome = tuner(operation).tune(LONG)
    assert {c.tile for c in operation.ran} == {16, 32, 64}
    assert config(outcome) == FakeConfig(64, 8, 2, hint=True)
    assert outcome.dropped[reason] >= 6
    assert any(c.tile == 128 for c in operation.compiled) == is_compiled
    assert any(c.tile == 128 for c in operation.checked) == is_checked


def test_what_does_not_fit_is_not_compiled_and_twins_are_timed_once():
    operation = FakeOperation()
    outcome = tuner(operation).tune(LONG)
    assert all(c.tile >= 8 * c.warps for c in operation.compiled)
    assert outcome.dropped["more warps than rows"] >= 6
    twins = FakeOperation(wrong=lambda c: c.tile != 16)
    assert config(tuner(twins).tune(LONG, again=True)).tile == 16
    assert not any(c.order for c in twins.ran), "order makes no other code at tile 16"


def test_a_wrong_default_leaves_the_others_and_where_nothing_is_right_nothing_is_kept():
    operation = FakeOperation(wrong=lambda c: True)
    outcome = tuner(operation).tune(LONG)
    assert (outcome.found, operation.ran, tuned.kept()) == (None, [], [])
    outcome = tuner(FakeOperation(wrong=lambda c: c == FakeConfig())).tune(LONG)
    assert config(outcome) == BEST_LONG
    assert found(outcome).speedup == 1.0


def test_a_known_class_is_not_searched_again():
    first = tuner().tune(LONG)
    operation = FakeOperation()
    known = tuner(operation).tune(FakeProblem(4100))
    assert (known.found, known.known, operation.ran, operation.compiled) == (first.found, True, [], [])
    assert not tuner(operation).tune(LONG, again=True).known
    assert operation.ran


def test_other_sources_search_again(monkeypatch):
    tuner().tune(LONG)
    monkeypatch.setattr(tuned, "current_sources", lambda: "other")
    outcome = tuner().tune(LONG)
    assert not outcome.known
    assert found(outcome).sources == "other"


def test_a_notation_that_is_not_read_any_more_carries_nothing_over():
    long, short = tuner(FakeOperation(kinds=(MatmulSm80,))).tune_all([LONG, SHORT])
    assert config(long) == BEST_LONG
    assert config(short) == FakeConfig(32, 4, 2, hint=True)


def test_a_kernel_that_takes_the_gpu_with_it_ends_the_search():
    operation = FakeOperation(crashing=lambda c: c == FakeConfig(128, 8, 2), lost=True)
    with pytest.raises(GpuLostError, match=r"tile=128.*warps=8.*refused a call"):
        tuner(operation).tune(LONG)
    assert operation.ran == []


def test_a_kernel_that_hangs_is_told():
    bad, hung = FakeConfig(32, 4), threading.Event()
    told = []

    class KilledError(BaseException):
        """What ``leave_hung`` does to the process."""

    def hang(config):
        if config == bad:
            assert hung.wait(20)
            raise KilledError

    def report(name):
        told.append(name)
        hung.set()

    with pytest.raises(KilledError):
        tuner(FakeOperation(first_run=hang), effort=replace(QUICK, hung_after_seconds=0.1), hung=report).tune(LONG)
    assert told == [str(bad)]


def test_the_budget_ends_the_search_with_the_best_so_far():
    operation = FakeOperation()
    search = tuner(operation, budget=0.05, now=lambda: operation.clock.now)
    first, *others = search.tune_all([LONG, SHORT, FakeProblem(256)])
    assert found(first)
    assert not first.complete
    assert [(o.found, o.complete) for o in others] == [(None, False)] * 2
    assert operation.clock.now < 0.5


def test_progress_only_rises():
    told = []
    tuner(report=lambda text, fraction: told.append((fraction, text))).tune_all([LONG, SHORT])
    texts = " ".join(text for _, text in told)
    assert all(word in texts for word in ("compiling 1/", "checking results", "timing", "finalists", "fake n=2^12"))
    assert min(fraction for fraction, text in told if "n=2^6" in text) >= 0.5
    assert all(0 <= fraction <= 1 for fraction, _ in told)


def test_a_folder_that_cannot_be_written_is_an_error_before_hours_are_spent(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "file"))
    operation = FakeOperation()
    with pytest.raises(OSError, match="file"):
        tuner(operation)
    assert operation.ran == []


def test_a_disk_that_fills_up_costs_the_file_and_not_the_search(monkeypatch):
    search = tuner()
    monkeypatch.setattr(tuned, "keep", full_disk)
    outcome = search.tune(LONG)
    assert config(outcome) == BEST_LONG
    assert outcome.not_kept == "there: No space left on device"
    assert tuned.kept() == []


def test_what_is_far_behind_is_not_timed_again():
    told: list[str] = []
    tuner(effort=replace(QUICK, most_behind=1.05), report=lambda text, _: told.append(text)).tune(LONG)
    assert "timing 3 finalists" in told, "the best, the same with its hint, and the default"


def test_one_flag_must_be_worth_it():
    outcome = tuner(effort=replace(QUICK, worth=1.10)).tune(LONG)
    assert config(outcome) == replace(BEST_LONG, hint=False)
