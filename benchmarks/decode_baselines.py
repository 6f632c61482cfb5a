"""The kernels of others that :mod:`decode_cells` times besides: each checked as ours is, and why one is not timed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attention_others import sdpa

from warploom_lab.bench import baselines
from warploom_lab.bench.cells import Inputs, Run, said

if TYPE_CHECKING:
    from decode_cells import Cell

CONTIGUOUS_PAGE = 16
"""Keys of the pages as which FlashInfer reads a contiguous cache, in place: it divides sequences between pages only."""
WORKSPACE = 2**27
"""Bytes of FlashInfer's workspace, as its documentation has it."""


def of_torch(backend: str, cell: Cell, _sets: list[Inputs]) -> Run:
    """PyTorch's attention on contiguous caches of even lengths."""
    run, length = sdpa(backend, enable_gqa=True), int(cell.lengths[0])
    return lambda x: run(x["q"], x["k_cache"][:, :length], x["v_cache"][:, :length])


def flash_attention_4(_cell: Cell, _sets: list[Inputs]) -> Run:
    """FlashAttention-4 on the caches as they are; without a mask, for a single query sees every key."""
    run, why = baselines.flash_attention_4("flash_attn_varlen_func")
    assert run is not None, why
    return lambda x: run(x["q"], x["k_cache"], x["v_cache"], seqused_k=x["kv_lens"], page_table=x.get("block_table"))


def flashinfer(tensor_cores: bool, cell: Cell, sets: list[Inputs]) -> Run:
    """FlashInfer, planned once for each set as its users plan once for each step."""
    import torch

    wrapping: Any = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    page = cell.page or CONTIGUOUS_PAGE
    counts = -(-cell.lengths // page)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).cuda()
    last = torch.from_numpy(((cell.lengths - 1) % page + 1).astype(np.int32)).cuda()
    entries = cell.capacity // page
    in_place = torch.arange(cell.batch * entries, dtype=torch.int32, device="cuda").view(cell.batch, entries)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    calls: dict[int, Callable[[], Any]] = {}
    for x in sets:
        table = x.get("block_table", in_place)
        pages = torch.cat([row[:n] for row, n in zip(table, counts.tolist(), strict=True)])
        wrapper = wrapping(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=pages.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        wrapper.plan(
            starts,
            pages,
            last,
            cell.group * cell.kv_heads,
            cell.kv_heads,
            cell.head_dim,
            page,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        cache = tuple(x[n].view(-1, page, cell.kv_heads, cell.head_dim) for n in ("k_cache", "v_cache"))
        calls[id(x)] = partial(wrapper.run, x["q"][:, 0], cache)
    return lambda x: calls[id(x)]()


BASELINES: dict[str, Callable[[Any, list[Inputs]], Run]] = {
    "cudnn": partial(of_torch, "torch_cudnn"),
    "torch_flash": partial(of_torch, "torch_flash"),
    "flash_attention_4": flash_attention_4,
    "flashinfer": partial(flashinfer, False),
    "flashinfer_tensor_cores": partial(flashinfer, True),
}
_FLASHINFER, _TORCH = ("flashinfer", "flashinfer-python"), ("torch", "torch")
PACKAGES = {
    "cudnn": _TORCH,
    "torch_flash": _TORCH,
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
    "flashinfer": _FLASHINFER,
    "flashinfer_tensor_cores": _FLASHINFER,
}
"""What has to be imported, and the name that its version goes by."""


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of those of :data:`BASELINES` that can be imported here: the version of what has them."""
    found: dict[str, str] = {}
    for name in names:
        module, package = PACKAGES[name]
        try:
            importlib.import_module(module)
            found[name] = importlib.metadata.version(package)
        except Exception as error:  # absent, or without what it needs
            print(f"no {name}: {said(error)}", flush=True)
    return found


def runs_of(cell: Cell, sets: list[Inputs], names: Iterable[str]) -> dict[str, Run]:
    """Those of ``names`` that are for such a cell, each made at its first call."""
    own = [] if cell.fp8 else [n for n in names if PACKAGES[n] != _TORCH or not (cell.page or cell.uneven)]
    made = {name: cache(partial(BASELINES[name], cell, sets)) for name in own}
    return {name: lambda x, make=make: make()(x) for name, make in made.items()}


def to_the_fastest(cells: Iterable[Mapping[str, Any]]) -> list[float]:
    """How many times as fast as the fastest of :data:`BASELINES` we are, in measured cells that have one."""
    ratios = ([x["median"] for name, x in c["ratio"].items() if name in BASELINES] for c in cells)
    return [min(found) for found in ratios if found]
