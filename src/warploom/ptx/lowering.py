"""Declared instructions that become other operations of a Program, or several: what registers and launches decide.

Moves need no operation of their own, addresses of one state space have 32 bits, states of an mbarrier stand for the
parity of a phase, calls of the system take their arguments from local memory. Accesses to memory are in
:mod:`warploom.ptx.accesses`.

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``mov``, ``cvta``, ``isspacep``, ``mapa``,
``tensormap``), "Parallel Synchronization and Communication Instructions" (``mbarrier``, ``membar`` / ``fence``,
``griddepcontrol``), ``wgmma.wait_group``, ``nanosleep``, ``call``; CUDA C++ Programming Guide, "Formatted Output",
"Assertion".
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.core.dtypes import pred, u32, u64
from warploom.ir.statements import Const
from warploom.ir.statements import Operand as Value
from warploom.isa.barriers import SYSTEM_CALLS, mbarrier_test, mbarrier_wait
from warploom.isa.conversion import FULL_MASK, special
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import select
from warploom.isa.matrix import wgmma_wait
from warploom.isa.memory import load, store
from warploom.ptx.builder import FlowBuilder, lowered
from warploom.ptx.emitter import constant
from warploom.ptx.syntax import Operand, PtxRegister

Operands = Sequence[Operand]


# Registers and addresses


@lowered("mov", "cvta")
def move(b: FlowBuilder, made: Instruction, targets: Operands, sources: Operands) -> None:
    """``mov`` of one register, and ``cvta`` of what is generic already; of a parameter the tensor map's address."""
    if made.copies:
        b.assign(targets[0], b.read(sources[0], b.home(targets[0], made.result_types[0])))
    elif "param" in made.words:
        b.assign(targets[0], b.generic(b.read(sources[0], u64)))
    else:
        b.declared(made, targets, sources)


# Barriers, fences and waits


@lowered("fence")
def fence(b: FlowBuilder, made: Instruction, targets: Operands, sources: Operands) -> None:
    """Fences. The address of an acquired tensor map is one operand."""
    _on_map(b, made, targets, sources) if made.addresses else b.declared(made, targets, sources)


@lowered("wgmma")
def warpgroup(b: FlowBuilder, made: Instruction, targets: Operands, sources: Operands) -> None:
    """``wgmma.wait_group`` names the registers that it completes; other forms are what they are."""
    names = b.completed.get(id(b.current), ())
    if not names:
        b.declared(made, targets, sources)
        return
    registers = [b.register(name) for name in names]
    for dtype in dict.fromkeys(r.dtype for r in registers):
        done = [r for r in registers if r.dtype is dtype]
        b.emit(wgmma_wait(made.pending, len(done), dtype), done, done)


@lowered("mbarrier")
def mbarrier(b: FlowBuilder, made: Instruction, targets: Operands, sources: Operands) -> None:
    """``mbarrier``: waits become loops, and states the parity of their phase."""
    kind = made.words[1]
    if kind in ("try_wait", "test_wait"):
        _wait(b, made, targets[0], sources)
        return
    if kind in ("arrive", "arrive_drop"):
        _state(b, sources[0])
    b.declared(made, targets, sources)


def _state(b: FlowBuilder, address: Operand) -> None:
    """The state that an arrival returns stands for the phase: here, its parity. It cannot end before this arrival."""
    state = b.current.operands[0]
    if isinstance(state, PtxRegister) and state.name in b.usage.read:
        base, offset, within = b.address(address, "shared")
        odd = b.fresh(pred)
        test = mbarrier_test(relaxed=True).at(offset=offset)
        b.emit(test, (base, constant(0, u32)), (odd,), within)
        b.assign(state, b.op(select(u64), odd, constant(1, u64), constant(0, u64)))


def _wait(b: FlowBuilder, made: Instruction, target: Operand, sources: Operands) -> None:
    base, offset, within = b.address(sources[0], "shared")
    scope, operands = made.fields.get("scope") or "cta", (base, b.read(sources[1], u32))
    if b.loops_until(target):
        b.emit(mbarrier_wait(scope, "relaxed" in made.words).at(offset=offset), operands, within=within)
        b.assign(target, Const(pred, True))
    else:
        unread = isinstance(target, PtxRegister) and target.name not in b.usage.read  # what follows runs in any case
        relaxed = unread or "relaxed" in made.words
        b.set_all((target,), mbarrier_test(scope, relaxed).at(offset=offset), operands, within)


# Tensor maps


@lowered("tensormap")
def tensor_map(b: FlowBuilder, made: Instruction, targets: Operands, sources: Operands) -> None:
    """``tensormap.replace``, and ``tensormap.cp_fenceproxy``: a warp copies a map, 4 bytes a lane, and publishes it."""
    if made.words[1] == "replace":
        _on_map(b, made, targets, sources)
        return
    (to, to_offset, _), (base, offset, within) = b.address(sources[0], "global"), b.address(sources[1], "shared")
    place = b.binary("shl", b.binary("and", b.once(special("tid.x")), 31), 2)
    word = b.fresh(u32)
    b.emit(load("shared", u32).at(offset=offset), (b.binary("add", base, place),), (word,), within)
    b.emit(store("global", u32).at(offset=to_offset), (b.binary("add", to, b.extend(place, u64)), word))
    b.emit(named("fence.proxy.tensormap::generic.release.gpu"))
    b.emit(named("bar.warp.sync"), (Const(u32, FULL_MASK),))


def _on_map(b: FlowBuilder, made: Instruction, _: Operands, sources: Operands) -> None:
    """An instruction on a whole tensor map, whose address is one operand."""
    address, *values = sources
    base, offset, within = b.address(address, "global" if made.operand_types[0] is u64 else "shared")
    given = [b.read(x, t) for x, t in zip(values, made.operand_types[1:], strict=True)]
    b.emit(made, (b.binary("add", base, offset), *given), within=within)


# Calls of the system, whose arguments and results lie in local memory; others have been replaced by their bodies


@lowered(*SYSTEM_CALLS)
def call(b: FlowBuilder, made: Instruction, targets: Operands, sources: Operands) -> None:
    """``vprintf`` and ``__assertfail``."""
    given: list[Value] = []
    for place, dtype in zip(sources, made.operand_types, strict=True):
        base, offset, _ = b.address(place, "local")
        given.append(b.op(load("local", dtype).at(offset=offset), base))
    found = [b.fresh(t) for t in made.result_types]
    b.emit(made, given, found)
    for place, value in zip(targets, found, strict=True):
        base, offset, _ = b.address(place, "local")
        b.emit(store("local", value.dtype).at(offset=offset), (base, value))
