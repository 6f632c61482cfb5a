"""The table of special registers: who a thread is.

Source: PTX ISA, "Special Registers".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from warploom.core.dtypes import DType, u32, u64
from warploom.isa.base import PREFIX
from warploom.isa.effects import ReadSpecial
from warploom.isa.form import Expression, Formed, form, instruction, named

FULL_MASK = 0xFFFFFFFF

SPECIAL_REGISTERS: dict[str, tuple[DType, str]] = {
    "tid.x": (u32, "threadIdx.x"),
    "ctaid.x": (u32, "blockIdx.x"),
    "ctaid.y": (u32, "blockIdx.y"),
    "ctaid.z": (u32, "blockIdx.z"),
    "nctaid.x": (u32, "gridDim.x"),
    "nctaid.y": (u32, "gridDim.y"),
    "nctaid.z": (u32, "gridDim.z"),
    "cluster_ctarank": (u32, "__clusterRelativeBlockRank()"),
    "cluster_nctarank": (u32, "__clusterSizeInBlocks()"),
    **{f"cluster_ctaid.{axis}": (u32, f"__clusterRelativeBlockIdx().{axis}") for axis in "xyz"},
    **{f"clusterid.{axis}": (u32, f"__clusterIdx().{axis}") for axis in "xyz"},
    "shared_base": (u32, "(unsigned)__cvta_generic_to_shared(shared_memory)"),
    "local_base": (u32, "(unsigned)__cvta_generic_to_local(local_memory)"),
    "clock64": (u64, "(unsigned long long)clock64()"),
}
"""Name → (type, CUDA C++): what :func:`special` can read. ``shared_base`` is the address of dynamic shared memory,
``local_base`` of a thread's own.

``clusterid`` is the cluster's place in the grid of clusters, ``cluster_ctaid`` the CTA's in its cluster,
``cluster_ctarank`` the same as one number, x fastest.
"""


_SPECIAL = form(
    "special.{register} d:kind",
    register=" ".join(f"{name}@sm_90" if name.startswith("cluster") else name for name in SPECIAL_REGISTERS),
    let=lambda i: {"kind": SPECIAL_REGISTERS[i.register][0]},
    call=lambda i: Expression(SPECIAL_REGISTERS[i.register][1], PREFIX, ()),
    effects=lambda i: (ReadSpecial(i.register),),
    ptx=False,
)
form(
    "mov.u64.clock64 d",
    inline=lambda _: "mov.u64 %0, %%clock64;",  # volatile, so that two reads are never joined
    effects=(ReadSpecial("clock64"),),
    asm="volatile memory",
    ptx=False,
)


def special(register: str) -> Formed:
    """The value of a special register (a key of :data:`SPECIAL_REGISTERS`)."""
    return instruction(_SPECIAL, ("special", register))


def read_clock() -> Formed:
    """``clock64()``: the SM's cycle counter; never shared or dropped, so that it stays where it is written."""
    return named("mov.u64.clock64", ptx=False)
