"""From an accumulator to the next instruction's operand: by renaming registers, or else by shuffles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from warploom.core.errors import LayoutError
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap


def _check_shapes(source: FragmentLayout, target: FragmentLayout) -> None:
    if source.shape != target.shape or source.warps != target.warps:
        raise LayoutError(
            f"{source.name} is {source.shape[0]}×{source.shape[1]} over {source.warps} warp(s), {target.name} "
            f"{target.shape[0]}×{target.shape[1]} over {target.warps}; tile them to one shape first"
        )


@lru_cache(maxsize=512)
def operand_registers(accumulator: FragmentLayout, operand: FragmentLayout) -> tuple[int, ...]:
    """For each element of ``operand`` that a thread holds, the element of ``accumulator`` that already has it.

    Proven for every thread and element: two m16n8 accumulators side by side are one m16n8k16 A operand, with the
    elements in the same order. The caller converts the type and packs. Raises LayoutError if the shapes differ or if
    some element is in another thread or in a register that depends on the thread (see :func:`conversion_plan`).
    """
    _check_shapes(accumulator, operand)
    held = accumulator.gather_index()
    wanted = operand.gather_index()
    holders: dict[bytes, int] = {}
    for element in range(accumulator.elements_per_thread):
        holders.setdefault(held[:, element].tobytes(), element)
    found = [holders.get(wanted[:, element].tobytes()) for element in range(operand.elements_per_thread)]
    missing = [element for element, holder in enumerate(found) if holder is None]
    if missing:
        raise LayoutError(
            f"{accumulator.name} is no renaming of {operand.name}: its elements {missing} are held by other lanes or "
            "in registers that depend on the lane; use conversion_plan for the shuffles"
        )
    return tuple(element for element in found if element is not None)


@dataclass(frozen=True)
class ConversionPlan:
    """The shuffles (``shfl.idx``) within each warp that turn fragment ``source`` into fragment ``target``.

    ``moves`` takes (register, lane) of the target to the (register, lane) of the source that has the same matrix
    element. For target element ``e``: for each candidate of :meth:`source_registers`, every lane offers that element
    and reads lane :meth:`source_lane`; where there are several candidates it keeps the one that equals
    :meth:`source_register`.
    """

    source: FragmentLayout
    target: FragmentLayout
    moves: LinearMap

    def source_lane(self, element: int, lane: Any) -> Any:
        """The lane that ``lane`` reads to get target element ``element``; integer, array or traced, like ``lane``."""
        return self.moves.project("lane").apply(register=element, lane=lane)["lane"]

    def source_register(self, element: int, lane: Any) -> Any:
        """The source element ``lane`` needs; a plain integer when it is the same for all lanes."""
        return self.moves.project("register").apply(register=element, lane=lane)["register"]

    def source_registers(self, element: int) -> tuple[int, ...]:
        """The source elements that some lane needs for target element ``element``, ascending."""
        needed = np.asarray(self.source_register(element, np.arange(self.moves.in_size("lane"))))
        return tuple(int(register) for register in np.unique(needed))

    @property
    def shuffles(self) -> int:
        """``shfl.idx`` instructions in all."""
        return sum(len(self.source_registers(e)) for e in range(self.target.elements_per_thread))

    def __str__(self) -> str:
        lines = [f"{self.source.name} → {self.target.name}: {self.shuffles} shuffles"]
        for element in range(self.target.elements_per_thread):
            choices = " | ".join(f"x{register}" for register in self.source_registers(element))
            lines.append(f"  y{element} = shfl.idx({choices})")
        return "\n".join(lines)


def conversion_plan(source: FragmentLayout, target: FragmentLayout) -> ConversionPlan:
    """The shuffles that bring ``source`` into the layout ``target``.

    Both need power-of-two tile counts and the same shape. Raises LayoutError when an element would have to cross
    warps, which takes shared memory.
    """
    _check_shapes(source, target)
    moves = source.map.invert().compose(target.map)
    if moves.has_input("warp"):
        straight = moves.project("warp")
        own = LinearMap.identity({"warp": moves.in_size("warp")})
        crossing = any(vector[0] for dim in ("register", "lane") for vector in straight.bases(dim))
        if (
            crossing
            or straight.restrict("warp") != own
            or any(vector != (0, 0) for vector in moves.project("register", "lane").bases("warp"))
        ):
            raise LayoutError(f"{source.name} → {target.name} moves elements between warps; go through shared memory")
        moves = moves.restrict("register", "lane").project("register", "lane")
    return ConversionPlan(source, target, moves)
