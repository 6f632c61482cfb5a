"""attention() takes the winner of the store where there is one, and says why."""

from dataclasses import replace

import pytest

from warploom.core.dtypes import bf16, f16
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.ladder import BEST
from warploom.kernels.attention.problem import AttentionProblem
from warploom.ops import attention_plan as ops
from warploom.winners.classes import attention_class
from warploom.winners.store import Winner, WinnerStore, package_version

GPU = "NVIDIA Test 9000"
PROBLEM = AttentionProblem(4, 16, 16, 4096, 4096, 128, bf16)
CONFIG = replace(BEST, tile_m=128, num_warps=4, tile_n=32, min_ctas=2)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(ops, "gpu_name", lambda device: GPU)
    return WinnerStore(tmp_path / "tuned")


def keep(store, config, problem=PROBLEM):
    store.add(
        Winner(GPU, package_version(), attention_class(problem), config, 1e-3, 9e-4, 2e-3, 9, 1.1, 30, "2026-01-01")
    )


def tuned(problem):
    found = ops.tuned(problem, target("sm_90a"), 0)
    assert found is not None
    return found


def test_a_winner_goes_before_the_default(store):
    assert ops.tuned(PROBLEM, target("sm_90a"), 0) is None
    keep(store, str(CONFIG))
    config, reason = tuned(PROBLEM)
    assert config == CONFIG
    assert reason.startswith(f"tuned on {GPU} for attention bf16 head_dim=128 mask=full")


def test_type_and_head_dim_follow_the_problem(store):
    keep(store, str(CONFIG))
    config, _ = tuned(replace(PROBLEM, dtype=f16, head_dim=96))
    assert config == replace(CONFIG, dtype=f16, head_dim=96)


def test_a_winner_leaves_behind_what_the_problem_has_no_room_for(store):
    """Row sums as a column need whole panels, and with carried maxima bf16; the rest stays."""
    winner = HopperConfig(carry_max=True, sum_column=True, hold=False)
    keep(store, str(winner))
    assert tuned(PROBLEM)[0] == winner
    for change in ({"dtype": f16}, {"head_dim": 96}):
        assert tuned(replace(PROBLEM, **change))[0] == replace(winner, sum_column=False, **change)


@pytest.mark.parametrize(
    "text", ["nonsense", "(BF16, 128, 64, 64, 4): async+no_such_flag", str(replace(CONFIG, tile_n=8))]
)
def test_a_winner_of_no_use_leaves_the_default(store, text):
    keep(store, text)
    assert ops.tuned(PROBLEM, target("sm_90a"), 0) is None


def test_a_winner_must_fit_the_target(store):
    keep(store, str(replace(BEST, tile_m=256, tile_n=128)))
    assert ops.tuned(PROBLEM, target("sm_90a"), 0) is not None
    assert ops.tuned(PROBLEM, target("sm_86"), 0) is None


def test_the_default_says_that_it_is_untuned():
    assert "untuned" in choose(PROBLEM, target("sm_90a"))[1]
