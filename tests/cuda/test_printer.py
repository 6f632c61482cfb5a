"""The printed CUDA: its text, its constants, what is inlined, and where each line comes from."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.core.dtypes import DType, bf16, f32, f64, pred, s32, s64, u16, u32, u64
from warploom.cuda.expressions import constant
from warploom.cuda.names import identifier
from warploom.cuda.printer import COLUMNS, print_cuda, source_map
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
from warploom.isa.async_copy import cp_async, tensor_load
from warploom.isa.barriers import bar_sync
from warploom.isa.collective import shuffle
from warploom.isa.conversion import FULL_MASK, convert, move, pack_pair, special
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, multiply_wide, select, unary
from warploom.isa.matrix import matrix_access, mma
from warploom.isa.memory import load, store

GOLDEN = Path(__file__).parent / "golden"


class Writer:
    """Appends statements to a block; values are numbered as they come."""

    def __init__(self) -> None:
        self.body: list[Statement] = []
        self.count = 0
        self.line = 10

    def value(self, dtype: DType, name: str = "") -> Value:
        self.count += 1
        return Value(self.count, dtype, name)

    def register(self, dtype: DType, name: str) -> Register:
        self.count += 1
        return Register(self.count, dtype, name)

    def do(self, instruction: Instruction, *operands: Operand, name: str = "", into: tuple[Value, ...] = ()) -> Value:
        results = into or tuple(self.value(t, name) for t in instruction.result_types)
        self.body.append(Op(instruction, operands, results, SourceLine("/somewhere/dots.py", self.line)))
        return results[0] if results else Value(-1, u32)

    def block(self) -> tuple[Statement, ...]:
        taken, self.body = tuple(self.body), []
        return taken

    def text(self, *inputs: Value) -> str:
        """The block as a kernel whose parameters are these values."""
        parameters = tuple(Parameter(v.name, "scalar", v.dtype, v) for v in inputs)
        return print_cuda(Program("k", parameters, 32, self.block()), comments=False)


def _n(value: int, dtype: DType = u32) -> Const:
    return Const(dtype, value)


def dots() -> Program:
    """Row maxima of tiles of A·B: a copy, a barrier, ldmatrix, mma, a loop, a shuffle and a guarded store."""
    w = Writer()
    a, out, tiles = (w.value(t, n) for t, n in ((u64, "a"), (u64, "out"), (u32, "tiles")))
    thread = w.do(special("tid.x"), name="thread")
    base = w.do(special("shared_base"), name="base")
    row = w.do(binary("shr", u32), thread, _n(2))
    column = w.do(binary("and", u32), thread, _n(3))
    swizzled = w.do(binary("xor", u32), row, column)
    place = w.do(binary("add", u32), base, w.do(binary("shl", u32), swizzled, _n(4)), name="place")
    w.line = 14
    best = w.register(f32, "best")
    c = tuple(w.register(f32, f"c{i}") for i in range(4))
    w.do(move(f32), Const(f32, float("-inf")), into=(best,))
    before = w.block()

    index = w.value(u32, "tile")
    w.line = 16
    wide = w.do(multiply_wide(u32), w.do(binary("add", u32), w.do(binary("shl", u32), index, _n(7)), thread), _n(16))
    w.do(cp_async(16), place, w.do(binary("add", u64), a, wide))
    w.do(named("cp.async.commit_group"))
    w.line = 17
    w.do(named("cp.async.wait_group", numbers=(("pending", 0),)))
    w.do(bar_sync(), _n(0))
    w.line = 18
    fragment = tuple(w.value(u32, f"a{i}") for i in range(4))
    w.do(matrix_access("ldmatrix", 4).at(offset=64), place, into=fragment)
    for r in c:
        w.do(move(f32), Const(f32, 0.0), into=(r,))
    w.do(mma("m16n8k16", bf16), *fragment, fragment[0], fragment[1], *c, into=c)
    w.line = 19
    scaled = w.do(binary("mul", f32), c[0], Const(f32, 0.1), name="scaled")
    w.do(binary("max", f32), best, scaled, into=(best,))
    w.do(bar_sync(), _n(0))
    loop = Loop(index, _n(0), tiles, _n(1), w.block(), SourceLine("/somewhere/dots.py", 15))

    w.line = 21
    other = w.do(shuffle("xor", f32), best, _n(16), _n(FULL_MASK), name="other")
    power = w.do(named("ex2.approx.ftz.f32"), w.do(binary("max", f32), best, other))
    after = w.block()
    w.line = 22
    lane = w.do(binary("and", u32), thread, _n(31))
    first = w.do(binary("lt", u32), lane, _n(16))
    guard = w.block()
    packed = w.do(pack_pair(bf16), power, Const(f32, -1.5))
    w.do(store("global", u32), out, packed)
    when = When(first, w.block(), (), False, SourceLine("/somewhere/dots.py", 22))
    return Program(
        "dots",
        (
            Parameter("a", "pointer", bf16, a),
            Parameter("out", "pointer", bf16, out),
            Parameter("tiles", "scalar", u32, tiles),
        ),
        128,
        (*before, loop, *after, *guard, when),
        (SharedRegion("a_tile", 0, 2048),),
        2048,
        min_ctas=2,
        where=SourceLine("/somewhere/dots.py", 8),
    )


def roles() -> Program:
    """A producer warpgroup that copies by TMA and two consumer warpgroups, with register budgets."""
    w = Writer()
    source = w.value(u64, "source")
    base = w.do(special("shared_base"), name="base")
    head = w.block()
    total = w.register(u32, "total")
    w.do(tensor_load(2), base, source, base, Const(pred, True), Const(s32, -8), Const(s32, 0))
    producer = w.block()
    w.do(move(u32), _n(-1), into=(total,))
    w.do(binary("sub", u32), total, _n(1), into=(total,))
    consumer = w.block()
    chain = Roles(
        (
            Role(0, 4, producer, 24, SourceLine("/somewhere/roles.py", 5)),
            Role(4, 12, consumer, 240, SourceLine("/somewhere/roles.py", 7)),
        ),
        SourceLine("/somewhere/roles.py", 5),
    )
    parameters = (Parameter("source", "tensor_map", u64, source),)
    return Program("roles", parameters, 384, (*head, chain), shared_bytes=4096, requires="sm_90a")


@pytest.mark.parametrize("program", [dots(), roles()], ids=lambda p: p.name)
def test_golden_text(program: Program) -> None:
    """Set WARPLOOM_UPDATE_GOLDEN to write the files anew, then read the difference."""
    verify(program)
    text, path = print_cuda(program), GOLDEN / f"{program.name}.cu"
    if os.environ.get("WARPLOOM_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    mapped = source_map(program)
    roles_of = [role.where for s in program.body if isinstance(s, Roles) for role in s.branches]
    assert set(mapped.values()) <= {s.where for s in program.statements()} | set(roles_of)
    assert {number for number, line in enumerate(text.splitlines(), 1) if "asm" in line} <= set(mapped)
    core = pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")
    assert core.Program(text, "c++", core.ProgramOptions(arch=program.requires, fma=False)).compile("cubin").code


def test_source_text_is_shown_and_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "author.py"
    file.write_text("first\nsecond = x + 1  \\\n")
    x = Value(0, u32, "x")

    def program(line: int) -> Program:
        op = Op(store("global", u32), (Const(u64, 0), x), (), SourceLine(str(file), line))
        return Program("k", (Parameter("x", "scalar", u32, x),), 32, (op,))

    assert "  // author.py:2  second = x + 1\n" in print_cuda(program(2))
    assert print_cuda(program(1)) != print_cuda(program(2))
    bare = print_cuda(program(2), comments=False)
    assert print_cuda(program(1), comments=False) == bare
    assert "//" not in bare


def test_a_comment_of_two_lines_is_one() -> None:
    name = "a_kernel_with_a_name_that_is_longer_than_any_other_that_people_would_write"
    head, *_ = print_cuda(Program(name, (), 32, (), where=SourceLine("a_file_of_some_name.py", 3))).split("extern")
    lines = head.splitlines()
    assert len(lines) > 1
    assert all(line.startswith("//") for line in lines if line)


# Constants


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        (f32, 0.125, "0.125f"),
        (f32, 1.0, "1.0f"),
        (f32, 0.1, "0.1f"),
        (f32, -0.0, "-0.0f"),
        (f32, 1e30, "1e+30f"),
        (f32, float("inf"), "__int_as_float(0x7f800000)"),
        (f32, float("-inf"), "__int_as_float(0xff800000)"),
        (f32, float("nan"), "__int_as_float(0x7fc00000)"),
        (f64, 0.1, "0.1"),
        (u32, 7, "7u"),
        (u32, -1, "0xffffffffu"),
        (u64, -1, "0xffffffffffffffffull"),
        (s32, -5, "-5"),
        (s32, -(2**31), "(-2147483647 - 1)"),
        (s64, 3, "3ll"),
        (pred, True, "true"),
        (pred, False, "false"),
        (u16, 3, "(unsigned short)3u"),
    ],
)
def test_constants(dtype: DType, value: float, text: str) -> None:
    assert constant(Const(dtype, value)).text == text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float_constants_are_exact(value: float) -> None:
    text = constant(Const(f32, value)).text.removesuffix("f")
    back = float.fromhex(text) if "0x" in text else float(text)
    assert np.float32(back).tobytes() == np.float32(value).tobytes()


# Expressions


def _expression(build: object, **types: DType) -> str:
    """The right-hand side printed for a value stored at the end."""
    w = Writer()
    inputs = {name: w.value(dtype, name) for name, dtype in types.items()}
    result = build(w, **inputs)  # type: ignore[operator]
    w.do(store("global", result.dtype), Const(u64, 0), result)
    text = w.text(*inputs.values())
    found = re.search(r'"[rlf]"\(((?:(?!"[rlf]"\().)*)\) : "memory"\);', text)
    assert found is not None, text
    return found[1]


def _u(op: str, dtype: DType = u32) -> Instruction:
    return binary(op, dtype)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda w, x, y: w.do(_u("mul"), w.do(_u("add"), x, y), y), "(x + y) * y"),
        (lambda w, x, y: w.do(_u("add"), w.do(_u("mul"), x, y), y), "x * y + y"),
        (lambda w, x, y: w.do(_u("sub"), x, w.do(_u("sub"), x, y)), "x - (x - y)"),
        (lambda w, x, y: w.do(_u("sub"), w.do(_u("sub"), x, y), y), "x - y - y"),
        (lambda w, x, y: w.do(_u("xor"), w.do(_u("xor"), x, y), y), "x ^ y ^ y"),
        (lambda w, x, y: w.do(_u("xor"), w.do(_u("and"), x, y), y), "(x & y) ^ y"),
        (lambda w, x, y: w.do(_u("add"), w.do(_u("shl"), x, _n(3)), y), "(x << 3) + y"),
        (lambda w, x, y: w.do(_u("add"), x, _n(-64)), "x - 64u"),
        (lambda w, x, y: w.do(_u("add"), x, _n(2**32 - 64)), "x - 64u"),
        (lambda w, x, y: w.do(_u("min"), w.do(_u("add"), x, y), y), "min(x + y, y)"),
        (lambda w, x, y: w.do(unary("not", u32), w.do(_u("or"), x, y)), "~(x | y)"),
        (lambda w, x, y: w.do(unary("neg", s32), w.do(convert(u32, s32), x)), "(int)-(unsigned)(int)x"),
        (lambda w, x, y: w.do(select(u32), w.do(_u("lt"), w.do(_u("add"), x, y), y), x, y), "x + y < y ? x : y"),
        (lambda w, x, y: w.do(multiply_wide(u32), w.do(_u("add"), x, y), _n(4)), "(unsigned long long)(x + y) * 4u"),
        (lambda w, x, y: w.do(unary("neg", s32), Const(s32, -3)), "(int)-(unsigned)(-3)"),
        (lambda w, x, y: w.do(move(u32), w.do(_u("add"), x, y)), "x + y"),
    ],
)
def test_expressions_have_the_parentheses_they_need(build: object, text: str) -> None:
    assert _expression(build, x=u32, y=u32) == text


def test_signed_arithmetic_is_computed_as_unsigned() -> None:
    w = Writer()
    x, y = w.value(s32, "x"), w.value(s32, "y")
    w.do(_u("add", s32), x, _n(-64, s32), name="near")
    w.do(_u("add", s32), w.do(_u("sub", s32), x, y), y, name="sum")
    w.do(_u("mul", s32), x, w.do(_u("shl", s32), y, _n(3)), name="product")
    text = w.text(x, y)
    assert "near = (int)((unsigned)x - 64);" in text
    assert "sum = (int)((unsigned)((unsigned)x - y) + y);" in text
    assert "product = (int)((unsigned)x * (int)((unsigned)y << 3));" in text


def test_a_register_written_in_between_keeps_a_value_apart() -> None:
    w = Writer()
    r = w.register(u32, "r")
    w.do(move(u32), _n(0), into=(r,))
    early = w.do(_u("add"), r, _n(1))
    late = w.do(_u("add"), early, _n(2))
    w.do(move(u32), _n(9), into=(r,))
    w.do(store("global", u32), Const(u64, 0), late)
    text = w.text()
    assert "const unsigned t0 = r + 1u + 2u;\n  r = 9u;" in text


def test_a_value_used_twice_or_elsewhere_or_named_is_a_statement() -> None:
    w = Writer()
    x = w.value(u32, "x")
    twice = w.do(_u("add"), x, _n(1))
    outside = w.do(_u("add"), x, _n(2))
    named = w.do(_u("add"), x, _n(3), name="named")
    w.do(store("global", u32, 2), Const(u64, 0), twice, twice)
    w.do(store("global", u32), Const(u64, 0), named)
    before = list(w.block())
    w.do(store("global", u32), Const(u64, 0), outside)
    loop = Loop(w.value(u32, "i"), _n(0), x, _n(2), w.block())
    w.body = [*before, loop]
    text = w.text(x)
    for statement in ("= x + 1u;", "= x + 2u;", "named = x + 3u;", "for (unsigned i = 0u; i < x; i += 2u) {"):
        assert statement in text


def test_long_expressions_get_lines_of_their_own() -> None:
    w = Writer()
    x = w.value(u32, "a_rather_long_name_of_a_value")
    total: Value = x
    for i in range(40):
        total = w.do(_u("add"), w.do(_u("mul"), total, x), w.do(_u("xor"), x, _n(i)))
    w.do(store("global", u32), Const(u64, 0), total)
    text = w.text(x)
    assert max(map(len, text.splitlines())) <= COLUMNS


# Names, roles


def test_names_are_valid_and_unique() -> None:
    assert identifier("α_2") == "alpha_2"
    assert identifier("float") == "float_"
    assert identifier("2x") == "v2x"
    assert identifier("fmaxf") == "fmaxf_"
    w = Writer()
    values = [w.do(load("global", u32), Const(u64, 0), name=name) for name in ("s", "s", "k", "while", "t0", "")]
    w.do(store("global", u32, 2), Const(u64, 0), *values[:2])
    text = w.text()
    assert re.findall(r"unsigned (\w+);", text) == ["s", "s_1", "k_1", "while_", "t0", "t0_1"]


def test_warps_between_roles() -> None:
    stop = Op(bar_sync(32), (_n(1),), ())

    def printed(first: int, end: int) -> str:
        chain = Roles((Role(first, end, (stop,)), Role(4, 8, (stop,))))
        return print_cuda(Program("k", (), 256, (chain,)), comments=False)

    for text in ("if (warp == 1u) {", "} else if (warp >= 4u) {"):
        assert text in printed(1, 2)
    for text in ("if (warp < 4u) {", "} else {"):
        assert text in printed(0, 4)
