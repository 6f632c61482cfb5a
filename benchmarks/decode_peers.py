"""The kernels of others that :mod:`decode_cells` times besides: each checked as ours is, and why one is not timed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from warploom.bench.timing import Candidate, graphed

if TYPE_CHECKING:
    from decode_cells import Cell

Inputs = dict[str, Any]
Run = Callable[[int], Any]
CONTIGUOUS_PAGE = 16
"""Keys of the pages as which FlashInfer reads a contiguous cache, in place: it divides sequences between pages only."""
WORKSPACE = 2**27
"""Bytes of FlashInfer's workspace, as its documentation has it."""


def of_torch(backend: str, cell: Cell, sets: list[Inputs]) -> Run | None:
    """PyTorch's attention on contiguous caches of even lengths."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if cell.page or cell.uneven:
        return None
    length = int(cell.lengths[0])

    def run(i: int) -> Any:
        q, k, v = (sets[i][n][:, :length].transpose(1, 2) for n in ("q", "k_cache", "v_cache"))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def flash_attention_4(_cell: Cell, sets: list[Inputs]) -> Run:
    """FlashAttention-4 on the caches as they are; without a mask, for a single query sees every key."""
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def run(i: int) -> Any:
        x = sets[i]
        found = function(x["q"], x["k_cache"], x["v_cache"], seqused_k=x["kv_lens"], page_table=x.get("block_table"))
        return found[0] if isinstance(found, tuple) else found

    return run


def flashinfer(tensor_cores: bool, cell: Cell, sets: list[Inputs]) -> Run:
    """FlashInfer, planned once for each set as its users plan once for each step."""
    import torch

    made: Any = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    page = cell.page or CONTIGUOUS_PAGE
    counts = -(-cell.lengths // page)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).cuda()
    last = torch.from_numpy(((cell.lengths - 1) % page + 1).astype(np.int32)).cuda()
    entries = cell.capacity // page
    in_place = torch.arange(cell.batch * entries, dtype=torch.int32, device="cuda").view(cell.batch, entries)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    calls: list[Callable[[], Any]] = []
    for x in sets:
        table = x.get("block_table", in_place)
        pages = torch.cat([row[:n] for row, n in zip(table, counts.tolist(), strict=True)])
        wrapper = made(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=pages.clone(), paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            starts, pages, last, cell.group * cell.kv_heads, cell.kv_heads, cell.head_dim, page,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        cache = tuple(x[n].view(-1, page, cell.kv_heads, cell.head_dim) for n in ("k_cache", "v_cache"))
        calls.append(partial(wrapper.run, x["q"][:, 0], cache))
    return lambda i: calls[i]()


PEERS: dict[str, Callable[[Any, list[Inputs]], Run | None]] = {
    "cudnn": partial(of_torch, "CUDNN_ATTENTION"),
    "torch_flash": partial(of_torch, "FLASH_ATTENTION"),
    "flash_attention_4": flash_attention_4,
    "flashinfer": partial(flashinfer, False),
    "flashinfer_tensor_cores": partial(flashinfer, True),
}
PACKAGES = {
    "cudnn": ("torch", "torch"),
    "torch_flash": ("torch", "torch"),
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
    "flashinfer": ("flashinfer", "flashinfer-python"),
    "flashinfer_tensor_cores": ("flashinfer", "flashinfer-python"),
}
"""What has to be imported, and the name that its version goes by."""


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of those of :data:`PEERS` that can be imported here: the version of what has them."""
    found: dict[str, str] = {}
    for name in names:
        module, package = PACKAGES[name]
        try:
            importlib.import_module(module)
            found[name] = importlib.metadata.version(package)
        except Exception as error:  # absent, or without what it needs
            print(f"no {name}: {_said(error)}", flush=True)
    return found


def beside(
    cell: Cell, sets: list[Inputs], names: Iterable[str], error: Callable[[Any], float]
) -> tuple[list[Candidate], dict[str, float], dict[str, str]]:
    """Those of ``names`` that take a cell and are right, as graphs; their errors; and what the others said."""
    import torch

    found, errors, not_run = list[Candidate](), dict[str, float](), dict[str, str]()
    for name in [] if cell.fp8 else names:
        try:
            if (run := PEERS[name](cell, sets)) is None:
                continue
            torch.full_like(sets[0]["q"], float("nan"))  # the memory that the result is likely to get
            errors[name] = error(run(0).reshape(sets[0]["q"].shape))
            if not errors[name] <= 1.0:
                raise ValueError(f"its error is {errors[name]:.2f} of what is allowed")
            graph = graphed(Candidate(name, run), len(sets), torch)
            graph.run(0)
            torch.cuda.synchronize()
            found.append(graph)
        except Exception as refusal:
            not_run[name] = _said(refusal)
            refusal.add_note(f"{name} at {cell.name}")
            torch.cuda.synchronize()  # raises where the GPU refused: nothing can be timed behind that
    return found, errors, not_run


def to_the_fastest(cells: Iterable[Mapping[str, Any]]) -> list[float]:
    """How many times as fast as the fastest of :data:`PEERS` we are, in measured cells that have one."""
    ratios = ([x["median"] for name, x in c["ratio"].items() if name in PEERS] for c in cells)
    return [min(found) for found in ratios if found]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
