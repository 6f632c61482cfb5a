"""vLLM's kernels in Triton: of its wheel the Python files alone, since the rest is large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from .cuda import module_of
from .trial import Result, case

_VLLM = ("vllm==0.33.0", "triton==3.8.0")  # it asks for torch 2.14.0, which brings Triton 3.8


def _sampler(name: str) -> Any:
    interface = ("LogitsContext", "LogitsProcessor", "LogitsProcRequestState")
    stand_ins = {
        "vllm__triton_utils": {"tl": triton.language, "triton": triton},
        "vllm__sampling_params": {"SamplingParams": object},
        "vllm__v1__worker__gpu__buffer_utils": {"StagedWriteTensor": object, "UvaBackedTensor": object},
        "vllm__v1__worker__gpu__sample__logits_processor__interface": dict.fromkeys(interface, object),
    }
    return module_of(f"vllm/v1/worker/gpu/sample/{name}.py", **stand_ins)


@case(_VLLM, "2 × 5000 words f32, 300 allowed, 200 biased, a stop token among both")
def vllm_logit_bias() -> Iterator[Result]:
    logits = torch.randn(2, 5000)
    allowed = torch.stack([torch.randperm(5000)[:300] for _ in range(2)]).int()
    biased, bias = allowed.flip(1)[:, :200].contiguous(), torch.randn(2, 200)
    stops = biased[:, 150:151].contiguous()
    wanted = torch.full((2, 5000), float("-inf"))
    for row in range(2):
        wanted[row, allowed[row].long()] = logits[row, allowed[row].long()]
        wanted[row, biased[row].long()] += bias[row]
        wanted[row, stops[row].long()] = float("-inf")

    def each(n: int) -> torch.Tensor:
        return torch.full((2,), n, dtype=torch.int32)

    rows = torch.arange(2, dtype=torch.int32)
    masks = each(300), allowed, each(200), biased, bias, each(9), each(1), torch.zeros(2, dtype=torch.bool), stops
    _sampler("logit_bias").apply_logit_bias(logits, rows, each(3).long(), *masks)
    yield logits, wanted, 1e-6


@case(_VLLM, "3 × 900 words f32")
def vllm_min_p() -> Iterator[Result]:
    logits, p = torch.randn(3, 900), torch.tensor([0.1, 0.5, 0.0])
    wanted = torch.where(logits < (logits.amax(-1) + p.log())[:, None], float("-inf"), logits)
    _sampler("min_p").apply_min_p(logits, torch.arange(3, dtype=torch.int32), p)
    yield logits, wanted, 1e-6


@case(_VLLM, "3 × 900 words f32")
def vllm_temperature() -> Iterator[Result]:
    logits, temperature = torch.randn(3, 900), torch.tensor([0.7, 1.0, 0.0])
    wanted = logits / torch.tensor([0.7, 1.0, 1.0])[:, None]
    _sampler("gumbel").apply_temperature(logits, torch.arange(3, dtype=torch.int32), temperature)
    yield logits, wanted, 1e-6


@case(_VLLM, "2 × 20000 words f32, k 50 and 20")
def vllm_top_k_top_p() -> Iterator[Result]:
    same = lambda *_, **__: lambda function: function  # noqa: E731
    stand_ins = {
        "vllm__triton_utils": {"tl": triton.language, "triton": triton},
        "vllm__model_executor__warmup__jit_warmup": dict.fromkeys(("WarmupChoices", "WarmupIntRange", "_when"), same),
        "vllm__model_executor__warmup__jit_warmup_triton_helper": {
            "DispatchSpec": object,
            "TritonWarmupTensor": object,
            "triton_kernel_dispatcher_with_warmup": same,
        },
        "vllm__platforms": {"current_platform": None},
        "vllm__utils__gpu_sync_debug": {"gpu_sync_allowed": None},
        "vllm__utils__math_utils": {"next_power_of_2": triton.next_power_of_2},
        "vllm__utils__platform_utils": {"num_compute_units": None},
    }
    sampler = module_of("vllm/v1/sample/ops/topk_topp_triton.py", **stand_ins)
    logits, words = 2 * torch.randn(2, 20000), 20000
    k, p = torch.tensor([50, 20], dtype=torch.int32), torch.tensor([1.0, 1.0])
    least = logits.sort(-1, descending=True).values.gather(1, k[:, None].long() - 1)
    wanted = torch.where(logits >= least, logits, float("-inf"))
    names = "PERCENTILE_TO_STD", "NORMAL_CDF_TO_SIGMA"
    tables = (torch.tensor(getattr(sampler, f"_{name}_TABLE")) for name in names)
    given = [
        logits,
        words,
        torch.zeros(2, words),
        *tables,
        k,
        p,
        2,
        words,
        float("-inf"),
        8192,
        4096,
        True,
        True,
        False,
    ]
    sampler._topk_topp_kernel[(2,)](*given, num_warps=8)
    yield logits, wanted, 1e-6
