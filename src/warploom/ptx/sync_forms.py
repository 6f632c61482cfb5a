"""Fences whose scope depends on the launch, waits for ``wgmma``, and what only concerns other grids or time.

Source: PTX ISA, "membar / fence", "griddepcontrol", "nanosleep", "wgmma.wait_group".
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.isa.form import Formed, named
from warploom.ptx.builder import FlowBuilder, lowered
from warploom.ptx.syntax import Operand


@lowered("fence")
def fence(b: FlowBuilder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """Fences. Of a cluster of one CTA the scope is the CTA's; the address of an acquired tensor map is one operand."""
    if made.fields.get("scope") == "cluster":
        made = named(f"fence.{made.order}.{b.scope(made)}")
    if made.addresses:
        base, offset, _ = b.address(sources[0], "global")
        b.emit(made, (b.binary("add", base, offset) if offset else base,))
    else:
        b.declared(made, targets, sources)


@lowered("griddepcontrol", "nanosleep")
def nothing(b: FlowBuilder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """Ignore ``griddepcontrol`` and ``nanosleep``: they affect scheduling only."""


@lowered("wgmma")
def warpgroup(b: FlowBuilder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``wgmma.wait_group`` names the registers that it completes; other forms are what they are."""
    names = b.completed.get(id(b.current), ())
    if not names:
        b.declared(made, targets, sources)
        return
    done = [b.register(name) for name in names]
    b.emit(made.at(registers=len(done)), done, done)
