"""The backward pass of packed sequences: what is asked, and the launches that configurations make of it."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import u32
from warploom.core.targets import Target
from warploom.kernels.attention.backward_choice import tiles_of_keys
from warploom.kernels.attention.backward_sm80 import BackwardSm80
from warploom.kernels.attention.backward_sm90 import BackwardSm90
from warploom.kernels.attention.packed import ListedTiles, PackedOperands
from warploom.kernels.attention.packed_backward_problem import PackedBackwardProblem, row_calls
from warploom.kernels.settings import first_fitting, violations_of
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.order import heads_together

PackedBackwardConfig = BackwardSm90 | BackwardSm80
KINDS = (BackwardSm90, BackwardSm80)


def choose_packed_backward(problem: PackedBackwardProblem, target: Target) -> PackedBackwardConfig:
    """The configuration for packed sequences on a target. Raises ProblemError when none fits."""
    none = f"no backward kernel for {target.name} takes these packed sequences"
    tiles = tiles_of_keys(problem.typical, target, listed=True)
    return first_fitting(tiles, lambda c: violations_of(c, problem.typical, target), none)


def packed_backward_calls(
    config: PackedBackwardConfig, problem: PackedBackwardProblem, operands: PackedOperands, multiprocessors: int
) -> tuple[KernelCall, ...]:
    """The launches in order: both lists, then the configuration's. Arrays as for the forward pass, and gradients.

    Without any keys only sinks have gradients, by the log-sum-exps.
    """
    if problem.forward.total_k == 0:
        rows, _ = config.blocks
        return lists(config, problem)[0], *row_calls(problem, operands, rows, rows)
    return *lists(config, problem), *config.calls_packed(problem, operands, multiprocessors)


def lists(config: PackedBackwardConfig, problem: PackedBackwardProblem) -> tuple[KernelCall, KernelCall]:
    """The launches that list blocks of queries ("blocks") and tiles of keys ("tiles"), each with its slots.

    Each also puts zeros into the gradients' rows of no sequence.
    """
    p, (rows, keys) = problem.forward, config.blocks
    queries = _Side("q", p.total_q, p.heads, rows, "blocks", {"dq": p.head_dim})
    others = _Side("k", p.total_k, p.kv_heads, keys, "tiles", {"dk": p.head_dim, "dv": p.value_dim})
    slots = problem.slots(rows)
    of_keys = _list(problem, others, queries, (rows, True), slots, config.least_together)
    return _list(problem, queries, others, (rows, False), slots), of_keys


@dataclass(frozen=True)
class _Side:
    """Queries or keys: whose sequences are cut into tiles of ``tile`` rows, of so many heads, in a list.

    ``gradients``: their names, and elements of a head.
    """

    name: str
    total: int
    heads: int
    tile: int
    words: str
    gradients: dict[str, int]


def _list(
    problem: PackedBackwardProblem,
    own: _Side,
    other: _Side,
    slots: tuple[int, bool],
    most_slots: int,
    least: int = 1,
) -> KernelCall:
    p = problem.forward
    arrays = *p.places(own.name, other.name), own.words, *own.gradients
    source = KernelSource.of(
        "warploom.kernels.attention.device.packed_backward:list_gradient_tiles",
        f"list_tiles_{own.tile}_{own.words}",
        tile=own.tile,
        used=tuple(f"{side.name}_used" in arrays for side in (own, other)),
        slots=slots,
        clears=tuple(own.heads * cols * p.dtype.bytes // u32.bytes for cols in own.gradients.values()),
    )
    row_bytes = p.head_dim * p.dtype.bytes * (2 if own.name == "q" else 4 * p.group)
    rows = -(-other.total // max(1, p.batch))  # of one sequence: all of its heads come before the next
    together = min(own.heads, max(least, heads_together(rows, row_bytes, own.heads)))
    scalars = {"own_total": own.total, "others_total": other.total, "most_slots": most_slots}
    tiles = ListedTiles(p.batch, own.heads, own.total, own.total, own.tile)
    return tiles.call(source, scalars, arrays, together, own.words)
