"""FlashAttention's functions: their names, order, defaults and results, by warploom's kernels."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from tests.hosts.reference import assert_like_float64, assert_near, attention64, tensors  # noqa: E402
from warploom import flash_attn  # noqa: E402
from warploom.core.errors import ProblemError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning")

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


def test_deterministic_reaches_the_backward_pass(monkeypatch):
    from warploom.operators import attention as operators

    asked = []

    def watched(*arguments, deterministic, **options):
        asked.append(deterministic)
        return backward(*arguments, deterministic=deterministic, **options)

    backward = operators.attention_backward
    monkeypatch.setattr(operators, "attention_backward", watched)
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
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, named):
    q, k, v = tensors(*HEADS)
    with pytest.raises(ProblemError, match=named):
        flash_attn.flash_attn_func(q, k, v, **options)


def test_an_unknown_option_is_no_option():
    q, k, v = tensors(*HEADS)
    with pytest.raises(TypeError, match="sofcap"):
        flash_attn.flash_attn_func(q, k, v, sofcap=3.0)
    assert flash_attn.flash_attn_func(q, k, v, attention_chunk=0, qv=None).shape == q.shape


def test_features_can_be_told_by_parameter_names():
    """Transformers looks for these in the signature."""
    names = set(inspect.signature(flash_attn.flash_attn_func).parameters)
    assert {"dropout_p", "window_size", "softcap", "deterministic"} <= names
