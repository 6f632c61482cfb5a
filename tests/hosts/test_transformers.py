"""Transformers' own model classes with random weights on warploom's kernels, beside float32."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from warploom.core.errors import ProblemError  # noqa: E402
from warploom.transformers import attention_forward, register  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
SLIDING = SMALL | {
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**SLIDING, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: transformers.GptOssConfig(**SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SLIDING),
}


@pytest.fixture(autouse=True)
def registered():
    register()


def model_of(name, **more):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # scores that differ enough for a mask, a window or a soft cap to matter
        parameter.data.copy_((8 * parameter.data if parameter.dim() == 2 else parameter.data).bfloat16())
    return model


def with_attention(model, name, call):
    """What ``call`` makes of a model with this attention: in float32 for eager, in bfloat16 for others."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        return call(model).float()


def assert_as_near(model, call):
    """warploom's bfloat16 is as near to float32 as eager bfloat16 is, within a factor."""
    exact = with_attention(model.float(), "eager", call)
    eager, ours = (with_attention(model.bfloat16(), name, call) for name in ("eager", "warploom"))
    bound = 2 * (eager - exact).abs().max() + 2**-8 * exact.abs().max()
    assert (ours - exact).abs().max() <= bound


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_a_step_from_the_cache(name):
    tokens = torch.randint(3, 60, (1, 21), generator=torch.Generator().manual_seed(1))

    def call(model):
        first = model(tokens[:, :20], use_cache=True)
        last = model(tokens[:, 20:], past_key_values=first.past_key_values)
        return torch.cat([first.logits, last.logits], 1)

    assert_as_near(model_of(name), call)


def test_images_are_seen_in_both_directions():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
        attn_implementation="eager",
    )
    model, image = transformers.ViTModel(config).eval(), torch.randn(1, 3, 16, 16)
    assert_as_near(model, lambda m: m(image.to(m.dtype)).last_hidden_state)


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_as_near_to_float32_as_eager_ones(padded):
    tokens = torch.arange(3, 43).view(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 1 - padded
    model = model_of("llama")

    def gradient(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        labels = tokens.clone()
        labels[0, :10] = -100  # nothing of a padded position is in the loss
        model(tokens, attention_mask=mask if padded else None, labels=labels).loss.backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.float()

    exact = gradient("eager")
    model.bfloat16()
    eager, ours = gradient("eager"), gradient("warploom")
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2**-8 * exact.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padded_batches(name):
    tokens = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0

    def call(model):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        first = model(tokens[:, :20], attention_mask=mask[:, :20], position_ids=positions[:, :20], use_cache=True)
        last = model(
            tokens[:, 20:], attention_mask=mask, position_ids=positions[:, 20:], past_key_values=first.past_key_values
        )
        return torch.cat([first.logits, last.logits], 1)[mask.bool()]

    assert_as_near(model_of(name), call)


def test_sequences_packed_in_one_row():
    tokens = torch.randint(3, 60, (1, 21), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(8), torch.arange(13)])[None]

    def call(model):
        if model.dtype is torch.bfloat16 and model.config._attn_implementation == "warploom":
            return model(tokens, position_ids=positions, use_cache=False).logits
        return torch.cat([model(part).logits for part in tokens.split((8, 13), 1)], 1)

    assert_as_near(model_of("llama"), call)


def test_masks_of_four_dimensions_run_on_sdpa():
    shown = torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(2)) > 0.3
    mask = torch.zeros(1, 1, 20, 20).masked_fill(~(shown | torch.eye(20, dtype=torch.bool)), -1e30)
    tokens = torch.arange(3, 23)[None]
    assert_as_near(model_of("llama"), lambda m: m(tokens, attention_mask=mask.to(m.dtype)).logits)


def test_what_is_not_computed_is_refused_by_name():
    model = model_of("llama", attention_dropout=0.5).bfloat16()
    model.set_attn_implementation("warploom")
    tokens = torch.arange(3, 23)[None]
    with pytest.raises(ProblemError, match="attention_dropout"):
        model.train()(tokens)
    x = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match="continuous batching"):
        attention_forward(model, x, x, x, None, cache=object())


@pytest.mark.parametrize("padded", [False, True])
def test_values_of_another_width_are_read_as_they_are(padded, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "pad", lambda *_: pytest.fail("copied, with zeros"))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 20, d, generator=generator).bfloat16() for d in (32, 32, 16))
    mask = torch.ones(1, 20, dtype=torch.int64) if padded else None
    found, _ = attention_forward(torch.nn.Module(), q, k, v, mask, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=2**-6, atol=2**-6)


def test_a_window_without_a_causal_mask_has_two_sides():
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator).bfloat16() for _ in range(3))
    found, _ = attention_forward(torch.nn.Module(), q, k, v, None, is_causal=False, sliding_window=4)
    apart = torch.arange(20)[:, None] - torch.arange(20)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=apart.abs() < 4
    )
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=2**-6, atol=2**-6)
