"""``append_to_cache``: every byte where it belongs and no other, rotary embedding beside float64, what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from tests.ops.paged_cases import Step
from warploom.core.errors import ProblemError

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]


def pair(both: Array) -> tuple[Array, Array]:
    """Keys and values."""
    return both[0], both[1]


def turned(x: Array, positions: Array, angles: Array, interleaved: bool) -> Array:
    """float64; x (tokens, heads, head_dim), angles (positions, rotary_dim / 2)."""
    x, half = x.astype(np.float64), angles.shape[1]
    cos, sin = np.cos(angles[positions])[:, None], np.sin(angles[positions])[:, None]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    ("rotary", "interleaved", "kind"),
    [
        (0, False, BF16),
        (64, False, BF16),
        (32, False, np.float32),
        (64, True, np.float32),
        (16, True, BF16),
    ],
)
def test_new_keys_and_values_lie_where_attention_looks_for_them(
    page: int, rotary: int, interleaved: bool, kind: Any
) -> None:
    numbers = np.random.default_rng(rotary)
    batch, tokens, kv_heads, d, capacity = 3, 2, 2, 64, 64
    lens = np.array([2, 33, 64], np.int32)
    shape = (batch * 4, 16, kv_heads, d) if page else (batch, capacity, kv_heads, d)
    caches = pair(numbers.standard_normal((2, *shape)).astype(BF16))
    before = [x.copy() for x in caches]
    k, v = (numbers.standard_normal((batch, tokens, kv_heads, d)).astype(BF16) for _ in range(2))
    q = numbers.standard_normal((batch, 3, 4, d)).astype(BF16)
    table = numbers.permutation(batch * 4).reshape(batch, 4).astype(np.int32)
    angles = numbers.uniform(0, 6, (capacity, rotary // 2))
    named: dict[str, Any] = {"block_table": table} if page else {}
    if rotary:
        cos, sin = np.cos(angles).astype(kind), np.sin(angles).astype(kind)
        named |= {"cos": cos, "sin": sin, "q": q, "interleaved": interleaved}
    found = warploom.append_to_cache(*caches, k, v, lens, **named, check=True)
    left = np.ones(shape[:2], bool)
    for b in range(batch):
        at = np.arange(lens[b] - tokens, lens[b])
        rows = (table[b, at // 16], at % 16) if page else (np.full(tokens, b), at)
        left[rows] = False
        assert np.array_equal(caches[1][rows].view(np.uint16), v[b].view(np.uint16))
        expected = turned(k[b], at, angles, interleaved)
        assert np.abs(caches[0][rows] - expected).max() <= (0.0 if not rotary else 0.06)
        if rotary:
            positions = np.maximum(np.arange(lens[b] - 3, lens[b]), 0)
            assert np.abs(found[b] - turned(q[b], positions, angles, interleaved)).max() <= 0.06
    for cache, old in zip(caches, before, strict=True):
        assert np.array_equal(cache[left].view(np.uint16), old[left].view(np.uint16))
    assert (found is None) == (rotary == 0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("page", [0, 16])
def test_a_cache_of_fp8_gets_keys_and_values_over_their_scales(page: int, scaled: bool) -> None:
    numbers = np.random.default_rng(page)
    lens, d, kv_heads, fp8 = np.array([2, 33], np.int32), 48, 2, np.dtype(ml_dtypes.float8_e4m3fn)
    shape = (8, 16, kv_heads, d) if page else (2, 64, kv_heads, d)
    caches = pair(numbers.standard_normal((2, *shape)).astype(fp8))
    before = [x.copy() for x in caches]
    k, v = (numbers.normal(0, 200, (2, 2, kv_heads, d)).astype(BF16) for _ in range(2))  # some beyond 448
    table = numbers.permutation(8).reshape(2, 4).astype(np.int32)
    named: dict[str, Any] = {"block_table": table} if page else {}
    scales = numbers.uniform(0.25, 4, (2, 2, kv_heads)).astype(np.float32) if scaled else np.ones((2, 2, 1), np.float32)
    if scaled:
        named |= {"k_scale": scales[0], "v_scale": scales[1]}
    warploom.append_to_cache(*caches, k, v, lens, **named, check=True)
    left = np.ones(shape[:2], bool)
    for b in range(2):
        at = np.arange(lens[b] - 2, lens[b])
        rows = (table[b, at // 16], at % 16) if page else (np.full(2, b), at)
        left[rows] = False
        for cache, x, scale in zip(caches, (k, v), scales, strict=True):
            expected = np.clip(x[b].astype(np.float32) / scale[b][:, None], -448, 448).astype(fp8)
            assert np.array_equal(cache[rows].view(np.uint8), expected.view(np.uint8))
    for cache, old in zip(caches, before, strict=True):
        assert np.array_equal(cache[left].view(np.uint8), old[left].view(np.uint8))


def test_a_rotation_is_exact_to_its_type() -> None:
    """With tables in float32 a result is the float64 one, rounded, or its neighbour."""
    numbers = np.random.default_rng(1)
    k = numbers.standard_normal((1, 1, 1, 64)).astype(np.float16)
    caches = pair(np.zeros((2, 1, 16, 1, 64), np.float16))
    angles = numbers.uniform(0, 6, (16, 32))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    warploom.append_to_cache(*caches, k, k, np.array([5], np.int32), cos=cos, sin=sin)
    expected = turned(k[0], np.array([4]), angles, False)[0, 0]
    assert np.abs(caches[0][0, 4, 0] - expected).max() <= 2.0**-10


def test_a_cache_grows_step_by_step() -> None:
    """Append and attend, beside a cache that was whole from the start."""
    step = Step((40, 21), page=16, capacity=48)
    (q, k, v, lens), named = step.arguments
    caches = pair(np.full((2, *k.shape), np.nan, BF16))
    table = named["block_table"]
    for number in range(0, 40, 10):
        now = np.minimum(lens, number + 10).astype(np.int32)
        new = pair(np.zeros((2, 2, 10, 1, 64), BF16))
        for b in range(2):
            at = np.arange(now[b] - 10, now[b])
            for to, of in zip(new, (k, v), strict=True):
                to[b, at >= 0] = of[table[b, at[at >= 0] // 16], at[at >= 0] % 16]
        warploom.append_to_cache(*caches, *new, now, block_table=table)
    expected = warploom.attention_paged(q, k, v, lens, **named)
    assert np.array_equal(warploom.attention_paged(q, *caches, lens, **named).view(np.uint16), expected.view(np.uint16))


def test_what_has_no_place_is_left_out_or_named() -> None:
    caches = pair(np.zeros((2, 4, 16, 1, 64), BF16))
    new = np.ones((2, 2, 1, 64), BF16)
    table = np.array([[0, 1], [2, 77]], np.int32)
    for lens, says in (
        ([33, 2], r"kv_lens\[0\] is 33: there is room for 32 keys"),
        ([2, 1], r"kv_lens\[1\] is 1: the 2 new keys count"),
        ([2, 18], r"block_table\[1, 1\] is 77: there are 4 pages"),
    ):
        given = np.array(lens, np.int32)
        with pytest.raises(ProblemError, match=says):
            warploom.append_to_cache(*caches, new, new, given, block_table=table, check=True)
        warploom.append_to_cache(*caches, new, new, given, block_table=table)  # the emulator finds writes outside
    written = np.argwhere(caches[0][..., 0, 0] != 0).tolist()
    assert written == [[0, 0], [0, 1], [1, 15], [2, 0], [2, 1]]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"k": np.zeros((2, 1, 1, 64), np.float32)}, "k_cache is f16 and k is f32"),
        ({"v": np.zeros((2, 2, 1, 64), np.float16)}, "v has shape"),
        ({"kv_lens": np.zeros(3, np.int32)}, r"kv_lens has shape \(3,\)"),
        ({"cos": np.zeros((4, 32), np.float16)}, "cos and sin come together"),
        ({"cos": np.zeros((4, 4), np.float16), "sin": np.zeros((4, 4), np.float16)}, "rotary_dim is a multiple of 16"),
        ({"q": np.zeros((2, 1, 1, 64), np.float16)}, "q is turned by cos and sin"),
        ({"block_table": None}, "k has shape|k_cache has shape"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], says: str) -> None:
    cache, new = np.zeros((4, 16, 1, 64), np.float16), np.zeros((2, 1, 1, 64), np.float16)
    given: dict[str, Any] = {
        "k_cache": cache,
        "v_cache": cache.copy(),
        "k": new,
        "v": new,
        "kv_lens": np.ones(2, np.int32),
        "block_table": np.zeros((2, 2), np.int32),
    }
    with pytest.raises(ProblemError, match=says):
        warploom.append_to_cache(**{**given, **changed})


def test_caches_lie_in_one_array_but_not_in_each_other() -> None:
    both, new = np.zeros((2, 2, 16, 1, 64), np.float16), np.ones((1, 1, 1, 64), np.float16)
    lens, table = np.ones(1, np.int32), np.array([[1, 0]], np.int32)
    warploom.append_to_cache(both[:, 0], both[:, 1], new, 2 * new, lens, block_table=table)
    assert both[1, :, 0, 0, 5].tolist() == [1, 2]
    with pytest.raises(ProblemError, match="k_cache shares memory with v_cache"):
        warploom.append_to_cache(both[:, 0], both[:, 0], new, new, lens, block_table=table)
    with pytest.raises(ProblemError, match="k_cache shares memory with k"):
        warploom.append_to_cache(both[:, 0], both[:, 1], both[:1, 0, :1], new, lens, block_table=table)


def test_every_call_is_held_to_where_its_caches_lie(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.hold(monkeypatch)
    both, new = np.zeros((2, 2, 16, 1, 64), np.float16), np.ones((1, 1, 1, 64), np.float16)
    lens, table = np.ones(1, np.int32), np.array([[1, 0]], np.int32)
    warploom.append_to_cache(both[:, 0], both[:, 1], new, 2 * new, lens, block_table=table)
    prepared = len(gpu.prepared)
    with pytest.raises(ProblemError, match="k_cache shares memory with v_cache"):
        warploom.append_to_cache(both[:, 0], both[:, 0], new, new, lens, block_table=table)
    with pytest.raises(ProblemError, match="k_cache shares memory with k"):
        warploom.append_to_cache(both[:, 0], both[:, 1], both[:1, 0, :1], new, lens, block_table=table)
    warploom.append_to_cache(both[:, 1], both[:, 0], 3 * new, 4 * new, lens, block_table=table)
    assert both[1, :, 0, 0, 5].tolist() == [4, 3]
    assert len(gpu.prepared) == prepared


def test_a_cache_whose_elements_lie_on_each_other_is_refused() -> None:
    new, lens, shape = np.ones((2, 1, 1, 64), np.float16), np.ones(2, np.int32), (2, 16, 1, 64)
    shared = np.lib.stride_tricks.as_strided(np.zeros((16, 1, 64), np.float16), shape, (0, 128, 128, 2))
    with pytest.raises(ProblemError, match=r"^v_cache has strides .*: some of its elements lie on each other"):
        warploom.append_to_cache(np.zeros(shape, np.float16), shared, new, new, lens)


def test_no_new_keys_are_none() -> None:
    """NumPy's strides of nothing are 0."""
    cache, empty = np.zeros((4, 16, 1, 64), BF16), np.zeros((2, 0, 1, 64)).astype(BF16)
    assert (
        warploom.append_to_cache(
            cache, cache.copy(), empty, empty, np.ones(2, np.int32), block_table=np.zeros((2, 2), np.int32)
        )
        is None
    )


@pytest.mark.parametrize("turning", [True, False])
def test_in_a_graph_it_is_one_operator_that_changes_the_caches(turning: bool) -> None:
    torch = pytest.importorskip("torch")

    def draw(*shape: int) -> Any:
        return torch.randn(*shape).half()

    lens, angles = torch.tensor([5, 16], dtype=torch.int32), torch.rand(16, 8)
    named = {"q": draw(2, 3, 2, 16), "cos": angles.cos(), "sin": angles.sin()} if turning else {}
    cache, new = draw(2, 2, 16, 1, 16), draw(2, 2, 3, 1, 16)

    def call(both: Any, new: Any) -> Any:
        found = warploom.append_to_cache(both[:, 0], both[:, 1], new[0], new[1], lens, **named)
        return both.double().sum() if found is None else found

    eager, compiled = cache.clone(), cache.clone()
    expected = call(eager, new)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(compiled, new), expected)
    assert torch.equal(compiled, eager)
    assert not torch.equal(eager, cache)
    torch.library.opcheck(
        torch.ops.warploom.append_to_cache.default,
        (
            cache[:, 0].clone(),
            cache[:, 1].clone(),
            new[0],
            new[1],
            lens,
            None,
            *(named.get(name) for name in ("q", "cos", "sin")),
            None,
            None,
            False,
            torch.empty_like(named["q"]) if turning else None,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )
    with pytest.raises(ProblemError, match="requires a gradient"):
        call(cache, new.requires_grad_())
