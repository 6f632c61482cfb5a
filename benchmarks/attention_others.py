"""What scripts of attention's cells share: inputs, the kernels of others, and the check of some rows against float64.

A set of inputs is a dictionary of tensors, ``q``, ``k``, ``v`` … in (batch, sequence, heads, head_dim) or packed rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from warploom.core.dtypes import bf16
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.kernels.attention.scores import seen_of
from warploom_lab.bench import baselines
from warploom_lab.bench.cells import Cell, CellScript, Inputs, Row, Run

CHECKED_ROWS = 128


class AttentionScript(CellScript[Cell]):
    """A script of attention's cells, which takes further configurations of this package's kernels."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--config", nargs="*", default=[], help="configurations timed besides, in their notation")

    def asked(self, head_dim: int) -> list[str]:
        """Those of the configurations that are for such heads."""
        return [text for text in self.given.config if f"head_dim={head_dim}," in text]

    def head(self) -> Row:
        """The version of FlashAttention-4, or why it is not there."""
        return {name: baselines.flash_attention_4()[1] for name in self.baselines if name == "flash_attention_4"}


def fresh(p: AttentionProblem) -> Inputs:
    """Random q, k and v."""
    import torch

    keys = p.kv_len, p.kv_heads
    sizes = {"q": (p.q_len, p.heads, p.head_dim), "k": (*keys, p.head_dim), "v": (*keys, p.value_dim)}
    return {n: torch.randn(p.batch, *size, device="cuda", dtype=torch.bfloat16) for n, size in sizes.items()}


def plane_error(x: Inputs, out: Any, window: tuple[Any, Any], sequence: int, head: int) -> float:
    """:func:`rows_error` of a head of a sequence."""
    of_keys = head * x["k"].shape[2] // x["q"].shape[2]
    k, v = (x[name][sequence, :, of_keys] for name in "kv")
    sinks = x["sinks"][head] if "sinks" in x else None
    return rows_error(x["q"][sequence, :, head], k, v, out[sequence, :, head], window, sinks)


def rows_error(q: Any, k: Any, v: Any, out: Any, window: tuple[Any, Any], sinks: Any = None) -> float:
    """The largest |o - o64| of random rows of one head over what bf16 allows; all are (rows, head_dim)."""
    import torch

    rows = torch.randperm(len(q), device=q.device)[:CHECKED_ROWS]
    seen = None if window == (None, None) else seen_of(len(q), len(k), window, rows=rows, device=q.device)
    reference = attention_reference(q[rows], k, v, bf16, seen=seen, sinks=sinks)
    return attention_error(out[rows], reference, bf16).value


def of_qkv(run: Callable[[Any, Any, Any], Any]) -> Run:
    """A call of q, k and v on a set of inputs."""
    return lambda x: run(x["q"], x["k"], x["v"])


def sdpa(name: str, **options: Any) -> Callable[[Any, Any, Any], Any]:
    """One of PyTorch's backends on (batch, sequence, heads, head_dim) tensors."""
    run = baselines.sdpa(name, **options)
    return lambda q, k, v: run(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def through_autograd(forward: Callable[[Any, Any, Any], Any]) -> Run:
    """The gradients of a baseline, by PyTorch's autograd; its forward pass runs once for each set of inputs."""
    import torch

    kept: dict[int, tuple[Any, Any]] = {}

    def run(x: Inputs) -> tuple[Any, ...]:
        if id(x) not in kept:
            leaves = [x[name].detach().requires_grad_() for name in "qkv"]
            kept[id(x)] = forward(*leaves), leaves
        out, leaves = kept[id(x)]
        return torch.autograd.grad(out, leaves, x["dout"], retain_graph=True)

    return run


def flash_attention_2(where: Callable[[Inputs], tuple[Any, ...]], *, gradients: bool, **sides: int) -> Run:
    """PyTorch's copy of FlashAttention-2, by its operators, which have windows and align the last query.

    ``where``: starts and longest lengths of queries and keys, dropout and whether the mask is causal.
    """
    import torch

    aten, kept = torch.ops.aten, dict[int, tuple[Any, ...]]()

    def run(x: Inputs) -> Any:
        qkv = [x[name] for name in "qkv"]
        if not gradients:
            return aten._flash_attention_forward(*qkv, *where(x), False, **sides)[0]
        if id(x) not in kept:
            kept[id(x)] = aten._flash_attention_forward(*qkv, *where(x), False, **sides)[:4]
        out, lse, seed, offset = kept[id(x)]
        return aten._flash_attention_backward(x["dout"], *qkv, out, lse, *where(x), seed, offset, **sides)

    return run
