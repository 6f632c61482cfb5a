"""What the members of a warp find out together: reductions of integers, equal values, who is here.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions" (``redux.sync``, ``match.sync``,
``activemask``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from warploom.core.dtypes import DType, pred, s32, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, Instruction, takes
from warploom.isa.effects import ReadSpecial, WarpSync

_LANES = np.arange(32, dtype=np.uint32)
_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _members(mask: Array) -> Array:
    """(warps, lane, member)."""
    return ((mask[:, :, None] >> _LANES) & 1).astype(np.bool_)


@dataclass(frozen=True, slots=True)
class Redux(Instruction):
    """``redux.sync``: operands value and member mask; every member gets the reduction over all of them."""

    op: Literal["add", "min", "max", "and", "or", "xor"]
    dtype: DType
    takes = ("dtype", u32)
    gives = ("dtype",)
    does = (WarpSync(mask=1),)
    clobbers_memory = False

    def __post_init__(self) -> None:
        if self.op not in _REDUCTIONS:
            raise VerifyError(f"there is no reduction {self.op!r}; there are {', '.join(_REDUCTIONS)}")
        takes(f"redux.sync.{self.op}", self.dtype, (u32,) if self.op in ("and", "or", "xor") else (u32, s32))

    @property
    def mnemonic(self) -> str:
        """As in PTX (PTX ISA, "redux.sync")."""
        return f"redux.sync.{self.op}.{'b32' if self.op in ('and', 'or', 'xor') else self.dtype.name}"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The reduction over the lanes of each lane's mask."""
        values, member = operands[0], _members(operands[1])
        info = np.iinfo(values.dtype)
        none = {"min": info.max, "max": info.min, "and": info.max}.get(self.op, 0)
        wide = np.where(member, values[:, None, :], values.dtype.type(none))
        return (_REDUCTIONS[self.op].reduce(wide, axis=2).astype(values.dtype),)


@dataclass(frozen=True, slots=True)
class Match(Instruction):
    """``match.{any,all}.sync``: operands value and member mask; the members that have the lane's value.

    ``all`` gives the mask if all members have one value, else 0, and as a second result whether they have.
    """

    mode: Literal["any", "all"]
    dtype: DType
    ptx = "match.{self.mode}.sync.b{self.dtype.bits}"
    takes = ("dtype", u32)
    does = (WarpSync(mask=1),)
    clobbers_memory = False

    def __post_init__(self) -> None:
        takes(f"match.{self.mode}", self.dtype, (u32, u64))

    @property
    def result_types(self) -> tuple[DType, ...]:
        """A mask of lanes; of ``all`` a predicate too."""
        return (u32,) if self.mode == "any" else (u32, pred)

    @property
    def template(self) -> str:
        """The predicate is a result beside the mask."""
        if self.mode == "any":
            return f"{self.mnemonic} %0, %1, %2;"
        return f"{{ .reg .pred p; {self.mnemonic} %0|p, %2, %3; selp.u32 %1, 1, 0, p; }}"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Comparisons of each lane with the lanes of its mask."""
        values, member = operands[0], _members(operands[1])
        same = member & (values[:, :, None] == values[:, None, :])
        mask = (same.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32)
        if self.mode == "any":
            return (mask,)
        equal = (same == member).all(axis=2)
        return np.where(equal, mask, np.uint32(0)), equal


@dataclass(frozen=True, slots=True)
class ActiveMask(Instruction):
    """``activemask``: the lanes that happen to execute it together; which they are, the order of execution decides."""

    ptx = "activemask.b32"
    call = "__activemask()"
    gives = (u32,)
    does = (ReadSpecial("activemask"),)
