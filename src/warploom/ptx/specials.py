"""PTX's special registers. A Program's threads are numbered in one dimension; here they get theirs back.

Source: PTX ISA, "Special Registers".
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import u32, u64
from warploom.ir.statements import Const, Operand
from warploom.isa.conversion import convert
from warploom.isa.special import SPECIAL_REGISTERS, read_clock, special
from warploom.ptx.emitter import Emitter

_MASKS = ("eq", "lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Specials:
    """Special registers of a launch: threads of a CTA along x, y, z, CTAs of a cluster, bytes of shared memory."""

    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_bytes: int
    total_bytes: int

    def read(self, b: Emitter, name: str) -> Operand:
        """The value of a special register (``%tid.x``). Raises PtxError for one that is not known."""
        known = name.removeprefix("%")
        register, _, axis = known.partition(".")
        if register == "tid":
            return self._thread(b, axis)
        fixed = self._fixed(register, axis)
        if fixed is not None:
            return Const(u32, fixed)
        if known in SPECIAL_REGISTERS and known not in ("shared_base", "local_base", "clock64"):
            return b.once(special(known))
        if known in ("clock64", "globaltimer"):
            return b.op(read_clock())
        if known in ("clock", "globaltimer_lo"):
            return b.op(convert(u64, u32), b.op(read_clock()))
        lane = b.binary("and", b.once(special("tid.x")), 31)
        if known == "laneid":
            return lane
        if known == "warpid":
            return b.binary("shr", b.once(special("tid.x")), 5)
        if register.startswith("lanemask_") and register[9:] in _MASKS:
            return _lane_mask(b, lane, register[9:])
        raise b.refusal(f"the register {name} is not known")

    def _fixed(self, register: str, axis: str) -> int | None:
        which = "xyz".find(axis) if axis else -1
        if register == "ntid" and which >= 0:
            return self.block[which]
        if register == "cluster_nctaid" and which >= 0:
            return self.cluster[which]
        warps = -(-self.block[0] * self.block[1] * self.block[2] // 32)
        return {
            "nwarpid": warps,
            "dynamic_smem_size": self.dynamic_bytes,
            "total_smem_size": self.total_bytes,
            "is_explicit_cluster": int(self.cluster != (1, 1, 1)),
        }.get(register)

    def _thread(self, b: Emitter, axis: str) -> Operand:
        linear = b.once(special("tid.x"))
        x, y, _ = self.block
        if self.block[1:] == (1, 1):
            return linear if axis == "x" else Const(u32, 0)
        if axis == "x":
            return b.binary("rem", linear, x)
        row = b.binary("div", linear, x)
        return b.binary("rem", row, y) if axis == "y" else b.binary("div", row, y)


def _lane_mask(b: Emitter, lane: Operand, kind: str) -> Operand:
    own = b.binary("shl", Const(u32, 1), lane)  # type: ignore[arg-type]
    below = b.binary("sub", own, 1)
    if kind == "eq":
        return own
    if kind == "lt":
        return below
    mask = b.binary("or", own, below)
    if kind == "le":
        return mask
    return b.binary("xor", mask if kind == "gt" else below, 0xFFFFFFFF)
