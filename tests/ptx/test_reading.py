"""PTX text: syntax, scopes, lines of the author, and what is refused, with its line and form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from tests.ptx.text import HEAD, check, kernel
from warploom.core.errors import EmulationError, ProblemError, PtxError
from warploom.cuda.printer import print_cuda
from warploom.ir.statements import Flow
from warploom.ir.verify import verify
from warploom.isa.form import FORMS, Form
from warploom.ptx.parser import parse
from warploom.ptx.program import entry_of, to_program
from warploom.ptx.syntax import Address, Float, Integer, PtxInstruction, PtxRegister, PtxVector

STORE = "st.global.u32 [%d0], %r1;"


def instructions(body: str) -> list[PtxInstruction]:
    (function,) = parse(kernel(body)).functions.values()
    return [i for i in function.body if isinstance(i, PtxInstruction)]


def test_operands_of_every_kind():
    body = """@!%p1 ld.global.nc.L1::no_allocate.v4.b32 {%r1, %r2, _, %r4}, [%d0+-16];
    mov.f32 %f1, 0f3F800000; mov.f64 %e1, 1.5; mov.u32 %r1, 0x10U; mov.u32 %r2, 010; mov.u32 %r3, -7;"""
    _, load, *moves, _ = instructions(body)
    assert load.form == "ld.global.nc.L1::no_allocate.v4.b32"
    assert load.guard is not None
    assert load.guard.negated
    target, address = load.operands
    assert target == PtxVector((PtxRegister("%r1"), PtxRegister("%r2"), PtxRegister(""), PtxRegister("%r4")))
    assert address == Address(PtxRegister("%d0"), -16)
    assert [m.operands[1] for m in moves] == [
        Float(0x3F800000, 32),
        Float(0x3FF8000000000000, 64),
        Integer(16),
        Integer(8),
        Integer(-7),
    ]


def test_names_of_a_block_are_its_own():
    """Twice the same block, as inline assembly prints it: registers and labels must not meet."""
    block = "{ .reg .u32 %r1; .reg .pred %q; mov.u32 %r1, N; setp.eq.u32 %q, %r1, N; @%q bra done; mov.u32 %r1, 99; "
    block += "done: add.u32 %r2, %r2, %r1; }"
    body = f"mov.u32 %r1, 5; mov.u32 %r2, 0; {block.replace('N', '10')} {block.replace('N', '200')}"
    out = np.zeros(1, np.uint32)
    check(kernel(f"{body} add.u32 %r1, %r1, %r2; {STORE}"), [out], 32)
    assert out[0] == 215


LOC = """
    .loc 1 3 1
    mov.u32 %r1, 1;
    .loc 2 40 5, function_name $L__info, inlined_at 1 5 9
    ld.global.u32 %r2, [%d0+8192];
    .loc 2 50 5, function_name $L__info+3, inlined_at 2 40 5
    ld.global.u32 %r3, [%d0+8192];
    .loc 1 0 0
    ld.global.u32 %r4, [%d0+8192];
"""
FILES = '.file 1 "/home/me/mine.py"\n.file 2 "{library}/helper.py", 123, 456\n'


@pytest.mark.parametrize(
    ("library", "lines"),
    [
        ("/usr/lib/python3/site-packages/triton/language", ["mine.py:5"]),
        ("/home/me", ["helper.py:40", "helper.py:50"]),
        ("/home/me/project/include/project", ["helper.py:40", "helper.py:50"]),
        ("/usr/local/cuda-13.0/targets/x86_64-linux/include", ["mine.py:5"]),
        ("/home/me/nvidia/cu13/include/cccl/cub/block", ["mine.py:5"]),
        ("/home/me/cutlass/include/cute/atom", ["mine.py:5"]),
    ],
)
def test_lines_are_those_of_the_author_not_of_a_library(library, lines):
    text = kernel(LOC, before=FILES.format(library=library))
    findings = check(text, [np.zeros(4, np.uint32)]).findings
    assert [str(f.where).split(" ")[0] for f in findings] == lines
    assert all("ld.global" in text.splitlines()[f.where.ptx - 1] for f in findings)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [t, {%r1}];", "tex.1d.v4.f32.s32"),
        ("mul.cc.u32 %r1, %r2, %r3;", "mul.cc"),
        ("cvt.rz.f16.f32 %h1, %f1;", "cvt.rz.f16.f32"),
        ("ld.global.v8.f32 {%f1, %f2}, [%d0];", "sm_100"),
        ("st.bulk.shared::cta [%r1], %d1, 0;", "sm_100"),
        ("tcgen05.wait::ld.sync.aligned;", "sm_100"),
        ("discard.global.L2 [%d0], 128;", "discard.global.L2"),
        ("atom.global.min.noftz.f16 %h1, [%d0], %h2;", "atom.global.min.noftz.f16"),
        ("cvta.shared.u32 %r1, %r2;", "it takes .u64"),
        ("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%r1}, {%r2}, {%r3}, {%r4};", "mma.sync.aligned.m16n8k64"),
        ("add.sat.u32 %r1, %r2, %r3;", "add.sat.u32"),
        ("setp.gt.f16x2 %p1, %r2, %r3;", "setp.gt.f16x2"),
        ("ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d0];", "ld.global.v8.b32"),
        ("ld.global.b128 %d1, [%d0];", "ld.global.b128"),
        ("mov.u32 %r1, %pm0;", "%pm0"),
        ("call (%r1), f, (%r2);", "call"),
        ("fns.b32 %r1, %r2, %r3, %r4;", "fns.b32"),
        ("mov.u32 %r1, nothing;", "nothing"),
        ("elect.sync %r1|%p1, 1;", "elect.sync %r1|%p1, 1: an election is for the whole warp"),
        ("popc.b32 %r1, %r2, !%p1;", "popc.b32 %r1, %r2, !%p1: "),
        ("and.b16 %h1, 1, 0f3F800000;", "the type .b16 for the constant 0f3F800000 is not supported"),
        ("add.u16 %h1, 1, 0f3F800000;", "the constant 0f3F800000 stands where add.u16 has an integer"),
        ("add.f32 %f1, %f2, 1;", "the constant 1 stands where add.f32 has a float"),
        ("mov.f32 %f1, 1;", "the constant 1 stands where mov.f32 has a float"),
        ("st.global.f32 [%d0], 0;", "the constant 0 stands where st.global.f32 has a float"),
        ("elect.sync !%r1;", "elect.sync !%r1: it gives two registers"),
        ("add.u32 %r2, %r1, !%r1;", "!%r1 stands where a u32 is needed"),
        ("selp.b32 %r2, 1, 0, !%r1;", "%r1 is no predicate"),
        ("@%r1 mov.u32 %r2, %r1;", "%r1 is no predicate"),
        ("@%missing add.u32 %r2, %r1, 1;", "%missing is no predicate"),
        ("mov.u32 %missing, 1;", "%missing cannot be written"),
        ("mov.u32 %tid.x, %r1;", "%tid.x cannot be written"),
        ("mov.L2 %r2, 1;", ".L2 is not supported"),
        ("setp.ge.u32 %p1|%p2, [%r1+4], 8;", "setp.ge.u32 %p1|%p2, [%r1+4], 8: "),
        ("bar.sync [%r1], 64;", "[%r1] is an address"),
        ("mbarrier.arrive.shared.b64 [%r1], [%r1];", "mbarrier.arrive.shared.b64 [%r1], [%r1]: "),
        (
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%e0, %e1}, {%e2}, {%e0, %e1}, {%e3};",
            "as many registers as elements are needed",
        ),
        ("exit.noftz;", "exit.noftz : .noftz is not supported"),
        ("@%p1 ret.init;", "ret.init : .init is not supported"),
    ],
)
def test_unknown_forms_are_refused_with_line_and_form(body, named):
    text = kernel(f"mov.u32 %r1, 0;\n{body}\n{STORE}")
    with pytest.raises(PtxError) as error:
        check(text, [np.zeros(1, np.uint32)], file="theirs.ptx")
    line = next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith(body))
    assert f"theirs.ptx:{line}:" in str(error.value)
    assert named in str(error.value)


def test_a_refusal_names_the_authors_line_too():
    text = kernel(".loc 1 12 3\ndiscard.global.L2 [%d0], 128;", before='.file 1 "/home/me/mine.py"')
    with pytest.raises(PtxError, match=r"mine\.py:12 \(PTX line \d+\): discard"):
        check(text, [np.zeros(1, np.uint32)])


def test_constants_of_untyped_bits_are_integers_or_floats():
    """As ptxas takes them; %f1 and %r1 are set once, so that what they stand for is read in their place."""
    body = "mov.b32 %f1, 0x3F800000; mov.b32 %r1, 0f3F800000; add.f32 %f2, %f1, 0f3F800000; add.u32 %r2, %r1, 1;"
    body += "st.global.b32 [%d0], 0f40000000; st.global.f32 [%d0+4], %f2; st.global.u32 [%d0+8], %r2;"
    out = np.zeros(3, np.uint32)
    check(kernel(body), [out])
    assert list(out) == [0x40000000, 0x40000000, 0x3F800001]


def test_what_is_printed_and_read_alone_is_not_emulated(monkeypatch):
    monkeypatch.setitem(FORMS, "vabsdiff", [Form("vabsdiff.u32 d, a, b", {}, asm="plain")])
    with pytest.raises(EmulationError, match=r"kernel\.ptx:\d+: vabsdiff\.u32 is printed and read alone"):
        check(kernel("ld.global.u32 %r1, [%d0]; vabsdiff.u32 %r1, %r1, %r1;" + STORE), [np.zeros(1, np.uint32)])


def test_an_access_without_any_array_is_out_of_bounds():
    text = kernel("mov.u64 %d1, 4096; ld.global.u32 %r1, [%d1]; st.global.v4.u32 [%d1], {%r1, %r1, %r1, %r1};", [])
    assert {f.kind for f in check(text, []).findings} == {"bounds"}


@pytest.mark.parametrize("text", ["", "hello", "int main() {}", ".version 8.0\n", HEAD + ".entry k() { add.u32 %r1"])
def test_what_is_no_ptx(text):
    with pytest.raises(PtxError):
        check(text, [])


def test_the_kernel_of_several_is_named():
    one = kernel("mov.u32 %r1, 3; " + STORE)
    two = kernel("mov.u32 %r1, 4; " + STORE).replace(" k(", " other(").removeprefix(HEAD)
    out = np.zeros(1, np.uint32)
    with pytest.raises(PtxError, match="k, other"):
        check(one + two, [out])
    check(one + two, [out], kernel="other")
    assert out[0] == 4


PARAMETERS = "mad.lo.u32 %r1, %r51, %r52, 7; st.global.u32 [%d0], %r1;"


def test_arguments_by_position_by_name_and_under_other_names():
    text, out = kernel(PARAMETERS, ["u64", "u32", "u32"]), np.zeros(1, np.uint32)
    check(text, [out, 5, 6])
    assert out[0] == 37
    check(text, {"p2": 2, "p0": out, "p1": np.uint32(3)})
    assert out[0] == 13
    check(text, {"times": 4, "out": out, "n": 4}, names=["out", "n", "times"])
    assert out[0] == 23


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([1, 2], "takes 3 arguments"),
        ({"p0": 1}, "missing arguments"),
        ([np.zeros(1), "x", 1], "str"),
        ([np.zeros(1), np.zeros(1), 1], "32 bits"),
        ([np.zeros(1), 1 << 40, 1], "does not fit"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises((ProblemError, PtxError), match=message):
        check(kernel(PARAMETERS, ["u64", "u32", "u32"]), arguments)


@pytest.mark.parametrize("block", [0, (32, 0), (8, 8, 8, 8), "x", 1025])
def test_blocks_that_no_kernel_has(block):
    with pytest.raises((ProblemError, PtxError)):
        check(kernel(STORE), [np.zeros(1, np.uint32)], block)


def test_a_kernel_compiled_for_other_blocks():
    text = kernel(STORE).replace(")\n{", ")\n.reqntid 128\n{")
    with pytest.raises(PtxError, match="128"):
        check(text, [np.zeros(1, np.uint32)], 64)


def test_floats_are_scalars_of_declared_and_undeclared_types():
    body = "mov.b32 %f1, %r51; st.global.f32 [%d0], %f1;"
    out = np.zeros(1, np.float32)
    check(kernel(body, ["u64", "b32"]), [out, 1.25])
    assert out[0] == 1.25


def test_tensors_of_torch_are_used_where_they_are():
    torch = pytest.importorskip("torch")
    out = torch.zeros(1, dtype=torch.int32)
    check(kernel("mov.u32 %r1, 9; " + STORE), [out])
    assert out.item() == 9


BRANCHES = """mov.u32 %r2, %tid.x; mov.u32 %r1, 0;
again: add.u32 %r1, %r1, 3; setp.lt.u32 %p1, %r1, %r2; @%p1 bra again;
table: .branchtargets a, b; and.b32 %r3, %r2, 1; brx.idx %r3, table; a: add.u32 %r1, %r1, 100; b: @%p2 bra again;
st.global.u32 [%d0], %r1;"""


def test_the_program_prints_as_cuda_that_compiles():
    pytest.importorskip("cuda.core")
    from warploom.cuda.compile import compile_source

    module = parse(kernel("setp.ne.u32 %p2, 0, 0;" + BRANCHES))
    program = to_program(module, entry_of(module), block=(64, 1, 1))
    verify(program)
    assert isinstance(program.body[-1], Flow)
    assert compile_source(print_cuda(program), "k", arch="sm_80", cache=False).cubin
    assert program.text == to_program(module, entry_of(module), block=(64, 1, 1)).text


def test_public_names():
    assert warploom.check_ptx.__module__ == "warploom.checking.foreign"


def test_lines_within_inline_assembly_are_not_counted_on():
    """LLVM adds one for every line of the assembly."""
    body = """.loc 1 3 1
    // begin inline asm
    .loc 1 5 1
    mov.u32 %r1, 1;
    .loc 1 6 1
    ld.global.u32 %r2, [%d0+8192];
    // end inline asm
    .loc 1 9 1
    ld.global.u32 %r3, [%d0+8192];"""
    (found,) = check(kernel(body, before='.file 1 "mine.py"'), [np.zeros(4, np.uint32)]).findings
    assert [f.where.line for f in (found, *found.follows)] == [5, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (kernel("{" * 3000 + "}" * 3000), "nested too deeply"),
        (kernel(".reg .b32 %q<300000000>;"), "300000000 registers"),
        (kernel("", before=".shared .b8 many[-4];"), "negative size"),
        (kernel("", before=".shared .align 3 .b8 x;"), "power of two"),
        (kernel("mov.u32 %r1, x;", before=".shared .b8 x[240000];"), "240000 bytes of shared memory"),
        (kernel(".local .b8 x[999999]; mov.u32 %r1, x;"), "999999 bytes of local memory"),
        (kernel("mov.u64 %d1, x;", before=f".global .b8 x[{1 << 60}];"), "x has 1152921504606846976 bytes"),
        (kernel("").replace("64", "08", 1), "an integer"),
        (kernel("mov.f32 %f1, 0f12;"), "expected"),
        (b"", "text of PTX"),
    ],
)
def test_text_that_no_assembler_takes_gets_one_message(text: str, message: str) -> None:
    with pytest.raises((PtxError, ProblemError), match=message):
        check(text, [np.zeros(1, np.uint32)])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (5, {}, "arguments are a list"),
        ([np.zeros(1, object)], {}, "Python objects"),
        ([1.5], {"text": "u32"}, "is an integer"),
        ([1], {"names": []}, "1 parameters"),
        ([1], {"shared_bytes": -1}, "shared_bytes counts"),
        ([1], {"block": 2048}, "1024"),
    ],
)
def test_launches_that_no_gpu_takes_get_one_message(arguments: Any, options: dict[str, Any], message: str) -> None:
    text = kernel("", [options.pop("text", "u64")])
    with pytest.raises((PtxError, ProblemError), match=message):
        check(text, arguments, **options)
