"""The kernels of others that :mod:`decode_cells` times besides."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

import warploom

if TYPE_CHECKING:
    from decode_cells import Cell


def of_torch(cell: Cell, sets: list[dict[str, Any]]) -> dict[str, Any]:
    """PyTorch's attention on contiguous caches of even lengths: cuDNN's and FlashAttention's, if they take it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if cell.page or cell.uneven or cell.fp8:
        return {}
    found: dict[str, Any] = {}
    length = int(cell.lengths[0])
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("torch_flash", SDPBackend.FLASH_ATTENTION)):

        def run(i: int, backend: Any = backend) -> Any:
            q, k, v = (sets[i][n][:, :length].transpose(1, 2) for n in ("q", "k_cache", "v_cache"))
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        try:
            run(0)
        except RuntimeError:
            continue
        found[name] = run
    return found


def flash_attention_4(cell: Cell, sets: list[dict[str, Any]]) -> Any:
    """FlashAttention-4 on the caches as they are."""
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def run(i: int) -> Any:
        x = sets[i]
        found = function(
            x["q"], x["k_cache"], x["v_cache"], seqused_k=x["kv_lens"], page_table=x.get("block_table"), causal=True
        )
        return found[0] if isinstance(found, tuple) else found

    return run


def flashinfer(cell: Cell, sets: list[dict[str, Any]]) -> Any:
    """FlashInfer on pages, planned once for each set."""
    import torch

    if not cell.page:
        raise ValueError("it takes pages")
    made: Any = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    counts = -(-cell.lengths // cell.page)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).cuda()
    last = torch.from_numpy(((cell.lengths - 1) % cell.page + 1).astype(np.int32)).cuda()
    wrappers: list[Any] = []
    for x in sets:
        pages = torch.cat([row[:n] for row, n in zip(x["block_table"], counts.tolist(), strict=True)])
        wrapper = made(
            torch.empty(2**27, dtype=torch.uint8, device="cuda"), "NHD", use_cuda_graph=True,
            use_tensor_cores=cell.group > 1, paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=pages.clone(), paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            starts, pages, last, cell.group * cell.kv_heads, cell.kv_heads, cell.head_dim, cell.page,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        wrappers.append(wrapper)
    return lambda i: wrappers[i].run(sets[i]["q"][:, 0], (sets[i]["k_cache"], sets[i]["v_cache"]))


PEERS = {"flash_attention_4": flash_attention_4, "flashinfer": flashinfer}


def imported(cell: Cell, sets: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Those of :data:`PEERS` that are here, take a cell, and give what we do; of the others the reason is printed."""
    ours = warploom.attention_paged(**sets[0]).float().flatten()
    found: dict[str, Any] = {}
    for name in [] if cell.fp8 else names:
        try:
            run = PEERS[name](cell, sets)
            apart = float((run(0).float().flatten() - ours).abs().max() / ours.abs().max())
            if not apart <= 2.0**-6:
                raise ValueError(f"results differ by {apart:.3f} of the largest")
        except Exception as error:  # not installed, no compiler for it, or a shape that it refuses
            print(f"{cell.name}: no {name}: {type(error).__name__}: {error}".splitlines()[0][:200])
            continue
        found[name] = run
    return found
