"""FlashInfer's kernels in CUDA C++, from the headers of its wheel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .cuda import cuda, packages
from .trial import Result, case

_FLASHINFER = ("flashinfer-python==0.7.2.post1", "nvidia-curand")
_STATE = 1 << 14
"""Words for the states of groups of CTAs, which the host sets to zero once."""


def _check(header: str, kernel: str, grid: Any, block: Any, arguments: list[Any], **more: Any) -> None:
    data = packages() / "flashinfer" / "data"
    options = [f"-I{data / 'include'}", f"-I{data / 'csrc'}", f"-I{packages() / 'nvidia' / 'cu13' / 'include'}"]
    lines = "\n".join(f"#include <{name}>" for name in header.split())
    cuda(lines, f"flashinfer::{kernel}", grid, block, arguments, options=[*options, *more.pop("options", ())], **more)


def _masked(dtype: torch.dtype, name: str, ks: list[int], vocabulary: int = 512) -> Iterator[Result]:
    """Rows shared by two CTAs; a row of k = the vocabulary is copied."""
    logits, state = torch.randn(len(ks), vocabulary).to(dtype), np.zeros(_STATE, np.uint32)
    masked = torch.full_like(logits, float("nan"))
    given = [logits, masked, np.array(ks, np.int32), 0, vocabulary, len(ks), state, vocabulary // 2, 2]
    kernel = f"sampling::RadixTopKMaskLogitsKernel_MultiCTA<256, 1, false, {name}, int>"
    _check("flashinfer/topk.cuh", kernel, 2, 256, given, shared_bytes=8192)
    for row, k in enumerate(ks):
        least = logits[row].sort(descending=True).values[k - 1]
        yield masked[row], torch.where(logits[row] >= least, logits[row], float("-inf")), 1e-6


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32 and 7")
def flashinfer_mask_logits() -> Iterator[Result]:
    yield from _masked(torch.float32, "float", [32, 7])


@case(_FLASHINFER, "2 rows of 512 f16 on 2 CTAs, k 32 and all")
def flashinfer_mask_logits_all() -> Iterator[Result]:
    yield from _masked(torch.float16, "half", [32, 512])


def _renormed(ks: list[int], vocabulary: int = 512) -> Iterator[Result]:
    given, state = torch.rand(len(ks), vocabulary), np.zeros(_STATE, np.uint32)
    out = torch.full_like(given, float("nan"))
    arguments = [given, out, np.array(ks, np.int32), 0, vocabulary, len(ks), state, vocabulary // 2, 2]
    kernel = "sampling::RadixTopKRenormProbKernel_MultiCTA<256, 1, false, false, float, int>"
    _check("flashinfer/sampling.cuh flashinfer/topk.cuh", kernel, 2, 256, arguments, shared_bytes=8192)
    for row, k in enumerate(ks):
        least = given[row].sort(descending=True).values[k - 1]
        kept = torch.where(given[row] >= least, given[row], 0)
        yield out[row], kept / kept.sum(), 1e-5


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32 and 7")
def flashinfer_renorm() -> Iterator[Result]:
    yield from _renormed([32, 7])


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32 and all")
def flashinfer_renorm_all() -> Iterator[Result]:
    yield from _renormed([32, 512])


def _top_k(mode: str, deterministic: bool) -> Iterator[Result]:
    """Two rows shared by two CTAs; of pages, the table is a permutation."""
    rows, k, length = 2, 32, 512
    scores = torch.randn(rows, length)
    table = torch.stack([torch.randperm(length) for _ in range(rows)]).int()
    found, values = torch.full((rows, k), -7, dtype=torch.int32), torch.full((rows, k), float("nan"))
    plain = mode == "Basic"
    aux: Any = {"Basic": 0, "PageTableTransform": table, "RaggedTransform": torch.tensor([0, 1000]).int()}[mode]
    lengths: Any = 0 if plain else torch.full((rows,), length, dtype=torch.int32)
    states, scratch = np.zeros(_STATE, np.uint32), np.zeros(_STATE, np.uint32)
    given = [scores, found, values if plain else 0, aux, lengths, 0, 0, 0, length, k, length, rows]
    given += [states, scratch, length // 2, 2]
    kernel = f"sampling::RadixTopKKernel_Unified<256, 1, false, {str(deterministic).lower()}, "
    kernel += f"flashinfer::sampling::RadixTopKMode::{mode}, float, int>"
    _check("flashinfer/topk.cuh", kernel, 2, 256, given, shared_bytes=8192)
    best = scores.topk(k, -1).indices.sort(-1).values
    wanted = {
        "Basic": best,
        "PageTableTransform": table.gather(1, best),
        "RaggedTransform": best + torch.tensor([[0], [1000]]),
    }
    yield found.sort(-1).values, wanted[mode].sort(-1).values, 0


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32")
def flashinfer_top_k() -> Iterator[Result]:
    yield from _top_k("Basic", False)


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32, deterministic")
def flashinfer_top_k_deterministic() -> Iterator[Result]:
    yield from _top_k("Basic", True)


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32, page table")
def flashinfer_top_k_pages() -> Iterator[Result]:
    yield from _top_k("PageTableTransform", False)


@case(_FLASHINFER, "2 rows of 512 f32 on 2 CTAs, k 32, offsets")
def flashinfer_top_k_ragged() -> Iterator[Result]:
    yield from _top_k("RaggedTransform", False)
