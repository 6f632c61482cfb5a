"""Every instruction: text that agrees with its operands, effects that name existing ones, meanings that keep types."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest

from tests.isa.functions import function
from warploom.core.dtypes import bf16, f16, f32, f64, pred, s8, s32, tf32, u8, u16, u32, u64
from warploom.isa.async_copy import bulk_store, cp_async, tensor_load, tensor_store
from warploom.isa.barriers import bar_arrive, bar_sync, mbarrier_arrival, mbarrier_wait
from warploom.isa.collective import shuffle
from warploom.isa.conversion import bitcast, convert, pack_bytes, pack_pair, unpack_half
from warploom.isa.cpp import inline_ptx
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, pair_arithmetic, select
from warploom.isa.matrix import matrix_access, mma
from warploom.isa.memory import atomic, load, reduce_add, store

INSTRUCTIONS: list[Instruction] = [
    *(function(op) for op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "tf32")),
    *(pack_pair(t) for t in (f16, bf16)),
    *(pack_bytes(t) for t in (s8, u8)),
    *(unpack_half(f16, i) for i in (0, 1)),
    *(pair_arithmetic(op, f16) for op in ("fma", "add", "max")),
    *(load("shared", u32, n).at(offset=64) for n in (1, 2, 4)),
    load("global", f64, 2),
    load("global", u16, cache="nc"),
    load("global", u32, order="acquire"),
    load("shared", f32, volatile=True),
    *(store("global", u32, n) for n in (1, 2, 4)),
    store("shared", f32).at(offset=-16),
    atomic("global", "add", u32),
    atomic("global", "cas", u32),
    *(matrix_access("ldmatrix", n, t).at(offset=128) for n in (1, 2, 4) for t in (False, True)),
    *(matrix_access("stmatrix", n) for n in (1, 2, 4)),
    mma("m16n8k16", bf16),
    mma("m16n8k16", f16, f16),
    mma("m16n8k8", tf32),
    *(cp_async(n, "ca") for n in (4, 8, 16)),
    cp_async(16, "cg", True, 128).at(shared_offset=32, global_offset=-64),
    cp_async(16, "cg", eviction="first"),
    named("cp.async.commit_group"),
    named("cp.async.wait_group", numbers=(("pending", 1),)),
    bar_sync(64),
    bar_arrive(64),
    named("fence.acq_rel.gpu"),
    mbarrier_arrival(512),
    mbarrier_wait().at(offset=8),
    mbarrier_wait("cluster").at(offset=8),
    mbarrier_arrival(remote=True, scope="cluster").at(offset=8),
    named("barrier.cluster.arrive.release.aligned"),
    named("barrier.cluster.wait.acquire.aligned"),
    named("mapa.shared::cluster.u32"),
    tensor_load(2),
    tensor_load(3, "last", True).at(shared_offset=128, barrier_offset=8),
    tensor_store(3),
    *(bulk_store(4096, adds).at(shared_offset=32, global_offset=64) for adds in (False, True)),
    *(reduce_add(n).at(offset=16) for n in (1, 2, 4)),
    named("ld.acquire.gpu.global.u32", ptx=False).at(offset=4),
    named("elect.sync", numbers=(("mask", 0xFFFFFFFF),)),
]


def _names(instruction: Instruction) -> tuple[list[str], list[str]]:
    return (
        [f"r{i}" for i in range(len(instruction.result_types))],
        [f"x{i}" for i in range(len(instruction.operand_types))],
    )


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.mnemonic)
def test_ptx_names_every_operand_once_and_no_other(instruction):
    results, operands = _names(instruction)
    text = instruction.cuda(results, operands)
    assert text.endswith((";", "}"))
    for name in operands:
        assert re.search(rf"\({name}\)|{name}\)", text), (name, text)
    body = re.search(r'asm(?: volatile)?\("([^"]*)"', text)
    assert body is not None
    numbered = {int(n) for n in re.findall(r"%(\d+)", body[1])}
    listed = len(re.findall(r'"[=+]?[a-z]"\(', text))
    assert numbered == set(range(listed)), text


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.mnemonic)
def test_the_mnemonics_opcode_is_in_the_text(instruction):
    text = instruction.cuda(*_names(instruction))
    opcode = instruction.mnemonic.split(".")[0]
    assert opcode in text


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.mnemonic)
def test_constraints_fit_the_types(instruction):
    results, operands = _names(instruction)
    text = instruction.cuda(results, operands)
    types = (*instruction.result_types, *instruction.operand_types)
    for name, dtype in zip((*results, *operands), types, strict=True):
        found = re.search(rf'"[=+]?([a-z])"\({name}\)', text)
        if found and dtype.constraint:
            assert found[1] == dtype.constraint, (name, dtype, text)


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.mnemonic)
def test_effects_name_operands_that_exist(instruction):
    count = len(instruction.operand_types)
    for effect in instruction.effects():
        for f in fields(effect):
            if f.name in (
                "address",
                "shared",
                "source",
                "valid_bytes",
                "barrier",
                "mask",
                "guard",
                "parity",
                "multicast",
            ):
                position = getattr(effect, f.name)
                assert position is None or 0 <= position < count, (effect, f.name)


def test_memory_instructions_are_volatile_and_clobber_memory():
    for instruction in INSTRUCTIONS:
        touches_memory = any(hasattr(e, "space") or "Copy" in type(e).__name__ for e in instruction.effects())
        if touches_memory:
            text = instruction.cuda(*_names(instruction))
            assert "asm volatile" in text, instruction.mnemonic
            assert '"memory"' in text, instruction.mnemonic


def test_accumulating_in_place_reads_and_writes_one_register():
    instruction = mma("m16n8k16", bf16)
    c = [f"c{i}" for i in range(4)]
    text = instruction.cuda(c, [f"x{i}" for i in range(6)] + c)
    assert text.count('"+f"') == 4
    assert "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" in text
    apart = instruction.cuda(["d0", "d1", "d2", "d3"], [f"x{i}" for i in range(6)] + ["0.0f"] * 4)
    assert apart.count('"=f"') == 4
    assert apart.count('"f"(0.0f)') == 4


def test_the_high_half_comes_first_in_a_conversion():
    assert '"f"(high), "f"(low)' in pack_pair(bf16).cuda(["r"], ["low", "high"])


def test_offsets_are_immediates_of_the_address():
    assert "[%4+128]" in matrix_access("ldmatrix", 4).at(offset=128).cuda(list("abcd"), ["base"])
    assert "[%0+-16]" in store("shared", f32).at(offset=-16).cuda([], ["base", "x"])
    assert inline_ptx("nop;") == 'asm volatile("nop;");'
    assert inline_ptx("nop;", memory=True) == 'asm volatile("nop;" ::: "memory");'


def test_programs_show_displacements_in_the_order_of_their_operands():
    copy = bulk_store(4096).at(global_offset=64, shared_offset=32)
    assert copy.details == ["shared_offset=32", "global_offset=64"]
    assert copy is bulk_store(4096).at(shared_offset=32, global_offset=64)


def test_instructions_are_values():
    assert binary("add", u32) == binary("add", u32)
    assert hash(load("shared", u32)) == hash(load("shared", u32))
    assert (four := matrix_access("ldmatrix", 4)) != four.at(offset=16)
    assert four.at(offset=16) is four.at(offset=16)
    assert four.at(offset=16).at(offset=0) is four


LANEWISE: list[Instruction] = [
    binary("add", f32),
    binary("lt", s32),
    binary("shl", u64),
    named("fma.rn.f32"),
    select(f32),
    bitcast(f32, u32),
    convert(f32, s32, "rni"),
    convert(u32, pred),
    pack_pair(f16),
    unpack_half(bf16, 1),
    pair_arithmetic("mul", bf16),
    named("prmt.b32", numbers=(("selector", 0x3210),), ptx=False),
    *(function(op) for op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "tf32", "neg", "abs")),
]


@pytest.mark.parametrize("instruction", LANEWISE, ids=lambda i: i.mnemonic)
def test_meanings_give_the_result_types_for_every_broadcast(instruction):
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (1, 32), (4, 1), (4, 32)):
        operands = [
            rng.integers(0, 2, shape).astype(bool)
            if t is pred
            else rng.integers(0, 256, (*shape, t.bytes), np.uint8).view(t.numpy)[..., 0]
            for t in instruction.operand_types
        ]
        results = instruction.meaning(*operands)
        assert [r.dtype for r in results] == [t.numpy for t in instruction.result_types]
        assert all(r.shape == shape for r in results)


@pytest.mark.parametrize(
    "instruction",
    [shuffle("xor", f32), named("vote.sync.ballot.b32"), named("bar.warp.sync")],
    ids=lambda i: i.mnemonic,
)
def test_collectives_say_their_member_mask(instruction):
    (sync,) = instruction.effects()
    assert sync.mask == len(instruction.operand_types) - 1
    assert not instruction.lanewise
    assert not instruction.pure
