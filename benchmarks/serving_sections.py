"""What serving with this package reaches, as parts of pages made from results of ``benchmarks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import geometric_mean
from typing import Any

from decode_peers import to_the_fastest
from page_tables import markdown_table

Result = Mapping[str, Any]

PEERS = {"cudnn": "cuDNN", "torch_flash": "FlashAttention-2", "flash_attention_2": "FlashAttention-2",
         "flash_attention_4": "FlashAttention-4", "flashinfer": "FlashInfer",
         "flashinfer_tensor_cores": "FlashInfer (tensor cores)"}  # fmt: skip


def decode(result: Result) -> str:
    """Decode: which part of the copy's rate each kernel reads keys and values at, over all groups and pages."""
    shown = [*PEERS]
    rows: dict[str, list[Mapping[str, float]]] = {}
    for c in result["cells"]:
        width, _, *others = c["cell"].replace("no pages", "pages 0").split()  # d128 32/8 pages 64 b16 even 256MB
        rows.setdefault(" ".join((width, *others[2:])), []).append(c["part"])
    names = [name for name in shown if any(name in part for parts in rows.values() for part in parts)]
    body = [
        [name, str(len(parts)), *(_range([part[n] for part in parts if n in part]) for n in ("warploom", *names))]
        for name, parts in rows.items()
    ]
    ratios = to_the_fastest(result["cells"])
    beside = ratios and (
        f" Beside the fastest of the others, in {len(ratios)} cells: {geometric_mean(ratios):.2f}× in geometric mean, "
        f"{min(ratios):.2f}× at least."
    )
    further = ", ".join(PEERS[n] for n in names if n not in ("cudnn", "torch_flash"))
    said = (
        "One new query for each of many sequences (b16: of 16), bf16 but for fp8 caches: the part of a copy's rate on "
        "the same GPU at which keys and values are read, from the lowest to the highest cell of groups of 1, 4, 8 and "
        "16 query heads and pages of 16, 64 and 256 keys and none, by `attention_paged` and by others: PyTorch's cuDNN "
        f"and FlashAttention-2 on contiguous caches of even lengths{', and, on all, ' * bool(further)}{further} "
        f"(`benchmarks/decode_cells.py`).{beside or ''}\n\n"
    )
    return said + markdown_table(
        ["head_dim, sequences, lengths, bytes", "cells", "warploom", *(PEERS[n] for n in names)], body
    )


def _range(values: list[float]) -> str:
    """The lowest and the highest."""
    if not values:
        return "–"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} … {high}"


def packed(result: Result) -> str:
    """Packed sequences of uneven lengths: TFLOP/s, and ratios to even ones of the same FLOPs and to peers."""
    return _packed(result, "")


def packed_gradients(result: Result) -> str:
    """The same of their gradients."""
    return _packed(result, " --backward")


def _packed(result: Result, option: str) -> str:
    said = (
        f"Uneven lengths, bf16{', gradients' if option else ''}: TFLOP/s, and the ratio to even lengths of the "
        "same FLOPs in packed rows (`even`) and in "
        "an array of four dimensions (`dense`), and to others on the uneven ones "
        f"(`benchmarks/varlen_cells.py{option}`)."
    )
    blocks = [(c["whole_blocks"], c["cell"]) for c in result["cells"] if "whole_blocks" in c and not option]
    if blocks:
        least, cell = min(blocks)
        said += f" Tiles pad keys and rows: that alone leaves {least:.2f}× of `even` at {cell}, and more elsewhere."
    return f"{said}\n\n" + _ratios(result, "uneven", "TFLOP/s")


def _ratios(result: Result, of: str, header: str) -> str:
    """A table of the cells' TFLOP/s ``of`` one way, and its ratios to the others."""
    cells = result["cells"]
    names: list[str] = list(dict.fromkeys(name for c in cells for name in c["ratio"]))
    body = [
        [c["cell"], f"{c['tflops'][of]['median']:.0f}",
         *(f"{c['ratio'][name]['median']:.2f}×" if name in c["ratio"] else "–" for name in names)]
        for c in cells
    ]  # fmt: skip
    return markdown_table(["cell", header, *(PEERS.get(name, name) for name in names)], body)


def prefill(result: Result) -> str:
    """Many queries on a cache: TFLOP/s of attention on contiguous keys, and ratios to it."""
    said = (
        "Many queries on a cache, causal, bf16: TFLOP/s of `attention` on contiguous keys, and the ratio to it of "
        "`attention_varlen` (`packed`), of `attention_paged`, and of its kernels of few queries "
        "(`benchmarks/prefill_cells.py`).\n\n"
    )
    return said + _ratios(result, "attention", "attention")


def their_tests(result: Result) -> str:
    """FlashAttention's own tests: how many cases of each ran and passed."""
    tests = sorted({case["test"] for case in result["cases"]})
    worst = {test: [max(case["excess"].values()) for case in result["cases"] if case["test"] == test] for test in tests}
    body = [[f"`{test}`", str(len(x)), str(sum(y <= 1 for y in x)), f"{max(x):.2f}"] for test, x in worst.items()]
    said = (
        "FlashAttention's own tests, with their references and bounds, drawn at random "
        "(`benchmarks/flash_attn_tests.py`); the last column is the largest error as a part of their bound.\n\n"
    )
    return said + markdown_table(["test", "cases", "pass", "error"], body)


def models(result: Result) -> str:
    """Models of Transformers: errors, greedy tokens and tokens per second beside the baseline."""
    body: list[list[str]] = []
    for row in result["rows"]:
        base, own = row["baseline"], row["tokens_per_second"]["warploom"]
        error, rates = row["error"], row["tokens_per_second"][base]
        body.append([
            f"{row['model']} ({base})", f"{error['warploom']:.3f} · {error[base]:.3f}",
            f"{row['clear'] - row['tokens_differ']['warploom']} of {row['clear']}",
            *(f"{own[kind]:.0f} · {own[kind] / rates[kind]:.2f}×" for kind in ("prefill", "generate")),
        ])  # fmt: skip
    said = (
        "Four layers of the sizes of real models with random weights, bf16 (`benchmarks/transformers_h200.py`, "
        f"Transformers {result['transformers']}): the largest error of a logit against float32, by these kernels · by "
        "the baseline; greedy tokens that equal float32's where its two best are further apart than the error; and "
        "tokens per second · their ratio to the baseline's.\n\n"
    )
    return said + markdown_table(["model (baseline)", "error", "tokens equal", "prefill", "generate"], body)


SECTIONS: dict[str, Callable[[Result], str]] = {
    "decode": decode, "prefill": prefill, "packed": packed, "packed_gradients": packed_gradients,
    "their_tests": their_tests, "models": models,
}  # fmt: skip
"""Parts of a page that bring their own sentences: nothing is there until they were measured."""
