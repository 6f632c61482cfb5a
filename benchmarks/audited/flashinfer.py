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


def _sampled(kernel: str, arguments: Any, allowed: torch.Tensor) -> Iterator[Result]:
    """Tokens drawn for each row of ``allowed``, which says of each token whether it may be drawn."""
    drawn = torch.full((len(allowed),), -1, dtype=torch.int32)
    valid = torch.zeros(len(allowed), dtype=torch.bool)
    options = "256, cub::BLOCK_SCAN_WARP_SCANS, cub::BLOCK_REDUCE_WARP_REDUCTIONS, 4, true, float, int"
    seeds = [allowed.shape[1], 0, 11, 0, 5, 0, 0]
    given = [*arguments(drawn, valid), *seeds]
    _check("flashinfer/sampling.cuh", f"sampling::{kernel}<{options}>", len(allowed), 256, given, shared_bytes=16384)
    yield allowed.gather(1, drawn[:, None].long()), torch.ones(len(allowed), 1), 0
    if "Logits" not in kernel and kernel != "SamplingFromProbKernel":
        yield valid, torch.ones(len(allowed)), 0


def _probabilities() -> torch.Tensor:
    return (3 * torch.randn(3, 1000)).softmax(-1)


@case(_FLASHINFER, "3 × 1000 f32")
def flashinfer_sample_logits() -> Iterator[Result]:
    logits = torch.randn(3, 1000)
    logits[:, ::3] = float("-inf")
    yield from _sampled("SamplingFromLogitsKernel", lambda out, _: [logits, out, 0], logits.isfinite())


@case(_FLASHINFER, "3 × 1000 f32")
def flashinfer_sample() -> Iterator[Result]:
    p = _probabilities() * (torch.rand(3, 1000) > 0.5)
    p /= p.sum(-1, keepdim=True)
    yield from _sampled("SamplingFromProbKernel", lambda out, valid: [p, out, valid, 0], p > 0)


@case(_FLASHINFER, "3 × 1000 f32, k 5")
def flashinfer_sample_top_k() -> Iterator[Result]:
    p = _probabilities()
    best = p >= p.topk(5, -1).values[:, -1:]
    yield from _sampled("TopKSamplingFromProbKernel", lambda out, valid: [p, out, valid, 0, 0, 5], best)


@case(_FLASHINFER, "3 × 1000 f32, p 0.3")
def flashinfer_sample_top_p() -> Iterator[Result]:
    p = _probabilities()
    values, order = p.sort(-1, descending=True)
    best = torch.zeros(3, 1000, dtype=torch.bool).scatter(1, order, values.cumsum(-1) - values < 0.3)
    yield from _sampled("TopPSamplingFromProbKernel", lambda out, valid: [p, out, valid, 0, 0, 0.3], best)


@case(_FLASHINFER, "3 × 1000 f32, p 0.4")
def flashinfer_sample_min_p() -> Iterator[Result]:
    p = _probabilities()
    best = p >= 0.4 * p.amax(-1, keepdim=True)
    yield from _sampled("MinPSamplingFromProbKernel", lambda out, valid: [p, 0, out, valid, 0, 0.4], best)


@case(_FLASHINFER, "3 × 1000 f32, k 9, p 0.5")
def flashinfer_sample_top_k_top_p() -> Iterator[Result]:
    p = _probabilities()
    values, order = p.sort(-1, descending=True)
    best = torch.zeros(3, 1000, dtype=torch.bool).scatter(1, order, values.cumsum(-1) - values < 0.5)
    best &= p >= p.topk(9, -1).values[:, -1:]
    yield from _sampled("TopKTopPSamplingFromProbKernel", lambda out, valid: [p, 0, 0, out, valid, 0, 9, 0.5], best)


@case(_FLASHINFER, "3 × 1000 f32, p 0.6")
def flashinfer_top_p_renorm() -> Iterator[Result]:
    p, out = _probabilities(), torch.full((3, 1000), float("nan"))
    kernel = "sampling::TopPRenormProbKernel<256, cub::BLOCK_REDUCE_WARP_REDUCTIONS, 4, float>"
    _check("flashinfer/sampling.cuh", kernel, 3, 256, [p, out, 0, 0.6, 1000], shared_bytes=16384)
    values, order = p.sort(-1, descending=True)
    kept = torch.zeros(3, 1000).scatter(1, order, (values.cumsum(-1) - values < 0.6).float()) * p
    yield out, kept / kept.sum(-1, keepdim=True), 1e-4


@case(_FLASHINFER, "3 × 1000 f32, a temperature")
def flashinfer_softmax() -> Iterator[Result]:
    x, out = torch.randn(3, 1000), torch.full((3, 1000), float("nan"))
    kernel = "sampling::OnlineSoftmaxFusedKernel<256, 4, float, true>"
    _check("flashinfer/sampling.cuh", kernel, 3, 256, [x, out, 0, 0.7, 1000], shared_bytes=16384)
    yield out, (x / 0.7).softmax(-1), 1e-5


@case(_FLASHINFER, "2 requests, 3 drafted tokens, 500 words f32")
def flashinfer_speculative_sampling() -> Iterator[Result]:
    draft, target = ((3 * torch.randn(2, n, 500)).softmax(-1) for n in (3, 4))
    target[:, :2] = draft[:, :2]  # the first two are accepted
    target[:, 2] = 0
    target[:, 2, 7] = 1
    tokens = draft.argmax(-1).int()
    out, accepted, emitted = torch.full((2, 4), -9).int(), torch.zeros(2).int(), torch.zeros(2).int()
    kernel = "256, cub::BLOCK_SCAN_WARP_SCANS, cub::BLOCK_REDUCE_WARP_REDUCTIONS, 4, true, float, int"
    given = [draft, tokens, target, out, accepted, emitted, 3, 500, 0, 11, 0, 5, 0, 0]
    _check(
        "flashinfer/sampling.cuh", f"sampling::ChainSpeculativeSampling<{kernel}>", 2, 256, given, shared_bytes=16384
    )
    yield out, torch.cat([tokens[:, :2], torch.tensor([[7, -1]] * 2)], 1), 0
    yield emitted, torch.full((2,), 2), 0


@case(_FLASHINFER, "5000 bits")
def flashinfer_pack_bits() -> Iterator[Result]:
    bits, packed = torch.rand(5000) > 0.5, torch.zeros(625, dtype=torch.uint8)
    kernel = "quantization::PackBitsKernel<flashinfer::quantization::BitOrder::kLittle>"
    _check("flashinfer/quantization.cuh", kernel, 3, 256, [bits, packed, 5000])
    yield packed, torch.from_numpy(np.packbits(bits.numpy(), bitorder="little")), 0


@case(_FLASHINFER, "5 positions × 3 heads × 64, 7 sets, f32")
def flashinfer_merge_states() -> Iterator[Result]:
    v, s = torch.randn(5, 7, 3, 64), torch.randn(5, 7, 3)
    merged, total = torch.full((5, 3, 64), float("nan")), torch.full((5, 3), float("nan"))
    given = [v, s, merged, total, 7, 3, 64]
    _check("flashinfer/attention/cascade.cuh", "MergeStatesKernel<4, float, float>", 5, (16, 3), given)
    weights = (s * np.log(2)).softmax(1)
    yield merged, (weights[..., None] * v).sum(1), 1e-5
    yield total, (s * np.log(2)).logsumexp(1) / np.log(2), 1e-5


@case(_FLASHINFER, "3 positions × 2 heads × 128, 70 sets, f32")
def flashinfer_merge_states_many() -> Iterator[Result]:
    v, s = torch.randn(3, 70, 2, 128), torch.randn(3, 70, 2)
    merged, total = torch.full((3, 2, 128), float("nan")), torch.full((3, 2), float("nan"))
    kernel = "MergeStatesLargeNumIndexSetsKernel<4, 32, 4, 2, float, float>"
    given = [v, s, merged, total, 70, 2]
    _check("flashinfer/attention/cascade.cuh", kernel, (3, 2), (32, 4), given, shared_bytes=2 * 4 * 32 * 4 * 4 + 2048)
    weights = (s * np.log(2)).softmax(1)
    yield merged, (weights[..., None] * v).sum(1), 1e-5
