"""SGLang's kernels in CUDA C++, which it compiles when they are first called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .cuda import cuda, packages
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
