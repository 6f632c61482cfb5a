"""Products of ``wgmma`` that were issued, and where and what their operands are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.accumulators import WARP_ROWS
from warploom.emulate.async_proxy import AsyncProxy
from warploom.emulate.barriers import Wait
from warploom.emulate.shared_memory import SHARED_BASE
from warploom.ir.program import Program
from warploom.ir.statements import Op, Tile, Value
from warploom.isa.conversion import half_to_f32
from warploom.isa.wgmma import K, M, Wgmma
from warploom.layout.wgmma import MatrixDescriptor, decode

Array = NDArray[Any]
WARPS = 4
"""Warps of a warpgroup."""
ELEMENT_BYTES = 2
"""Of an operand in shared memory."""


@dataclass(eq=False)
class Part:
    """What one warp gives to a product: A's registers and their shadows, and whether D is added to."""

    a: list[Array]
    a_shadow: list[Array] | None
    accumulate: bool


@dataclass(eq=False)
class Product:
    """One ``wgmma`` of one warpgroup. ``number`` counts them from 1."""

    op: Op
    instruction: Wgmma
    number: int
    cta: int
    a: int | None
    b: int
    stamp: int
    cells: Array
    before: Array
    outside: bool
    parts: dict[int, Part] = field(default_factory=dict[int, Part])


@dataclass(eq=False)
class Group:
    """One warpgroup of one CTA."""

    number: int
    first: int
    products: list[Product] = field(default_factory=list[Product])
    waits: list[tuple[Wait, int, int]] = field(default_factory=list[tuple[Wait, int, int]])  # (wait, row, needs)


class WatchedRegisters:
    """The registers that any ``wgmma`` of a program names, numbered; made once for a program."""

    def __init__(self, program: Program) -> None:
        self.numbers: dict[Value, int] = {}
        self._known: dict[int, tuple[Op, Array | None]] = {}
        for op in program.ops():
            if isinstance(op.instruction, Wgmma):
                count = 0 if op.instruction.a_source == "shared" else op.instruction.a_count
                for value in (*op.operands[:count], *op.results):
                    if isinstance(value, Value):
                        self.numbers.setdefault(value, len(self.numbers))

    def of(self, op: Op) -> Array | None:
        """The watched registers an instruction reads or writes; None for none."""
        if not self.numbers:
            return None
        kept = self._known.get(id(op))
        if kept is None:
            numbers = {self.numbers[x] for x in (*op.operands, *op.results) if x in self.numbers}  # type: ignore[index,operator]
            kept = self._known[id(op)] = op, np.array(sorted(numbers)) if numbers else None
        return kept[1]


class SharedOperands:
    """Operands that descriptors name in the shared memory of a batch."""

    def __init__(self, proxy: AsyncProxy) -> None:
        self.proxy = proxy
        self._indices: dict[tuple[Any, ...], tuple[Array, Array]] = {}

    def indices(self, instruction: Wgmma, which: str, descriptor: int) -> tuple[Array, Array]:
        """Indices of an operand's elements in 16-bit units of its CTA's shared memory, and their cells; kept."""
        transposed = instruction.transposed_b if which == "b" else instruction.transposed_a
        key = (which, instruction.n if which == "b" else 0, transposed, descriptor)
        found = self._indices.get(key)
        if found is None:
            addresses = instruction.a_addresses if which == "a" else instruction.b_addresses
            local = addresses(descriptor) - SHARED_BASE
            found = self._indices[key] = local >> 1, np.unique(local // self.proxy.shared.granule)
        return found

    def misplaced(
        self, instruction: Wgmma, which: str, descriptor: int | None, tile: Tile
    ) -> tuple[Literal["bounds", "layout"], str] | None:
        """How an operand's descriptor contradicts the tile that it was made for; None if it does not."""
        if descriptor is None:
            return None
        index = self.indices(instruction, which, descriptor)[0]
        first, end = 2 * int(index.min()), 2 * int(index.max()) + 2
        if first < tile.offset or end > tile.offset + tile.bytes:
            last = tile.offset + tile.bytes - 1
            return "bounds", (
                f"operand {which.upper()} takes bytes {first} to {end - 1} of shared memory, outside the tile "
                f"{tile.name} (bytes {tile.offset} to {last}): correct the descriptor's start, stride or leading offset"
            )
        shape = decode(descriptor)[1]
        if tile.swizzle_bytes != shape.row_bytes:
            has = "no swizzle" if tile.swizzle_bytes == 0 else f"swizzled rows of {tile.swizzle_bytes} bytes"
            has = "a swizzle that wgmma does not have" if tile.swizzle_bytes is None else has
            return "layout", (
                f"the tile {tile.name} has {has}, the descriptor of operand {which.upper()} says {shape.row_bytes}: "
                "make it with k.wgmma_operand, or give both one swizzle"
            )
        return self._wrong_steps(instruction, which, shape, tile)

    @staticmethod
    def _wrong_steps(
        instruction: Wgmma, which: str, shape: MatrixDescriptor, tile: Tile
    ) -> tuple[Literal["layout"], str] | None:
        """Distances between groups of rows, and between panels, that are not the tile's."""
        transposed = instruction.transposed_b if which == "b" else instruction.transposed_a
        extent = instruction.n if which == "b" else M
        lines, along = (K, extent) if transposed else (extent, K)
        for what, says, is_, needed in (
            ("stride", shape.stride, 8 * tile.row_bytes, shape.row_bytes and lines > 8),
            ("leading", shape.leading, tile.panel_bytes, shape.row_bytes and ELEMENT_BYTES * along > shape.row_bytes),
        ):
            if needed and says != is_:
                return "layout", (
                    f"the {what} offset of operand {which.upper()} is {says} bytes, in the tile {tile.name} it is "
                    f"{is_}: make the descriptor with k.wgmma_operand"
                )
        return None

    def shared_matrix(self, product: Product, which: str) -> tuple[Array, Array | None]:
        """What operand A or B holds now, f32, and which elements are poison (None: none)."""
        descriptor = product.a if which == "a" else product.b
        assert descriptor is not None
        index = self.indices(product.instruction, which, descriptor)[0]
        shared = self.proxy.shared
        first = product.cta * shared.stride >> 1
        words = shared.data.view(np.uint16)[first + index]
        poison = None
        if shared.shadow is not None:
            poison = shared.shadow.view(np.uint16)[first + index] != 0
            poison = poison if poison.any() else None
        return half_to_f32(words, product.instruction.inputs), poison


def register_a(instruction: Wgmma, registers: list[list[Array]], *, poison: bool = False) -> Array:
    """A of each warp (warps, 16, 16) from its four registers."""
    slot = instruction.a_slot
    words = np.ascontiguousarray(np.stack([np.stack(r, axis=-1) for r in registers])).view(np.uint16)
    elements = words != 0 if poison else half_to_f32(words, instruction.inputs)
    owner = slot.layout.owner_index()[: WARP_ROWS * slot.layout.shape[1]]
    return elements.reshape(len(registers), -1)[:, owner].reshape(len(registers), WARP_ROWS, -1)
