"""The attention ladder: the seeds' kernels by their numbers, each one change on the one before."""

from __future__ import annotations

from typing import Any

from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionConfig
from warploom_lab.kernels.attention.ladder_config import RungSm80
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90
from warploom_lab.kernels.ladder import Ladder, Rung, steps

_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("0", "kernel 0: shared softmax", "softmax by a round trip through shared memory", {"softmax_in_shared": True}),
    ("1", "kernel 1: base", "softmax in registers; cp.async, ldmatrix, mma.m16n8k16", {"softmax_in_shared": False}),
    ("2", "kernel 2: swizzle", "XOR swizzle of the shared tiles", {"swizzle": True}),
    ("3", "kernel 3: eager K/V", "the next K and V copies start before they are needed", {"eager": True}),
    (
        "4",
        "kernel 4: k-slices",
        "fragments loaded in slices of 16, between the mma",
        {"load_q": 2, "load_k": 2, "load_v": 2},
    ),
    ("5", "kernel 5: buffered", "the next slice loads while this one multiplies", {"double_buffer": True}),
    ("6", "kernel 6: folded scale", "scale folded into exp2: one FMA per score", {"folded_scale": True}),
    (
        "7",
        "kernel 7: tuned",
        "Q whole in registers again: what the seeds' search took",
        {"load_q": 0, "double_buffer": False},
    ),
    (
        "8",
        "kernel 8: strided swizzle",
        "CTA-wide copies; addresses as base + strides; larger tile",
        {"load_q": 2, "cooperative": True, "strided": True, "tile_m": 128},
    ),
    ("9", "kernel 9: K row-major", "K fragments load so that no copies precede the mma", {"k_row_major": True}),
    ("10", "kernel 10: peeled", "first step peeled: no zeroing, no rescaling", {"peel": True}),
    ("11", "kernel 11: strided epilogue", "base + strides for registers → shared as well", {"strided_epilogue": True}),
    ("12", "kernel 12: block index", "K/V addresses from the block's index, no pointers", {"block_index": True}),
    ("13", "kernel 13: backward", "K/V blocks from the last to the first", {"backward": True}),
    ("14", "kernel 14: cache hints", "output stores do not allocate in L1", {"output_hint": True}),
    ("15", "kernel 15: head_dim tiles", "shared tiles as panels of 64 columns", {"head_dim_panels": True}),
    ("16", "kernel 16: static strides", "row strides known while tracing", {"static_strides": True}),
)
_WGMMA_STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("h1", "wgmma: roles", "TMA producer, two consumer warpgroups with wgmma, no overlap", {}),
    ("h2", "wgmma: overlap", "the next Q·Kᵀ is issued before this block's softmax", {"overlap": True}),
    ("h3", "wgmma: ping-pong", "consumers take turns at the tensor cores", {"turns": True}),
    ("h4", "wgmma: Q in registers", "Q as the register operand", {"q_in_registers": True}),
    ("h5", "wgmma: lazy rescale", "O rescaled only when a row's maximum grew by more than 2^8", {"lazy_rescale": True}),
    ("h6", "wgmma: persistent", "the pipeline runs on from tile to tile", {"persistent": True}),
    ("h7", "wgmma: hold", "the wait is held below the exponentials", {"hold": True}),
)
_PLAIN = RungSm90(overlap=False, turns=False, persistent=False, q_in_registers=False, lazy_rescale=False)
_STALE = "the maxima so far serve until P shows that one grew; no hold"
_TWO_STAGES = "32 rows per warp, two K/V stages with one barrier, lazy rescaling"

CONFIGURATIONS = (RungSm90, RungSm80)
"""Configurations that calls of attention take beside the production kernels'."""

LADDER = Ladder[AttentionConfig](
    "attention", (*steps(RungSm80(), _STEPS), Rung("best", "two stages", _TWO_STAGES, ForwardSm80()))
)
"""The ``mma.sync`` ladder: what every GPU from sm_80 on runs."""

HOPPER_LADDER = Ladder[AttentionConfig](
    "attention",
    (
        *steps(_PLAIN, _WGMMA_STEPS),
        Rung("h8", "wgmma: stale max", _STALE, ForwardSm90()),
        Rung("h9", "wgmma: sum column", "the row sums are one more column of P·V", ForwardSm90(sum_column=True)),
    ),
)
"""The rungs above it, for sm_90a alone."""

FULL_LADDER = Ladder[AttentionConfig]("attention", (*LADDER.rungs, *HOPPER_LADDER.rungs))
"""Every rung."""
