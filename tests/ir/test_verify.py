"""Each rule of the verifier has a Program that breaks it, and a sound Program breaks none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from warploom.core.dtypes import bf16, f32, pred, s32, u32, u64
from warploom.core.errors import VerifyError
from warploom.core.targets import target
from warploom.ir.program import Parameter, Program
from warploom.ir.statements import (
    Const,
    Loop,
    Op,
    Operand,
    Register,
    Role,
    Roles,
    SharedRegion,
    SourceLine,
    Statement,
    Value,
    When,
)
from warploom.ir.verify import verify
from warploom.isa import memory as isa
from warploom.isa.async_copy import cp_async, tensor_store
from warploom.isa.barriers import bar_arrive, bar_sync, mbarrier_arrival, set_max_registers
from warploom.isa.conversion import move
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, pair_arithmetic
from warploom.isa.matrix import matrix_access, wgmma, wgmma_wait

COMMIT = named("wgmma.commit_group.sync.aligned")

AT = SourceLine("/somewhere/kernel.py", 88)
X = Value(0, u32, "x")
PARAMETERS = (Parameter("x", "scalar", u32, X),)
ZERO = Const(u32, 0)


def op(instruction: Instruction, *operands: Operand, into: tuple[Value, ...] = ()) -> Op:
    return Op(instruction, operands, into, AT)


def add(into: Value, a: Operand, b: Operand) -> Op:
    return op(binary("add", u32), a, b, into=(into,))


def program(*body: Statement, threads: int = 256, requires: str = "sm_80") -> Program:
    return Program("tested", PARAMETERS, threads, body, requires=requires, where=AT)


def store(x: Operand) -> Op:
    return op(isa.store("global", u32), Const(u64, 0), x)


COMMIT_COPIES = op(named("cp.async.commit_group"))
WAIT_COPIES = op(named("cp.async.wait_group", numbers=(("pending", 0),)))
Y, R = Value(1, u32, "y"), Register(2, u32, "r")
INDEX = Value(3, u32, "i")

BROKEN: dict[str, tuple[Program, str]] = {
    "operand count": (program(op(binary("add", u32), X, into=(Y,))), "add.u32 has 2 operands, not 1"),
    "result count": (program(op(binary("add", u32), X, X)), "add.u32 has 1 results, not 0"),
    "operand type": (
        program(op(binary("add", s32), X, Const(s32, 1), into=(Value(9, s32),))),
        "operand 0 of add.s32 is 'x' of type u32, it must be s32",
    ),
    "constant type": (program(add(Y, X, Const(f32, 1.0))), "operand 1 of add.u32 is the constant 1.0 of type f32"),
    "constant range": (program(add(Y, X, Const(u32, 1 << 32))), "the constant 4294967296 does not fit into u32"),
    "condition type": (program(When(X, (), (), False, AT)), "the condition is 'x' of type u32, it must be pred"),
    "undefined": (program(store(Y)), "'y' is used before it is defined"),
    "used before": (program(store(Y), add(Y, X, X)), "'y' is used before it is defined"),
    "out of scope": (
        program(When(Const(pred, True), (add(Y, X, X),), (), False, AT), store(Y)),
        "'y' was defined inside a loop, condition or role that has ended",
    ),
    "assigned twice": (program(add(Y, X, X), add(Y, X, X)), "'y' is assigned twice"),
    "parameter assigned": (program(add(X, ZERO, ZERO)), "'x' is assigned twice"),
    "unwritten register": (program(store(R)), "register 'r' is read before anything is written to it"),
    "register of another role": (
        program(Roles((Role(0, 4, (op(move(u32), X, into=(R,)),), None, AT), Role(4, 8, (store(R),), None, AT)), AT)),
        "register 'r' is read before anything is written to it",
    ),
    "moving bound": (
        program(op(move(u32), X, into=(R,)), Loop(INDEX, ZERO, R, Const(u32, 1), (add(R, R, X),), AT)),
        "the loop changes its own bound 'r'",
    ),
    "endless": (program(Loop(INDEX, ZERO, X, ZERO, (), AT)), "the loop's step is 0: it must be positive"),
    "loop types": (program(Loop(INDEX, Const(s32, 0), X, Const(u32, 1), (), AT)), "the loop's start is s32"),
    "threads": (program(threads=100), "100 threads: a CTA has a multiple of 32, from 32 to 1024"),
    "too many threads": (program(threads=1056), "1056 threads"),
    "region": (
        replace(program(), shared=(SharedRegion("tile", 1024, 513),), shared_bytes=1536),
        "shared region 'tile' takes bytes 1024 to 1537, the kernel has 1536",
    ),
    "architecture": (program(op(matrix_access("stmatrix", 1), X, X)), "needs sm_90, the kernel requires only sm_80"),
    "unknown architecture": (program(requires="hopper"), "requires 'hopper': write an architecture"),
    "overlapping roles": (
        program(Roles((Role(0, 4, (), None, AT), Role(3, 8, (), None, AT)), AT)),
        "warps 3..8 overlap the role of warps 0..4",
    ),
    "role beyond": (program(Roles((Role(4, 9, (), None, AT),), AT)), "is not a range of the CTA's 8 warps"),
    "budget of part": (
        program(Roles((Role(0, 2, (), 64, AT),), AT), requires="sm_90a"),
        "register budget, which only whole warpgroups",
    ),
    "budget size": (program(Roles((Role(0, 4, (), 100, AT),), AT), requires="sm_90a"), "setmaxnreg takes a multiple"),
    "budget sum": (
        program(Roles((Role(0, 8, (), 256, AT), Role(8, 12, (), 24, AT)), AT), threads=384, requires="sm_90a"),
        "need 68608 registers; a CTA is launched with 64512",
    ),
    "budget of others": (
        program(Roles((Role(0, 4, (), 240, AT), Role(4, 8, (), 240, AT)), AT), threads=384, requires="sm_90a"),
        "need 82944 registers; a CTA is launched with 64512",
    ),
    "budget of two CTAs": (
        replace(program(Roles((Role(0, 4, (), 40, AT), Role(4, 8, (), 232, AT)), AT), requires="sm_90a"), min_ctas=2),
        "a CTA is launched with 32768",
    ),
    "two budgets": (
        program(Roles((Role(0, 4, (), 40, AT),), AT), Roles((Role(0, 4, (), 48, AT),), AT), requires="sm_90a"),
        "warp 0 already has a budget of 40",
    ),
    "budget on Ampere": (program(Roles((Role(0, 4, (), 64, AT),), AT)), "setmaxnreg needs sm_90a"),
    "nested roles": (
        program(When(Const(pred, True), (Roles((Role(0, 4, ()),), AT),), (), False, AT)),
        "warp roles stand at the top of a kernel",
    ),
    "barrier number": (program(op(bar_sync(), Const(u32, 16))), "the barrier is the constant 16"),
    "barrier threads": (program(op(bar_arrive(40), Const(u32, 1))), "a barrier of 40 threads"),
    "barrier of more": (program(op(bar_sync(512), Const(u32, 1))), "a barrier of 512 threads"),
    "accumulator copied": (
        program(
            op(COMMIT),
            op(wgmma_wait(0, 1), Const(f32, 0.0), into=(Value(9, f32),)),
            requires="sm_90a",
        ),
        "must overwrite its accumulator registers in place",
    ),
    "wait alone": (
        program(WAIT_COPIES),
        "waits for a cp.async group that was never committed",
    ),
    "wait of another queue": (
        program(
            COMMIT_COPIES,
            op(named("cp.async.bulk.wait_group", numbers=(("pending", 0),))),
            requires="sm_90",
        ),
        "waits for a bulk group that was never committed",
    ),
    "commit in another role": (
        program(
            Roles(
                (
                    Role(0, 4, (COMMIT_COPIES,), None, AT),
                    Role(4, 8, (WAIT_COPIES,), None, AT),
                ),
                AT,
            )
        ),
        "waits for a cp.async group that was never committed",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_with_its_line(rule: str) -> None:
    broken, message = BROKEN[rule]
    with pytest.raises(VerifyError) as error:
        verify(broken)
    assert message in str(error.value)
    assert str(error.value).startswith("kernel.py:88: ")
    assert error.value.where == AT
    assert "\n" not in str(error.value), "the Program was to break this rule alone"


def sound() -> Program:
    """Uses every construct that the rules look at."""
    copy = op(cp_async(16), X, Const(u64, 0))
    loop = Loop(
        INDEX,
        ZERO,
        X,
        Const(u32, 1),
        (WAIT_COPIES, add(Y, INDEX, R), op(move(u32), Y, into=(R,))),
        AT,
    )
    when = When(Const(pred, True), (store(R),), (store(X),), True, AT)
    chain = Roles((Role(0, 4, (op(bar_sync(128), Const(u32, 1)),), None, AT), Role(4, 8, (when,), None, AT)), AT)
    return program(op(move(u32), Const(u32, -1), into=(R,)), copy, COMMIT_COPIES, loop, chain)


def test_a_sound_program_passes() -> None:
    verify(sound())
    for name in ("sm_80", "sm_86", "sm_90a", "sm_120a"):
        verify(sound(), target(name))


def test_an_accumulator_that_a_product_overwrites_needs_no_value_before() -> None:
    d = tuple(Register(20 + i, f32, f"d{i}") for i in range(4))
    descriptor, first = Const(u64, 0), op(wgmma(8, bf16), *(Const(u64, 0),) * 2, Const(pred, False), *d, into=d)
    rest = op(COMMIT), op(wgmma_wait(0, 4), *d, into=d)
    verify(program(op(named("wgmma.fence.sync.aligned")), first, *rest, requires="sm_90a"))
    copied = op(wgmma(8, bf16), descriptor, descriptor, Const(pred, False), *reversed(d), into=d)
    with pytest.raises(VerifyError, match="in place"):
        verify(program(copied, requires="sm_90a"))


def test_all_violations_are_listed() -> None:
    with pytest.raises(VerifyError, match="breaks 3 rules") as error:
        verify(program(WAIT_COPIES, store(Y), threads=100))
    assert len(str(error.value).splitlines()) == 4


def test_targets_limit_shared_memory() -> None:
    large = replace(sound(), shared_bytes=120 * 1024)
    verify(large, target("sm_80"))
    with pytest.raises(VerifyError, match="needs 122880 bytes of shared memory, sm_86 has 101376"):
        verify(large, target("sm_86"))


def test_targets_limit_residency() -> None:
    with pytest.raises(VerifyError, match="7 CTAs of 256 threads do not fit an SM of sm_86, which has 1536 threads"):
        verify(replace(sound(), min_ctas=7), target("sm_86"))


def test_architecture_specific_kernels_run_there_alone() -> None:
    hopper = replace(sound(), requires="sm_90a")
    verify(hopper, target("sm_90a"))
    with pytest.raises(VerifyError, match="runs on sm_90a alone, not on sm_100a"):
        verify(hopper, target("sm_100a"))
    with pytest.raises(VerifyError, match="requires sm_90, the target is sm_80"):
        verify(replace(sound(), requires="sm_90"), target("sm_80"))


@pytest.mark.parametrize(
    ("instruction", "architecture"),
    [
        (binary("add", u32), "sm_80"),
        (matrix_access("stmatrix", 4), "sm_90"),
        (named("elect.sync", numbers=(("mask", 0xFFFFFFFF),)), "sm_90"),
        (tensor_store(2), "sm_90"),
        (mbarrier_arrival(), "sm_80"),
        (mbarrier_arrival(128), "sm_90"),
        (named("cp.async.bulk.commit_group"), "sm_90"),
        (pair_arithmetic("add", bf16), "sm_90"),
        (pair_arithmetic("fma", bf16), "sm_80"),
        (set_max_registers(24, "dec"), "sm_90a"),
        (cp_async(16), "sm_80"),
        (cp_async(16, eviction="first"), "sm_90"),
    ],
)
def test_least_architecture(instruction: Instruction, architecture: str) -> None:
    assert instruction.since == architecture
