"""``warploom tune``: what it prints, keeps and refuses."""

import json
from dataclasses import replace

import pytest

from tests.tune.fakes import GPU, FakeConfig, FakeOperation, FakeProblem, fake_gpu
from tests.tune.test_tuner import full_disk
from warploom.core.dtypes import bf16
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.ops import tuned
from warploom.tune import attention, matmul
from warploom.tune.tuner import Effort, Tuner

BEST = str(FakeConfig(128, 8, 2, hint=True))


@pytest.fixture
def simulated(monkeypatch):
    """The whole command with a simulated GPU: all that the search sees of a problem is its number of rows.

    Holds the problems that the command asked for.
    """
    operation, asked = FakeOperation(), []
    monkeypatch.setattr(attention, "ATTENTION", operation)
    monkeypatch.setattr(matmul, "MATMUL", operation)
    monkeypatch.setattr("warploom.tune.tuner.gpu_for_tuning", lambda index: fake_gpu(operation.clock))

    class Simulated(Tuner):
        def tune_all(self, problems, *, again=False):
            asked.extend(problems)
            return super().tune_all([FakeProblem(getattr(p, "q_len", 0) or p.m) for p in problems], again=again)

    monkeypatch.setattr(
        "warploom.tune.tuner.Tuner", lambda *a, **o: Simulated(*a, **o, build=operation.build, effort=Effort(rounds=1))
    )
    return asked


@pytest.fixture
def run(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: invoke("tune", *words)


def flat(result):
    return " ".join(result.output.split())


def test_tuning_prints_and_keeps_configurations(run, simulated):
    result = run("attention", "--seq", "4096,64", "--json", "--causal", "--heads", "8", "--kv-heads", "2")
    assert result.exit_code == 0, result.output
    assert [(p.q_len, p.heads, p.kv_heads, p.window) for p in simulated] == [
        (4096, 8, 2, (None, 0)),
        (64, 8, 2, (None, 0)),
    ]
    outcomes = json.loads(result.stdout)
    assert [o["size_class"] for o in outcomes] == ["fake n=2^12", "fake n=2^6"]
    assert all(o["found"]["gpu"] == GPU and not o["known"] for o in outcomes)
    assert len(tuned.kept()) == 2
    again = run("attention", "--seq", "4096")
    assert again.exit_code == 0
    assert "known" in again.output
    assert BEST in flat(again)


def test_a_product_is_the_one_that_the_words_name(run, simulated):
    result = run("gemm", "4096", "512", "64", "--b", "nk", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert simulated == [contiguous_problem(4096, 512, 64, bf16, b_rows=False)]
    assert BEST in flat(result)


def test_what_the_budget_does_not_reach_is_an_exit_code(run, simulated, monkeypatch):
    monkeypatch.setattr(Tuner, "is_over", lambda self: True)
    result = run("attention", "--seq", "4096", "--budget", "1")
    assert result.exit_code == 1
    assert "the budget was spent" in result.output


def test_a_full_disk_is_told_after_the_configurations(run, simulated, monkeypatch):
    monkeypatch.setattr(tuned, "keep", full_disk)
    result = run("attention", "--seq", "4096")
    assert result.exit_code == 2
    assert flat(result).index(BEST) < flat(result).index("are not kept")
    assert "No space left on device" in result.output


def test_show_lists_what_calls_use_and_then_the_rest(run):
    assert "nothing has been tuned" in run("show").output
    made = tuned.Tuned(GPU, "one", "mine", 1e-3, 9e-4, 2e-3, 1.1, 30, "2026-01-01", tuned.current_sources())
    tuned.keep(made)
    tuned.keep(replace(made, size_class="two", config="stale", sources="of another day"))
    tuned.keep(replace(made, gpu="NVIDIA Other", config="theirs"))
    text = run("show").output
    assert text.index("theirs") < text.index("mine") < text.index("no call uses") < text.index("stale")
    listed = json.loads(run("show", "--json", "--gpu", GPU).stdout)
    assert [(one["config"], one["used"]) for one in listed] == [("mine", True), ("stale", False)]
