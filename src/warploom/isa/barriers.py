"""The table of barriers, fences and what else threads meet at: ``bar``, ``fence``, ``elect``, ``setmaxnreg``, ``trap``.

Sources: PTX ISA, "Parallel Synchronization and Communication Instructions" (``bar``, ``membar`` / ``fence``,
``griddepcontrol``, ``elect.sync``) and "Miscellaneous Instructions" (``setmaxnreg``, ``nanosleep``, ``trap``); CUDA C++
Programming Guide, "Formatted Output", "Assertion".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from warploom.core.errors import VerifyError
from warploom.isa.base import ANY, PRIMARY
from warploom.isa.effects import (
    Abort,
    Barrier,
    ClusterBarrier,
    Fence,
    MbarrierFence,
    Printed,
    ProxyFence,
    RegisterBudget,
    TensorMapFence,
    WarpSync,
)
from warploom.isa.form import Expression, Formed, form, named
from warploom.isa.tensor_map import whole_map

ORDERED: dict[str, Any] = {"asm": "volatile memory"}


# Barriers of a CTA. Where they are not aligned, each thread of a warp comes when it comes.


def _barrier(i: Formed) -> dict[str, Any]:
    aligned = i.op == "bar" or bool(i.aligned)
    sync = WarpSync(aligned=aligned)
    holds = 1 if i.how == "red" else None
    return {"opcode": "bar" if aligned else "barrier", "met": (sync, Barrier(0, i.threads, i.how != "arrive", holds))}


def _sync_threads(i: Formed, _: Sequence[str], operands: Sequence[str]) -> str | None:
    """Barrier 0 of the whole CTA is CUDA's own."""
    return "__syncthreads();" if i.opcode == "bar" and i.threads is None and operands[0] == "0u" else None


def _votes(i: Formed) -> Any:
    """The result of ``bar.red`` from the count of threads whose predicate holds, and of all that came."""
    rules: dict[str, Any] = {"popc": lambda n, _: n, "and": lambda n, every: n == every, "or": lambda n, _: n > 0}
    return rules[i.rop]


def _reduction(i: Formed) -> str:
    """Inline PTX of ``bar.red``: one predicate register for the operand, one for the result."""
    count = "" if i.threads is None else f", {i.threads}"
    result, taken = ("%0", "") if i.rop == "popc" else ("q", "selp.u32 %0, 1, 0, q; ")
    return f"{{ .reg .pred p, q; setp.ne.u32 p, %2, 0; {i.mnemonic} {result}, %1{count}, p; {taken}}}"


for opcode, aligned in (("bar", ""), ("barrier", "{.aligned}")):
    said: dict[str, Any] = {"let": _barrier, "effects": lambda i: i.met, **ORDERED}
    said |= {"default": {"threads": None, "aligned": ""}, "how": "sync", "name": "{opcode}.{how}"}
    form(f"{opcode}{{.cta}}.{{how}}{aligned} id:u32, #threads?", statement=_sync_threads, **said)
    form(f"{opcode}{{.cta}}.{{how}}{aligned} id:u32, #threads", **(said | {"how": "arrive"}))
    said |= {"how": "red", "name": "{opcode}.red.{rop}.{kind}", "choose": _votes, "inline": _reduction}
    for rop, kind in (("popc", "u32"), ("and or", "pred")):
        pattern = f"{opcode}{{.cta}}.{{how}}.{{rop}}{aligned}.{{kind}} d:kind, id:u32, #threads?, holds:pred"
        form(pattern, rop=rop, kind=kind, **said)


def bar_sync(threads: int | None = None) -> Formed:
    """``bar.sync``: ``threads`` threads meet, all of the CTA without a count. Operand: the barrier's number."""
    return _counted("bar.sync", threads)


def bar_arrive(threads: int) -> Formed:
    """``bar.arrive``: the warp counts among ``threads`` threads, and goes on. Operand: the barrier's number."""
    return _counted("bar.arrive", threads)


def bar_reduce(op: Literal["popc", "and", "or"]) -> Formed:
    """``bar.red``: all threads meet and learn of how many a predicate holds. Operands: the barrier's number, it."""
    return named(f"bar.red.{op}.{'u32' if op == 'popc' else 'pred'}")


def _counted(name: str, threads: int | None) -> Formed:
    return named(name, numbers=() if threads is None else (("threads", threads),))


# The barrier of a cluster. A relaxed arrival publishes nothing but mbarriers whose initialisation was fenced.

CLUSTER: dict[str, Any] = {"since": "sm_90", **ORDERED}
form(
    "barrier.cluster.arrive{.order}{.aligned}",
    order="release relaxed",
    default={"order": "release"},
    name=lambda i: f"barrier.cluster.arrive.{i.order}{'.aligned' if i.aligned else ''}",
    effects=lambda i: (WarpSync(aligned=bool(i.aligned)), ClusterBarrier(waits=False, relaxed=i.order == "relaxed")),
    **CLUSTER,
)
form(
    "barrier.cluster.wait{.acquire}{.aligned}",
    name=lambda i: f"barrier.cluster.wait.acquire{'.aligned' if i.aligned else ''}",
    effects=lambda i: (WarpSync(aligned=bool(i.aligned)), ClusterBarrier(waits=True)),
    **CLUSTER,
)

# Fences

FENCE: dict[str, Any] = {"effects": lambda i: (Fence("gpu" if i.scope == "gl" else i.scope),), **ORDERED}
form("fence.{order}.{scope}", order="acq_rel sc", scope="cta gpu sys cluster@sm_90", **FENCE)
form("membar.{scope}", scope="cta gl sys", **FENCE)
_SPACES: dict[str, Any] = {"": "all", "shared::cta": "shared", "global": "global"}
form(
    "fence.proxy.async{.space}",
    space="shared::cta global",
    effects=lambda i: (ProxyFence(_SPACES[i.space]),),
    since="sm_90",
    **ORDERED,
)
form("fence.mbarrier_init.release.cluster", effects=(MbarrierFence(),), since="sm_90", **ORDERED)
MAP_FENCE: dict[str, Any] = {"scope": "gpu sys", "since": "sm_90", **ORDERED}
form("fence.proxy.tensormap::generic.release.{scope}", effects=(TensorMapFence(),), **MAP_FENCE)


form(
    "fence.proxy.tensormap::generic.acquire.{scope} [at], #size",
    name="fence.proxy.tensormap::generic.acquire.{scope}",
    let=whole_map,
    effects=(TensorMapFence(0),),
    **MAP_FENCE,
)

# The warp and its registers


def _full_warp(i: Formed) -> dict[str, Any]:
    if i.mask % (1 << 32) != 0xFFFFFFFF:
        raise VerifyError("an election is for the whole warp")
    if "d" not in i.left:
        raise VerifyError("the elected lane's number is not supported: use the predicate")
    return {}


form(
    "elect.sync d:b32?|p:pred, #mask:hex",
    name="elect.sync",
    let=_full_warp,
    # PTX does not say which lane. Where a kernel counts on the first, lanes race that nothing orders.
    meaning=lambda: (np.arange(32) == 31)[None, :],
    inline=lambda _: "{ .reg .pred p; .reg .b32 d; elect.sync d|p, 0xffffffff; selp.u32 %0, 1, 0, p; }",
    effects=(WarpSync(aligned=True),),
    since="sm_90",
    asm="volatile",
)


def elect() -> Formed:
    """``elect.sync``: true in one lane of a full warp."""
    return named("elect.sync", numbers=(("mask", 0xFFFFFFFF),))


def _budget(i: Formed) -> dict[str, Any]:
    if i.registers % 8 or not 24 <= i.registers <= 256:
        raise VerifyError(f"setmaxnreg takes a multiple of 8, from 24 to 256, not {i.registers}")
    return {}


form(
    "setmaxnreg.{way}.sync.aligned.u32 #registers",
    way="inc dec",
    name="setmaxnreg.{way}.sync.aligned.u32",
    let=_budget,
    effects=lambda i: (WarpSync(aligned=True), RegisterBudget(i.registers, i.way)),
    since="sm_90a",
    asm="volatile",
)


def set_max_registers(registers: int, way: Literal["inc", "dec"]) -> Formed:
    """``setmaxnreg``: the registers of each thread of a warpgroup, a multiple of 8 from 24 to 256."""
    return named(f"setmaxnreg.{way}.sync.aligned.u32", numbers=(("registers", registers),))


# Other launches, time, and the end

form("griddepcontrol.{action}", action="launch_dependents wait", since="sm_90", **ORDERED)
form("nanosleep.u32 a", **ORDERED)


def _called(function: str, count: int) -> Expression:
    return Expression(function, PRIMARY, (ANY,) * count)


form("trap", call=lambda _: _called("__trap()", 0), effects=(Abort(),), **ORDERED)
form(
    "vprintf d:u32, format:u64, arguments:u64",
    call=lambda _: _called("vprintf((const char *)({0}), (void *)({1}))", 2),
    let=lambda _: {"declaration": 'extern "C" __device__ int vprintf(const char *, void *);'},  # unknown to NVRTC
    effects=(Printed(0, 1),),
    ptx=False,
    **ORDERED,
)
SYSTEM_CALLS = ("vprintf", "__assertfail")
"""Functions of the system, which PTX calls and has no body of."""
_ASSERTION = "__assertfail((const char *)({0}), (const char *)({1}), {2}, (const char *)({3}), {4})"
form(
    "__assertfail message:u64, file:u64, line:u32, function:u64, size:u64",
    call=lambda _: _called(_ASSERTION, 5),
    effects=(Abort((0, 1, 2, 3)),),
    ptx=False,
    **ORDERED,
)
