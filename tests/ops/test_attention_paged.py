"""``attention_paged`` on CPU arrays: right beside float64, equal bits with a given split, and what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from tests.ops.paged_cases import Step
from warploom.core.dtypes import f16
from warploom.core.errors import ConfigError, ProblemError

STEPS = {
    "pages of 16": Step((200, 3, 0, 256)),
    "contiguous": Step((130, 0, 41), page=0),
    "a group of 16, pages of 48": Step((90, 144), page=48, capacity=144, group=16),
    "several queries, two heads": Step((70, 1), (4, 4), kv_heads=2),
    "more rows than a tile": Step((100,), (7,), group=6),
    "mixed with a chunk of a prompt, and nothing": Step((150, 60, 9, 80), (1, 40, 0, 2)),
    "a window": Step((200, 30), (3, 3), options={"window": (40, 0)}),
    "a window ahead": Step((40, 90), (5, 5), options={"causal": False, "window": (20, 6)}),
    "a soft cap": Step((100,), (2,), options={"softcap": 2.0}),
    "no mask": Step((64, 77), (2, 2), options={"causal": False}),
    "head_dim 8, eight key heads in a line": Step((100, 33), kv_heads=8, head_dim=8),
    "head_dim 72, float16": Step((100, 33), head_dim=72, dtype=f16),
    "head_dim 128": Step((256, 65), head_dim=128, page=64),
    "head_dim 192": Step((100,), head_dim=192),
    "head_dim 256": Step((130, 5), head_dim=256),
    "sinks, two key heads in a line": Step(
        (200, 30), (2, 2), kv_heads=2, head_dim=32, options={"sinks": np.array([2.5, -1.0, 0.5, 3.0], np.float32)}
    ),
    "fp8": Step((200, 3, 40), (2, 2, 2), fp8=True),
    "fp8, contiguous, scales by head": Step(
        (130, 70),
        page=0,
        kv_heads=2,
        fp8=True,
        options={name: np.array([[0.5, 2.0], [1.0, 0.25]], np.float32) for name in ("k_scale", "v_scale")},
    ),
    "fp8, head_dim 80, one scale, sinks": Step(
        (64, 200),
        page=32,
        head_dim=80,
        fp8=True,
        options={
            **{name: np.array([2.0], np.float32) for name in ("k_scale", "v_scale")},
            "sinks": np.array([0.5, 3.0], np.float32),
        },
    ),
    "fp8, scales that are no power of two": Step(
        (200, 130),
        (4, 4),
        page=0,
        kv_heads=2,
        dtype=f16,
        fp8=True,
        options={name: np.array([[0.6667, 1.7], [5.3, 3.3]], np.float32) for name in ("k_scale", "v_scale")},
    ),
    "fp8, q times its scale is beyond float16": Step(
        (64, 100),
        (2, 2),
        dtype=f16,
        fp8=True,
        options={"k_scale": np.array([1e5], np.float32), "v_scale": np.ones(1, np.float32), "scale": 1e-5 / 8},
    ),
    "fp8, q times its scale is below float16's normal numbers": Step(
        (64, 100),
        (2, 2),
        dtype=f16,
        fp8=True,
        options={"k_scale": np.array([1e-6], np.float32), "v_scale": np.ones(1, np.float32), "scale": 1e6 / 8},
    ),
    "fp8, head_dim 144": Step((100,), head_dim=144, fp8=True),
    "a given split, head_dim 8": Step((250, 3), head_dim=8, options={"fixed_split": 128}),
    "a given split": Step((256, 100), (2, 2), options={"fixed_split": 128}),
    "a given split, mixed": Step((200, 256, 30, 140), (9, 1, 0, 2), options={"fixed_split": 128}),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_element_is_as_near_float64_as_its_type_allows(name: str) -> None:
    assert STEPS[name].problems() == []


def test_random_steps() -> None:
    numbers = np.random.default_rng(7)
    for seed in range(3):
        batch, page = int(numbers.integers(1, 5)), int(numbers.choice([0, 16, 32, 64]))
        step = Step(
            tuple(numbers.integers(0, 193, batch).tolist()),
            (int(numbers.integers(1, 6)),) * batch,
            page,
            192,
            int(numbers.integers(1, 3)),
            int(numbers.choice([1, 3, 4])),
            int(numbers.choice([24, 64])),
            seed=seed,
        )
        assert step.problems() == [], step


def test_a_given_split_gives_equal_bits_whatever_else_is_in_the_batch() -> None:
    options: dict[str, Any] = {"fixed_split": 128}
    step = Step((200, 128, 17), (2,) * 3, options=options)
    outs, logs = step.call()
    (queries, k, v, lens), named = step.arguments
    for number in range(3):
        alone = slice(number, number + 1)
        own = {**named, "block_table": named["block_table"][alone]}
        out, lse = warploom.attention_paged(queries[alone], k, v, lens[alone], **own, return_lse=True)
        assert np.array_equal(np.swapaxes(out[0], 0, 1).view(np.uint16), outs[number].view(np.uint16))
        assert np.array_equal(lse[0], logs[number])


def test_a_given_split_gives_equal_bits_whatever_else_is_packed_beside() -> None:
    options: dict[str, Any] = {"fixed_split": 128}
    step = Step((200, 250, 140), (9, 1, 2), options=options)
    outs, logs = step.call()
    (queries, k, v, lens), named = step.arguments
    starts = named["cu_seqlens_q"]
    for number in (0, 2):
        own, table = queries[starts[number] : starts[number + 1]], named["block_table"][number : number + 1]
        out, lse = warploom.attention_paged(
            own,
            k,
            v,
            lens[number : number + 1],
            block_table=table,
            return_lse=True,
            cu_seqlens_q=np.array([0, len(own)], np.int32),
            **options,
        )
        assert np.array_equal(out.swapaxes(0, 1).view(np.uint16), outs[number].view(np.uint16))
        assert np.array_equal(lse, logs[number])


def test_no_kernel_depends_on_lengths_batch_or_pages() -> None:
    numbers, kernels = np.random.default_rng(0), set()
    for _ in range(40):
        batch, pages = int(numbers.integers(1, 300)), int(numbers.integers(1, 5000))
        entries, q_len = int(numbers.integers(1, 200)), int(numbers.integers(1, 5))
        q = np.zeros((batch, q_len, 4, 64), np.float16)
        cache = np.broadcast_to(np.zeros((1, 16, 1, 64), np.float16), (pages, 16, 1, 64))
        cache = np.lib.stride_tricks.as_strided(cache, cache.shape, (2048, 128, 128, 2))
        table, lens = np.zeros((batch, entries), np.int32), np.zeros(batch, np.int32)
        made = warploom.plan_attention_paged(q, cache, cache, lens, block_table=table)
        kernels |= {call.source for call in made.calls}
    assert len(kernels) == 2


def test_entries_that_point_outside_are_named_or_cut_off() -> None:
    step = Step((200, 100))
    (q, k, v, lens), named = step.arguments
    good = warploom.attention_paged(q, k, v, lens, **named, check=True)
    assert np.isfinite(good.astype(np.float32)).all()
    for place, value in (((0, 3), 4000), ((1, 0), -1)):
        table = named["block_table"].copy()
        table[place] = value
        with pytest.raises(
            ProblemError, match=rf"block_table\[{place[0]}, {place[1]}\] is {value}: there are 32 pages"
        ):
            warploom.attention_paged(q, k, v, lens, block_table=table, check=True)
        warploom.attention_paged(q, k, v, lens, block_table=table)  # the emulator finds any read outside
    for wrong in (257, -3):
        with pytest.raises(ProblemError, match=rf"kv_lens\[1\] is {wrong}: a sequence has room for 256 keys"):
            warploom.attention_paged(q, k, v, np.array([200, wrong], np.int32), **named, check=True)
        full = np.where(named["block_table"] < 32, named["block_table"], 0)
        warploom.attention_paged(q, k, v, np.array([200, wrong], np.int32), block_table=full)
    starts = np.array([0, 3, 2], np.int32)
    with pytest.raises(ProblemError, match=r"cu_seqlens_q\[2\] is 2"):
        warploom.attention_paged(np.repeat(q[0], 3, 0), k, v, lens, **named, cu_seqlens_q=starts, check=True)
    warploom.attention_paged(np.repeat(q[0], 3, 0), k, v, lens, **named, cu_seqlens_q=starts)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": np.zeros((2, 1, 2, 64), np.float32)}, "q is f32"),
    ({"q": np.zeros((2, 2, 64), np.float16)}, r"q has shape \(2, 2, 64\); it must be \(batch, q_len"),
    ({"q": np.zeros((2, 1, 3, 72), np.float16)}, "k_cache has shape .*head_dim = 72, as q has"),
    ({"k_cache": np.zeros((4, 16, 2, 64), np.float16)}, "v_cache has shape .*kv_heads = 2, as k_cache has"),
    (
        {"k_cache": np.zeros((4, 24, 1, 64), np.float16), "v_cache": np.zeros((4, 24, 1, 64), np.float16)},
        "a page has 24 keys",
    ),
    ({"kv_lens": np.zeros(3, np.int32)}, r"kv_lens has shape \(3,\)"),
    ({"kv_lens": np.zeros(2, np.int64)}, "kv_lens is int64, .*: convert it to int32"),
    ({"block_table": np.zeros((3, 2), np.int32)}, r"block_table has shape \(3, 2\); .* batch = 2, as q has"),
    ({"block_table": np.zeros((2, 4), np.int32)[:, ::2]}, "last dimension of block_table is not contiguous"),
    ({"block_table": None}, "k_cache has shape .*batch = 2, as q has.*block_table"),
    ({"cu_seqlens_q": np.zeros(2, np.int32)}, "q has shape .* with cu_seqlens_q"),
    ({"k_scale": np.zeros(1, np.float32)}, "belong to a float8_e4m3fn cache"),
    ({"k_cache": np.zeros((4, 16, 1, 64), ml_dtypes.float8_e4m3fn)}, "k_cache is float8_e4m3fn and v_cache is f16"),
    (
        {
            "k_cache": np.zeros((4, 16, 1, 64), ml_dtypes.float8_e4m3fn),
            "v_cache": np.zeros((4, 16, 1, 64), ml_dtypes.float8_e4m3fn),
            "k_scale": np.zeros(1, np.float32),
            "v_scale": np.zeros(2, np.float32),
        },
        r"v_scale has shape \(2,\)",
    ),
    ({"k_scale": 2.0}, "k_scale: float is not an array"),
    ({"kv_lens": [1, 2]}, "kv_lens: list is not an array"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\)"),
    *(({"fixed_split": n}, "fixed_split is a multiple of 128") for n in (0, -128, 64, 100, 2**30, 2**40)),
    ({"k_cache": np.zeros((4, 16, 1, 64), np.float16)[::-1]}, "k_cache has a stride that is negative"),
    ({"v_cache": np.zeros((4, 16, 1, 65), np.float16)[..., :64]}, "v_cache has rows .* multiples of 16 bytes"),
    ({"out": np.zeros((2, 1, 2, 64), np.float32)}, "q is f16 and out is f32"),
]


@pytest.mark.parametrize(("changed", "says"), REFUSED, ids=lambda x: "+".join(x) if isinstance(x, dict) else "")
def test_what_is_refused(changed: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "q": np.zeros((2, 1, 2, 64), np.float16),
        "k_cache": np.zeros((4, 16, 1, 64), np.float16),
        "v_cache": np.zeros((4, 16, 1, 64), np.float16),
        "kv_lens": np.zeros(2, np.int32),
        "block_table": np.zeros((2, 2), np.int32),
        **changed,
    }
    with pytest.raises(ProblemError, match=says):
        warploom.attention_paged(**given)


def test_a_given_split_may_be_longer_than_the_cache() -> None:
    arrays, named = Step((100,)).arguments
    found = [warploom.attention_paged(*arrays, **named, fixed_split=n) for n in (128, 2**30 - 128)]
    assert np.array_equal(*(x.view(np.uint16) for x in found))


def test_a_configuration_may_be_given_as_text() -> None:
    step = Step((100,))
    arrays, named = step.arguments
    made = warploom.plan_attention_paged(*arrays, **named)
    again = warploom.plan_attention_paged(*arrays, **named, config=str(made.config))
    assert again.config == made.config
    assert warploom.plan_attention_paged(*arrays, **named, scale=0.125).problem == made.problem  # the default, said
    with pytest.raises(ConfigError, match="head_dim is 64, the configuration's 128"):
        warploom.attention_paged(*arrays, **named, config="attention_decode(head_dim=128)")


def test_nothing_to_compute_gives_zeros() -> None:
    arrays, named = Step((0,)).arguments
    q, k, v, lens = arrays
    out, lse = warploom.attention_paged(q, k[:0], v[:0], lens, **named, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()
    assert warploom.attention_paged(q[:0], k, v, lens[:0], block_table=named["block_table"][:0]).shape == (0, 1, 2, 64)


def test_a_sink_takes_what_it_weighs() -> None:
    """None of it at -inf, all of it at +inf; where a sequence has no key the log-sum-exp is the sink."""
    arrays, named = Step((40, 0), page=0, capacity=48, group=3).arguments
    plain, without = warploom.attention_paged(*arrays, **named, return_lse=True)
    sinks = np.array([-np.inf, np.inf, 1.5], np.float32)
    out, lse = warploom.attention_paged(*arrays, **named, sinks=sinks, return_lse=True)
    assert np.array_equal(out[:, :, 0], plain[:, :, 0])
    assert np.array_equal(lse[:, 0], without[:, 0])
    assert not out[:, :, 1].any()
    assert np.isposinf(lse[:, 1]).all()
    assert lse[1, 2] == np.float32(1.5)


def test_out_is_written_and_returned() -> None:
    step = Step((30, 9), (2, 1))
    arrays, named = step.arguments
    expected = warploom.attention_paged(*arrays, **named)
    out = np.full_like(expected, np.nan)
    assert warploom.attention_paged(*arrays, **named, out=out) is out
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_torch_sees_one_operator() -> None:
    torch = pytest.importorskip("torch")
    step = Step((60, 33), dtype=f16)
    arrays, named = step.arguments
    given = [torch.from_numpy(x) for x in (*arrays, named["block_table"])]

    def call(q: Any, k: Any, v: Any, lens: Any, table: Any) -> Any:
        return warploom.attention_paged(q, k, v, lens, block_table=table, return_lse=True)

    eager = call(*given)
    compiled = torch.compile(call, fullgraph=True, backend="eager")(*given)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    with pytest.raises(ProblemError, match="requires a gradient"):
        call(given[0].clone().requires_grad_(), *given[1:])


def test_the_result_goes_where_out_lies_which_may_be_q() -> None:
    (q, k, v, lens), named = Step((40, 21), (2, 2), capacity=48).arguments
    expected = warploom.attention_paged(q, k, v, lens, **named)
    room = np.full((2, 3, 4, 64), 7, q.dtype)
    warploom.attention_paged(q, k, v, lens, out=room[:, 1:, ::2], **named)
    assert np.array_equal(room[:, 1:, ::2], expected)
    assert (room[:, :1] == 7).all()
    assert (room[:, :, 1::2] == 7).all()
    assert np.array_equal(warploom.attention_paged(q, k, v, lens, out=q, **named), expected)
    with pytest.raises(ProblemError, match="out shares memory with k_cache"):
        warploom.attention_paged(q, k, v, lens, out=k.reshape(-1)[: q.size].reshape(q.shape), **named)


@pytest.mark.parametrize("batch", [3, 5])
def test_a_result_in_q_is_fine_where_ctas_have_different_numbers_of_sequences(batch: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((batch, length, 1, 32)).astype(np.float16) for length in (1, 64, 64))
    lens = np.full(batch, 64, np.int32)
    expected = warploom.attention_paged(q, k, v, lens)
    assert np.array_equal(warploom.attention_paged(q, k, v, lens, out=q), expected)


def test_a_batch_of_no_sequences_has_a_plan_and_a_result() -> None:
    q, cache, lens = np.zeros((0, 4, 2, 16), np.float16), np.zeros((0, 16, 2, 16), np.float16), np.zeros(0, np.int32)
    plan = warploom.plan_attention_paged(q, cache, cache, lens)
    assert warploom.attention_paged(q, cache, cache, lens, config=plan.config).shape == q.shape


def test_every_call_is_held_to_where_its_out_lies(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that differ in addresses alone are one to the kernels; what memory they share differs all the same."""
    gpu.hold(monkeypatch)
    (q, k, v, lens), named = Step((40, 21), (2, 2), capacity=48).arguments
    both = np.concatenate([q, q], axis=2)
    mine, beside = both[:, :, :2], both[:, :, 2:]

    def call(q: Any, out: Any) -> Any:
        return warploom.attention_paged(q, k, v, lens, out=out, **named)

    expected = call(mine, np.array(both)[:, :, 2:]).copy()
    prepared = len(gpu.prepared)
    among_keys = k.reshape(-1)[: both.size].reshape(both.shape)[:, :, 2:]
    for _ in range(2):
        with pytest.raises(ProblemError, match="out shares memory with k_cache"):
            call(mine, among_keys)
    among_keys.flags.writeable = False
    with pytest.raises(ProblemError, match="read-only"):
        call(mine, among_keys)
    for out in (beside, beside, mine):
        assert np.array_equal(call(mine, out), expected)
    assert len(gpu.prepared) == prepared
