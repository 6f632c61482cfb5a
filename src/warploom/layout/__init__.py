"""Layouts as linear maps over bits: fragments, shared tiles, and everything derived from them.

Nothing outside this package computes a fragment's coordinates, a swizzle or a bank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warploom.layout.banks import (
        ideal_wavefronts,
        phase_lanes,
        predicted_conflicts,
        predicted_wavefronts,
        wavefronts,
    )
    from warploom.layout.catalogue import (
        FRAGMENTS,
        ldmatrix_fragment,
        mma_fragment,
        movmatrix_fragment,
        wgmma_accumulator,
        wgmma_operand,
        wmma_accumulator,
    )
    from warploom.layout.conversion import ConversionPlan, conversion_plan, operand_registers
    from warploom.layout.displacement import lane_addresses, signed_strides, split_displacement
    from warploom.layout.fragments import WARP_SIZE, FragmentLayout
    from warploom.layout.linear import LinearMap
    from warploom.layout.matrix_access import LdmatrixPlan, MatrixPlan, ldmatrix_plan, stmatrix_plan
    from warploom.layout.reduction import FULL_MASK, ReductionPlan, reduction_plan
    from warploom.layout.shared import Panel, SharedLayout, copy_positions
    from warploom.layout.swizzle import NO_SWIZZLE, Swizzle

__all__ = [
    "FRAGMENTS",
    "FULL_MASK",
    "NO_SWIZZLE",
    "WARP_SIZE",
    "ConversionPlan",
    "FragmentLayout",
    "LdmatrixPlan",
    "LinearMap",
    "MatrixPlan",
    "Panel",
    "ReductionPlan",
    "SharedLayout",
    "Swizzle",
    "conversion_plan",
    "copy_positions",
    "ideal_wavefronts",
    "lane_addresses",
    "ldmatrix_fragment",
    "ldmatrix_plan",
    "mma_fragment",
    "movmatrix_fragment",
    "operand_registers",
    "phase_lanes",
    "predicted_conflicts",
    "predicted_wavefronts",
    "reduction_plan",
    "signed_strides",
    "split_displacement",
    "stmatrix_plan",
    "wavefronts",
    "wgmma_accumulator",
    "wgmma_operand",
    "wmma_accumulator",
]

_MODULES = (
    "banks",
    "catalogue",
    "conversion",
    "displacement",
    "fragments",
    "linear",
    "matrix_access",
    "reduction",
    "shared",
    "swizzle",
)

if not TYPE_CHECKING:  # for a type checker the names above are all there is

    def __getattr__(name: str) -> Any:
        """Load these names on first use: a launch takes nothing of this package but its tensor maps."""
        if name in __all__:
            from importlib import import_module

            for module in _MODULES:
                found = vars(import_module(f"warploom.layout.{module}"))
                if name in found:
                    return globals().setdefault(name, found[name])
        raise AttributeError(f"module 'warploom.layout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
