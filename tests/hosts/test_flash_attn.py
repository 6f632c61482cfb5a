"""FlashAttention's functions: their names, order, defaults and results, by warploom's kernels."""

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import warploom  # noqa: E402
from tests.hosts.reference import assert_like_float64, assert_near, attention64, tensors  # noqa: E402
from warploom import flash_attn  # noqa: E402
from warploom.core.errors import ProblemError  # noqa: E402
from warploom.ops.attention import attention_backward_call  # noqa: E402
from warploom.ops.attention_varlen import attention_varlen_backward_call  # noqa: E402

HEADS = (1, 24, 2, 16), (1, 40, 1, 16), (1, 40, 1, 16)


def test_grouped_heads_causal_with_log_sum_exps_as_version_4_returns_them():
    q, k, v = tensors(*HEADS)
    out, lse = flash_attn.flash_attn_func(q, k, v, causal=True, return_lse=True, num_splits=1, pack_gqa=None)
    assert (lse.shape, lse.dtype) == ((1, 2, 24), torch.float32)
    torch.testing.assert_close(lse.double(), attention64(q, k, v, causal=True)[1], rtol=1e-5, atol=1e-5)
    assert_like_float64(out, (q, k, v), q, k, v, causal=True)


def test_the_positional_order_is_that_of_version_2():
    given = q, k, v = tensors(*HEADS, dtype=torch.float16)
    found = flash_attn.flash_attn_func(q, k, v, 0.0, 0.5, False, torch.tensor([7, 2]), 3.0, None, True, True)
    out, _, attention_probabilities = found
    assert attention_probabilities.numel() == 0
    assert_like_float64(out, given, q, k, v, scale=0.5, window=(7, 2), softcap=3.0)


def test_a_head_dim_that_kernels_do_not_take_is_padded():
    given = q, k, v = tensors((1, 24, 2, 11), (1, 40, 1, 11), (1, 40, 1, 11))
    assert_like_float64(flash_attn.flash_attn_func(q, k, v), given, q, k, v)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(20, 12), (20, 28), (16, 12), (12, 16)])
def test_values_of_a_head_dim_of_their_own_are_padded_by_themselves(head_dim, v_dim):
    given = q, k, v = tensors((1, 24, 2, head_dim), (1, 40, 1, head_dim), (1, 40, 1, v_dim))
    assert_like_float64(flash_attn.flash_attn_func(q, k, v), given, q, k, v)
    q, k, v = (x[0].detach() for x in given)
    packed = flash_attn.flash_attn_varlen_func(q, k, v, starts((24,)), starts((40,)), 24, 40)
    assert_near(packed, attention64(*(x.detach() for x in given))[0][0])


def test_packed_tensors_are_read_in_place():
    (qkv,) = tensors((1, 24, 3, 2, 16))
    given = (qkv,)
    assert_like_float64(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), given, *qkv.unbind(2), causal=True)
    q, kv = tensors((1, 24, 2, 16), (1, 40, 2, 1, 16))
    assert_near(flash_attn.flash_attn_kvpacked_func(q, kv).detach(), attention64(q, *kv.unbind(2))[0].detach())


def test_packed_heads_of_version_3():
    (qkv,) = tensors((1, 24, 4, 16))
    found = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=2)
    assert_near(found.detach(), attention64(qkv[:, :, :2], qkv[:, :, 2:3], qkv[:, :, 3:], causal=True)[0].detach())


def asked_of(monkeypatch, caller):
    """Whether each backward pass by ``caller`` is to give equal bits."""
    asked, work = [], caller.work

    def seen(given, config):
        asked.append(given.options["deterministic"])
        return work(given, config)

    monkeypatch.setattr(caller, "work", seen)
    return asked


def test_deterministic_reaches_the_backward_pass(monkeypatch):
    asked = asked_of(monkeypatch, attention_backward_call)
    q, k, v = tensors(*HEADS)
    for deterministic in (False, True):
        flash_attn.flash_attn_func(q, k, v, deterministic=deterministic).sum().backward()
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
        ({"qv": torch.ones(2)}, "qv"),
        ({"attention_chunk": 3}, "attention_chunk"),
        ({"score_mod": lambda s: s}, "score_mod"),
        ({"dropout_p": None}, "dropout_p is a number"),
        ({"softmax_scale": True}, "softmax_scale is a number"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, named):
    q, k, v = tensors(*HEADS)
    with pytest.raises(ProblemError, match=named):
        flash_attn.flash_attn_func(q, k, v, **options)


def test_positions_of_version_3_are_refused():
    """Its third option is the scale, and its fourth the causal mask; of packed sequences lengths come before."""
    q, k, v = tensors(*HEADS)
    flash: Any = flash_attn
    lengths = torch.tensor([24], dtype=torch.int32)
    for call in (
        lambda: flash.flash_attn_func(q, k, v, None, True),
        lambda: flash.flash_attn_func(q, k, v, 0.25, True),
        lambda: flash.flash_attn_func(q, k, v, 0.0, True),
        lambda: flash.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), None, True),
        lambda: flash.flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 24, 40, lengths, lengths, None, True),
    ):
        with pytest.raises(ProblemError, match="FlashAttention-3's: pass options by name"):
            call()


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_no_number_is_a_bool(name):
    q, k, v = (x.detach() for x in tensors(*HEADS))
    options: dict[str, Any] = {name: True}
    with pytest.raises(ProblemError, match=f"{name} is a number"):
        warploom.attention(q, k, v, **options)


def test_an_unknown_option_is_no_option():
    q, k, v = tensors(*HEADS)
    with pytest.raises(TypeError, match="sofcap"):
        flash_attn.flash_attn_func(q, k, v, sofcap=3.0)
    assert flash_attn.flash_attn_func(q, k, v, attention_chunk=0, qv=None).shape == q.shape


def test_features_can_be_told_by_parameter_names():
    """Transformers looks for these in the signature."""
    names = set(inspect.signature(flash_attn.flash_attn_func).parameters)
    assert {"dropout_p", "window_size", "softcap", "deterministic"} <= names


LENGTHS = (9, 0, 24), (20, 5, 24)
"""Of queries and keys of three sequences."""


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_each_sequence(out, q, k, v, lengths, **options):
    parts = (x.split(n) for x, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]), strict=True))
    expected = [attention64(*(x[None] for x in one), **options)[0][0] for one in zip(*parts, strict=True)]
    assert_near(out, torch.cat(expected))


def test_gradients_of_packed_sequences(monkeypatch):
    given = q, k, v = tensors((33, 2, 16), (49, 1, 16), (49, 1, 16))
    asked = asked_of(monkeypatch, attention_varlen_backward_call)
    where = starts(LENGTHS[0]), starts(LENGTHS[1])
    out = flash_attn.flash_attn_varlen_func(q, k, v, where[0], where[1], 24, 24, causal=True, deterministic=True)
    parts = (x.split(n) for x, n in zip(given, (LENGTHS[0], LENGTHS[1], LENGTHS[1]), strict=True))
    expected = torch.cat([attention64(*(x[None] for x in one), causal=True)[0][0] for one in zip(*parts, strict=True)])
    for grad, want in zip(*(torch.autograd.grad(x.sum(), given) for x in (out, expected)), strict=True):
        assert_near(grad, want.double())
    assert asked == [True]


@torch.no_grad()
def test_packed_sequences():
    q, k, v = tensors((33, 2, 16), (49, 1, 16), (49, 1, 16))
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        starts(LENGTHS[0]),
        starts(LENGTHS[1]),
        torch.tensor(24),
        24,
        causal=True,
        window_size=(7, -1),
        return_attn_probs=True,
    )
    assert_each_sequence(out, q, k, v, LENGTHS, causal=True, window=(7, -1))
    assert lse.shape == (2, 33)
    qkv = torch.stack([q, q, q], 1)
    lengths = LENGTHS[0], LENGTHS[0]
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts(lengths[0]), 24, causal=True)
    assert_each_sequence(out, q, q, q, lengths, causal=True)
    out = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *map(starts, LENGTHS), 24, 24, 0.0, 0.5)
    assert_each_sequence(out, q, k, v, LENGTHS, scale=0.5)


def test_sinks_by_both_names():
    q, k, v = tensors((1, 24, 2, 16), (1, 40, 1, 16), (1, 40, 1, 16))
    sinks = torch.tensor([1.0, -2.0])
    with torch.no_grad():
        by_4 = flash_attn.flash_attn_func(q, k, v, learnable_sink=sinks)
        by_others = flash_attn.flash_attn_func(q, k, v, s_aux=sinks)
        plain, lse = attention64(q, k, v)
    kept = torch.exp(lse - torch.logaddexp(lse, sinks.double()[:, None])).mT[..., None]
    assert_near(by_4, plain * kept)
    assert torch.equal(by_4, by_others)


def turned(x, cos, sin, first, interleaved):
    """Rotary embedding in float64 of (length, heads, head_dim), from position ``first`` on."""
    c, s = (table[first : first + len(x), None].double() for table in (cos, sin))
    half = c.shape[-1]
    order = torch.arange(2 * half).view(half, 2).T if interleaved else torch.arange(2 * half).view(2, half)
    a, b = (x[..., i].double() for i in order)
    found = x.double().clone()
    found[..., order[0]], found[..., order[1]] = a * c - b * s, b * c + a * s
    return found


@pytest.mark.parametrize("cache", ["plain", "pages", "rows"])
@torch.no_grad()
def test_caches_are_extended_and_read(cache):
    q, k, v, k_cache, v_cache = tensors(
        (2, 2, 4, 32), (2, 2, 2, 32), (2, 2, 2, 32), (6, 16, 2, 32), (6, 16, 2, 32), dtype=torch.float16
    )
    angles = torch.rand(48, 8, generator=torch.Generator().manual_seed(3))
    cos, sin = angles.cos().half(), angles.sin().half()
    lengths, interleaved = torch.tensor([5, 14], dtype=torch.int32), cache != "pages"
    places = {"block_table": torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)}
    if cache != "pages":
        k_cache, v_cache = (x.reshape(3, 32, 2, 32) for x in (k_cache, v_cache))
        places = {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)} if cache == "rows" else {}
    if cache == "plain":
        k_cache, v_cache = k_cache[:2].clone(), v_cache[:2].clone()
    before = {"k": k_cache.clone(), "v": v_cache.clone()}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cos,
        sin,
        lengths,
        causal=True,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **places,
    )
    assert lse.shape == (2, 4, 2)
    for i, length in enumerate(lengths.tolist()):
        rows = {"pages": [[4, 1], [0, 3]], "rows": [[2], [0]], "plain": [[0], [1]]}[cache][i]
        keys, values = (before[n][rows].flatten(0, 1)[: length + 2].double() for n in "kv")
        keys[length:], values[length:] = turned(k[i], cos, sin, length, interleaved), v[i]
        assert_near(k_cache[rows].flatten(0, 1)[: length + 2], keys)
        assert torch.equal(v_cache[rows].flatten(0, 1)[: length + 2].double(), values)
        query = turned(q[i], cos, sin, length, interleaved)
        assert_near(out[i], attention64(query[None], keys[None], values[None], causal=True)[0][0])
    touched = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for i, length in enumerate(lengths.tolist()):
        rows = {"pages": [[4, 1], [0, 3]], "rows": [[2], [0]], "plain": [[0], [1]]}[cache][i]
        size = k_cache.shape[1]
        for position in (length, length + 1):
            touched[rows[position // size], position % size] = True
    assert torch.equal((k_cache != before["k"]).flatten(2).any(-1), touched)


@torch.no_grad()
def test_packed_queries_of_pages():
    q, k, v = tensors((3, 4, 32), (4, 16, 2, 32), (4, 16, 2, 32), dtype=torch.float16)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        starts((1, 2)),
        seqused_k=torch.tensor([7, 20], dtype=torch.int32),
        causal=True,
        block_table=table,
        max_seqlen_q=2,
        max_seqlen_k=20,
    )
    for part, pages, length in zip(q.split((1, 2)), table.long(), (7, 20), strict=True):
        expected, _ = attention64(part[None], *(x[pages].flatten(0, 1)[None, :length] for x in (k, v)), causal=True)
        assert_near(out[:1] if len(part) == 1 else out[1:], expected[0])


FULL, PAGES = torch.tensor([31, 3], dtype=torch.int32), torch.tensor([[2, 1], [0, 3]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_seqlens": 33}, "cache_seqlens says 33 keys, .* 2 columns of block_table"),
        ({"cache_seqlens": 2**40}, "cache_seqlens says"),
        ({"cache_seqlens": -1}, "less than no key"),
        ({"cache_seqlens": FULL + 2}, "says 33 keys"),
        ({"cache_seqlens": FULL, "k": 2}, "says 31 keys, and 2 new ones do not fit"),
        ({"cache_seqlens": FULL + 2, "block_table": None}, "room for 32 keys"),
        ({"k": 1}, "pass it"),
    ],
)
@torch.no_grad()
def test_lengths_beyond_the_block_table_that_the_cpu_knows_are_refused(options, says):
    q, k_cache, v_cache = tensors((2, 3, 2, 16), *((4, 16, 1, 16),) * 2, dtype=torch.float16)
    options = {"block_table": PAGES, **options}
    if "k" in options:
        options |= dict.fromkeys("kv", torch.zeros(2, options["k"], 1, 16, dtype=torch.float16))
    if options["block_table"] is None:
        k_cache, v_cache = (x.reshape(2, 32, 1, 16) for x in (k_cache, v_cache))
    with pytest.raises(ProblemError, match=says):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **options)


@torch.no_grad()
def test_packed_lengths_beyond_the_block_table_are_refused():
    q, k, v = tensors((3, 2, 16), (4, 16, 1, 16), (4, 16, 1, 16))
    for where in ({"seqused_k": FULL + 2}, {"cu_seqlens_k": starts((33, 4))}):
        with pytest.raises(ProblemError, match=r"33 keys.*block_table"):
            flash_attn.flash_attn_varlen_func(q, k, v, starts((1, 2)), **where, block_table=PAGES)


NOT_TAKEN = {
    "a query of another type": {"q": torch.float32},
    "a window of three": {"window_size": (3, 0, 1)},
    "an infinite cap": {"softcap": float("inf")},
    "sinks of other heads": {"sinks": torch.zeros(3)},
    "an out of another shape": {"out": torch.zeros(2, 1, 2, 16, dtype=torch.float16)},
    "an out in the cache": {"out": "cache"},
    "tables of another width": {"rotary_cos": torch.ones(32, 16), "rotary_sin": torch.ones(32, 16)},
    "a query with a gradient": {"q": "gradient"},
    "heads that do not divide": {"q": "heads"},
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_nothing_is_written_by_a_call_that_is_refused(name):
    given = tensors((2, 3, 2, 16), *((2, 2, 2, 16),) * 2, *((4, 16, 2, 16),) * 2, dtype=torch.float16)
    q, k, v, k_cache, v_cache = (x.detach() for x in given)
    options = {**NOT_TAKEN[name]}
    changed = options.pop("q", None)
    if changed is torch.float32:
        q = q.float()
    elif changed == "gradient":
        q.requires_grad_()
    elif changed == "heads":
        q = q.repeat(1, 1, 3, 1)[:, :, :3].contiguous()
    if options.get("out") == "cache":
        options["out"] = k_cache[:2, :3]
    before = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    with pytest.raises(ProblemError):
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=PAGES, **options
        )
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@torch.no_grad()
def test_rotary_positions_of_their_own():
    q, k, v, k_cache, v_cache = tensors((2, 2, 4, 32), *((2, 2, 2, 32),) * 2, *((2, 32, 2, 32),) * 2)
    angles = torch.rand(48, 8, generator=torch.Generator().manual_seed(3))
    cos, sin = angles.cos(), angles.sin()
    lengths, positions = torch.tensor([5, 14], dtype=torch.int32), torch.tensor([2, 7], dtype=torch.int32)
    before = k_cache.clone()

    def call(**options):
        k_cache.copy_(before)
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True, scheduler_metadata=None, **options
        )

    assert torch.equal(call(), call(rotary_seqlens=lengths))
    out = call(rotary_seqlens=positions)
    for i, (length, first) in enumerate(zip(lengths.tolist(), positions.tolist(), strict=True)):
        keys, values = k_cache[i, : length + 2].double(), v_cache[i, : length + 2].double()
        assert_near(keys[length:].bfloat16(), turned(k[i], cos, sin, first, True))
        keys[length:] = turned(k[i], cos, sin, first, True)
        assert torch.equal(values[length:], v[i].double())
        query = turned(q[i], cos, sin, first, True)
        assert_near(out[i], attention64(query[None], keys[None], values[None], causal=True)[0][0])


def test_gradients_of_packed_queries_on_pages():
    """Two sequences share a page, and what no sequence counts, or no table names, is NaN and has a gradient of 0."""
    table, lengths = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32), (7, 20)
    given = tensors((3, 4, 32), (4, 16, 2, 32), (4, 16, 2, 32), dtype=torch.float16)
    q, k, v = (x.detach() for x in given)
    counted = torch.zeros(4, 16, dtype=torch.bool)
    counted[2, :7] = counted[1] = counted[2, :4] = True
    k[~counted] = v[~counted] = torch.nan
    given = q, k, v = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        starts((1, 2)),
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
        causal=True,
        block_table=table,
        return_attn_probs=True,
    )
    assert lse.shape == (4, 3)
    parts = [
        attention64(one[None], *(x[pages].flatten(0, 1)[None, :length] for x in (k, v)), causal=True)[0][0]
        for one, pages, length in zip(q.split((1, 2)), table.long(), lengths, strict=True)
    ]
    expected = torch.cat(parts)
    assert_near(out.detach(), expected.detach())
    by = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad(x, given, by.to(x.dtype)) for x in (out, expected))
    for mine, want in zip(found, wanted, strict=True):
        assert_near(mine, want.double())
    for gradient in found[1:]:
        assert not gradient[~counted].any()


def test_parts_are_combined():
    numbers = torch.Generator().manual_seed(0)
    outs, logs = (torch.randn(3, 2, 5, 4, *size, generator=numbers) for size in ((8,), ()))
    logs[1, 0], logs[:, 1, 2], outs[1, 0] = -torch.inf, -torch.inf, torch.nan
    out, lse = flash_attn.flash_attn_combine(outs, logs, out_dtype=torch.float16)
    weights = logs.double().exp()
    total = weights.sum(0)
    expected = (weights[..., None] * outs.double().nan_to_num()).sum(0) / total.clamp(1e-30)[..., None]
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(lse.double(), total.log(), rtol=1e-6, atol=1e-6)
    into = torch.empty(2, 5, 4, 8)
    assert flash_attn.flash_attn_combine(outs, logs, into)[0] is into
    torch.testing.assert_close(into.double(), expected, rtol=1e-6, atol=1e-6)
    for wrong in ({"lse_partial": logs[:2]}, {"out": into[:1]}, {"out": into, "out_dtype": torch.float16}):
        with pytest.raises(ProblemError, match="out"):
            flash_attn.flash_attn_combine(**{"out_partial": outs, "lse_partial": logs, **wrong})


def test_a_schedule_made_before_is_nothing():
    assert flash_attn.get_scheduler_metadata(2, 1, 32, 4, 2, 16, ONE, torch.bfloat16, causal=True) is None


ONE, SINKS, COS = torch.ones(2, dtype=torch.int32), torch.zeros(2), torch.ones(16, 8)
NEW, TABLE = torch.zeros(2, 1, 1, 16), torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"k": NEW}, "k and v"),
        ({"v": NEW}, "k and v"),
        ({"rotary_sin": COS}, "rotary_sin"),
        ({"rotary_cos": COS}, "rotary_cos"),
        ({"block_table": TABLE, "page_table": TABLE}, "block_table and page_table"),
        ({"block_table": TABLE, "cache_batch_idx": ONE}, "block_table and cache_batch_idx"),
        ({"sinks": SINKS, "s_aux": SINKS}, "sinks and s_aux"),
        ({"cu_seqlens_k_new": ONE}, "cu_seqlens_k_new"),
        ({"cache_seqlens": [5, 9]}, "cache_seqlens is an int"),
    ],
)
@torch.no_grad()
def test_options_of_caches_that_exclude_or_need_each_other(options, says):
    q, k_cache, v_cache = tensors((2, 1, 2, 16), (2, 16, 1, 16), (2, 16, 1, 16))
    with pytest.raises(ProblemError, match=says):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **{"cache_seqlens": ONE, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "seqused_k"),
        ({"seqused_k": ONE, "seqused_q": ONE}, "seqused_q"),
        ({"seqused_k": ONE, "page_table": TABLE}, "block_table and page_table"),
        ({"seqused_k": ONE, "s_aux": SINKS, "learnable_sink": SINKS}, "learnable_sink and s_aux"),
    ],
)
@torch.no_grad()
def test_options_of_pages_that_exclude_or_need_each_other(options, says):
    q, k, v = tensors((3, 2, 16), (2, 16, 1, 16), (2, 16, 1, 16))
    with pytest.raises(ProblemError, match=says):
        flash_attn.flash_attn_varlen_func(q, k, v, starts((1, 2)), block_table=TABLE, **options)


@pytest.mark.parametrize("shape", [(1, 24, 2, 16), (1, 24, 4, 2, 16), (1, 24)])
def test_packed_tensors_of_other_shapes(shape):
    (x,) = tensors(shape)
    flash = flash_attn
    for call, rest in (
        (flash.flash_attn_qkvpacked_func, ()),
        (flash.flash_attn_varlen_qkvpacked_func, (ONE,)),
        (lambda kv: flash.flash_attn_kvpacked_func(kv, kv), ()),
        (lambda kv: flash.flash_attn_varlen_kvpacked_func(kv, kv, ONE), ()),
        (lambda qkv: flash.flash_attn_qkvpacked_func(qkv, num_heads_q=3), ()),
    ):
        with pytest.raises(ProblemError, match=r"kv has shape .*it must be \("):
            call(x, *rest)


untyped: Any = flash_attn


def test_what_cannot_be_read_is_refused_by_name():
    q, starts = torch.ones(1, 16, 2, 16, dtype=torch.float16), torch.tensor([0, 16], dtype=torch.int32)
    qkv = torch.ones(1, 16, 6, 16, dtype=torch.float16)
    wrong = {
        "q: NoneType": lambda: untyped.flash_attn_func(None, q, q),
        "k: NoneType": lambda: untyped.flash_attn_varlen_func(q[0], None, q[0], starts),
        "k_cache: NoneType": lambda: untyped.flash_attn_with_kvcache(q, None, q),
        "kv: NoneType": lambda: untyped.flash_attn_kvpacked_func(q, None),
        "qkv: NoneType": lambda: untyped.flash_attn_qkvpacked_func(None, num_heads_q=2),
        "cache_seqlens says 1099511627776": lambda: untyped.flash_attn_with_kvcache(q, q, q, cache_seqlens=2**40),
        "cache_seqlens says -1": lambda: untyped.flash_attn_with_kvcache(q, q, q, cache_seqlens=-1),
        "num_heads_q": lambda: untyped.flash_attn_qkvpacked_func(qkv, num_heads_q=-2),
        "num_heads_q is an integer": lambda: untyped.flash_attn_qkvpacked_func(qkv, num_heads_q="2"),
        "q: ndarray": lambda: untyped.flash_attn_func(q.numpy(), q, q),
        "v is a single number": lambda: untyped.flash_attn_func(q, q, torch.tensor(1.0)),
        "lse_partial: NoneType": lambda: untyped.flash_attn_combine(q, None),
        "out_partial is torch.int32": lambda: untyped.flash_attn_combine(q.int(), q[..., 0]),
        "out_dtype is a torch.dtype, not 'bf16'": lambda: untyped.flash_attn_combine(q, q[..., 0], out_dtype="bf16"),
        "block_table: list": lambda: untyped.flash_attn_varlen_func(q[0], q, q, starts, starts, block_table=[[0]]),
    }
    for says, call in wrong.items():
        with pytest.raises(ProblemError, match=says):
            call()


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v"])
def test_keys_of_another_number_of_dimensions_are_refused_by_name(name):
    cache, q, lengths = torch.zeros(2, 16, 1, 16).half(), torch.ones(2, 1, 1, 16).half(), torch.tensor([3, 5]).int()
    given = {"k_cache": cache, "v_cache": cache.clone(), "k": q, "v": q, "cache_seqlens": lengths}
    with pytest.raises(ProblemError, match=f"^{name} has shape"):
        untyped.flash_attn_with_kvcache(q, **{**given, name: given[name].flatten()})
    if "cache" in name:
        pages = {**given, name: cache.flatten()}
        starts, table = torch.tensor([0, 1, 2]).int(), torch.tensor([[0], [1]]).int()
        with pytest.raises(ProblemError, match=f"^{name[0]} has shape"):
            untyped.flash_attn_varlen_func(
                q[:, 0], pages["k_cache"], pages["v_cache"], starts, seqused_k=lengths, block_table=table
            )


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64, torch.float16, torch.int64])
def test_lengths_of_a_cache_that_are_no_int32_are_refused_by_name(dtype):
    cache, q = torch.zeros(2, 16, 1, 16).half(), torch.ones(2, 1, 1, 16).half()
    for lengths in (torch.tensor([3, 5]).to(dtype), torch.tensor([3, 5]).to_sparse()):
        for new in (None, q):
            with pytest.raises(ProblemError, match=r"^cache_seqlens is"):
                untyped.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths)


def test_pages_of_no_keys_have_no_room():
    pages, q, table = torch.zeros(2, 0, 1, 16).half(), torch.ones(1, 1, 1, 16).half(), torch.tensor([[0]]).int()
    with pytest.raises(ProblemError, match="room for 0 keys"):
        untyped.flash_attn_with_kvcache(q, pages, pages.clone(), cache_seqlens=3, block_table=table)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", [[1.0]]),
        ("rotary_cos", [1.0]),
        ("rotary_seqlens", 3),
        ("cache_batch_idx", [0, 1]),
        ("block_table", [[0]]),
        ("window_size", 3),
    ],
)
def test_what_is_no_tensor_beside_a_cache_is_refused_by_name(name, value):
    cache, q, turns = torch.zeros(2, 16, 1, 16).half(), torch.ones(2, 1, 1, 16).half(), torch.ones(20, 8)
    given = {"k": q, "v": q, "rotary_cos": turns, "rotary_sin": turns, "cache_seqlens": torch.tensor([3, 5]).int()}
    with pytest.raises(ProblemError, match=name.removesuffix("_size")):
        untyped.flash_attn_with_kvcache(q, cache, cache.clone(), **{**given, name: value})


def test_an_open_window_beside_rotary_embedding():
    q, tables = torch.ones(1, 16, 2, 16, dtype=torch.float16), torch.ones(64, 8, dtype=torch.float16)
    found = [
        untyped.flash_attn_with_kvcache(
            q, *torch.zeros(2, 1, 32, 2, 16).half(), q, q, tables, tables, cache_seqlens=0, window_size=window
        )
        for window in (None, (-1, -1), torch.tensor([-1, -1]))
    ]
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("positions", [[1.5, 2.0], [True, False], [[3], [5]]], ids=str)
def test_what_is_no_rotary_position_of_each_sequence_is_refused_before_anything_is_written(positions):
    caches = [torch.zeros(2, 16, 1, 16, dtype=torch.float16) for _ in range(2)]
    q, new, lengths = torch.ones(2, 1, 1, 16).half(), torch.ones(2, 1, 1, 16).half(), torch.tensor([3, 5]).int()
    turns = torch.ones(20, 8).half()
    with pytest.raises(ProblemError, match=r"^rotary_seqlens is torch"):
        flash_attn.flash_attn_with_kvcache(
            q, caches[0], caches[1], new, new, turns, turns, lengths, rotary_seqlens=torch.tensor(positions)
        )
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_block_table_that_is_no_int32_is_refused_whether_or_not_a_gradient_is_wanted(dtype, wanted):
    q, pages = torch.ones(3, 1, 16).half().requires_grad_(wanted), torch.ones(2, 16, 1, 16).half()
    starts, table = torch.tensor([0, 3]).int(), torch.tensor([[1]]).to(dtype)
    with pytest.raises(ProblemError, match=r"^block_table is"):
        flash_attn.flash_attn_varlen_func(q, pages, pages, starts, starts, block_table=table)
