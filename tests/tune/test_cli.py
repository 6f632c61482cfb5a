"""``warploom tune``: what it prints, keeps and refuses."""

import json

import pytest
from typer.testing import CliRunner

from tests.tune.fakes import FakeFamily, SimulatedClock, fake_gpu
from tests.tune.test_tuner import full_disk
from tests.winners.samples import GPU, winner
from warploom.cli.main import app
from warploom.tune import attention, gpu
from warploom.tune.tuner import Tuner
from warploom.winners import store
from warploom.winners.store import WinnerStore


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    return tmp_path


@pytest.fixture
def simulated(monkeypatch):
    """The whole command with a simulated GPU: only the family's problems are numbers here."""
    family = FakeFamily(SimulatedClock())

    def of_length(method):
        return lambda problem, *rest: method(problem.q_len, *rest)

    for name in ("problem_class", "default", "spaces", "misfits", "kernel_key", "workload"):
        monkeypatch.setattr(family, name, of_length(getattr(family, name)), raising=True)
    monkeypatch.setattr(attention, "AttentionFamily", lambda: family)
    monkeypatch.setattr(gpu, "gpu_for_tuning", lambda index: fake_gpu(family.clock))
    monkeypatch.setattr("warploom.tune.tuner.Tuner", lambda *a, **o: Tuner(*a, **o, build=family.build))
    return family


def run(*words):
    return CliRunner().invoke(app, ["tune", *words])


def test_tuning_prints_and_keeps_winners(folder, simulated):
    result = run("attention", "--seq", "4096,64", "--json")
    assert result.exit_code == 0, result.output
    outcomes = json.loads(result.stdout)
    assert [o["problem"]["sizes"]["n"] for o in outcomes] == [12, 6]
    assert all(o["winner"]["gpu"] == GPU and not o["known"] for o in outcomes)
    assert len(WinnerStore(folder / "tuned").winners()) == 2
    again = run("attention", "--seq", "4096")
    assert again.exit_code == 0
    assert "known" in again.output
    assert "tile=128 warps=8 stages=2 hint=1" in " ".join(again.output.split())


def test_what_the_budget_does_not_reach_is_an_exit_code(simulated, monkeypatch):
    monkeypatch.setattr(Tuner, "_is_over", lambda self: True)
    result = run("attention", "--seq", "4096", "--budget", "1")
    assert result.exit_code == 1
    assert "the budget was spent" in result.output


def test_a_full_disk_is_told_after_the_winners(folder, simulated, monkeypatch):
    monkeypatch.setattr(store, "_remove_unfinished_line", full_disk)
    result = run("attention", "--seq", "4096")
    assert result.exit_code == 2
    assert "tile=128 warps=8" in " ".join(result.output.split())
    assert "No space left on device" in result.output
    assert "are not kept" in result.output


def test_show_lists_own_stale_and_shipped_winners(folder, monkeypatch):
    assert "no winners are known" in run("show").output
    kept = WinnerStore(folder / "tuned")
    kept.add(winner(config="mine"))
    kept.add(winner(config="stale", version="0.0.1"))
    (folder / "shipped").mkdir()
    content = {"gpu": "NVIDIA Shipped", "winners": [winner(gpu="NVIDIA Shipped", config="theirs").json()]}
    (folder / "shipped" / "nvidia-shipped.json").write_text(json.dumps(content))
    store.shipped_winners.cache_clear()
    text = run("show").output
    assert text.index("found on this machine") < text.index("mine") < text.index("come with the package")
    assert text.index("theirs") < text.index("not used by") < text.index("stale")
    listed = json.loads(run("show", "--json", "--gpu", "NVIDIA Shipped").stdout)
    assert [(one["from"], one["config"]) for one in listed] == [("package", "theirs")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seq", "long"), "lengths with commas"),
        (("--heads", "6", "--kv-heads", "4"), "no multiple of --kv-heads 4"),
        (("--dtype", "int4"), "int4"),
    ],
)
def test_wrong_words_are_explained(words, message):
    result = run("attention", *words)
    assert result.exit_code == 2
    assert message in result.output


def test_without_a_gpu_it_says_what_is_missing():
    from warploom.cuda.device import has_gpu

    if has_gpu():
        pytest.skip("there is a GPU")
    result = run("attention")
    assert result.exit_code == 2
    assert "error:" in result.output
    assert "NVIDIA driver" in result.output or "GPU" in result.output
