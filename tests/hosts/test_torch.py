"""PyTorch's FlashAttention operators on warploom's kernels: through the dispatcher, at the CPU's key without a GPU."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import warploom.torch  # noqa: E402
from tests.hosts.reference import assert_like_float64, assert_near, attention64, tensors  # noqa: E402
from warploom.core.errors import ProblemError  # noqa: E402
from warploom.torch import _Override  # noqa: E402

aten = torch.ops.aten

HEADS = (1, 24, 2, 16), (1, 40, 1, 16), (1, 40, 1, 16)


@pytest.fixture
def overridden():
    override = _Override("CPU")
    yield
    override.remove()


def swapped(tensors):
    """(batch, length, heads, head_dim) as PyTorch's (batch, heads, length, head_dim), and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def strides(x):
    """Those that say something: of dimensions of more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.usefixtures("overridden")
@pytest.mark.parametrize("lies", ["bshd", "bhsd", "mixed"])
def test_sdpa_and_its_backward_pass_lie_as_the_given_tensors(lies):
    given = tensors(*HEADS)
    if lies != "bshd":
        given = tuple(
            x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if lies == "bhsd" or i else x
            for i, x in enumerate(given)
        )
    q, k, v = swapped(given)
    out, lse, *_, max_q, max_k, _, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.25)
    assert (lse.shape, max_q, max_k) == ((1, 2, 24), 24, 40)
    assert out.stride() == torch.empty_like(q).stride()
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True), strict=True):
        assert strides(grad) == strides(torch.empty_like(x))
    assert_like_float64(out.transpose(1, 2), given, *given, causal=True, scale=0.25)


@pytest.mark.usefixtures("overridden")
def test_flash_attention_with_a_window():
    given = q, k, v = tensors(*HEADS, dtype=torch.float16)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, 24, 40, 0.0, False, False, window_size_left=7, window_size_right=2
    )
    assert lse.shape == (1, 2, 24)
    assert_like_float64(out, given, *given, window=(7, 2))


STARTS = torch.tensor([0, 9, 9, 33], dtype=torch.int32), torch.tensor([0, 20, 25, 49], dtype=torch.int32)


@pytest.mark.usefixtures("overridden")
def test_packed_sequences_of_varlen_attn():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    given = q, k, v = tensors((33, 2, 16), (49, 1, 16), (49, 1, 16))
    names = inspect.signature(varlen.varlen_attn).parameters
    more = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    more |= {"enable_gqa": True} if "enable_gqa" in names else {}
    out = varlen.varlen_attn(q, k, v, *STARTS, 24, 24, **more)
    parts = zip(q.split((9, 0, 24)), k.split((20, 5, 24)), v.split((20, 5, 24)), strict=True)
    expected = torch.cat([attention64(*(x[None] for x in one), causal=True)[0][0] for one in parts])
    assert_near(out.detach(), expected.detach())
    for grad, want in zip(*(torch.autograd.grad(x.sum(), given) for x in (out, expected)), strict=True):
        assert_near(grad, want.double())
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        into = torch.empty_like(q)
        lse = aten._flash_attention_forward_no_dropout_inplace(into, q, k, v, *STARTS, 24, 24, 0.0, True, False)
        assert lse.shape == (2, 33)
        assert torch.equal(into, out)


@pytest.mark.usefixtures("overridden")
def test_pages_of_flash_attention():
    schema = aten._flash_attention_forward.default._schema
    if "block_table" not in [argument.name for argument in schema.arguments]:
        pytest.skip("newer PyTorch")
    q, k, v = (x.detach() for x in tensors((2, 4, 32), (4, 16, 2, 32), (4, 16, 2, 32), dtype=torch.float16))
    table, used = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([7, 20], dtype=torch.int32)
    starts = torch.arange(3, dtype=torch.int32)
    ends = torch.tensor([0, 9, 40], dtype=torch.int32)  # where keys begin does not count beside how many there are
    for keys, counts in ((None, used), (ends, used), (ends, None)):
        out, *_ = aten._flash_attention_forward(
            q, k, v, starts, keys, 1, 32, 0.0, False, False, seqused_k=counts, block_table=table
        )
        for i, length in enumerate((7, 20) if counts is used else (9, 31)):
            held = (x[table[i].long()].flatten(0, 1)[None, :length] for x in (k, v))
            assert_near(out[i : i + 1], attention64(q[None, i : i + 1], *held)[0][0])


def test_what_is_not_taken_goes_to_pytorchs_own_kernel():
    library = torch.library.Library("aten", "IMPL", "CPU")
    reached = []

    def original(q, _k, _v, dropout_p=0.0, *_others, **_named):
        reached.append(dropout_p)
        some = q.new_empty(0)
        return q.clone(), some.float(), some, some, 0, 0, some, some, some

    library.impl("_scaled_dot_product_flash_attention", original, "CPU")
    override = _Override("CPU")
    try:
        q, k, v = (x.detach() for x in swapped(tensors(*HEADS)))
        aten._scaled_dot_product_flash_attention(q, k, v, 0.5)
        assert aten._scaled_dot_product_flash_attention(q.float(), k.float(), v.float())[0].dtype is torch.float32
        assert reached == [0.5, 0.0]
        aten._scaled_dot_product_flash_attention(q, k, v)
        assert reached == [0.5, 0.0]
    finally:
        override.remove()
    aten._scaled_dot_product_flash_attention(q, k, v)
    assert reached == [0.5, 0.0, 0.0]  # PyTorch's own kernel again
    library._destroy()


@pytest.mark.usefixtures("overridden")
def test_without_another_kernel_the_reason_is_told():
    q, k, v = swapped(tensors(*HEADS))
    with pytest.raises(ProblemError, match="dropout"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.5)


def test_activation_registers_by_name_and_deactivation_restores():
    from torch.nn import attention as registry

    def kernel():
        has = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
        return torch.library.get_kernel("aten::_flash_attention_forward", "CUDA") if has else None

    before = repr(kernel())
    warploom.torch.activate()
    assert registry.current_flash_attention_impl() == "warploom"
    assert repr(kernel()) != before
    warploom.torch.activate()  # twice is once
    warploom.torch.deactivate()
    assert registry.current_flash_attention_impl() is None
    assert repr(kernel()) == before
    warploom.torch.deactivate()  # nothing to restore


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_runs_on_these_kernels_on_a_gpu(causal):
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from warploom.ops import attention as of_attention

    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (2, 256, 8, 64), (2, 256, 2, 64), (2, 256, 2, 64)
    given = [torch.randn(s, generator=generator, device="cuda").bfloat16().requires_grad_() for s in shapes]
    q, k, v = swapped(given)

    def both():
        out = sdpa(q, k, v, is_causal=causal, enable_gqa=True)
        return out, *torch.autograd.grad(out.float().square().sum(), given)

    expected = both()
    warploom.torch.activate()
    try:
        of_attention.attention_call.cache.clear()
        found = both()
        assert of_attention.attention_call.cache  # warploom's kernel ran
        dropped = sdpa(q, k, v, dropout_p=0.5, is_causal=causal, enable_gqa=True)  # PyTorch's own
        assert dropped.shape == q.shape
    finally:
        warploom.torch.deactivate()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())
        assert a.stride() == b.stride()
