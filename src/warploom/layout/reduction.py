"""Reductions in registers, derived: which registers to combine, and over which lanes to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from warploom.core.errors import LayoutError
from warploom.layout.formula import is_integer
from warploom.layout.fragments import FragmentLayout
from warploom.layout.gf2 import Subspace, combine, kernel, span_elements
from warploom.layout.linear import LinearMap

FULL_MASK = 0xFFFFFFFF
"""Member mask of a shuffle in which all 32 lanes take part."""

_AXES = {"row": "row", "col": "col", 0: "row", 1: "col"}


@dataclass(frozen=True)
class ReductionPlan:
    """The steps that reduce a fragment over ``axis`` without leaving registers.

    First each thread combines, for every group, the elements ``groups[g]`` it holds; then, for each of ``lane_masks``,
    every lane combines its group values with those of lane ``lane ^ mask`` (``shfl.xor``); ``warp_masks`` name the
    warps that still have to be combined (through shared memory). Every lane then holds the result of each group.

    ``result`` maps ``register`` (the group within an atom), ``lane`` (and ``warp``) to the coordinates that survive;
    lane bits that were exchanged are replicated there, with zero basis vectors. ``tiles`` atoms are stacked along the
    surviving axis: group ``g`` is ``register = g % groups per atom`` of atom ``g // groups per atom``.

    ``halved`` are the first of ``lane_masks``, where lanes share the work (:meth:`spread`): of 2n values each lane of a
    pair keeps n and sends n, so that n shuffles do instead of 2n, and ends with the results that are its own.
    """

    axis: str
    groups: tuple[tuple[int, ...], ...]
    lane_masks: tuple[int, ...]
    warp_masks: tuple[int, ...]
    result: LinearMap
    tiles: int = 1
    halved: tuple[int, ...] = ()

    @property
    def results(self) -> int:
        """Results that each lane ends with."""
        return len(self.groups) >> len(self.halved)

    @property
    def shuffles(self) -> int:
        """``shfl`` instructions in all: one per lane mask and value that is left; half of them where work is shared."""
        shared = sum(len(self.groups) >> step for step in range(1, len(self.halved) + 1))
        return shared + self.results * (len(self.lane_masks) - len(self.halved))

    @property
    def replicated(self) -> int:
        """The lane bits over which results are the same: lanes with none of them set hold each result once."""
        return sum(self.lane_masks) - sum(self.halved)

    def spread(self) -> ReductionPlan:
        """Return this reduction with its results spread over the lanes that exchange them.

        Lanes exchange halves while the number of values is even: fewer shuffles, each lane with fewer results.
        """
        halved: list[int] = []
        while len(halved) < len(self.lane_masks):
            mask, left = self.lane_masks[len(halved)], len(self.groups) >> len(halved)
            if left % 2 or mask & (mask - 1) or self._step(left) is None:
                break
            halved.append(mask)
        return replace(self, halved=tuple(halved))

    def _step(self, values: int) -> int | None:
        """Return the distance from the first half of the first ``values`` groups to the second; None if it varies."""
        at = [self.group_coordinate(group, 0) for group in range(values)]
        apart = {high - low for low, high in zip(at, at[values // 2 :], strict=False)}
        return apart.pop() if len(apart) == 1 else None

    @property
    def permutation(self) -> tuple[int, ...]:
        """The elements group after group: the order that makes each group contiguous (no instruction is needed)."""
        return tuple(element for group in self.groups for element in group)

    @property
    def member_pattern(self) -> int:
        """The lanes that exchange with lane 0, as a member mask (0xF for a quad)."""
        return sum(1 << lane for lane in span_elements(self.lane_masks))

    def member_mask(self, lane: Any) -> Any:
        """The member mask of the lanes that ``lane`` exchanges with: ``0xF << (lane & 28)`` for quads.

        ``lane`` is an integer, an integer array, or a traced value that an integer can be shifted by. For every
        shuffle :data:`FULL_MASK` is as correct. Raises LayoutError for a traced lane when the groups of lanes are no
        shifted copies of one pattern.
        """
        if is_integer(lane):
            return sum(1 << (int(lane) ^ step) for step in span_elements(self.lane_masks))
        if any(mask & (mask - 1) for mask in self.lane_masks):
            raise LayoutError(f"lanes exchanged over {self.lane_masks} have no common mask pattern; use FULL_MASK")
        kept = 31 & ~sum(self.lane_masks)
        return self.member_pattern << (lane & kept) if kept else self.member_pattern

    def result_coordinate(self, group: int, lane: Any, warp: Any = 0) -> Any:
        """The surviving coordinate (a row when ``axis`` is ``"col"``) of result ``group`` of ``lane``."""
        at = self.group_coordinate(group, lane, warp)
        for step, mask in enumerate(self.halved):
            apart = self._step(len(self.groups) >> step)
            assert apart is not None
            at = at + ((lane >> (mask.bit_length() - 1)) & 1) * apart
        return at

    def group_coordinate(self, group: int, lane: Any, warp: Any = 0) -> Any:
        """The surviving coordinate of what ``lane`` combines in ``group``, before lanes share any work."""
        (dim,) = self.result.out_dims
        count = self.result.in_size("register")
        warps = {"warp": warp} if self.result.has_input("warp") else {}
        at = self.result.apply(register=group % count, lane=lane, **warps)[dim]
        tile = group // count
        return at + tile * self.result.out_size(dim) if tile else at

    def _repr_svg_(self) -> str:
        """The picture that notebooks show: a lane's registers before and after the permutation, and the steps."""
        from warploom.layout.draw import draw_plan

        return draw_plan(self).svg()

    def __str__(self) -> str:
        lines = [f"reduce over {self.axis}: {self.results} results per thread, {self.shuffles} shuffles"]
        for index, group in enumerate(self.groups):
            lines.append(f"  r{index} = " + " ⊕ ".join(f"x{element}" for element in group))
        for mask in self.lane_masks:
            if mask in self.halved:
                lines.append(f"  r  = own half of r ⊕ shfl.xor(other half of r, {mask})")
            else:
                lines.append(f"  r  = r ⊕ shfl.xor(r, {mask})")
        lines += [f"  r  = r ⊕ r of warp ^ {mask}" for mask in self.warp_masks]
        return "\n".join(lines)


def reduction_plan(layout: FragmentLayout | LinearMap, axis: str | int) -> ReductionPlan:
    """The plan that combines all elements along ``axis``.

    ``"col"`` (or 1) combines along columns and leaves one value per row, ``"row"`` (or 0) one per column.

    It is minimal: every thread combines what it holds, then one exchange per lane bit (or XOR of lane bits) that moves
    the axis and nothing else. Replicated elements are combined once. Raises LayoutError when some elements to combine
    differ in register and lane together, so that no plain ``shfl.xor`` brings them together.
    """
    dim = _AXES.get(axis)
    if dim is None:
        raise LayoutError(f"axis is 'row' (0) or 'col' (1), not {axis!r}")
    return _plan(layout, dim)


@lru_cache(maxsize=512)
def _plan(layout: FragmentLayout | LinearMap, axis: str) -> ReductionPlan:
    if isinstance(layout, LinearMap):
        return _atom_plan(layout, axis)
    atom = _atom_plan(layout.atom, axis)
    rows, cols = layout.tiles
    kept_tiles, folded_tiles = (rows, cols) if axis == "col" else (cols, rows)
    groups: list[tuple[int, ...]] = []
    for kept in range(kept_tiles):
        for group in atom.groups:
            elements: list[int] = []
            for folded in range(folded_tiles):
                place = (kept, folded) if axis == "col" else (folded, kept)
                start = layout.atom_elements(*place).start
                elements += [start + element for element in group]
            groups.append(tuple(elements))
    return ReductionPlan(axis, tuple(groups), atom.lane_masks, atom.warp_masks, atom.result, kept_tiles)


def _atom_plan(layout: LinearMap, axis: str) -> ReductionPlan:
    survivors = layout.project(*(dim for dim in layout.out_dims if dim != axis))
    _check_reducible(survivors)
    seen = Subspace()  # coordinates along the axis that are combined already
    along = layout.project(axis)
    masks = {dim: _combined(survivors.packed(dim), along.packed(dim), seen) for dim in _ordered(layout)}
    columns = survivors.packed("register")
    kept = [bit for bit in range(len(columns)) if columns[bit] not in Subspace(columns[:bit])]
    within = sorted(span_elements(masks["register"]))
    groups = tuple(
        tuple(sorted(start ^ step for step in within)) for start in span_elements([1 << bit for bit in kept])
    )
    vectors = survivors.bases("register")
    bases = {dim: survivors.bases(dim) for dim in survivors.in_dims} | {"register": tuple(vectors[bit] for bit in kept)}
    result = LinearMap(bases, dict(survivors.outs))
    return ReductionPlan(axis, groups, tuple(masks["lane"]), tuple(masks.get("warp", ())), result)


def _ordered(layout: LinearMap) -> list[str]:
    """Inputs from the cheapest place to combine in to the dearest."""
    known = [dim for dim in ("register", "lane", "warp") if layout.has_input(dim)]
    if set(known) != set(layout.in_dims) or "register" not in known or "lane" not in known:
        raise LayoutError(f"a reduction needs the inputs register and lane (and warp), not {layout.in_dims}")
    return known


def _combined(survivors: Sequence[int], along: Sequence[int], seen: Subspace) -> list[int]:
    """The XOR steps within one input that stay on a result and reach new coordinates of the axis."""
    steps = kernel(survivors)
    return [step for step in steps if seen.add(combine(along, step)) is None]


def _check_reducible(survivors: LinearMap) -> None:
    everything: list[int] = []
    separate = 0
    for dim in _ordered(survivors):
        columns = survivors.packed(dim)
        everything += columns
        separate += len(kernel(columns))
    if len(kernel(everything)) != separate:
        raise LayoutError(
            "not reducible by combining registers and then lanes: the elements of one result differ in register and "
            f"lane (or warp) together; convert the fragment first. Surviving coordinates:\n{survivors}"
        )
