"""What the calls that come with the package reach, as Markdown tables made from results of ``benchmarks``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from page_tables import markdown_table

Result = Mapping[str, Any]

SEQUENCES = (512, 1024, 4096, 16384)
"""Lengths that stand in the short table of attention; the result has more."""


def attention_calls(result: Result) -> str:
    """Per head_dim and mask: TFLOP/s and the ratios to cuDNN and FlashAttention-4 at each length of SEQUENCES."""
    cells = {(c["head_dim"], bool(c["causal"]), c["seq"]): c for c in result["cells"]}
    kinds = sorted({(head_dim, causal) for head_dim, causal, _ in cells})
    body = [
        [
            str(head_dim),
            "causal" if causal else "full",
            *(_attention(cells.get((head_dim, causal, n))) for n in SEQUENCES),
        ]
        for head_dim, causal in kinds
    ]
    return markdown_table(["head_dim", "mask", *(f"seq {n}" for n in SEQUENCES)], body)


def _attention(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    ratio = cell["ratio"]
    beside = (
        f"{ratio[peer]['median']:.2f}×" if peer in ratio else "–" for peer in ("torch_cudnn", "flash_attention_4")
    )
    return " · ".join((f"{cell['tflops']['warploom']['median']:.0f}", *beside))


def products(result: Result) -> str:
    """Products of layers against cuBLAS by rows and layout of the weights: least, mean and largest ratio.

    Of what ``matmul`` chooses, then of the fastest ``mma.sync`` configuration alone.
    """

    def group(row: Mapping[str, Any]) -> tuple[int, str]:
        return int(row["name"].rpartition(".m")[2]), row["weights"]

    body: list[list[str]] = []
    for (rows, weights), found in groupby(sorted(result["shapes"], key=group), key=group):
        members = list(found)
        cells = [str(rows), weights, str(len(members))]
        for key in ("chosen", "best mma.sync"):
            ratios = [row[key] / row["cublas"] for row in members]
            mean = math.prod(ratios) ** (1 / len(ratios))
            cells += [f"{x:.2f}×" for x in (min(ratios), mean, max(ratios))]
        body.append(cells)
    figures = ("least", "geometric mean", "most")
    return markdown_table(["m", "weights", "products", *figures, *(f"mma.sync: {name}" for name in figures)], body)


def product_cells(result: Result) -> str:
    """Every product of layers: cuBLAS, what ``matmul`` chooses, the fastest ``mma.sync``, for both layouts of W."""
    if not all("configs" in row for row in result["shapes"]):
        return "*Not measured yet.*\n"
    layouts = list(dict.fromkeys(row["weights"] for row in result["shapes"]))
    rows = {(row["name"], row["weights"]): row for row in result["shapes"]}
    body: list[list[str]] = []
    for name in dict.fromkeys(name for name, _ in rows):
        cells = [name]
        for layout in layouts:
            row = rows.get((name, layout))
            cells += ["–"] * 3 if row is None else _product(row)
        body.append(cells)
    kernels = ("cuBLAS", "matmul", "mma.sync")
    return markdown_table(["product", *(f"{layout}: {kernel}" for layout in layouts for kernel in kernels)], body)


def _product(row: Mapping[str, Any]) -> list[str]:
    """TFLOP/s with the 10th and 90th percentile, and the ratio to cuBLAS."""
    names = {"cublas": "cublas", **row["configs"]}
    found: list[str] = []
    for key in ("cublas", "chosen", "best mma.sync"):
        low, high = row["spread"].get(names[key], (row[key], row[key]))
        ratio = "" if key == "cublas" else f" · {row[key] / row['cublas']:.2f}×"
        found.append(f"{row[key]:.0f} ({low:.0f}–{high:.0f}){ratio}")
    return found


def large_products(result: Result) -> str:
    """Large products, each kernel rested, and alone without a rest: TFLOP/s, × cuBLAS, clock; watts and TFLOP/J."""
    body: list[list[str]] = []
    for product, kernels in result.get("large", {}).items():
        measured = {name: row for name, row in kernels.items() if row.get("sustained")}
        for name, row in measured.items():
            rested, alone, peers = row["rested"], row["sustained"], measured["cublas"]
            body.append([
                product, name, f"{rested['median']:.0f} ({rested['low']:.0f}–{rested['high']:.0f})",
                f"{rested['median'] / peers['rested']['median']:.2f}×", f"{rested['sm_mhz']:.0f}",
                f"{alone['tflops']:.0f}", f"{alone['tflops'] / peers['sustained']['tflops']:.2f}×",
                f"{alone['watts']:.0f}", f"{alone['sm_mhz']:.0f}", f"{alone['tflop_per_joule']:.2f}",
            ])  # fmt: skip
    header = ["product", "kernel", "rested TFLOP/s", "× cuBLAS", "MHz",
              "sustained TFLOP/s", "× cuBLAS", "W", "MHz", "TFLOP/J"]  # fmt: skip
    return markdown_table(header, body) if body else "*Not measured yet.*\n"


def reductions(result: Result) -> str:
    """``matmul_reduce`` and the loss: milliseconds, the ratio to PyTorch's faster way, memory beyond the inputs."""
    measured = result["result"]
    body: list[list[str]] = []
    for row in (*measured["against_torch"], *_as_list(measured["loss_against_torch"])):
        peers = {name: row[f"{name}_extra_bytes"] for name in row["over"]}
        fastest = min(row["over"], key=lambda name: row["over"][name])
        body.append([
            row["op"], f"{row['m']} × {row['n']} × {row['k']}", f"{1e3 * row['warploom_s']['median']:.2f}",
            f"{row['over'][fastest]:.2f}× {fastest}", f"{row['warploom_extra_bytes'] / 2**20:.0f}",
            f"{peers[fastest] / 2**20:.0f}",
        ])  # fmt: skip
    return markdown_table(["operation", "m × n × k", "ms", "against PyTorch", "extra MiB", "PyTorch's"], body)


def _as_list(rows: Any) -> list[Any]:
    return rows if isinstance(rows, list) else [rows]


def ptx_speed(result: Result) -> str:
    """How long a check of PTX takes, and how fast that is beside the Program that the PTX came from."""
    body = [
        [row["kernel"], f"{row['ptx']:.2f} s", f"{row['throughput']:.2f}" if "throughput" in row else ""]
        for row in result["rows"]
    ]
    return markdown_table(["kernel, all checks on", "time", "throughput, its own Program's being 1"], body)


CALL_TABLES: dict[str, Callable[[Result], str]] = {
    "attention-calls": attention_calls,
    "products": products,
    "product-cells": product_cells,
    "large-products": large_products,
    "reductions": reductions,
    "ptx-speed": ptx_speed,
}
"""The tables of calls a Markdown file can ask for."""
