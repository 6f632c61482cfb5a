"""``mma.sync`` of integers and doubles: products without rounding to explain.

Sources: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions" (``mma`` with ``.s8``/``.u8`` and ``.f64``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warploom.core.dtypes import DType, f64, s8, s32, u8, u32
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, Instruction, braces
from warploom.isa.effects import WarpSync
from warploom.isa.matrix import FragmentSlot
from warploom.layout.catalogue import mma_fragment

_INTEGER_SHAPES = ("m8n8k16", "m16n8k16", "m16n8k32")
_DOUBLE_SHAPES = ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")


@lru_cache(maxsize=64)
def _slots(shape: str, a: DType, b: DType, accumulator: DType) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
    found: list[FragmentSlot] = []
    first = 0
    for which, dtype in (("A", a), ("B", b), ("C", accumulator)):
        layout = mma_fragment(shape, which, dtype.bits)
        count = layout.registers if dtype.bits <= 32 else layout.elements_per_thread
        found.append(FragmentSlot(layout, dtype, first, count))
        first += count
    return found[0], found[1], found[2]


def _register(dtype: DType) -> DType:
    return u32 if dtype.bits < 32 else dtype


@dataclass(frozen=True, slots=True)
class _ExactMma(Instruction):
    """``mma.sync`` of types whose products and sums NumPy has: D = A·B + C in the accumulator's type.

    Operands: A's registers, B's, C's; results: D's.
    """

    does = (WarpSync(aligned=True),)
    volatile_ptx = False
    clobbers_memory = False

    @property
    def slots(self) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
        """A, B and C as fragments."""
        raise TypeError(f"{type(self).__name__} has no fragments")

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return tuple(_register(slot.dtype) for slot in self.slots for _ in range(slot.count))

    @property
    def result_types(self) -> tuple[DType, ...]:
        c = self.slots[2]
        return (_register(c.dtype),) * c.count

    @property
    def template(self) -> str:
        a, b, c = (slot.count for slot in self.slots)
        groups = (braces(0, c), braces(c, a), braces(c + a, b), braces(c + a + b, c))
        return f"{self.mnemonic} {', '.join(groups)};"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        a, b, c = (slot.matrix(operands[slot.first : slot.first + slot.count]) for slot in self.slots)
        return self.slots[2].registers(np.matmul(a.astype(c.dtype), b.astype(c.dtype)) + c)


@dataclass(frozen=True, slots=True)
class MmaInteger(_ExactMma):
    """``mma.sync.aligned.{shape}.row.col.s32``: D = A·B + C of 8-bit integers, in s32 that wraps.

    Operands: A's registers, B's, C's (s32); results: D's. ``a`` and ``b`` are s8 or u8, each its own.
    """

    shape: str
    a: DType
    b: DType
    ptx = "mma.sync.aligned.{self.shape}.row.col.s32.{self.a}.{self.b}.s32"

    def __post_init__(self) -> None:
        if self.shape not in _INTEGER_SHAPES or self.a not in (s8, u8) or self.b not in (s8, u8):
            raise VerifyError(
                f"mma.sync of integers takes s8 and u8 in {', '.join(_INTEGER_SHAPES)}, not {self.a}, {self.b} in "
                f"{self.shape}"
            )

    @property
    def slots(self) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
        """A, B and C as fragments."""
        return _slots(self.shape, self.a, self.b, s32)


@dataclass(frozen=True, slots=True)
class MmaDouble(_ExactMma):
    """``mma.sync.aligned.{shape}.row.col.f64``: D = A·B + C in float64; m8n8k4 from sm_80, m16n8k* from sm_90 on.

    Operands: A's registers (f64), B's, C's; results: D's. The order in which the hardware sums is not documented; the
    emulator sums as NumPy does, to within k · 2^-53 of Σ|a·b|.
    """

    shape: str
    ptx = "mma.sync.aligned.{self.shape}.row.col.f64.f64.f64.f64"

    @property
    def since(self) -> str:
        """Shapes of 16 rows came with sm_90."""
        return "sm_80" if self.shape == "m8n8k4" else "sm_90"

    def __post_init__(self) -> None:
        if self.shape not in _DOUBLE_SHAPES:
            raise VerifyError(f"mma.sync of f64 takes {', '.join(_DOUBLE_SHAPES)}, not {self.shape}")

    @property
    def slots(self) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
        """A, B and C as fragments."""
        return _slots(self.shape, f64, f64, f64)
