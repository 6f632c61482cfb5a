"""The CUDA C++ of PTX programs: arithmetic is written as expressions, which a compiler sees through."""

from __future__ import annotations

import re

import pytest

from tests.ptx.text import kernel
from warploom.cuda.printer import print_cuda
from warploom.ptx.parser import parse
from warploom.ptx.program import to_program

BITS = {"f16": 16, "bf16": 16, "b16": 16, "u16": 16, "s16": 16, "b64": 64, "u64": 64, "s64": 64, "f64": 64}
WRITTEN_AS_EXPRESSIONS = [
    *(f"{op}.{kind}" for op in ("add", "sub") for kind in ("u16", "u32", "s32", "u64", "s64", "f32", "rn.f32", "f64")),
    *(f"mul.{kind}" for kind in ("lo.u32", "lo.s32", "lo.u64", "wide.u32", "wide.s32", "f32", "rn.f64")),
    *(f"{op}.{kind}" for op in ("div", "rem", "min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *(f"{op}.{kind}" for op in ("min", "max", "neg", "abs") for kind in ("f32", "f64")),
    *("div.rn.f32", "div.rn.f64", "neg.s32", "fma.rn.f32", "fma.rn.f64"),
    *(f"{op}.{kind}" for op in ("and", "or", "xor", "not") for kind in ("b32", "b64")),
    *("popc.b32", "clz.b32", "brev.b32"),
    *(f"mad.{how}.{kind}" for how in ("lo", "wide") for kind in ("u32", "s32")),
    *(f"selp.{kind}" for kind in ("b32", "u32", "s32", "f32", "b64", "f64")),
    *(f"setp.{cmp}.{kind}" for cmp in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("u32", "s32", "u64", "s64")),
    *(f"setp.{cmp}.u32" for cmp in ("lo", "ls", "hi", "hs")),
    *(f"setp.{cmp}.f32" for cmp in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu")),
    *("setp.num.f32", "setp.nan.f64", "setp.lt.and.s32", "setp.ge.or.f32"),
]
THREE = ("mad", "fma", "selp")


def cuda_text(form: str) -> str:
    """The CUDA C++ of a kernel that runs one instruction on its parameters and stores what comes of it."""
    opcode, *modifiers = form.split(".")
    bits = BITS.get(modifiers[-1], 32)
    to = 2 * bits if "wide" in modifiers else 32 if opcode in ("popc", "clz") else bits
    count = 3 if opcode in THREE else 1 if opcode in ("neg", "abs", "not", "popc", "clz", "brev") else 2
    body = f".reg .b{to} %out; .reg .b{bits} %in<4>; .reg .b{to} %wide; .reg .pred %q<3>;\n"
    body += "".join(f"ld.param.b{bits} %in{i}, [p{i + 1}];\n" for i in range(3))
    body += "setp.ne.s32 %q0, %r5, 0;\n"
    operands = [f"%in{i}" for i in range(count)]
    if opcode == "selp":
        operands[2] = "%q0"
    if opcode == "mad" and "wide" in modifiers:
        body += "ld.param.b64 %wide, [p4];\n"
        operands[2] = "%wide"
    target = "%q1" if opcode == "setp" else "%out"
    if {"and", "or", "xor"} & set(modifiers):
        operands.append("%q0")
    body += f"{form} {target}, {', '.join(operands)};\n"
    body += f"selp.b{bits} %out, %in0, %in1, %q1;\n" if opcode == "setp" else ""
    body += f"st.global.b{to} [%d0], %out;\n"
    module = parse(kernel(body, ["u64", *(f"b{bits}",) * 3, "b64"]))
    return print_cuda(to_program(module, module.entries[0], block=(32, 1, 1)))


HINTS = {
    "ld.global.nc": "ld.global.nc",
    "ld.global.nc.L1::no_allocate": "ld.global.nc.L1::no_allocate",
    "ld.global.nc.L1::evict_last": "ld.global.nc",
    "ld.global.L1::no_allocate": "ld.global.L1::no_allocate",
    "ld.global.L1::evict_first": "ld.global.L1::evict_first",
    "ld.global.cs": "ld.global.cs",
    "ld.volatile.global": "ld.relaxed.sys.global",
    "ld.acquire.gpu.global": "ld.acquire.gpu.global",
}


@pytest.mark.parametrize("form", HINTS)
def test_a_load_keeps_its_hint_where_programs_have_one_and_its_order(form: str) -> None:
    module = parse(kernel(f"{form}.b32 %r0, [%d0]; st.global.b32 [%d0+4], %r0;", target="sm_90"))
    text = print_cuda(to_program(module, module.entries[0], block=(32, 1, 1)))
    assert re.search(rf'"{re.escape(HINTS[form])}\.b32 ', text), text


@pytest.mark.parametrize("form", WRITTEN_AS_EXPRESSIONS)
def test_arithmetic_is_an_expression(form: str) -> None:
    """Inline PTX would keep the compiler from folding it."""
    inline = re.findall(r'asm(?: volatile)?\("([^"]*)"', cuda_text(form))
    assert [text for text in inline if not text.startswith("st.")] == []


@pytest.mark.parametrize("form", ["add.rz.f32", "mul.hi.s32", "bfe.u32", "shf.l.wrap.b32", "ex2.approx.f32", "shl.b32"])
def test_what_has_no_expression_is_inline_ptx(form: str) -> None:
    three = "%in0, %in1, %in2" if form[:3] in ("bfe", "shf") else "%in0" if form[:3] == "ex2" else "%in0, %in1"
    loads = "".join(f"ld.param.b32 %in{i}, [p{i + 1}];\n" for i in range(3))
    body = f".reg .b32 %out; .reg .b32 %in<3>;\n{loads}{form} %out, {three};\nst.global.b32 [%d0], %out;\n"
    module = parse(kernel(body, ["u64", "b32", "b32", "b32"]))
    text = print_cuda(to_program(module, module.entries[0], block=(32, 1, 1)))
    assert f'"{form} ' in text
