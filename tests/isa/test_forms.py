"""The tables of forms: samples of each go through text both ways, the emulator and ptxas, and have what passes ask."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warploom
from tests.isa.every_form import every, forms, instructions, line, refused
from tests.isa.functions import function
from tests.ptx.text import check, kernel, lanewise
from warploom.core.dtypes import f32, pred, u32
from warploom.isa.conversion import move
from warploom.isa.effects import MatrixAccess
from warploom.isa.form import FORMS, Form, RefusedError, candidates
from warploom.isa.instruction import Instruction, instruction, named
from warploom.isa.lanewise import binary
from warploom.ptx.parser import parse
from warploom.ptx.reading import find
from warploom.ptx.syntax import PtxInstruction

PER_FORM = 6


def sample(form: Form) -> list[Instruction]:
    """Some instructions of a form, the first and the last among them."""
    made = list(dict.fromkeys(instructions(form)))
    chosen = np.linspace(0, len(made) - 1, min(PER_FORM, len(made))).astype(int)
    return [made[i] for i in chosen]


SAMPLES = {f"{number} {form}": sample(form) for number, form in enumerate(forms())}
LANEWISE = {name: made for name, made in SAMPLES.items() if made[0].lanewise}


@pytest.mark.parametrize("name", SAMPLES)
def test_text_reads_back_as_the_instruction(name: str) -> None:
    for made in SAMPLES[name]:
        (function,) = parse(kernel(line(made), ())).entries
        read = next(i for i in function.body if isinstance(i, PtxInstruction))
        found, targets, sources = find(
            read, lambda _, default, made=made: made.home or default, lambda x: x, {"%r1", "%p2"}
        )
        of = FORMS[made.words[0]]  # a text that two forms have is the first one's
        assert found is made or of.index(found.form) < of.index(made.form)
        assert found.ptx_name == made.ptx_name
        assert len(targets) == len(made.result_types)
        assert len(sources) == len(made.operand_types)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_ptxas_takes_every_instruction_of_the_tables(target: str) -> None:
    assert refused(every(), target) == {}


def test_ptxas_would_refuse_what_is_declared_too_wide() -> None:
    """The check finds a defect: a rounding that no addition of f64 has in ``sat``."""
    if shutil.which("ptxas") is None:
        pytest.skip("needs ptxas")
    wrong = Form("add{.rnd}.sat.f64 d, a, b", {"rnd": "rn"}, choose=lambda _: np.add)
    found = refused([instruction(wrong, ("add", "rn", "sat", "f64")), named("add.rn.f64")], "sm_90a")
    assert [i.ptx_name for i in found] == ["add.rn.sat.f64"]


def operands_of(made: Instruction, count: int = 32) -> list[np.ndarray[Any, Any]]:
    """Random operands; small numbers where an instruction divides or shifts."""
    rng = np.random.default_rng(0)
    found: list[np.ndarray[Any, Any]] = []
    for dtype in made.operand_types:
        if dtype is pred:
            found.append(rng.integers(0, 2, count).astype(bool))
        elif dtype.is_float:
            found.append(rng.standard_normal(count).astype(dtype.numpy))
        else:
            found.append(rng.integers(1, 64, count).astype(dtype.numpy))
    return found


@pytest.mark.parametrize("name", LANEWISE)
def test_the_emulator_gives_an_instructions_meaning(name: str) -> None:
    """From the line of PTX, with its predicates as numbers, to the results of all lanes."""
    for made in LANEWISE[name][:2]:
        if any(p.hidden for p in made.present) or not made.operand_types:
            continue  # carries, which tests of whole sums cover; cache policies without a fraction
        values = operands_of(made)
        names, before = [f"%o{i}" for i in range(len(made.result_types))], ""
        results, taken = (made.ptx_types[: len(made.result_types)], made.ptx_types[len(made.result_types) :])
        for i, dtype in enumerate(taken):
            names.append(f"%q{i}" if dtype is pred else f"%in{i}")
            before += f".reg .pred %q{i}; setp.ne.b32 %q{i}, %in{i}, 0;\n" if dtype is pred else ""
        after = ""
        for i, dtype in enumerate(results):
            kind = "pred" if dtype is pred else f"b{dtype.bits}"
            before += f".reg .{kind} %o{i};\n"
            moved = f"selp.u32 %out, 1, 0, %o{i};" if dtype is pred else f"mov.b{dtype.bits} %out, %o{i};"
            after = after or moved
        out = np.dtype(np.uint32) if made.result_types[0] is pred else results[0].numpy
        given = [x.astype(np.uint32 if x.dtype == bool else t.numpy) for x, t in zip(values, taken, strict=True)]
        got = lanewise(f"{before}{made.text(names)}\n{after}", given, out)
        with np.errstate(all="ignore"):
            expected = made.meaning(*(x[None] for x in values))[0].reshape(-1)
        assert np.array_equal(got, expected.astype(out), equal_nan=out.kind == "f"), made


def of_global_memory(*opcodes: str) -> dict[str, list[Instruction]]:
    """Samples of opcodes whose accesses are to global memory, by a generic address or not."""
    found = {
        name: [i for i in made if i.op in opcodes and i.fields.get("space") in ("", "global")]
        for name, made in SAMPLES.items()
    }
    return {name: made for name, made in found.items() if made}


def accessed(
    made: Instruction, memory: np.ndarray[Any, Any], given: list[np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    """What 32 threads, each with its own bytes of ``memory``, get by an access of registers ``given``."""
    results, values = made.result_types, made.operand_types[1 : 1 + len(given)]
    wide = 8 if any(t.bits == 64 for t in (*results, *values)) else 4
    body = f"mov.u32 %r0, %tid.x; mad.wide.u32 %d20, %r0, {made.bytes}, %d0; mov.b64 %d39, 0;\n"
    names = [f"%o{n}" for n in range(len(results))], [f"%i{n}" for n in range(len(given))]
    for name, dtype in zip((*names[0], *names[1]), (*results, *values), strict=True):
        body += f".reg .b{dtype.bits} {name};\n"
    for n, (name, dtype) in enumerate(zip(names[1], values, strict=True)):
        body += f"mad.wide.u32 %d21, %r0, {dtype.bytes}, %d{2 + n}; ld.global.b{dtype.bits} {name}, [%d21];\n"
    body += made.text([*names[0], "%d20", *names[1], "%d39"]) + "\n"
    for n, (name, dtype) in enumerate(zip(names[0], results, strict=True)):
        body += f"mad.wide.u32 %d22, %r0, {wide}, %d1; st.global.b{dtype.bits} [%d22+{32 * wide * n}], {name};\n"
    out = np.zeros((max(1, len(results)), 32), f"u{wide}")
    run = check(kernel(body, ["u64"] * (2 + len(given)), target="sm_90"), [memory, out, *given])
    assert run.findings == (), made
    return out


@pytest.mark.parametrize("name", of_global_memory("ld", "ldu"))
def test_the_emulator_loads_what_a_form_means(name: str) -> None:
    for made in of_global_memory("ld", "ldu")[name]:
        memory = np.random.default_rng(1).integers(0, 256, 32 * made.bytes, np.uint8)
        words = memory.view(f"u{made.bytes // made.count}").reshape(1, 32, made.count)
        out = accessed(made, memory, [])
        for row, expected in zip(out, made.meaning(words), strict=True):
            assert row.astype(f"u{expected.dtype.itemsize}").tobytes() == expected.tobytes(), made


@pytest.mark.parametrize("name", of_global_memory("st"))
def test_the_emulator_stores_what_a_form_means(name: str) -> None:
    for made in of_global_memory("st")[name]:
        registers = [t.numpy for t in made.operand_types[1 : 1 + made.count]]
        given = [np.arange(1, 33, dtype=np.uint64).astype(f"u{t.itemsize}") * (n + 3) for n, t in enumerate(registers)]
        memory = np.zeros(32 * made.bytes, np.uint8)
        accessed(made, memory, given)
        (words,) = made.meaning(*(x.view(t)[None] for x, t in zip(given, registers, strict=True)))
        assert memory.tobytes() == words.tobytes(), made


@pytest.mark.parametrize("name", of_global_memory("atom", "red"))
def test_the_emulator_leaves_what_an_atomic_means(name: str) -> None:
    for made in of_global_memory("atom", "red")[name]:
        element = made.operand_types[1].numpy
        rng = np.random.default_rng(2)
        old, *values = [
            rng.integers(1, 9, (32, made.count)).astype(element) for _ in range(3 if made.rmw == "cas" else 2)
        ]
        given = [np.ascontiguousarray(x[:, n]) for x in values for n in range(made.count)]
        memory = old.copy()
        out = accessed(made, memory.reshape(-1).view(np.uint8), given)
        assert made.combine is not None
        assert memory.tobytes() == made.combine(old, *values).tobytes(), made
        for n in range(len(made.result_types)):
            assert out[n].astype(f"u{element.itemsize}").tobytes() == np.ascontiguousarray(old[:, n]).tobytes(), made


WITHOUT_EFFECTS = ("griddepcontrol", "nanosleep", "prefetch", "prefetchu", "applypriority")
"""What changes speed alone."""


@pytest.mark.parametrize("name", SAMPLES)
def test_pure_forms_have_a_meaning_and_no_effects(name: str) -> None:
    for made in SAMPLES[name]:
        if made.pure:
            assert made.effects() == ()
            with np.errstate(all="ignore"):
                results = made.meaning(*(x[None] for x in operands_of(made)))
            assert tuple(r.dtype for r in results) == tuple(t.numpy for t in made.result_types)
        else:
            assert made.effects() or made.op in WITHOUT_EFFECTS or "prefetch" in made.words


def made_of(*opcodes: str) -> Iterator[Instruction]:
    return (i for i in every() if i.op in opcodes)


def test_every_integer_division_says_where_it_is_undefined() -> None:
    divisions = [i for i in made_of("div", "rem") if not i.operand_types[0].is_float]
    assert len(divisions) == 12
    for made in divisions:
        zero, *overflow = made.open
        dtype = made.operand_types[1].numpy
        assert zero.where(np.ones(1, dtype), np.zeros(1, dtype)).all()
        assert len(overflow) == (made.operand_types[0].kind == "signed")


def test_every_bitwise_form_tracks_poison_by_the_bit() -> None:
    for made in made_of("and", "or", "xor"):
        dtype = made.operand_types[0].numpy
        a, b = (np.full((1, 1), 0, dtype), np.full((1, 1), 1, dtype))
        word = np.bool_ if dtype == np.bool_ else np.dtype(f"u{dtype.itemsize}")
        poison, clean = np.full((1, 1), 1, word), np.zeros((1, 1), word)
        (shadow,) = made.shadow((b, a), (poison, clean), made.meaning(b, a))
        assert bool(shadow.any()) == (made.op != "and"), made  # a clean 0 decides an and


def test_every_word_of_arithmetic_on_f32_has_a_derivative() -> None:
    words = [binary(op, f32) for op in ("add", "sub", "mul", "div", "min", "max")]
    words += [function(op) for op in ("neg", "abs", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh")]
    assert all(made.gradient is not None for made in words)


def test_every_form_of_an_address_has_its_value_without_an_end_of_the_integers() -> None:
    integers = [i for i in made_of("add", "sub", "mul", "mad", "shl") if i.form.exact and i.fields.get("how") != "hi"]
    assert {i.op for i in integers} == {"add", "sub", "mul", "mad", "shl"}
    for made in integers:
        x = [np.full((1, 1), 3.0) for _ in made.operand_types]
        typed = [v.astype(t.numpy) for v, t in zip(x, made.operand_types, strict=True)]
        assert made.exact is not None
        assert made.exact(*x)[0, 0] == made.meaning(*typed)[0][0, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("add.rn.sat.f64", ".sat"),
        ("mul.s32", "must name"),
        ("add.b32", "no type"),
        ("lop4.b32", "not supported"),
        ("setp.lt.b32", ".lt"),
    ],
)
def test_refusals_name_the_word(text: str, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        candidates(tuple(text.split(".")))


# What passes ask of an instruction


def test_every_product_of_a_warp_has_its_fragments() -> None:
    for made in made_of("mma"):
        a, b, c = made.slots
        assert (c.first, c.first + c.count) == (a.count + b.count, len(made.operand_types))
        assert len(made.result_types) == c.count


def test_every_product_of_a_warpgroup_says_where_its_operands_are() -> None:
    for made in made_of("wgmma"):
        product = made.warpgroup_product
        assert (product is not None) == ("mma_async" in made.words)
        if product is not None:
            assert made.optional_operands == range(product.a_count + 2, len(made.operand_types))
            assert len(made.result_types) == product.n * product.sums.bits // 64


def test_every_access_of_a_warp_to_a_matrix_names_its_fragment() -> None:
    for made in made_of("wmma"):
        accesses = [e for e in made.effects() if isinstance(e, MatrixAccess)]
        assert (made.fragment is not None) == bool(accesses)


def test_every_conversion_between_integers_tracks_poison_by_the_bit() -> None:
    between = [i for i in made_of("cvt") if i.form.exact]
    assert len(between) > 64
    for made in between:
        source = made.operand_types[0].numpy
        low = np.full((1, 1), 1, source)
        (shadow,) = made.shadow((low,), (low.view(f"u{source.itemsize}"),), made.meaning(low))
        everything = ~np.zeros((), shadow.dtype)
        assert (shadow == everything).all() == bool(made.fields["sat"]), made


def test_moves_of_registers_are_known_as_copies() -> None:
    assert all(move(t).copies and move(t).gradient is not None for t in (u32, f32, pred))
    copies = [i for i in every() if i.copies]  # of a global address its generic one
    assert {i.op for i in copies} == {"mov", "cvta"}
    assert {i.space for i in copies if i.op == "cvta"} == {"global", "const"}


ROOMS = ("ir", "emulate", "lang", "cuda")


@pytest.mark.parametrize("room", ROOMS)
def test_no_pass_asks_for_the_class_of_an_instruction(room: str) -> None:
    """What a pass needs to know is an attribute, so that a new instruction is not forgotten by one."""
    for path in sorted((Path(warploom.__file__).parent / room).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance":
                kinds = {x.id for x in ast.walk(call.args[1]) if isinstance(x, ast.Name)}
                assert "Instruction" not in kinds, f"{path.name}: {ast.unparse(call)}"
