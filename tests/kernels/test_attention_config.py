"""The configurations of attention: what fits, notation, overrides; what problems they take; the ladder; the choice."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_cases import EVERY_RUNG, RUNGS, Case, changed
from tests.properties import slow_property
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import TARGETS, target
from warploom.ir.program import Program
from warploom.ir.verify import verify
from warploom.kernels.attention.choice import KINDS, choose
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem, Even
from warploom.kernels.settings import read
from warploom_lab.kernels.attention.ladder import FULL_LADDER, LADDER
from warploom_lab.kernels.attention.ladder_config import RungSm80
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90

TILED: tuple[type[Any], ...] = (ForwardSm80, ForwardSm90, RungSm80, RungSm90)


def some(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Configurations of a kind, each flag at any of its documented choices."""
    return st.builds(kind, **{f.name: st.sampled_from(f.metadata["choices"]) for f in fields(kind)})


CONFIGS = st.one_of(*map(some, TILED))


@settings(deadline=None, max_examples=200)
@given(CONFIGS)
def test_notation_and_settings_round_trip(config: Any) -> None:
    assert read(str(config), KINDS) == config
    texts = {f.name: str(getattr(config, f.name)) for f in fields(config)}
    assert type(config)().with_settings(texts) == config


@settings(deadline=None, max_examples=60)
@given(CONFIGS, st.sampled_from(list(TARGETS.values())))
def test_check_gives_reasons_and_require_lists_them_all(config: Any, arch: Any) -> None:
    reasons = config.check(arch)
    assert all(isinstance(reason, str) and reason for reason in reasons)
    if not reasons:
        config.require(arch)
        assert config.shared_bytes <= arch.shared_per_block
        return
    with pytest.raises(ConfigError) as caught:
        config.require(arch)
    assert all(reason in str(caught.value) for reason in reasons)


@slow_property(12)
@given(CONFIGS)
def test_what_check_accepts_can_be_traced_and_verified(config: Any) -> None:
    if not config.check(target("sm_90a")):
        program = Case.of_blocks(config, 2).program
        verify(program)
        assert (program.threads, program.shared_bytes <= config.shared_bytes) == (config.threads, True)


@pytest.mark.parametrize("kind", TILED)
def test_every_flag_is_documented(kind: type[Any]) -> None:
    assert all(f.metadata["doc"] and f.metadata["choices"] for f in fields(kind))


def test_the_seeds_notation_is_read() -> None:
    config = RungSm80.parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_fragments+buffer+opt_softmax")
    assert (config.dtype, config.head_dim, config.tile_m, config.tile_n, config.num_warps) == (f16, 128, 64, 64, 4)
    assert (config.load_q, config.load_k, config.load_v) == (0, 2, 2)
    assert all((config.async_copy, config.eager, config.swizzle, config.double_buffer, config.folded_scale))
    assert not RungSm80.parse("(BF16, 64, 64, 64, 4): load_0_0_0_fragments").async_copy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(FP16, 128, 64): async", "no configuration"),
        ("(FP16, 128, 64, 64, 4): async+turbo", "'turbo' is no flag"),
        ("(FP16, 128, 64, 64, 4): head_dim=3", "'head_dim=3' is no flag"),
        ("attention_sm90(turbo=1)", "known: consumers, tile_n"),
        ("attention_sm90(stages)", "no configuration"),
        ("attention_sm80(stages=two)", "an integer"),
        ("attention_sm90(turns=maybe)", "true or false"),
        ("attention_sm90(dtype=quaternion)", "not a type warploom knows"),
    ],
)
def test_notation_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(text, KINDS)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("YES", True), ("1", True), ("off", False), ("0", False)])
def test_truth_in_words(text: str, value: bool) -> None:
    assert RungSm80().with_settings({"swizzle": text}).swizzle is value


ALONE = {"overlap": False, "turns": False, "persistent": False}


@pytest.mark.parametrize(
    ("kind", "flags", "says"),
    [
        (RungSm80, {"dtype": f32}, "not f16 or bf16"),
        (RungSm80, {"head_dim": 84}, "head_dim 84"),
        (RungSm80, {"tile_m": 48}, "tile_m 48"),
        (RungSm80, {"num_warps": 0}, "num_warps is at least 1"),
        (RungSm80, {"tile_n": 24}, "tile_n 24"),
        (RungSm80, {"load_k": 3}, "load_k is 0"),
        (RungSm80, {"eager": True, "async_copy": False}, "eager copies are asynchronous"),
        (RungSm80, {"tile_m": 512, "num_warps": 8}, "bytes of shared memory"),
        (ForwardSm80, {"tile_m": 64}, "tile_m 64 is no multiple"),
        (ForwardSm80, {"tile_n": 24}, "tile_n 24"),
        (ForwardSm80, {"head_dim": 8, "tile_n": 64}, "64 rows are no multiple of the 128 rows"),
        (ForwardSm80, {"stages": 1}, "at least 2 stages"),
        (ForwardSm80, {"tile_n": 128, "stages": 3}, "bytes of shared memory"),
        (ForwardSm90, {"consumers": 4}, "1 to 3 consumer"),
        (ForwardSm90, {"stages": 1}, "at least 2 stages"),
        (ForwardSm90, {"tile_n": 72}, "tile_n 72"),
        (ForwardSm90, {"sum_column": True, "head_dim": 80}, "64, 128 or 192"),
        (ForwardSm90, {"sum_column": True, "head_dim": 256}, "64, 128 or 192"),
        (ForwardSm90, {"sum_column": True, "dtype": f16}, "needs bf16"),
        (ForwardSm90, {"skip_masked": True, "consumers": 3, "tile_n": 48}, "up to 3 blocks at once"),
        (ForwardSm90, {"head_dim": 64}, "needs sm_90a"),
        (RungSm90, ALONE | {"turns": True}, "set overlap"),
        (RungSm90, ALONE | {"hold": True}, "set overlap"),
        (RungSm90, ALONE | {"persistent": True}, "set overlap"),
        (RungSm90, {"sum_column": True}, "the production kernel's"),
    ],
)
def test_what_does_not_fit_is_said(kind: type[Any], flags: dict[str, Any], says: str) -> None:
    reasons = kind(**flags).check(target("sm_86"))
    assert any(says in reason for reason in reasons), reasons


PROBLEM = AttentionProblem(2, 3, 3, Even(128, 128), 128, bf16)


def test_a_problem_that_fits() -> None:
    assert RungSm80().violations(PROBLEM) == []
    assert Case(RungSm80(), 128, 256, heads=3).call.grid == (2, 3, 1)
    assert PROBLEM.flops == 4 * 2 * 3 * 128 * 128 * 128


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (RungSm80(), {"head_dim": 64}, "head_dim is 64"),
        (RungSm80(), {"dtype": f16}, "the arrays are f16, the configuration bf16"),
        (RungSm80(), {"softcap": 5.0}, "no softcap"),
        (RungSm80(), {"lse": True}, "no log-sum-exp"),
        (RungSm80(softmax_in_shared=True), {"window": (None, 0)}, "no masks"),
        (ForwardSm80(), {"heads": 70000}, "at most 65535"),
        (ForwardSm80(), {"kv_len": 1 << 30}, "positions"),
        (ForwardSm90(), {"batch": 1 << 30}, "tiles of query rows"),
    ],
)
def test_problems_that_a_kernel_does_not_take(config: AttentionConfig, changes: dict[str, Any], says: str) -> None:
    assert config.violations(PROBLEM) == []
    reasons = config.violations(changed(PROBLEM, **changes))
    assert any(says in reason for reason in reasons), reasons


@cache
def traced(config: AttentionConfig) -> Program:
    """A small problem's, which several architectures choose."""
    return Case(config, 64, 64).program


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_every_problem_has_a_configuration_that_can_be_traced(head_dim: int, arch: str) -> None:
    for length, causal, cap in ((64, True, None), (4096, True, 20.0), (4096, False, None)):
        window = (None, 0) if causal else (None, None)
        problem = AttentionProblem(4, 16, 16, Even(length, length), head_dim, f16, window=window, softcap=cap, lse=True)
        config, reason = choose(problem, target(arch))
        assert config.check(target(arch)) + config.violations(problem) == []
        assert reason
    assert isinstance(config, ForwardSm80 | ForwardSm90)
    verify(traced(config), target(arch))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("length", [512, 1024, 8192, 16384, 65536])
def test_sm90_multiplies_by_wgmma(head_dim: int, length: int) -> None:
    for right, cap, lse in product((None, 0), (None, 20.0), (False, True)):
        problem = changed(PROBLEM, q_len=length, kv_len=length, head_dim=head_dim, window=(None, right), softcap=cap)
        assert isinstance(choose(replace(problem, lse=lse), target("sm_90a"))[0], ForwardSm90), problem


CHUNK = AttentionProblem(1, 16, 16, Even(128, 8192), 128, bf16, window=(None, 0))


@pytest.mark.parametrize(
    "options", [{}, {"lse": True, "sinks": True}, {"softcap": 20.0}, {"window": (8000, 0)}], ids=lambda x: ",".join(x)
)
def test_all_sms_share_keys_that_few_tiles_would_pass(options: dict[str, Any]) -> None:
    """Beside what runs where there are more queries, fewer keys or fewer SMs (benchmarks/few_queries_cells.py)."""
    chunk, sm90 = changed(CHUNK, **options), target("sm_90a")
    assert isinstance(choose(chunk, sm90, 132)[0], Decode)
    assert isinstance(choose(changed(chunk, q_len=512), sm90, 132)[0], ForwardSm90)
    assert isinstance(choose(changed(chunk, kv_len=1024), sm90, 132)[0], ForwardSm90)
    assert isinstance(choose(chunk, sm90, 16)[0], ForwardSm90)
    assert isinstance(choose(replace(chunk, v_dim=64), sm90, 132)[0], ForwardSm90)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"kv_len": 1024}, 64),  # 32 tiles of 64, or 16 of 128, for 132 SMs
        ({"q_len": 256}, 64),
        ({"batch": 8}, 128),
        ({"batch": 8, "q_len": 64}, 64),
        ({"batch": 64, "q_len": 200, "kv_len": 200}, 128),
    ],
)
def test_tiles_are_as_small_as_takes_no_more_rounds(change: dict[str, int], rows: int) -> None:
    config, _ = choose(changed(CHUNK, **change), target("sm_90a"), 132)
    assert (type(config), config.tile_m) == (ForwardSm90, rows)


@pytest.mark.parametrize(("batch", "persistent"), [(1, False), (9, True)])
def test_ctas_that_have_one_tile_each_are_not_ready_for_another(batch: int, persistent: bool) -> None:
    config, _ = choose(changed(CHUNK, kv_len=1024, batch=batch), target("sm_90a"), 132)
    assert isinstance(config, ForwardSm90)
    assert config.persistent == persistent


def test_a_few_queries_of_wide_heads_take_the_blocks_of_as_many_keys() -> None:
    few, many = (AttentionProblem(1, 32, 8, Even(q, 8192), 256, bf16, window=(None, 0)) for q in (256, 8192))
    found = [choose(x, target("sm_90a"), 132)[0] for x in (few, many)]
    assert [replace(x, consumers=1) for x in found if isinstance(x, ForwardSm90)] == [found[0]] * 2


def test_tiles_of_few_queries_on_few_keys_share_an_sm() -> None:
    short = changed(CHUNK, batch=64, q_len=40, kv_len=40)
    assert isinstance(choose(short, target("sm_90a"), 132)[0], ForwardSm80)


@pytest.mark.parametrize(
    ("change", "in_registers"),
    [({}, True), ({"lse": True}, False), ({"dtype": f16}, False), ({"dtype": f16, "window": (None, None)}, True)],
)
def test_under_a_causal_mask_row_sums_in_registers_leave_q_in_shared_memory(
    change: dict[str, Any], in_registers: bool
) -> None:
    """As measured on the H200 (benchmarks/compare_trees.py)."""
    problem = changed(AttentionProblem(4, 16, 16, Even(4096, 4096), 128, bf16, window=(None, 0)), **change)
    config, _ = choose(problem, target("sm_90a"))
    assert isinstance(config, ForwardSm90)
    assert config.q_in_registers == in_registers


def test_a_chunk_of_a_prompt_takes_the_tiles_of_as_many_keys() -> None:
    """At head_dim 64 and a causal mask; a window bounds the keys."""
    prompt = AttentionProblem(4, 32, 32, Even(8000, 8000), 64, bf16, window=(None, 0))
    chunk = changed(prompt, q_len=512)
    assert choose(chunk, target("sm_90a"))[0] == choose(prompt, target("sm_90a"))[0]
    near = [replace(x, window=(200, 0)) for x in (prompt, chunk)]
    assert len({choose(x, target("sm_90a"))[0] for x in near}) == 1


def test_a_problem_for_no_kernel_says_why() -> None:
    with pytest.raises(ProblemError, match="head_dim 264"):
        choose(replace(PROBLEM, head_dim=264), target("sm_90a"))


def test_the_ladder_finds_rungs_by_key_and_name() -> None:
    assert LADDER.rung("2").config == RUNGS["2"]
    assert LADDER.rung("kernel 1: base") is LADDER.rung("1")
    with pytest.raises(ConfigError, match=r"no rung '99'; its rungs: .*1 \(kernel 1: base\)"):
        LADDER.rung("99")


def test_rungs_have_distinct_keys_and_say_what_they_change() -> None:
    rungs = FULL_LADDER.rungs
    assert all(rung.changes and rung.name for rung in rungs)
    assert len({rung.key for rung in rungs}) == len({rung.config for rung in rungs}) == len(rungs)


@pytest.mark.parametrize("key", ["1", "best", *(key for key in EVERY_RUNG if key not in RUNGS)])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, f16), (128, bf16)])
def test_every_rung_traces_and_verifies(key: str, head_dim: int, dtype: DType) -> None:
    config: Any = replace(EVERY_RUNG[key], head_dim=head_dim, dtype=dtype)  # type: ignore[type-var]
    if getattr(config, "sum_column", False):
        config = replace(config, dtype=bf16)
    arch = target(config.requires)
    config.require(arch)
    program = Case.of_blocks(config, 2).program
    verify(program, arch)
    assert all(op.where.file.endswith(".py") and op.where.line > 0 for op in program.ops())
    assert not any("/tile/" in op.where.file for op in program.ops()), "lines are the kernel author's"
