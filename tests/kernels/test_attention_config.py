"""The attention configuration: what fits, its notation, overrides; problems and the ladder."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_cases import RUNGS, traced
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import TARGETS, target
from warploom.ir.verify import verify
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.ladder import BEST, LADDER
from warploom.kernels.attention.problem import AttentionProblem


def field_values(name: str) -> st.SearchStrategy[Any]:
    """Any of a flag's documented choices."""
    choices = next(f.metadata["choices"] for f in fields(AttentionConfig) if f.name == name)
    return st.sampled_from(choices)


CONFIGS = st.fixed_dictionaries({f.name: field_values(f.name) for f in fields(AttentionConfig)}).map(
    lambda flags: AttentionConfig(**flags)
)


@settings(deadline=None, max_examples=200)
@given(CONFIGS)
def test_the_notation_round_trips(config):
    assert AttentionConfig.parse(str(config)) == config


@settings(deadline=None, max_examples=200)
@given(CONFIGS)
def test_settings_as_text_round_trip(config):
    texts = {f.name: str(getattr(config, f.name)) for f in fields(config)}
    assert AttentionConfig().with_settings(texts) == config


@settings(deadline=None, max_examples=40)
@given(CONFIGS, st.sampled_from(list(TARGETS.values())))
def test_check_gives_reasons_and_require_lists_them_all(config, goal):
    reasons = config.check(goal)
    assert all(isinstance(reason, str) and reason for reason in reasons)
    if not reasons:
        config.require(goal)
        assert config.shared_bytes <= goal.shared_per_block
        return
    with pytest.raises(ConfigError) as caught:
        config.require(goal)
    assert all(reason in str(caught.value) for reason in reasons)


@settings(deadline=None, max_examples=12)
@given(CONFIGS)
def test_what_check_accepts_can_be_traced_and_verified(config):
    if not config.check():
        verify(traced(config))


def test_every_flag_is_documented():
    assert all(f.metadata["doc"] and f.metadata["choices"] for f in fields(AttentionConfig))


def test_the_seeds_notation_is_read():
    config = AttentionConfig.parse(
        "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_fragments+buffer+opt_softmax"
    )
    assert (config.dtype, config.head_dim, config.tile_m, config.tile_n, config.num_warps) == (f16, 128, 64, 64, 4)
    assert (config.load_q, config.load_k, config.load_v) == (0, 2, 2)
    assert all((config.async_copy, config.eager, config.swizzle, config.double_buffer, config.folded_scale))
    assert not AttentionConfig.parse("(BF16, 64, 64, 64, 4): load_0_0_0_fragments").async_copy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(FP16, 128, 64): async", "no configuration"),
        ("nothing", "no configuration"),
        ("(FP16, 128, 64, 64, 4): async+turbo", "'turbo' is no flag"),
        ("(FP16, 128, 64, 64, 4): head_dim=3", "'head_dim=3' is no flag"),
    ],
)
def test_notation_that_is_none_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        AttentionConfig.parse(text)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("turbo", "1", "known: tile_m, tile_n"),
        ("swizzle", "maybe", "true or false"),
        ("stages", "two", "an integer"),
        ("dtype", "quaternion", "not a type warploom knows"),
    ],
)
def test_settings_that_cannot_be_are_refused(flag, value, says):
    with pytest.raises(ConfigError, match=says):
        AttentionConfig().with_settings({flag: value})


@pytest.mark.parametrize(("text", "value"), [("true", True), ("YES", True), ("1", True), ("off", False), ("0", False)])
def test_truth_in_words(text, value):
    assert AttentionConfig().with_settings({"swizzle": text}).swizzle is value


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"dtype": f32}, "not f16 or bf16"),
        ({"head_dim": 84}, "head_dim 84"),
        ({"tile_m": 48}, "tile_m 48"),
        ({"num_warps": 0}, "num_warps is at least 1"),
        ({"tile_n": 24}, "tile_n 24"),
        ({"load_k": 3}, "load_k is 0"),
        ({"stages": 2}, "stages=2 needs eager"),
        ({"stages": 3, "eager": True, "cooperative": True}, "stages is 1 or 2"),
        ({"eager": True, "async_copy": False}, "eager copies are asynchronous"),
        ({"lazy_rescale": True}, "folded scales"),
        ({"tile_m": 512, "num_warps": 8}, "bytes of shared memory"),
    ],
)
def test_what_does_not_fit_is_said(flags: dict[str, Any], says):
    reasons = replace(AttentionConfig(), **flags).check(target("sm_86"))
    assert any(says in reason for reason in reasons), reasons


def _problem(q_len: int = 128, kv_len: int = 128, head_dim: int = 128, dtype: DType = bf16) -> AttentionProblem:
    return AttentionProblem(2, 3, 3, q_len, kv_len, head_dim, dtype)


def test_a_problem_that_fits():
    problem, config = _problem(), AttentionConfig()
    assert problem.misfits(config) == []
    assert problem.grid(config) == (2, 3, 2)
    assert problem.flops == 4 * 2 * 3 * 128 * 128 * 128


@pytest.mark.parametrize(
    ("problem", "says"),
    [(_problem(head_dim=64), "head_dim is 64"), (_problem(dtype=f16), "the arrays are f16, the configuration bf16")],
)
def test_misfits_are_said(problem, says):
    reasons = problem.misfits(AttentionConfig())
    assert any(says in reason for reason in reasons), reasons
    with pytest.raises(ConfigError, match=says):
        problem.grid(AttentionConfig())


def test_the_ladder_finds_rungs_by_key_and_name():
    assert LADDER.rung("2").config == RUNGS["2"]
    assert LADDER.rung("kernel 1: base") is LADDER.rung("1")
    assert LADDER.rung("best").config == BEST
    with pytest.raises(ConfigError, match=r"no rung '99'; its rungs: .*1 \(kernel 1: base\)"):
        LADDER.rung("99")


def test_rungs_have_distinct_keys_and_say_what_they_change():
    keys = [rung.key for rung in LADDER.rungs]
    assert len(set(keys)) == len(keys)
    assert all(rung.changes and rung.name for rung in LADDER.rungs)
    assert len({rung.config for rung in LADDER.rungs}) == len(keys)


@pytest.mark.parametrize("key", RUNGS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_every_rung_traces_and_verifies(key, head_dim, dtype):
    config = replace(RUNGS[key], head_dim=head_dim, dtype=dtype)
    config.require(target("sm_80"))
    program = traced(config)
    verify(program, target("sm_80"))
    assert program.threads == config.threads
    assert program.shared_bytes == config.shared_bytes
    assert all(op.where.file.endswith(".py") and op.where.line > 0 for op in program.ops())
