"""The table of what threads meet at: ``bar``, ``fence``, ``mbarrier``, ``elect``, ``setmaxnreg``, ``trap``.

Sources: PTX ISA, "Parallel Synchronization and Communication Instructions" (``bar``, ``membar`` / ``fence``,
``griddepcontrol``, ``elect.sync``) and "Miscellaneous Instructions" (``setmaxnreg``, ``nanosleep``, ``trap``); CUDA C++
Programming Guide, "Formatted Output", "Assertion".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DType
from warploom.core.errors import VerifyError
from warploom.isa.async_copy import whole_map
from warploom.isa.cpp import address, called
from warploom.isa.effects import (
    Abort,
    Barrier,
    ClusterBarrier,
    ClusterScope,
    Fence,
    LaunchWait,
    MbarrierArrive,
    MbarrierFence,
    MbarrierInit,
    MbarrierInvalidate,
    MbarrierWait,
    Printed,
    ProxyFence,
    RegisterBudget,
    TensorMapFence,
    WarpSync,
)
from warploom.isa.form import common, form
from warploom.isa.instruction import Instruction, named

ORDERED = common(asm="volatile memory")


# Barriers of a CTA. Where they are not aligned, each thread of a warp comes when it comes.


def _barrier(i: Instruction) -> dict[str, Any]:
    aligned = i.op == "bar" or bool(i.aligned)
    sync = WarpSync(aligned=aligned)
    holds = 1 if i.how == "red" else None
    return {"opcode": "bar" if aligned else "barrier", "met": (sync, Barrier(0, i.threads, i.how != "arrive", holds))}


def _sync_threads(i: Instruction, _: Sequence[str], operands: Sequence[str]) -> str | None:
    """Barrier 0 of the whole CTA is CUDA's own."""
    return "__syncthreads();" if i.opcode == "bar" and i.threads is None and operands[0] == "0u" else None


def _votes(i: Instruction) -> Any:
    """The result of ``bar.red`` from the count of threads whose predicate holds, and of all that came."""
    rules: dict[str, Any] = {"popc": lambda n, _: n, "and": lambda n, every: n == every, "or": lambda n, _: n > 0}
    return rules[i.rop]


def _reduction(i: Instruction) -> str:
    """Inline PTX of ``bar.red``: one predicate register for the operand, one for the result."""
    count = "" if i.threads is None else f", {i.threads}"
    result, taken = ("%0", "") if i.rop == "popc" else ("q", "selp.u32 %0, 1, 0, q; ")
    return f"{{ .reg .pred p, q; setp.ne.u32 p, %2, 0; {i.mnemonic} {result}, %1{count}, p; {taken}}}"


for opcode, aligned in (("bar", ""), ("barrier", "{.aligned}")):
    said = common(let=_barrier, effects=lambda i: i.met, **ORDERED)
    said |= {"default": {"threads": None, "aligned": ""}, "how": "sync", "name": "{opcode}.{how}"}
    form(f"{opcode}{{.cta}}.{{how}}{aligned} id:u32, #threads?", said, statement=_sync_threads)
    form(f"{opcode}{{.cta}}.{{how}}{aligned} id:u32, #threads", said, how="arrive")
    said |= {"how": "red", "name": "{opcode}.red.{rop}.{kind}", "choose": _votes, "inline": _reduction}
    for rop, kind in (("popc", "u32"), ("and or", "pred")):
        pattern = f"{opcode}{{.cta}}.{{how}}.{{rop}}{aligned}.{{kind}} d:kind, id:u32, #threads?, holds:pred"
        form(pattern, said, rop=rop, kind=kind)


def bar_sync(threads: int | None = None) -> Instruction:
    """``bar.sync``: ``threads`` threads meet, all of the CTA without a count. Operand: the barrier's number."""
    return _counted("bar.sync", threads)


def bar_arrive(threads: int) -> Instruction:
    """``bar.arrive``: the warp counts among ``threads`` threads, and goes on. Operand: the barrier's number."""
    return _counted("bar.arrive", threads)


def _counted(name: str, threads: int | None) -> Instruction:
    return named(name, numbers=() if threads is None else (("threads", threads),))


# The barrier of a cluster. A relaxed arrival publishes nothing but mbarriers whose initialisation was fenced.

CLUSTER = common(since="sm_90", **ORDERED)
form(
    "barrier.cluster.arrive{.order}{.aligned}",
    CLUSTER,
    order="release relaxed",
    default={"order": "release"},
    name=lambda i: f"barrier.cluster.arrive.{i.order}{'.aligned' if i.aligned else ''}",
    effects=lambda i: (WarpSync(aligned=bool(i.aligned)), ClusterBarrier(waits=False, relaxed=i.order == "relaxed")),
)
form(
    "barrier.cluster.wait{.acquire}{.aligned}",
    CLUSTER,
    name=lambda i: f"barrier.cluster.wait.acquire{'.aligned' if i.aligned else ''}",
    effects=lambda i: (WarpSync(aligned=bool(i.aligned)), ClusterBarrier(waits=True)),
)

# Fences


def _fence(i: Instruction) -> tuple[Fence, ...]:
    return (Fence("gpu" if i.scope == "gl" else i.scope, i.order == "sc", i.order != "release", i.order != "acquire"),)


FENCE = common(effects=_fence, **ORDERED)
form("fence.{order}.{scope}", FENCE, order="acq_rel sc acquire@sm_90 release@sm_90", scope="cta gpu sys cluster@sm_90")
form("membar.{scope}", FENCE, scope="cta gl sys", default={"order": "sc"})
_SPACES: dict[str, Any] = {"": "all", "shared::cta": "shared", "global": "global"}
form(
    "fence.proxy.async{.space}",
    ORDERED,
    space="shared::cta global",
    effects=lambda i: (ProxyFence(_SPACES[i.space]),),
    since="sm_90",
)
form("fence.mbarrier_init.release.cluster", ORDERED, effects=(MbarrierFence(),), since="sm_90")
MAP_FENCE = common(scope="gpu sys", since="sm_90", **ORDERED)
form("fence.proxy.tensormap::generic.release.{scope}", MAP_FENCE, effects=(TensorMapFence(),))


form(
    "fence.proxy.tensormap::generic.acquire.{scope} [at], #size",
    MAP_FENCE,
    name="fence.proxy.tensormap::generic.acquire.{scope}",
    let=whole_map,
    effects=(TensorMapFence(0),),
)

# The warp and its registers


def _full_warp(i: Instruction) -> dict[str, Any]:
    if i.mask % (1 << 32) != 0xFFFFFFFF:
        raise VerifyError("an election is for the whole warp")
    return {}


def _elected(i: Instruction) -> Any:
    """The lane that is elected, where its number is asked for, and whether a lane is it.

    PTX does not say which lane. Where a kernel counts on the first, lanes race that nothing orders.
    """
    lanes = np.arange(32)[None, :]
    return lambda: (np.full_like(lanes, 31), lanes == 31)[-len(i.result_types) :]


def _election(i: Instruction) -> str:
    holds = len(i.result_types) - 1
    lane = "mov.b32 %0, d; " * holds
    return f"{{ .reg .pred p; .reg .b32 d; elect.sync d|p, 0xffffffff; {lane}selp.u32 %{holds}, 1, 0, p; }}"


form(
    "elect.sync d:b32?|p:pred, #mask:hex",
    name="elect.sync",
    let=_full_warp,
    choose=_elected,
    inline=_election,
    effects=(WarpSync(aligned=True),),
    since="sm_90",
    asm="volatile",
)


def _budget(i: Instruction) -> dict[str, Any]:
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


def set_max_registers(registers: int, way: Literal["inc", "dec"]) -> Instruction:
    """``setmaxnreg``: the registers of each thread of a warpgroup, a multiple of 8 from 24 to 256."""
    return named(f"setmaxnreg.{way}.sync.aligned.u32", numbers=(("registers", registers),))


# Other launches, time, and the end

form("griddepcontrol.launch_dependents", ORDERED, since="sm_90")
form("griddepcontrol.wait", ORDERED, effects=(LaunchWait(),), since="sm_90")
form("nanosleep.u32 a", ORDERED)


form("{op}", ORDERED, op="trap brkpt", call=lambda i: called(f"__{i.op}()", 0), effects=(Abort(),))
form(
    "vprintf d:u32, format:u64, arguments:u64",
    ORDERED,
    call=lambda _: called("vprintf((const char *)({0}), (void *)({1}))", 2),
    let=lambda _: {"declaration": 'extern "C" __device__ int vprintf(const char *, void *);'},  # unknown to NVRTC
    effects=(Printed(0, 1),),
    ptx=False,
)
form(
    "printf #format, #^types, values*types:types",
    ORDERED,
    name=lambda i: f"printf {json.dumps(i.format)}",
    call=lambda i: called(f"printf({', '.join([_braced(i.format), *(f'{{{n}}}' for n in range(len(i.types)))])})", 0),
    effects=lambda i: (Printed(i.format),),
    ptx=False,
)


def _braced(text: str) -> str:
    """A text as C++ has it, within a format of Python's."""
    return json.dumps(text).replace("{", "{{").replace("}", "}}")


def printf(text: str, types: Sequence[DType]) -> Instruction:
    """``printf`` of values of these types."""
    return named("printf", numbers=(("format", text), ("types", tuple(types))), ptx=False)


SYSTEM_CALLS = ("vprintf", "__assertfail")
"""Functions of the system, which PTX calls and has no body of."""
_ASSERTION = "__assertfail((const char *)({0}), (const char *)({1}), {2}, (const char *)({3}), {4})"
form(
    "__assertfail message:u64, file:u64, line:u32, function:u64, size:u64",
    ORDERED,
    call=lambda _: called(_ASSERTION, 5),
    effects=(Abort((0, 1, 2, 3)),),
    ptx=False,
)


# Barriers in shared memory. Of arrivals, the threads whose predicate holds (``guard``) make them. It guards the PTX
# instruction itself, which keeps loop variables in uniform registers where a branch around it would not.


BARRIER = common(space="shared shared::cta", scope="cta cluster@sm_90", asm="volatile memory")


def _count_of_arrivals(i: Instruction) -> dict[str, Any]:
    if not 1 <= i.count < 1 << 20:
        raise VerifyError(f"an mbarrier counts 1 to {(1 << 20) - 1} arrivals, not {i.count}")
    return {}


for number, how in (("#count", ".{count}"), ("count:u32", "")):
    form(
        f"mbarrier.init.{{space}}.b64 [at], {number}",
        BARRIER,
        name=f"mbarrier.init{how}",
        default={"count": 1},
        let=_count_of_arrivals,
        effects=lambda i: (MbarrierInit(0, i.offset, i.count, i.position("count")),),
    )
form(
    "mbarrier.inval.{space}.b64 [at]",
    BARRIER,
    name="mbarrier.inval",
    effects=lambda i: (MbarrierInvalidate(0, i.offset),),
)

# Arrivals, of which the phase's state that they give is dropped


def _arrival(i: Instruction) -> dict[str, Any]:
    _count_of_arrivals(i)
    arrives = i.how.startswith("arrive")  # else it changes the bytes alone
    scope = (i.fields.get("scope") or "cta") if arrives else "cta"
    return {"arrives": arrives, "scope": scope, "remote": "shared::cluster" in i.words, "size": i.expected_bytes}


def _arrival_name(i: Instruction) -> str:
    order = i.fields.get("order") if i.arrives else None
    return ".".join(
        filter(
            None,
            (
                f"mbarrier.{i.how}",
                "expect_tx" * (i.arrives and "expect_tx" in i.words),
                "" if i.size is None else str(i.size),
                f"{order or 'release'}.{i.scope}" * (i.scope == "cluster" or order == "relaxed"),
                "shared::cluster" * i.remote,
                str(i.count) * (i.count > 1),
            ),
        )
    )


def _arrives(i: Instruction) -> tuple[MbarrierArrive, ...]:
    size = -i.size if i.how == "complete_tx" else i.size
    relaxed = i.arrives and i.fields.get("order") == "relaxed"
    arrival = MbarrierArrive(
        0,
        i.offset,
        size,
        i.position("guard"),
        i.remote,
        i.scope,
        i.count if i.arrives else 0,
        drops=i.how == "arrive_drop",
        releases=not relaxed,
        counted=i.position("count"),
        expects=i.position("expected_bytes"),
    )
    return (arrival,)


ARRIVAL = BARRIER | common(space="shared shared::cta shared::cluster@sm_90", let=_arrival, how="arrive arrive_drop")
ARRIVAL.update(default={"count": 1, "expected_bytes": None}, name=_arrival_name, effects=_arrives)
for order, since in (("", "sm_80"), (".{order}.{scope}", "sm_90")):
    said = common(order="release relaxed", **ARRIVAL)
    form(f"mbarrier.{{how}}{order}.{{space}}.b64 _, [at], ^guard:pred", said, since=since)
    for count, size in (("#count", "#expected_bytes"), ("count:u32", "expected_bytes:u32")):
        form(f"mbarrier.{{how}}{order}.{{space}}.b64 _, [at], {count}, ^guard:pred", said, since="sm_90")
        form(f"mbarrier.{{how}}.expect_tx{order}.{{space}}.b64 _, [at], {size}, ^guard:pred", said, since="sm_90")
for size, how in (("#expected_bytes", "expect_tx complete_tx"), ("expected_bytes:u32", "expect_tx")):
    for order in ("", ".relaxed.{scope}"):
        form(f"mbarrier.{{how}}{order}.{{space}}.b64 [at], {size}, ^guard:pred", ARRIVAL, how=how, since="sm_90")
for order in ("", ".release.cta"):  # the phase must not end by them
    form(
        f"mbarrier.arrive.noComplete{order}.{{space}}.b64 _, [at], #count",
        BARRIER,
        name="mbarrier.arrive.noComplete.{count}",
        effects=lambda i: (MbarrierArrive(0, i.offset, count=i.count, completes=False),),
    )


def mbarrier_init(count: int) -> Instruction:
    """``mbarrier.init``: ``count`` arrivals complete a phase. Operand: its address."""
    return named("mbarrier.init.shared::cta.b64", numbers=(("count", count),))


def mbarrier_arrival(
    expected_bytes: int | None = None, remote: bool = False, scope: ClusterScope = "cta"
) -> Instruction:
    """``mbarrier.arrive``, which raises the bytes to expect first. Operands: address, predicate.

    ``remote``: the address comes from ``mapa``, and the mbarrier is another CTA's. ``scope`` ``"cluster"`` publishes
    writes to the whole cluster, at the price of a fence of the whole GPU (``MEMBAR.ALL.GPU`` in sm_90a's SASS); giving
    back a stage that was only read needs none.
    """
    expect = "" if expected_bytes is None else ".expect_tx"
    release = ".release.cluster" if scope == "cluster" else ""
    numbers = () if expected_bytes is None else (("expected_bytes", expected_bytes),)
    return named(f"mbarrier.arrive{expect}{release}.shared::{'cluster' if remote else 'cta'}.b64", numbers=numbers)


# Waits. One that acquires at the cluster's scope what other CTAs released costs the L1 cache's lines (``CCTL.IVALL``).


def _test(i: Instruction) -> tuple[MbarrierWait, ...]:
    relaxed, scope = "relaxed" in i.words, i.fields.get("scope") or "cta"
    return (MbarrierWait(0, i.offset, 1, scope, blocks=False, acquires=not relaxed),)


def _test_name(i: Instruction) -> str:
    order = ".relaxed.cta" if "relaxed" in i.words else ".acquire.cluster" if i.fields.get("scope") == "cluster" else ""
    return f"mbarrier.{i.how}{'.parity' if 'parity' in i.words else ''}{order}"


for order, since in (("", "sm_80"), (".acquire.{scope}", "sm_80"), (".relaxed.{scope}", "sm_90")):
    said = BARRIER | common(name=_test_name, effects=_test)
    for parity, phase in ((".parity", "parity:u32"), ("", "state:b64")):
        test, tried = (
            f"mbarrier.{{how}}{parity}{order}.{{space}}.b64 d:pred, [at], {phase}{x}" for x in ("", ", ns:u32?")
        )
        form(test, said, how="test_wait", since=since)
        form(tried, said, how="try_wait", since="sm_90")
form(
    "mbarrier.try_wait.parity{.acquire}{.relaxed}{.cta}{.cluster} [at]:u32, parity:u32",
    inline=lambda i: (  # a loop: one try_wait may give up before the phase completes
        f"{{ .reg .pred done; waiting: {i.mnemonic}.shared::cta.b64 done, {address(0, i.offset)}, %1; "
        "@done bra arrived; bra waiting; arrived: }"
    ),
    effects=lambda i: (MbarrierWait(0, i.offset, 1, i.cluster or "cta", acquires=not i.relaxed),),
    since="sm_90",
    asm="volatile memory",
    ptx=False,
)


def mbarrier_wait(scope: ClusterScope = "cta", relaxed: bool = False) -> Instruction:
    """A loop on ``mbarrier.try_wait.parity``: blocks until the phase of that parity completed.

    Operands: address, parity (0 for the first phase). ``scope`` ``"cluster"`` acquires what other CTAs of the cluster
    released at that scope. A ``relaxed`` wait acquires nothing before a fence.
    """
    order = f".relaxed.{scope}" if relaxed else ".acquire.cluster" if scope == "cluster" else ""
    return named(f"mbarrier.try_wait.parity{order}", ptx=False)


def mbarrier_test(scope: ClusterScope = "cta", relaxed: bool = False) -> Instruction:
    """``mbarrier.test_wait.parity``: whether the phase of that parity completed; ``relaxed``: it acquires nothing."""
    order = ".relaxed.cta" if relaxed else ".acquire.cluster" if scope == "cluster" else ""
    return named(f"mbarrier.test_wait.parity{order}.shared::cta.b64")
