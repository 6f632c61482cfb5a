"""What serving with this package reaches, as parts of pages made from results of ``benchmarks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from page_tables import markdown_table

Result = Mapping[str, Any]

PEERS = {"cudnn": "cuDNN", "torch_flash": "FlashAttention-2", "flash_attention_2": "FlashAttention-2",
         "flash_attention_4": "FlashAttention-4"}  # fmt: skip


def decode(result: Result) -> str:
    """Decode: which part of the copy's rate each kernel reads keys and values at."""
    cells = result["cells"]
    names: list[str] = list(dict.fromkeys(name for c in cells for name in c["part"]))
    body = [[c["cell"], *(f"{c['part'][name]:.2f}" if name in c["part"] else "–" for name in names)] for c in cells]
    said = (
        "One new query for each of many sequences, bf16: the part of a copy's rate on the same GPU at which keys and "
        "values are read, by `attention_paged` with its two kernels one after the other, with the second overlapping "
        "the first (`overlap=True`, the default), and by PyTorch's kernels on contiguous caches "
        "(`benchmarks/decode_cells.py`).\n\n"
    )
    return said + markdown_table(["cell", *(PEERS.get(name, name) for name in names)], body)


def packed(result: Result) -> str:
    """Packed sequences of uneven lengths: TFLOP/s, and ratios to even ones of the same FLOPs and to peers."""
    cells = result["cells"]
    names: list[str] = list(dict.fromkeys(name for c in cells for name in c["ratio"]))
    body = [
        [c["cell"], f"{c['tflops']['uneven']['median']:.0f}",
         *(f"{c['ratio'][name]['median']:.2f}×" if name in c["ratio"] else "–" for name in names)]
        for c in cells
    ]  # fmt: skip
    said = (
        "Uneven lengths, bf16: TFLOP/s, and the ratio to even lengths of the same FLOPs in packed rows (`even`) and in "
        "an array of four dimensions (`dense`), and to others on the uneven ones (`benchmarks/varlen_cells.py`).\n\n"
    )
    return said + markdown_table(["cell", "TFLOP/s", *(PEERS.get(name, name) for name in names)], body)


SECTIONS: dict[str, Callable[[Result], str]] = {"decode": decode, "packed": packed}
"""Parts of a page that bring their own sentences: nothing is there until they were measured."""
