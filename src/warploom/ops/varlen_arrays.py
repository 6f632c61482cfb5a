"""The arrays of packed sequences: checked, aligned, and read as a problem; and their lengths, where somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from warploom.core.dtypes import s32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, describe_new, filled, require_dtype, same_device
from warploom.kernels.attention.problem import AttentionProblem, Packed
from warploom.ops.attention_arrays import (
    Options,
    check_form,
    check_heads,
    check_output,
    check_sinks,
    check_types,
    on_host,
    refuse_first,
    refuse_output,
    refuse_starts,
)
from warploom.ops.declare import ArrayArgument

Arrays = dict[str, ArrayView]
NAMES = {"q_starts": "cu_seqlens_q", "k_starts": "cu_seqlens_k", "q_used": "seqused_q", "k_used": "seqused_k"}
"""What callers call the kernels' arrays of lengths."""
QueryStarts = Annotated[Any, ArrayArgument("q_starts")]
KeyStarts = Annotated[Any, ArrayArgument("k_starts")]
QueryCounts = Annotated[Any, ArrayArgument("q_used")]
KeyCounts = Annotated[Any, ArrayArgument("k_used")]


def read_packed(views: Arrays, options: Options) -> tuple[AttentionProblem, Arrays]:
    """The problem, and the arrays that its kernels take. Raises ProblemError with the first thing that is wrong."""
    problem = checked_packed(views, options)
    arrays = {name: view for name, view in views.items() if name != "out"}
    if problem.kv_len == 0 < problem.q_len:  # no tensor map without a row: one that no sequence has
        q = views["q"]
        for name, cols in (("k", problem.head_dim), ("v", problem.value_dim)):
            arrays[name] = describe_new(filled(q.kind, (1, problem.kv_heads, cols), q.dtype, q.device, 0.0))
    arrays.setdefault("k_starts", views["q_starts"])
    return problem, arrays


def checked_packed(views: Mapping[str, ArrayView], options: Options) -> AttentionProblem:
    """The problem, by shapes, types and devices alone. Raises ProblemError with the first thing that is wrong."""
    options.check()
    for name in "qkv":
        check_form(name, views[name], "(total, heads, head_dim)")
    check_types({name: views[name] for name in "qkv"})
    same_device([*views.values()], [NAMES.get(name, name) for name in views])
    q, k, v = (tuple(views[name].shape) for name in "qkv")
    if k[:2] != v[:2]:
        raise ProblemError(f"k has shape {k} and v {v}: they must have as many rows and heads")
    if q[2] != k[2]:
        raise ProblemError(f"q has shape {q} and k {k}: head_dim must be equal")
    check_heads(q[1], k[1], q[2], v[2])
    check_sinks(views.get("sinks"), q[1])
    batch = _batch(views)
    if "k_starts" not in views and q[0] != k[0]:
        raise ProblemError(f"q has {q[0]} rows and k {k[0]}: give cu_seqlens_k as well")
    if "out" in views:
        check_output(views["out"], views["q"], shape_of_result(views))
    used = "q_used" in views, "k_used" in views
    return AttentionProblem(
        batch,
        q[1],
        max(1, k[1]),
        Packed(q[0], k[0], used),
        q[2],
        views["q"].dtype,
        sinks="sinks" in views,
        v_dim=0 if v[2] == q[2] else v[2],
        **options.asked(q[2]),
    )


def _batch(views: Mapping[str, ArrayView]) -> int:
    """How many sequences there are. Raises ProblemError where arrays of lengths differ in that, or are none."""
    shape = tuple(views["q_starts"].shape)
    if len(shape) != 1 or shape[0] < 1:
        raise ProblemError(f"cu_seqlens_q has shape {shape}; it is (batch + 1,): where sequences begin and end")
    batch = shape[0] - 1
    for name, caller in NAMES.items():
        if name not in views:
            continue
        require_dtype(views[name], caller, (s32,))
        wanted = (batch + 1,) if name.endswith("starts") else (batch,)
        found = tuple(views[name].shape)
        if found != wanted:
            raise ProblemError(f"{caller} has shape {found}, cu_seqlens_q {shape}: it must be {wanted}")
    return batch


def shape_of_result(views: Mapping[str, ArrayView]) -> tuple[int, ...]:
    """(total_q, heads, head_dim of v)."""
    return (*views["q"].shape[:2], views["v"].shape[2])


def refuse_out(given: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError where ``out`` cannot be written to, or shares memory with an array that is read."""
    if "out" in given:
        refuse_output(given["out"], {NAMES.get(name, name): view for name, view in given.items() if name != "out"})


def check_lengths(views: Mapping[str, ArrayView]) -> None:
    """Wait for the arrays of lengths and look at them. Raises ProblemError that names the first wrong entry."""
    _batch(views)
    known = {name: on_host(views[name]) for name in NAMES if name in views}
    for name in ("q_starts", "k_starts"):
        if name in known:
            refuse_starts(NAMES[name], known[name], views[name[0]].shape[0])
    for name in ("q_used", "k_used"):
        if name in known:
            lengths, used = np.diff(known.get(f"{name[0]}_starts", known["q_starts"])), known[name]
            refuse_first(NAMES[name], (used < 0) | (used > lengths), used, "no count of rows that the sequence has")
