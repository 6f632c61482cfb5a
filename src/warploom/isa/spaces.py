"""Generic addresses: from and to those of a thread's own state spaces.

Source: PTX ISA, "Generic Addressing", ``cvta``, ``isspacep``. A global address is its own generic one. Within a space
addresses of Programs have 32 bits.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, Literal

import numpy as np

from warploom.isa.effects import ReadSpecial
from warploom.isa.form import Formed, form, named

Window = Literal["shared", "local"]
_MARK = {"shared": np.uint64(1 << 60), "local": np.uint64(1 << 61)}
"""What the emulator adds to addresses of a space to have generic ones: above all of global memory."""
_LOW = np.uint64(0xFFFFFFFF)


def _within(i: Formed) -> Any:
    """A function from generic addresses to their low halves; others become one beyond all of the space."""

    def address(generic: Any) -> Any:
        inside = generic >> np.uint64(32) == _MARK[i.space] >> np.uint64(32)
        return np.where(inside, generic & _LOW, _LOW).astype(np.uint32)

    return address


WINDOW: dict[str, Any] = {"let": lambda i: {"space": i.window.partition("::")[0]}}
WINDOWS = "shared shared::cta shared::cluster@sm_90 local"
form("cvta{.to}.{space}.u64 d, a", space="global const", meaning=lambda a: a)
form("cvta.param.u64 d, a", asm="plain", effects=(ReadSpecial("param_base"),))
form(
    "cvta.{window}.u64 d, a:u32=b64",
    window=WINDOWS,
    name="cvta.{space}.u64",
    choose=lambda i: lambda a: a.astype(np.uint64) | _MARK[i.space],
    **WINDOW,
)
form(
    "cvta.to.{window}.u64 d:u32=b64, a",
    window=WINDOWS,
    name="cvta.to.{space}.u64",
    choose=_within,
    inline=lambda i: f"{{ .reg .u64 a; {i.ptx_name} a, %1; cvt.u32.u64 %0, a; }}",
    **WINDOW,
)
form(
    "isspacep.{window} d:pred, a:u64",
    window="shared shared::cta local",
    name="isspacep.{space}",
    choose=lambda i: lambda a: (a & _MARK[i.space]) != 0,
    **WINDOW,
)
form("isspacep.global d:pred, a:u64", meaning=lambda a: a < _MARK["shared"])


def to_generic(window: Window) -> Formed:
    """``cvta``: the generic address of an address within a state space."""
    return named(f"cvta.{window}.u64")


def from_generic(window: Window) -> Formed:
    """``cvta.to``: the address within a state space of a generic address that lies in it."""
    return named(f"cvta.to.{window}.u64")


def is_space(window: Window) -> Formed:
    """``isspacep``: whether a generic address lies in a state space."""
    return named(f"isspacep.{window}")
