"""The table of ``mbarrier``: barriers in shared memory.

Of arrivals, the threads whose predicate holds (``guard``) make them. It guards the PTX instruction itself, which keeps
loop variables in uniform registers where a branch around it would not.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions" (``mbarrier``).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from functools import partial
from typing import Any

from warploom.core.errors import VerifyError
from warploom.isa.base import address
from warploom.isa.effects import ClusterScope, MbarrierArrive, MbarrierInit, MbarrierInvalidate, MbarrierWait
from warploom.isa.form import Formed, form, named

BARRIER: dict[str, Any] = {"space": "shared shared::cta", "scope": "cta cluster@sm_90", "asm": "volatile memory"}


def _counted(i: Formed) -> dict[str, Any]:
    if not 1 <= i.count < 1 << 20:
        raise VerifyError(f"an mbarrier counts 1 to {(1 << 20) - 1} arrivals, not {i.count}")
    return {}


form(
    "mbarrier.init.{space}.b64 [at], #count",
    name="mbarrier.init.{count}",
    let=_counted,
    effects=lambda i: (MbarrierInit(0, i.offset, i.count),),
    **BARRIER,
)
form(
    "mbarrier.inval.{space}.b64 [at]",
    name="mbarrier.inval",
    effects=lambda i: (MbarrierInvalidate(0, i.offset),),
    **BARRIER,
)

# Arrivals, of which the phase's state that they give is dropped


def _arrival(i: Formed) -> dict[str, Any]:
    remote, scope = "shared::cluster" in i.words, i.fields.get("scope") or "cta"
    where = ".shared::cluster" * remote
    _counted(i)
    if i.how in ("expect_tx", "complete_tx"):  # no arrival
        size, count, name = i.bytes * (-1 if i.how == "complete_tx" else 1), 0, f"mbarrier.{i.how}.{i.bytes}{where}"
        scope = "cta"
    else:
        size, count = i.fields.get("expected_bytes"), i.count
        expects = "" if size is None else f".expect_tx.{size}"
        release = ".release.cluster" if scope == "cluster" else ""
        name = f"mbarrier.{i.how}{expects}{release}{where}{f'.{count}' if count > 1 else ''}"
    said: dict[str, Any] = {"scope": scope, "count": count, "drops": i.how == "arrive_drop"}
    arrival = partial(MbarrierArrive, 0, expected_bytes=size, guard=1, remote=remote, **said)
    return {"called": name, "arrival": arrival, "remote": remote, "expected_bytes": size}


ARRIVAL: dict[str, Any] = BARRIER | {"space": "shared shared::cta shared::cluster@sm_90", "let": _arrival}
ARRIVAL.update(default={"count": 1}, name=lambda i: i.called, effects=lambda i: (i.arrival(offset=i.offset),))
for order in ("", ".release.{scope}"):
    said: dict[str, Any] = {"how": "arrive arrive_drop", **ARRIVAL}
    form(f"mbarrier.{{how}}{order}.{{space}}.b64 _, [at], ^guard:pred", **said)
    form(f"mbarrier.{{how}}{order}.{{space}}.b64 _, [at], #count, ^guard:pred", since="sm_90", **said)
    expecting = f"mbarrier.{{how}}.expect_tx{order}.{{space}}.b64 _, [at], #expected_bytes, ^guard:pred"
    form(expecting, since="sm_90", **said)
for order in ("", ".relaxed.{scope}"):
    said = {"how": "expect_tx complete_tx", "since": "sm_90", **ARRIVAL}
    form(f"mbarrier.{{how}}{order}.{{space}}.b64 [at], #bytes, ^guard:pred", **said)
for order in ("", ".release.cta"):  # the phase must not end by them
    form(
        f"mbarrier.arrive.noComplete{order}.{{space}}.b64 _, [at], #count",
        name="mbarrier.arrive.noComplete.{count}",
        effects=lambda i: (MbarrierArrive(0, i.offset, count=i.count, completes=False),),
        **BARRIER,
    )


def mbarrier_init(count: int) -> Formed:
    """``mbarrier.init``: ``count`` arrivals complete a phase. Operand: its address."""
    return named("mbarrier.init.shared::cta.b64", numbers=(("count", count),))


def mbarrier_arrival(
    expected_bytes: int | None = None, remote: bool = False, scope: ClusterScope = "cta", count: int = 1
) -> Formed:
    """``mbarrier.arrive``, which raises the bytes to expect first. Operands: address, predicate.

    ``remote``: the address comes from ``mapa``, and the mbarrier is another CTA's. ``scope`` ``"cluster"`` publishes
    writes to the whole cluster, at the price of a fence of the whole GPU (``MEMBAR.ALL.GPU`` in sm_90a's SASS); giving
    back a stage that was only read needs none.
    """
    expect = "" if expected_bytes is None else ".expect_tx"
    release = ".release.cluster" if scope == "cluster" else ""
    numbers = (("count", count),) if count != 1 else ()
    numbers = numbers if expected_bytes is None else (("expected_bytes", expected_bytes),)
    return named(f"mbarrier.arrive{expect}{release}.shared::{'cluster' if remote else 'cta'}.b64", numbers=numbers)


# Waits. One that acquires at the cluster's scope what other CTAs released costs the L1 cache's lines (``CCTL.IVALL``).


def _test(i: Formed) -> tuple[MbarrierWait, ...]:
    relaxed, scope = "relaxed" in i.words, i.fields.get("scope") or "cta"
    return (MbarrierWait(0, i.offset, 1, scope, blocks=False, acquires=not relaxed),)


def _test_name(i: Formed) -> str:
    order = ".relaxed.cta" if "relaxed" in i.words else ".acquire.cluster" if i.fields.get("scope") == "cluster" else ""
    return f"mbarrier.{i.how}{'.parity' if 'parity' in i.words else ''}{order}"


for order, since in (("", "sm_80"), (".acquire.{scope}", "sm_80"), (".relaxed.{scope}", "sm_90")):
    said = BARRIER | {"name": _test_name, "effects": _test}
    for parity, phase in ((".parity", "parity:u32"), ("", "state:b64")):
        test, tried = (
            f"mbarrier.{{how}}{parity}{order}.{{space}}.b64 d:pred, [at], {phase}{x}" for x in ("", ", ns:u32?")
        )
        form(test, how="test_wait", since=since, **said)
        form(tried, how="try_wait", since="sm_90", **said)
form(
    "mbarrier.try_wait.parity{.acquire}{.cluster} [at]:u32, parity:u32",
    inline=lambda i: (  # a loop: one try_wait may give up before the phase completes
        f"{{ .reg .pred done; waiting: {i.mnemonic}.shared::cta.b64 done, {address(0, i.offset)}, %1; "
        "@done bra arrived; bra waiting; arrived: }"
    ),
    effects=lambda i: (MbarrierWait(0, i.offset, 1, i.cluster or "cta"),),
    since="sm_90",
    asm="volatile memory",
    ptx=False,
)


def mbarrier_wait(scope: ClusterScope = "cta") -> Formed:
    """A loop on ``mbarrier.try_wait.parity``: blocks until the phase of that parity completed.

    Operands: address, parity (0 for the first phase). ``scope`` ``"cluster"`` acquires what other CTAs of the cluster
    released at that scope.
    """
    return named(f"mbarrier.try_wait.parity{'.acquire.cluster' if scope == 'cluster' else ''}", ptx=False)


def mbarrier_test(scope: ClusterScope = "cta", relaxed: bool = False) -> Formed:
    """``mbarrier.test_wait.parity``: whether the phase of that parity completed; ``relaxed``: it acquires nothing."""
    order = ".relaxed.cta" if relaxed else ".acquire.cluster" if scope == "cluster" else ""
    return named(f"mbarrier.test_wait.parity{order}.shared::cta.b64")
