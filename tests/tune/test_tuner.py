"""The search on a family whose answer is known: what is pruned, what wins, what is kept, and what survives a kill."""

import errno
import json
import os
import threading
from dataclasses import replace

import pytest

from tests.tune.fakes import FakeConfig, FakeFamily, SimulatedClock, fake_gpu
from warploom.tune.space import Space, distinct
from warploom.tune.tuner import Effort, GpuLostError, Tuner
from warploom.winners import store
from warploom.winners.store import WinnerStore, find_winner

QUICK = Effort(sample_seconds=5e-4, warm_up_seconds=2e-4, rounds=2, final_rounds=5)
BEST_LONG = FakeConfig(128, 8, 2, hint=True)


def tuner(folder, family=None, **options):
    family = family or FakeFamily(SimulatedClock())
    options = {"effort": QUICK, "build": family.build} | options
    return Tuner(family, fake_gpu(family.clock), WinnerStore(folder), **options)


def won(outcome):
    assert outcome.winner is not None
    return outcome.winner


def test_a_space_comes_from_the_metadata():
    space = Space(FakeConfig(), ("tile", "stages"), frozenset({"size"}))
    assert len(list(space.combinations())) == 8
    assert next(space.combinations()) == FakeConfig(16, 4, 1)
    assert list(space.variants(FakeConfig(128))) == [
        FakeConfig(128, warps=2), FakeConfig(128, warps=8), FakeConfig(128, hint=True), FakeConfig(128, order=True),
    ]  # fmt: skip
    assert distinct([1, 2, 1]) == [1, 2]
    with pytest.raises(ValueError, match="no choices for note"):
        Space(FakeConfig(), ("note",))


def test_the_fastest_wins_with_its_small_flags(tmp_path):
    family = FakeFamily(SimulatedClock())
    outcome = tuner(tmp_path, family).tune(4096)
    assert outcome.winner is not None
    assert family.parse(won(outcome).config) == BEST_LONG
    assert won(outcome).seconds == pytest.approx(family.cost(4096, BEST_LONG), rel=1e-3)
    assert won(outcome).speedup == pytest.approx(
        family.cost(4096, FakeConfig()) / family.cost(4096, BEST_LONG), rel=1e-3
    )
    assert outcome.complete
    found = find_winner("NVIDIA Test 9000", family.problem_class(5000), WinnerStore(tmp_path))
    assert found is not None
    assert found.winner == outcome.winner


def test_other_problems_have_other_winners_and_take_over_small_flags(tmp_path):
    family = FakeFamily(SimulatedClock())
    long, short = tuner(tmp_path, family).tune_all([4096, 64])
    assert family.parse(won(long).config) == BEST_LONG
    assert family.parse(won(short).config) == FakeConfig(32, 4, 2, hint=True)
    assert len(family.compiled) == len(set(family.compiled)), "each kernel is compiled once"
    assert len(family.checked) == len(set(family.checked)), "and checked once"


def test_drifting_clocks_do_not_decide(tmp_path):
    """Interleaved rounds: a GPU that slows down with every call still has the same winner."""
    family = FakeFamily(SimulatedClock(drift=1e-4))
    assert family.parse(won(tuner(tmp_path, family).tune(4096)).config) == BEST_LONG


def test_results_do_not_depend_on_the_run(tmp_path):
    runs = []
    for name in ("a", "b"):
        family = FakeFamily(SimulatedClock())
        outcomes = tuner(tmp_path / name, family).tune_all([4096, 64, 256])
        runs.append(([o.winner for o in outcomes], [o.dropped for o in outcomes], family.ran))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("defect", "reason", "is_compiled", "is_checked"),
    [
        ("wrong", "computes wrong results", True, True),
        ("spilling", "spills 4096 bytes", True, False),
        ("broken", "does not compile: a test", True, False),
        ("crashing", "does not run: the CUDA driver refused a call: a test", True, True),
    ],
)
def test_what_is_wrong_is_never_timed(tmp_path, defect, reason, is_compiled, is_checked):
    family = FakeFamily(SimulatedClock())
    setattr(family, defect, lambda config: config.tile == 128)
    outcome = tuner(tmp_path, family).tune(4096)
    assert {c.tile for c in family.ran} == {16, 32, 64}
    assert family.parse(won(outcome).config) == FakeConfig(64, 8, 2, hint=True)
    assert outcome.dropped[reason] >= 6
    assert any(c.tile == 128 for c in family.compiled) == is_compiled
    assert any(c.tile == 128 for c in family.checked) == is_checked


def test_what_does_not_fit_is_not_compiled_and_twins_are_timed_once(tmp_path):
    family = FakeFamily(SimulatedClock())
    outcome = tuner(tmp_path, family).tune(4096)
    assert all(c.tile >= 8 * c.warps for c in family.compiled)
    assert outcome.dropped["more warps than rows"] == 6
    twins = FakeFamily(SimulatedClock(), wrong=lambda c: c.tile != 16)
    outcome = tuner(tmp_path / "twins", twins).tune(4096)
    assert not any(c.order for c in twins.ran), "order makes no other code at tile 16"
    assert twins.parse(won(outcome).config).tile == 16


def test_a_wrong_default_leaves_the_others(tmp_path):
    family = FakeFamily(SimulatedClock(), wrong=lambda c: c == FakeConfig())
    outcome = tuner(tmp_path, family).tune(4096)
    assert family.parse(won(outcome).config) == BEST_LONG
    assert won(outcome).speedup == 1.0


def test_nothing_right_means_no_winner(tmp_path):
    family = FakeFamily(SimulatedClock(), wrong=lambda c: True)
    outcome = tuner(tmp_path, family).tune(4096)
    assert outcome.winner is None
    assert family.ran == []
    assert WinnerStore(tmp_path).winners() == []


def test_a_known_winner_is_not_searched_again(tmp_path):
    first = tuner(tmp_path).tune(4096)
    family = FakeFamily(SimulatedClock())
    known = tuner(tmp_path, family).tune(4100)
    assert (known.winner, known.known, family.ran, family.compiled) == (first.winner, True, [], [])
    assert not tuner(tmp_path, family).tune(4096, again=True).known
    assert family.ran


def test_another_version_of_the_package_searches_again(tmp_path, monkeypatch):
    tuner(tmp_path).tune(4096)
    monkeypatch.setattr("warploom.__version__", "99.0")
    family = FakeFamily(SimulatedClock())
    outcome = tuner(tmp_path, family).tune(4096)
    assert not outcome.known
    assert won(outcome).version == "99.0"
    assert {w.version for w in WinnerStore(tmp_path).winners()} > {"99.0"}


class Killed(BaseException):
    pass


def test_a_killed_search_goes_on_with_what_it_had_left(tmp_path):
    whole = FakeFamily(SimulatedClock())
    expected = tuner(tmp_path / "whole", whole).tune(4096)

    def kill(calls):
        if calls == kill_at:
            raise Killed

    resumed_shorter, folder = 0, tmp_path
    for kill_at in range(1, len(whole.ran), 97):
        folder = tmp_path / str(kill_at)
        family = FakeFamily(SimulatedClock(), after_calls=kill)
        with pytest.raises(Killed):
            tuner(folder, family).tune(4096)
        assert WinnerStore(folder).winners() == []
        family = FakeFamily(SimulatedClock())
        outcome = tuner(folder, family).tune(4096)
        assert won(outcome).config == won(expected).config
        resumed_shorter += len({str(c) for c in family.ran}) < len({str(c) for c in whole.ran})
    assert resumed_shorter > 0
    rounds = [r for r in WinnerStore(folder).records() if r["record"] == "round"]
    assert rounds
    assert set(rounds[-1]["left"]) <= set(rounds[-1]["seconds"])
    json.dumps(rounds)


def test_a_kernel_that_takes_the_gpu_with_it_is_left_out_next_time(tmp_path):
    bad = FakeConfig(128, 8, 2)
    family = FakeFamily(SimulatedClock(), crashing=lambda c: c == bad, lost=True)
    with pytest.raises(GpuLostError, match="start the same command again"):
        tuner(tmp_path, family).tune(4096)
    family = FakeFamily(SimulatedClock())
    other, outcome = tuner(tmp_path, family).tune_all([64, 4096])
    assert outcome.dropped["did not come back from its first run"] == 1
    assert other.dropped["did not come back from its first run"] == 1, "another length runs the same kernel"
    assert bad not in family.ran
    assert family.parse(won(outcome).config).tile == 128


def test_a_kernel_that_hangs_is_told_and_left_out_next_time(tmp_path):
    bad, told = FakeConfig(32, 4), threading.Event()

    def hang(config):
        if config == bad:
            assert told.wait(20)
            raise Killed  # what leave_hung does to the process

    family = FakeFamily(SimulatedClock(), first_run=hang)
    effort = replace(QUICK, hung_after_seconds=0.2)
    with pytest.raises(Killed):
        tuner(tmp_path, family, effort=effort, hung=lambda name: told.set()).tune(4096)
    family = FakeFamily(SimulatedClock())
    assert tuner(tmp_path, family).tune(4096).dropped["did not come back from its first run"] == 1
    assert bad not in family.ran


def test_rounds_of_another_space_do_not_count(tmp_path):
    store = WinnerStore(tmp_path)
    family = FakeFamily(SimulatedClock())
    problem = family.problem_class(4096)
    from warploom.winners.store import package_version

    record = {
        "record": "round", "gpu": "NVIDIA Test 9000", "version": package_version(), "problem": problem.json(),
        "space": "of another day", "round": 1, "left": [str(FakeConfig(16, 2))], "seconds": {},
    }  # fmt: skip
    store.append(record)
    assert family.parse(won(tuner(tmp_path, family).tune(4096)).config) == BEST_LONG


def test_the_budget_ends_the_search_with_the_best_so_far(tmp_path):
    family = FakeFamily(SimulatedClock())
    search = tuner(tmp_path, family, budget=0.05, now=lambda: family.clock.now)
    first, *others = search.tune_all([4096, 64, 256])
    assert first.winner is not None
    assert not first.complete
    assert [(o.winner, o.complete) for o in others] == [(None, False)] * 2
    assert family.clock.now < 0.5


def test_progress_only_rises(tmp_path):
    told = []
    tuner(tmp_path, report=lambda text, fraction: told.append((fraction, text))).tune_all([4096, 64])
    texts = " ".join(text for _, text in told)
    assert all(word in texts for word in ("compiling 1/", "checking results", "timing", "finalists", "fake bf16"))
    firsts = [fraction for fraction, text in told if "n=2^6" in text]
    assert min(firsts) >= 0.5
    assert all(0 <= fraction <= 1 for fraction, _ in told)


def test_an_unwritable_store_is_an_error_before_hours_are_spent(tmp_path):
    (tmp_path / "file").write_text("")
    family = FakeFamily(SimulatedClock())
    with pytest.raises(OSError, match="file"):
        tuner(tmp_path / "file", family)
    assert family.ran == []


def test_a_disk_that_fills_up_costs_the_record_and_not_the_search(tmp_path, monkeypatch):
    expected = tuner(tmp_path / "whole").tune(4096)
    search = tuner(tmp_path / "full")
    monkeypatch.setattr(store, "_remove_unfinished_line", full_disk)
    outcome = search.tune(4096)
    assert won(outcome).config == won(expected).config
    assert outcome.not_kept == f"{tmp_path / 'full' / 'winners.jsonl'}: No space left on device"
    assert expected.not_kept == ""
    monkeypatch.undo()
    assert WinnerStore(tmp_path / "full").winners() == []


def full_disk(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_one_flag_must_be_worth_it(tmp_path):
    family = FakeFamily(SimulatedClock())
    effort = replace(QUICK, worth=1.10)
    assert family.parse(won(tuner(tmp_path, family, effort=effort).tune(4096)).config) == replace(BEST_LONG, hint=False)
