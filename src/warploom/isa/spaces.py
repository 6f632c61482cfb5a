"""Generic addresses: from and to those of a thread's own state spaces.

Source: PTX ISA, "Generic Addressing", ``cvta``, ``isspacep``. A global address is its own generic one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from warploom.core.dtypes import pred, u32, u64
from warploom.isa.base import Array, Lanewise

Window = Literal["shared", "local"]
_MARK = {"shared": np.uint64(1 << 60), "local": np.uint64(1 << 61)}
"""What the emulator adds to addresses of a space to have generic ones: above all of global memory."""
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class ToGeneric(Lanewise):
    """``cvta.{shared,local}``: the generic address of one in a space."""

    space: Window
    ptx = "cvta.{self.space}.u64"
    inline = "{{ .reg .u64 a; cvt.u64.u32 a, %1; {self.mnemonic} %0, a; }}"  # within the space they are of 32 bits
    takes = (u32,)
    gives = (u64,)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The address, marked as one of the space."""
        return (operands[0].astype(np.uint64) | _MARK[self.space],)


@dataclass(frozen=True, slots=True)
class FromGeneric(Lanewise):
    """``cvta.to.{shared,local}``: the address within a space of a generic one that lies in it."""

    space: Window
    ptx = "cvta.to.{self.space}.u64"
    inline = "{{ .reg .u64 a; {self.mnemonic} a, %1; cvt.u32.u64 %0, a; }}"
    takes = (u64,)
    gives = (u32,)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The low half; of an address elsewhere, one beyond all of the space."""
        inside = operands[0] >> np.uint64(32) == _MARK[self.space] >> np.uint64(32)
        return (np.where(inside, operands[0] & _LOW, _LOW).astype(np.uint32),)


@dataclass(frozen=True, slots=True)
class IsSpace(Lanewise):
    """``isspacep.{shared,local}``: whether a generic address lies in a space."""

    space: Window
    ptx = "isspacep.{self.space}"
    inline = "{{ .reg .pred p; {self.mnemonic} p, %1; selp.u32 %0, 1, 0, p; }}"
    takes = (u64,)
    gives = (pred,)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """By the mark of the space."""
        return ((operands[0] & _MARK[self.space]) != 0,)
