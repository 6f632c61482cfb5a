"""SGLang's kernels in CUDA C++, which it compiles when they are first called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton

from .cuda import cuda, module_of, packages
from .trial import Result, case

_SGLANG = ("sglang==0.5.23", "apache-tvm-ffi==0.1.15.post2")


def _check(file: str, kernel: str, grid: Any, block: Any, arguments: list[Any], **more: Any) -> None:
    jit = packages() / "sglang" / "kernels" / "jit"
    options = [f"-I{jit / 'csrc'}", f"-I{jit / 'include'}", f"-I{packages() / 'tvm_ffi' / 'include'}"]
    cuda(f'#include "{file}"', kernel, grid, block, arguments, options=[*options, "-DSGL_CUDA_ARCH=900"], **more)


def _top(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.topk(k, -1).values.sort(-1).values


@case(_SGLANG, "3 rows of 700, 1500 and 100, k 512")
def sglang_fast_topk() -> Iterator[Result]:
    scores, lengths = torch.randn(3, 1500), torch.tensor([700, 1500, 100], dtype=torch.int32)
    starts, indices = torch.zeros(3, dtype=torch.int32), torch.full((3, 512), -7, dtype=torch.int32)
    given = [scores.numpy(), starts.numpy(), indices.numpy(), lengths.numpy(), np.int64(1500)]
    _check(
        "elementwise/fast_topk.cuh",
        "sglang::fast_topk_detail::fast_topk_kernel<512, false>",
        3,
        1024,
        [given],
        shared_bytes=32768,
    )
    for row, length in enumerate((700, 1500)):
        got = scores[row][indices[row].long()].sort().values
        yield got, _top(scores[row, :length], 512), 0
    yield indices[2], torch.cat([torch.arange(100), torch.full((412,), -1)]), 0


@case(_SGLANG, "a row of 6000 scores between 1 and 1.2, k 512")
def sglang_fast_topk_alike() -> Iterator[Result]:
    scores, indices = 1 + torch.rand(1, 6000) / 5, torch.full((1, 512), -7, dtype=torch.int32)
    given = [scores.numpy(), np.zeros(1, np.int32), indices.numpy(), np.array([6000], np.int32), np.int64(6000)]
    _check(
        "elementwise/fast_topk.cuh",
        "sglang::fast_topk_detail::fast_topk_kernel<512, false>",
        1,
        1024,
        [given],
        shared_bytes=32768,
    )
    yield scores[0][indices[0].long()].sort().values, _top(scores[0], 512), 0


# -- Triton: SGLang 0.5.23 asks for torch 2.14.1, which brings Triton 3.8
_WITH_TRITON = (_SGLANG[0], "triton==3.8.0")
_KERNELS = "sglang/kernels/ops"


@case(_WITH_TRITON, "3 × 512 bf16, 32 experts f32, K split in 8")
def sglang_router_gemv() -> Iterator[Result]:
    stand_ins = {
        "sglang__kernels__ops__quantization__bf16x3_split": {"split_fp32_to_bf16x3": None},
        "sglang__srt__utils": {"is_gfx95_supported": lambda: False, "is_hip": lambda: False},
    }
    gemv = module_of(f"{_KERNELS}/gemm/router_gemv.py", **stand_ins)
    x, w = torch.randn(3, 1024).bfloat16(), torch.randn(32, 1024)
    yield gemv.router_gemv(x, w), x.double() @ w.double().T, 1e-5


@case(_WITH_TRITON, "5 × 4096 f16, 4 streams, low rank 96, on 4 CTAs")
def sglang_hc_mix() -> Iterator[Result]:
    mix = module_of(f"{_KERNELS}/gemm/hc_mix.py")
    x, down, up = (torch.randn(*shape).half() / 16 for shape in ((5, 4096), (96, 4096), (4096, 96)))
    t = (x.double() @ down.double().T) / 4
    t = t * t.sigmoid()
    gates = (t @ up.double().T).sigmoid().view(5, 4, 1024)
    yield mix.fused_hc_mix(x, down, up, 4, 1024), (gates * x.double().view(5, 4, 1024)).sum(1) / 4, 1e-2


@case(_WITH_TRITON, "200 experts")
def sglang_ep_scatter() -> Iterator[Result]:
    utils = {"ceil_div": triton.cdiv, "is_cuda": lambda: False, "is_musa": lambda: False}
    stand_ins = {"sglang__srt__environ": {"envs": None}, "sglang__srt__utils": utils}
    scatter = module_of(f"{_KERNELS}/moe/ep_moe_kernels.py", **stand_ins)._fwd_kernel_ep_scatter_1
    padded = 128 * torch.randint(0, 3, (200,), dtype=torch.int32)
    valid = (padded - 5).clamp(min=0)
    starts = torch.full((200,), 1 << 20, dtype=torch.int32)
    rows = torch.full((int(padded.sum()),), -7, dtype=torch.int32)
    scatter[(200,)](padded, valid, starts, rows, num_experts=200, num_warps=8, BLOCK_E=128, BLOCK_EXPERT_NUM=256)
    yield starts, padded.cumsum(0) - padded, 0
    wanted = [
        torch.where(torch.arange(n) < m, e, -1)
        for e, (n, m) in enumerate(zip(padded.tolist(), valid.tolist(), strict=True))
    ]
    yield rows, torch.cat(wanted), 0
