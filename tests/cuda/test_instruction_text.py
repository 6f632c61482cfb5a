"""NVRTC accepts the CUDA text of every instruction: one tiny kernel each."""

from __future__ import annotations

import itertools

import pytest
from tests.isa.every_form import WMMA_PRODUCTS, every, forms, instructions
from tests.isa.functions import function

from warploom.core.dtypes import DTYPES, DType, bf16, f16, f32, f64, pred, s8, s32, s64, tf32, u8, u16, u32, u64
from warploom.cuda.names import entry_name
from warploom.cuda.printer import print_cuda
from warploom.ir.program import Parameter, Program
from warploom.ir.statements import Const, Op, Operand, Register, Value
from warploom.ir.verify import verify
from warploom.isa.async_copy import bulk_store, cp_async, tensor_load, tensor_store
from warploom.isa.barriers import (
    bar_arrive,
    bar_sync,
    mbarrier_arrival,
    mbarrier_init,
    mbarrier_test,
    mbarrier_wait,
    set_max_registers,
)
from warploom.isa.collective import shuffle
from warploom.isa.conversion import (
    SPECIAL_REGISTERS,
    bitcast,
    convert,
    half_of,
    move,
    pack_bytes,
    pack_pair,
    special,
    unpack_half,
)
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, multiply_wide, pair_arithmetic, select, unary
from warploom.isa.matrix import matrix_access, mma, wgmma, wgmma_wait, wmma_load, wmma_mma, wmma_store
from warploom.isa.memory import (
    CACHE_HINTS,
    atomic,
    from_generic,
    load,
    reduce_add,
    store,
)
from warploom.layout.wmma import WMMA_ACCUMULATORS

core = pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")

_INTEGERS = (u32, s32, u64, s64)
_FLOATS = (f32, f64)
_ARITHMETIC = ("add", "sub", "mul", "div", "min", "max", "lt", "le", "gt", "ge", "eq", "ne")
_BITS = ("rem", "and", "or", "xor", "shl", "shr")

ALU: list[Instruction] = [
    *(binary(op, t) for op in _ARITHMETIC for t in (*_INTEGERS, *_FLOATS)),
    *(binary(op, t) for op in _BITS for t in _INTEGERS),
    *(binary(op, pred) for op in ("and", "or", "xor", "eq", "ne")),
    *(function(op) for op in ("neg", "abs", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "tf32")),
    *(unary(op, t) for op in ("neg", "not", "abs") for t in (s32, s64)),
    unary("not", u32),
    *(unary(op, t) for op in ("popc", "clz", "brev") for t in _INTEGERS),
    *(binary(op, u16) for op in (*_ARITHMETIC, *_BITS)),
    *(unary(op, f64) for op in ("neg", "abs")),
    unary("not", pred),
    *(named(f"fma.rn.{t}") for t in _FLOATS),
    *(multiply_wide(t) for t in (u32, s32)),
    *(select(t) for t in (*_INTEGERS, *_FLOATS)),
    *(bitcast(a, b) for a, b in itertools.permutations((u32, s32, f32), 2)),
    *(bitcast(a, b) for a, b in itertools.permutations((u64, s64, f64), 2)),
    *(convert(a, b) for a, b in itertools.permutations((*_INTEGERS, *_FLOATS), 2)),
    *(convert(t, pred) for t in _INTEGERS),
    *(convert(pred, t) for t in _INTEGERS),
    *(convert(a, b, r) for a in (f32, f64) for b in (s32, u32, s64, u64) for r in ("rni", "rmi", "rpi")),
    *(pack_bytes(t) for t in (s8, u8)),
    *(pack_pair(t) for t in (f16, bf16)),
    *(unpack_half(t, which) for t in (f16, bf16) for which in (0, 1)),
    *(pair_arithmetic(op, t) for t in (f16, bf16) for op in ("fma", "add", "mul", "min", "max")),
    named("prmt.b32", numbers=(("selector", 0x5410),), ptx=False),
    *(move(t) for t in (pred, *_INTEGERS, *_FLOATS)),
]
WARP: list[Instruction] = [
    *(special(register) for register in SPECIAL_REGISTERS),
    named("mov.u64.clock64", ptx=False),
    *(shuffle(mode, t) for mode in ("xor", "idx", "up", "down") for t in (u32, s32, f32)),
    *(shuffle(mode, t, 0x181F) for mode in ("xor", "idx", "down") for t in (u32, f32)),
    shuffle("up", u32, 0x1800),
    named("elect.sync", numbers=(("mask", 0xFFFFFFFF),)),
]
_LOADS = ("", "ca", "cg", "cs", "lu", "cv", "nc", "no_allocate", "evict_first", "evict_last", "nc.no_allocate")
_SIZES = ((u8, 1), (u16, 1), (u32, 1), (u32, 4), (f32, 2), (u64, 2), (f64, 1))
_STORES = ("", "wb", "cg", "cs", "wt", "no_allocate", "evict_first", "evict_last")
MEMORY: list[Instruction] = [
    *(load("global", t, n).at(offset=16) for t, n in _SIZES),
    *(load("shared", t, n).at(offset=16) for t, n in ((u8, 1), (bf16, 1), (u32, 2), (f32, 4), (s32, 1), (s64, 1))),
    *(load("global", u32, 4, cache=hint) for hint in _LOADS),
    *(load(space, f32, n, volatile=True) for space in ("shared", "global") for n in (1, 4)),
    *(load("global", u32, order=order, scope=scope) for order in ("relaxed", "acquire") for scope in ("cta", "gpu")),
    *(store("global", t, n).at(offset=16) for t, n in _SIZES),
    *(store("shared", t, n).at(offset=16) for t, n in ((u8, 1), (bf16, 1), (u32, 2), (f32, 4), (s32, 1), (s64, 1))),
    *(store("global", u32, 4, cache=hint) for hint in _STORES),
    *(store("global", u32, order=order, scope=scope) for order in ("relaxed", "release") for scope in ("gpu", "sys")),
    *(atomic("global", op, t).at(offset=8) for op in ("add", "exch", "cas") for t in (*_INTEGERS, *_FLOATS)),
    *(atomic("shared", op, t).at(offset=8) for op in ("add", "exch", "cas") for t in (*_INTEGERS, *_FLOATS)),
    *(atomic("global", op, t) for op in ("min", "max", "and", "or", "xor") for t in _INTEGERS),
    *(atomic(space, op, u32) for space in ("shared", "global") for op in ("inc", "dec")),
    *(load("local", t, n).at(offset=16) for t, n in ((u8, 1), (u32, 4), (f64, 1))),
    *(store("local", t, n).at(offset=16) for t, n in ((u16, 1), (f32, 2), (u64, 2))),
    *(from_generic(space) for space in ("shared", "local")),
    *(named(name) for space in ("shared", "local") for name in (f"cvta.{space}.u64", f"isspacep.{space}")),
    *(atomic("global", "add", u32, order=order) for order in ("acquire", "release", "acq_rel")),
    *(reduce_add(n).at(offset=16) for n in (1, 2, 4)),
    *(named("ld.acquire.gpu.global.u32", ptx=False).at(offset=offset) for offset in (0, 8)),
    *(
        atomic(space, "add", u32 if "x2" in kind else u16, kind=f"noftz.{kind}")
        for space in ("shared", "global")
        for kind in ("f16", "bf16", "f16x2", "bf16x2")
    ),
    *(
        matrix_access(op, n, t).at(offset=32)
        for op in ("ldmatrix", "stmatrix")
        for n in (1, 2, 4)
        for t in (False, True)
    ),
]
ASYNC: list[Instruction] = [
    *(cp_async(n, "ca", zero_fill) for n in (4, 8, 16) for zero_fill in (False, True)),
    *(cp_async(16, "cg", True, prefetch).at(shared_offset=64, global_offset=-128) for prefetch in (0, 64, 128, 256)),
    *(
        cp_async(16, "cg", fill, 128, eviction).at(shared_offset=64, global_offset=-128)
        for fill in (False, True)
        for eviction in ("first", "last")
    ),
    *(named(f"cp.async{bulk}.commit_group") for bulk in ("", ".bulk")),
    named("cp.async.wait_group", numbers=(("pending", 2),)),
    named("cp.async.bulk.wait_group", numbers=(("pending", 0),)),
    named("cp.async.bulk.wait_group.read", numbers=(("pending", 0),)),
    *(
        (tensor_load if direction == "load" else tensor_store)(rank).at(shared_offset=128, barrier_offset=8)
        for direction in ("load", "store")
        for rank in (1, 2, 3, 4, 5)
    ),
    *(
        tensor_load(rank, eviction, True).at(shared_offset=128, barrier_offset=8)
        for rank in (1, 2, 5)
        for eviction in ("", "first", "last")
    ),
    *(named(f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group") for op in ("add", "min", "max")),
    *(tensor_load(4, eviction).at(shared_offset=128, barrier_offset=8) for eviction in ("first", "last")),
    named("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes").at(
        shared_offset=16, global_offset=32, barrier_offset=8
    ),
    *(named(f"cp.async.mbarrier.arrive{'.noinc' * counted}.shared.b64").at(offset=8) for counted in (False, True)),
    load("shared", u32, 2, remote=True).at(offset=8),
    store("shared", u32, remote=True),
    atomic("shared", "add", u32, remote=True),
    *(bulk_store(4096, adds).at(shared_offset=64, global_offset=128) for adds in (False, True)),
]
SYNC: list[Instruction] = [
    bar_sync(),
    bar_sync(64),
    bar_arrive(64),
    *(named(f"bar.red.{op}") for op in ("popc.u32", "and.pred", "or.pred")),
    mbarrier_init(1).at(offset=8),
    mbarrier_arrival(),
    mbarrier_arrival(4096).at(offset=8),
    *(mbarrier_arrival(count, True, scope).at(offset=8) for count in (None, 4096) for scope in ("cta", "cluster")),
    mbarrier_arrival(scope="cluster").at(offset=8),
    mbarrier_wait().at(offset=8),
    mbarrier_wait("cluster").at(offset=8),
    mbarrier_test().at(offset=8),
    mbarrier_test("cluster"),
    mbarrier_test(relaxed=True),
    named("mbarrier.arrive.shared::cta.b64", numbers=(("count", 3),)),
    named("mbarrier.arrive.noComplete.shared.b64", numbers=(("count", 3),)).at(offset=8),
    named("mbarrier.complete_tx.relaxed.cta.shared::cta.b64", numbers=(("expected_bytes", 16),)).at(offset=8),
    named("mbarrier.inval.shared::cta.b64").at(offset=8),
    named("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", numbers=(("expected_bytes", 4096),)),
    named("mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64", numbers=(("expected_bytes", 4096),)).at(offset=8),
    named("mbarrier.arrive_drop.shared::cta.b64"),
    named("mapa.shared::cluster.u32"),
    named("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32").at(target_offset=16, barrier_offset=8),
    set_max_registers(240, "inc"),
    set_max_registers(24, "dec"),
    named("prefetch.global.L2").at(offset=256),
]
CALLS: list[Instruction] = [named(name, ptx=False) for name in ("vprintf", "__assertfail")]
MAPS = [i for form in forms() if "replace" in form.words for i in instructions(form) if i.op == "tensormap"]
MATRIX: list[Instruction] = [
    *(mma(shape, t) for shape in ("m16n8k16", "m16n8k8") for t in (f16, bf16)),
    *(mma(shape, tf32) for shape in ("m16n8k8", "m16n8k4")),
    *(mma(shape, f16, f16) for shape in ("m16n8k16", "m16n8k8")),
]
EXACT: list[Instruction] = [
    *(mma(shape, a, s32, b) for shape in ("m8n8k16", "m16n8k16", "m16n8k32") for a in (s8, u8) for b in (s8, u8)),
    *(mma(shape, f64, f64) for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
]
_ACCUMULATED = [(s, t, DTYPES[c]) for s, t in WMMA_PRODUCTS for c in WMMA_ACCUMULATORS[t.name]]
WMMA: list[Instruction] = [
    *(
        wmma_load(which, s, t, order, "global").at(offset=64)
        for which in ("A", "B")
        for s, t in WMMA_PRODUCTS
        for order in ("row", "col")
    ),
    *(wmma_load("A", s, t, "row", "shared") for s, t in WMMA_PRODUCTS),
    *(wmma_load("C", s, c, order, "global") for s, _, c in _ACCUMULATED for order in ("row", "col")),
    *(
        wmma_store(s, c, order, space).at(offset=32)
        for s, _, c in _ACCUMULATED
        for order in ("row", "col")
        for space in ("shared", "global")
    ),
    *(wmma_mma(s, t, c, a, b) for s, t, c in _ACCUMULATED for a in ("row", "col") for b in ("row", "col")),
]
WGMMA: list[Instruction] = [
    named("wgmma.fence.sync.aligned"),
    *(wgmma(n, f16) for n in (*range(8, 257, 24), 256)),
    *(
        wgmma(n, bf16, source, transposed)
        for n in (8, 176)
        for source in ("shared", "registers")
        for transposed in (False, True)
    ),
    named("wgmma.commit_group.sync.aligned"),
    wgmma_wait(1, 4),
    wgmma_wait(0, 128),
]
OF_MEMORY = {"ld", "ldu", "st", "atom", "red", "prefetch", "prefetchu", "applypriority", "cp", "mbarrier", "mapa"}
"""Opcodes of which the groups before have some; the other instructions of the tables are tried one and all."""
SCALAR: list[Instruction] = [
    *(made for made in every() if made.since in ("sm_80", "sm_90") and made.op not in OF_MEMORY),
    *(named(name, operands=2) for name in ("mov.b32", "mov.b64")),
    *(half_of(t, which) for t in (u32, u64) for which in (0, 1)),
]
GROUPS = {
    "alu": ALU,
    "warp": WARP,
    "memory": MEMORY,
    "async": ASYNC,
    "sync": SYNC,
    "matrix": MATRIX,
    "exact": EXACT,
    "wmma": WMMA,
    "wgmma": WGMMA,
    "scalar": SCALAR,
    "maps": MAPS,
    "calls": CALLS,
}


def _operand(instruction: Instruction, dtype: DType, of_parameter: dict[DType, Value]) -> Operand:
    return Const(dtype, 1) if instruction.mnemonic.startswith("bar") and dtype is u32 else of_parameter[dtype]


def program_of(instructions: list[Instruction], requires: str) -> Program:
    """Each instruction once, its operands scalar parameters, its results stored so that nothing is dropped."""
    types = dict.fromkeys(t for i in instructions for t in i.operand_types)
    types[u64] = None
    numbers = itertools.count()
    values = {t: Value(next(numbers), t, f"x_{t.name}") for t in types}
    body: list[Op] = []
    for instruction in instructions:
        if instruction.mnemonic.startswith("wgmma.wait"):
            body.append(Op(named("wgmma.commit_group.sync.aligned"), (), ()))
        if instruction.mnemonic.startswith("cp.async") and "wait_" in instruction.mnemonic:
            body.append(Op(named(f"cp.async{'.bulk' * ('bulk' in instruction.mnemonic)}.commit_group"), (), ()))
        operands: list[Operand] = [_operand(instruction, t, values) for t in instruction.operand_types]
        results: list[Value] = [Value(next(numbers), t) for t in instruction.result_types]
        if instruction.mnemonic.startswith(("wgmma.mma", "wgmma.wait")):  # accumulates in place
            results = [Register(next(numbers), t) for t in instruction.result_types]
            body += [Op(move(f32), (Const(f32, 0.0),), (r,)) for r in results]
            operands[-len(results) :] = results
        if instruction.warpgroup_product is not None:
            body.append(Op(named("wgmma.fence.sync.aligned"), (), ()))
        body.append(Op(instruction, tuple(operands), tuple(results)))
        if instruction.warpgroup_product is not None:
            body += [
                Op(named("wgmma.commit_group.sync.aligned"), (), ()),
                Op(wgmma_wait(0, len(results)), tuple(results), tuple(results)),
            ]
        for result in results:
            kept = result
            if kept.dtype.bits < 32:
                kept = Value(next(numbers), u32)
                body.append(Op(convert(result.dtype, u32), (result,), (kept,)))
            body.append(Op(store("global", kept.dtype), (values[u64], kept), ()))
    parameters = tuple(Parameter(v.name, "scalar", t, v) for t, v in values.items())
    return Program("kernel", parameters, 128, tuple(body), shared_bytes=1024, local_bytes=64, requires=requires)


def _cubin(program: Program) -> bytes:
    options = core.ProgramOptions(arch=program.requires, fma=False)
    return core.Program(print_cuda(program), "c++", options).compile("cubin").code


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("group", GROUPS)
def test_nvrtc_accepts_every_instruction(group: str, architecture: str) -> None:
    """All of a group in one kernel (fast); on failure, one by one to name those that are refused."""
    wanted = [i for i in GROUPS[group] if (i.since == "sm_80") == (architecture == "sm_80")]
    if not wanted:
        pytest.skip(f"no instruction of {group} starts at {architecture}")
    program = program_of(wanted, architecture)
    verify(program)
    try:
        assert _cubin(program)
    except Exception:
        refused: list[str] = []
        for instruction in wanted:
            try:
                _cubin(program_of([instruction], architecture))
            except Exception as error:
                refused.append(f"{instruction}\n{error}")
        pytest.fail("\n".join(refused) or "refused together, though accepted one by one")


def test_every_cache_hint_is_tried() -> None:
    hinted = {i.mnemonic for i in MEMORY if i.mnemonic.startswith(("ld.", "st."))}
    assert all(any(hint in name for name in hinted) for hint in CACHE_HINTS.values())


def test_a_kernel_may_have_any_name() -> None:
    names = ["double", "round", "norm", "main", "abs", "threadIdx", "exp2f", "reverse"]
    source = "\n".join(print_cuda(Program(name, (), 32, ())) for name in names)
    code = core.Program(source, "c++", core.ProgramOptions(arch="sm_80")).compile("cubin").code
    assert [name for name in names if entry_name(name).encode() not in code] == []
