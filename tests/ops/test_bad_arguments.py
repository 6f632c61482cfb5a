"""Arguments of the wrong kind: refused with a message that says what to do, or read as what they plainly mean."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from warploom.core.dtypes import f32
from warploom.core.errors import ConfigError, ProblemError, TraceError
from warploom.flash_attn import flash_attn_func
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.lang.functions import relu


def random(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


A, B = random(16, 32), random(32, 48)
Q = random(1, 16, 2, 64, dtype=ml_dtypes.bfloat16)


# -- what is no array
LENGTHS, TARGET = np.array([0, 16], np.int32), np.zeros(16, np.int32)
LSE = np.zeros((1, 2, 16), np.float32)
NEEDED: dict[Any, dict[str, Any]] = {
    warploom.attention: {"q": Q, "k": Q, "v": Q},
    warploom.plan: {"q": Q, "k": Q, "v": Q},
    warploom.attention_varlen: {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": LENGTHS},
    warploom.attention_paged: {"q": Q[:, :1], "k_cache": Q, "v_cache": Q, "kv_lens": LENGTHS[1:]},
    warploom.append_to_cache: {"k_cache": Q.copy(), "v_cache": Q.copy(), "k": Q, "v": Q, "kv_lens": LENGTHS[1:]},
    warploom.attention_backward: {"dout": Q, "q": Q, "k": Q, "v": Q, "out": Q, "lse": LSE},
    warploom.plan_attention_backward: {"dout": Q, "q": Q, "k": Q, "v": Q, "out": Q, "lse": LSE},
    warploom.matmul: {"a": A, "b": B},
    warploom.plan_matmul_reduce: {"a": A, "b": B},
    warploom.linear_cross_entropy: {"x": A, "w": A, "target": TARGET},
    warploom.plan_linear_cross_entropy: {"x": A, "w": A},
}


@pytest.mark.parametrize("call", NEEDED, ids=lambda call: call.__name__)
def test_none_for_an_array_that_a_call_needs_is_refused_by_its_name(call):
    for name in NEEDED[call]:
        with pytest.raises(ProblemError, match=f"^{name}\\b.*: NoneType is not an array") as refused:
            call(**{**NEEDED[call], name: None})
        assert name != "lse" or "return_lse=True" in str(refused.value)


def test_what_is_wrong_with_the_gradient_of_the_log_sum_exp_says_what_it_is():
    for wrong in (1.0, LSE[:, 1:], LSE.astype(np.float16)):
        with pytest.raises(ProblemError, match=r"^dlse\b.*the gradient of lse"):
            warploom.attention_backward(Q, Q, Q, Q, Q, LSE, dlse=wrong)


def test_a_number_for_an_array_is_refused_by_its_name():
    with pytest.raises(ProblemError, match="sinks: float"):
        warploom.attention(Q, Q, Q, sinks=1.0)
    for call in (warploom.matmul, warploom.matmul_reduce, warploom.plan_matmul, warploom.plan_matmul_reduce):
        with pytest.raises(ProblemError, match="bias: float"):
            call(A, B, bias=0.0)
    for call, given in ((warploom.linear_cross_entropy, (A, A, TARGET)), (warploom.plan_linear_cross_entropy, (A, A))):
        with pytest.raises(ProblemError, match="bias: float"):
            call(*given, bias=0.0)


# -- configurations
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("BM=0", "tile_m is at least 1, not 0"),
        ("BN=0,BK=0", "tile_n is at least 1, not 0; tile_k is at least 1"),
        ("BM=x", "BM is an integer, not 'x'"),
        ("BM=128,opt_level=9", "opt_level is ptxas's, 0 to 3, not 9"),
        ("BM=128,dtype=f13", "dtype: 'f13' is not a type"),
        ("matmul_sm80(min_ctas=0)", "min_ctas is at least 1"),
        ("matmul_sm80(BM=7)", "divides tile_m 7$"),
        ("matmul_sm80(BM=0)", "tile_m is at least 1, not 0$"),
        ("matmul_sm80", "is no configuration; write matmul_sm80.tile_m=128"),
        ("matmul_sm90(BM=0)", "tile_m is at least 1"),
        ("matmul_sm90(consumers=0)", "consumers is at least 1"),
        ("matmul_sm90(cluster=2)", "no flag of matmul_sm90"),
        ([1], r"config cannot be \[1\]: .*matmul_sm90.*matmul_sm80"),
        (MatmulSm80(tile_m="64"), "tile_m is a Python int, not '64'"),
        (MatmulSm80(dtype="f16"), "dtype is a type of warploom.core.dtypes"),
        (MatmulSm80(stream_k=1), "stream_k is True or False, not 1"),
        (MatmulSm80(tile_m=[64]), "tile_m is a Python int"),
    ],
)
def test_configurations_of_products_that_cannot_be(config, says):
    for call in (warploom.plan_matmul, warploom.matmul, warploom.matmul_reduce, warploom.plan_matmul_reduce):
        with pytest.raises((ConfigError, ProblemError), match=says):
            call(A, B, config=config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("(BF16, 64, 0, 64, 0)", "tile_m is at least 1, not 0; num_warps is at least 1"),
        ("(BF16, 64, 64, 64, 4): opt_level=9", "opt_level is ptxas's"),
        ("(F13, 64, 64, 64, 4)", "'F13' is not a type"),
        ("attention_sm90(consumers=0)", "consumers is at least 1"),
        ("attention_sm90(dtype=f13)", "'f13' is not a type"),
        ([1], r"config cannot be \[1\]: "),
        (ForwardSm80(dtype=f32, head_dim=64), "dtype f32 is not f16 or bf16"),
        (ForwardSm80(dtype="bf16", head_dim=64), "dtype is a type of"),
        (ForwardSm80(tile_m=[64]), "tile_m is a Python int"),
    ],
)
def test_configurations_of_attention_that_cannot_be(config, says):
    for call in (warploom.plan, warploom.attention):
        with pytest.raises(ConfigError, match=says):
            call(Q, Q, Q, config=config)


# -- numbers and switches
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scale": np.array([0.5, 1.0])}, r"scale is a number, not ndarray of shape \(2,\)"),
        ({"scale": [0.5]}, r"scale is a number, not \[0.5\]"),
        ({"scale": 1j}, "scale is a number"),
        ({"softcap": 10**400}, "softcap must be a finite float32"),
        ({"causal": "no"}, "causal is True or False, not 'no'"),
        ({"causal": 2}, "causal is True or False, not 2"),
        ({"causal": None}, "causal is True or False, not None"),
        ({"return_lse": np.array([1, 0])}, "return_lse is True or False"),
        ({"scale": math.inf}, "scale must be a finite float32"),
        ({"softcap": "x"}, "softcap is a number"),
        ({"window": 3}, "window is"),
        ({"window": (1, 2, 3)}, "window is"),
        ({"window": ("a", 0)}, "window is"),
        ({"window": (-5, 0)}, "left side is -5"),
        ({"window": np.array(3)}, "window is .left, right. counts"),
        ({"window": np.array([1.5, 2.0])}, "window is .left, right. counts"),
        ({"window": {1, 2}}, "window is .left, right. counts"),
        ({"layout": ["bshd"]}, "layout is 'bshd'"),
        ({"layout": "sbhd"}, r"layout is 'bshd'.*or 'bhsd', not 'sbhd'"),
    ],
)
def test_options_of_attention_that_are_no_numbers(options, says):
    for call in (warploom.plan, warploom.attention):
        with pytest.raises(ProblemError, match=says):
            call(Q, Q, Q, **options)


def test_one_number_in_an_array_is_that_number():
    given: dict[str, Any] = {"scale": np.array([0.25]), "softcap": np.array(5.0), "causal": np.array(True)}
    given["window"] = np.array([3, 0])
    plain: dict[str, Any] = {"scale": 0.25, "softcap": 5.0, "causal": True, "window": (3, 0)}
    assert (warploom.attention(Q, Q, Q, **given) == warploom.attention(Q, Q, Q, **plain)).all()
    factor: Any
    for factor in (np.array(2.0), np.float32(2), ml_dtypes.bfloat16(2), 2, np.array([[2]])):
        assert (warploom.matmul(A, B, alpha=factor) == warploom.matmul(A, B, alpha=2.0)).all()
    two: Any = np.array(2.0)
    reduced = warploom.matmul_reduce(A, B, scale=two)
    assert (reduced == warploom.matmul_reduce(A, B, scale=2.0)).all()


def test_a_tensor_given_as_a_factor_is_read_in_every_call():
    """Tensors hash by identity: kept as part of a key, the factor of the first call would be every call's."""
    torch = pytest.importorskip("torch")
    a, b, factor = torch.ones(16, 16).half(), torch.ones(16, 16).half(), torch.tensor(2.0)
    assert (warploom.matmul(a, b, alpha=factor) == 32).all()
    factor.fill_(3.0)
    assert (warploom.matmul(a, b, alpha=factor) == 48).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": "x"}, "alpha is a number, not 'x'"),
        ({"alpha": None}, "alpha is a number, not None"),
        ({"alpha": [2]}, "alpha is a number"),
        ({"alpha": np.ones(2)}, "alpha is a number"),
        ({"alpha": 10**400}, "alpha must be a finite float32"),
        ({"out_dtype": [1]}, r"out_dtype is f16, bf16 or f32, not \[1\]"),
        ({"accumulate": np.ones(2)}, "accumulate is 'f32', .*; not ndarray of shape"),
        ({"epilogue": len}, "the epilogue len does not compute with numbers that are traced: .* has no len"),
        ({"extras": random(16, 48), "epilogue": lambda x, y: x + y}, r"write extras=\(matrix,\)"),
        ({"extras": 5, "epilogue": lambda x, y: x + y}, "extras is a tuple of matrices, not 5"),
    ],
)
def test_options_of_products_that_are_no_numbers(options, says):
    with pytest.raises(ProblemError, match=says):
        warploom.matmul(A, B, **options)


def test_a_few_numbers_at_an_odd_address_are_refused_by_their_name():
    odd = np.zeros(9, np.uint8)[1:].view(np.float32)
    with pytest.raises(ProblemError, match=r"^sinks starts at an odd address, no multiple of its elements' 4 bytes"):
        warploom.attention(*[random(1, 8, 2, 16) for _ in "qkv"], sinks=odd)


# -- ranges, types, and arrays without elements
def test_a_head_dim_that_no_kernel_takes_may_be_padded_as_the_message_says():
    x = random(1, 6, 1, 20)
    with pytest.raises(ProblemError, match=r"scale=20\*\*-0\.5"):
        warploom.attention(x, x, x)
    padded = np.pad(x, ((0, 0),) * 3 + ((0, 4),))
    found = warploom.attention(padded, padded, padded, scale=20**-0.5)[0, :, 0, :20].astype(np.float64)
    rows = x[0, :, 0].astype(np.float64)
    weights = np.exp(rows @ rows.T / np.sqrt(20))
    np.testing.assert_allclose(found, weights @ rows / weights.sum(1, keepdims=True), atol=2e-3)


@pytest.mark.parametrize("value", [2.4e38, -3e38, 3.4e38])
def test_scales_whose_product_with_log2_e_is_no_float32(value):
    for call in (warploom.plan, warploom.attention):
        with pytest.raises(ProblemError, match="scale must be a finite float32 within"):
            call(Q, Q, Q, scale=value)


@pytest.mark.parametrize("value", [0.0, 1e-320, 1e-40, 2e38, -1.0, math.nan])
def test_soft_caps_that_no_kernel_forms(value):
    for call in (warploom.plan, warploom.attention):
        with pytest.raises(ProblemError, match="softcap must be positive and finite, from"):
            call(Q, Q, Q, softcap=value)


@pytest.mark.parametrize("options", [{"scale": 2.3e38}, {"scale": 1e-46}, {"softcap": 1e-38}, {"softcap": 1.6e38}])
def test_options_at_the_ends_of_their_range_make_a_kernel(options):
    out, lse = warploom.attention(Q, Q[:, :9], Q[:, :9], return_lse=True, **options)
    assert np.isnan(out.astype(np.float32)).all() == ("scale" in options and options["scale"] > 1)
    assert not np.isnan(lse).any()


@pytest.mark.parametrize("shapes", [((0, 8), (8, 4)), ((4, 8), (8, 0)), ((0, 4, 8), (0, 8, 4)), ((4, 0), (0, 4))])
def test_a_result_without_elements_may_be_given(shapes):
    a, b = (np.zeros(shape, np.float16) for shape in shapes)
    out = np.ones((*shapes[0][:-1], shapes[1][-1]), np.float16)
    assert warploom.matmul(a, b, out=out) is out
    assert (out == 0).all()
    assert warploom.plan_matmul(a, b, out=out).problem.m == shapes[0][-2]


def test_configurations_are_read_where_there_is_nothing_to_compute():
    nothing = Q[:, :0]
    for config, says in (
        ("nonsense", "config cannot be"),
        (3, "cannot be 3"),
        ("(BF16, 128, 64, 64, 4): async", "head_dim"),
    ):
        for q, k in ((Q, nothing), (nothing, Q)):
            with pytest.raises(ConfigError, match=says):
                warploom.attention(q, k, k, config=config)
    for call in (warploom.matmul, warploom.matmul_reduce):
        for config, says in (("nonsense", "config cannot be"), ("matmul_sm80(BM=7)", "divides tile_m 7")):
            with pytest.raises(ConfigError, match=says):
                call(A[:0], B, config=config)


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.complex64, ml_dtypes.float8_e4m3fn, ">f2"])
def test_of_types_messages_name_those_that_the_operation_takes(dtype):
    wrong = np.zeros((16, 16)).astype(dtype)
    four = wrong[None, :, None]
    calls = {
        "q is .*convert it to f16 or bf16": lambda: warploom.attention(four, four, four),
        "a is .*convert it to f16 or bf16": lambda: warploom.matmul(wrong, wrong),
        "a is f16 and bias is .*: convert them to one type, f16 or bf16": lambda: warploom.matmul(
            A, B[:, :16], bias=wrong[0]
        ),
        "convert it to int32 or int64": lambda: warploom.linear_cross_entropy(A, B.T, wrong[0]),
    }
    if dtype is not np.float32:
        calls["convert it to f16 or bf16 or f32"] = lambda: warploom.matmul(A, B[:, :16], out=wrong)
    for says, call in calls.items():
        with pytest.raises(ProblemError, match=says) as refused:
            call()
        assert "s64" not in str(refused.value)


@pytest.mark.parametrize("name", ["f64", "int8", 3, np.complex64, "quaternion", "f8"])
def test_types_of_results_and_sums_that_there_are_none_of(name):
    with pytest.raises(ProblemError, match=r"^out_dtype is f16, bf16 or f32, not"):
        warploom.matmul(A, B, out_dtype=name)
    with pytest.raises(ProblemError, match=r"^accumulate is 'f32', or 'f16' for float16 inputs; not"):
        warploom.matmul(A, B, accumulate=name)


# -- epilogues
@pytest.mark.parametrize(
    ("epilogue", "says"),
    [
        (5, "epilogue is a function of the sum, such as warploom.lang.functions.relu, not 5"),
        ("relu", "not 'relu'"),
        (lambda: 1, r"which <lambda>\(\) does not take"),
        (lambda x, y: x, "missing a required .*'y'"),
        (lambda x, *, y: x, "missing a required .*'y'"),
        (lambda x: x > 0, r"an f32, not a condition: warploom.lang.functions.select"),
        (lambda x: x if x > 0 else 0.0, "select, maximum, minimum of warploom.lang.functions"),
        (lambda x: np.exp(x), "numpy.exp computes with arrays"),
        (lambda x: np.where(x > 0, x, 0), "numpy.where computes with arrays"),
        (lambda x: np.ones(3) * x, "numpy.multiply computes with arrays"),
        (lambda x: x * np.ones(3), r"ndarray of shape \(3,\) is no number that f32 can hold"),
        (lambda x: math.exp(x), "warploom.lang.functions where there is no k"),
        (lambda x: x**2, r"write x \* x"),
        (lambda x: x + "a", "'a' is no number that f32 can hold"),
        (lambda x: x + None, "None is no number"),
        (lambda x: 10**400, "is no number that f32 can hold"),
        (round, "no Python number"),
    ],
)
def test_epilogues_that_cannot_be(epilogue, says):
    with pytest.raises((ProblemError, TraceError), match=says):
        warploom.matmul(A, B, epilogue=epilogue)


@pytest.mark.parametrize("wrong", [lambda x: np.tanh(x), lambda x: None, lambda x: x > 0, lambda x: x.foo()])
def test_a_wrong_epilogue_is_told_at_its_own_line(wrong):
    with pytest.raises((ProblemError, TraceError)) as refused:
        warploom.matmul(A, B, epilogue=wrong)
    assert str(refused.value).startswith(f"test_bad_arguments.py:{wrong.__code__.co_firstlineno}: ")
    assert "called from" not in str(refused.value)


def test_an_epilogue_of_torch_is_pointed_at_warplooms_functions():
    torch = pytest.importorskip("torch")
    for function in (torch.relu, torch.nn.functional.gelu, torch.nn.ReLU()):
        with pytest.raises(TraceError, match=r"torch's (relu|gelu) computes with.*warploom\.lang\.functions\.\1"):
            warploom.matmul(A, B, epilogue=function)


def test_an_epilogue_takes_as_many_values_as_there_are_extras():
    extra = random(16, 48)
    with pytest.raises(ProblemError, match="the sum and one element of each of the 2 extra matrices"):
        warploom.matmul(A, B, epilogue=lambda x, y: x + y, extras=(extra, extra))
    both = warploom.matmul(A, B, epilogue=lambda *values: values[0] + values[1], extras=[extra])
    assert (both == warploom.matmul(A, B, epilogue=lambda x, y: x + y, extras=(extra,))).all()


def test_numpys_numbers_stand_on_either_side_of_an_operator():
    expected = warploom.matmul(A, B, epilogue=lambda x: relu(2.0 - x) * 3.0)
    two, three, whole = np.float32(2), np.float64(3), np.array(2.0)
    assert (warploom.matmul(A, B, epilogue=lambda x, a=two, b=three: relu(a - x) * b) == expected).all()
    with pytest.raises(ProblemError, match="reads a, a ndarray"):  # whose element may change
        warploom.matmul(A, B, epilogue=lambda x, a=whole: relu(a - x))


def test_messages_show_no_contents_of_arrays():
    with pytest.raises(ProblemError) as refused:
        warploom.matmul(A, B, alpha=np.ones((40, 40)))  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert not re.search(r"1\.", str(refused.value))


# -- the loss
@pytest.mark.parametrize(
    ("x", "w", "target", "says"),
    [
        (random(4, 8, dtype=np.float32), random(5, 8), np.zeros(4, np.int32), "^x is f32"),
        (random(4, 8), random(5, 8, dtype=np.float32), np.zeros(4, np.int32), "x is f16 and w is f32"),
        (random(4, 8), random(0, 8), np.zeros(4, np.int32), "^w has shape .* at least one word"),
        (random(4, 8), random(5, 9), np.zeros(4, np.int32), "^w has shape .* k = 8, as x has"),
        (random(4, 8), random(5, 8), np.zeros(4, np.float32), "^target is f32"),
        (random(4, 8), random(5, 8), np.zeros(3, np.int32), "^target has shape"),
        (random(4, 8), random(5, 8, dtype=ml_dtypes.bfloat16), np.zeros(4, np.int32), "^x is f16 and w is bf16"),
    ],
)
def test_the_loss_speaks_of_its_own_arguments(x, w, target, says):
    with pytest.raises(ProblemError, match=says):
        warploom.linear_cross_entropy(x, w, target)


@pytest.mark.parametrize(
    ("call", "name", "says"),
    [
        (warploom.attention, "is_causal", "write causal="),
        (warploom.attention, "dropout_p", "no dropout"),
        (warploom.attention, "softmax_scale", "write scale="),
        (warploom.attention, "causl", "write causal="),
        (warploom.attention, "anything", "its parameters are q, k, v, causal"),
        (warploom.attention_varlen, "window_size", "write window="),
        (warploom.attention_varlen, "cu_seqlens", "write cu_seqlens_q="),
        (warploom.attention_paged, "cache_seqlens", "write kv_lens="),
        (warploom.attention_paged, "page_table", "write block_table="),
        (warploom.attention_paged, "num_splits", "leave it out"),
        (warploom.append_to_cache, "rotary_cos", "write cos="),
        (warploom.attention_backward, "learnable_sink", "write sinks="),
        (warploom.matmul, "transpose_b", "b.T"),
        (warploom.matmul, "out_type", "write out_dtype="),
        (warploom.matmul, "scale", "write alpha="),
        (warploom.matmul_reduce, "return_indices", "write return_index="),
        (warploom.linear_cross_entropy, "lse_square_scale", "write z_loss="),
        (warploom.linear_cross_entropy, "weight", "no weights of their own"),
        (warploom.plan, "is_causal", "write causal="),
        (warploom.plan_matmul, "aplha", "write alpha="),
    ],
)
def test_a_keyword_of_other_libraries_says_what_to_write(call, name, says):
    parameters = inspect.signature(call).parameters.values()
    needed = [x for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    called = "a plan of .*" if call.__name__.startswith("plan") else call.__name__
    with pytest.raises(TypeError, match=rf"^{called}\(\) got an unexpected keyword argument '{name}'") as refused:
        call(*(np.zeros((1, 16, 1, 16), np.float16),) * len(needed), **{name: True})
    assert says in str(refused.value)


def test_the_functions_named_as_flash_attentions_say_so_too():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 16, 1, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"flash_attn_func\(\) got .* 'window': write window_size="):
        flash_attn_func(q, q, q, window=(1, 1))


def test_a_reduction_that_there_is_not_says_how_to_have_it():
    a = np.zeros((16, 16), np.float16)
    with pytest.raises(ProblemError, match=r"op is 'max'.*not 'min': .*max of -a"):
        warploom.matmul_reduce(a, a, "min")  # pyright: ignore
