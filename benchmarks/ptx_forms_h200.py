"""Every lanewise PTX form that the emulator runs, beside a GPU: are the results the same, bit for bit?

    PYTHONPATH=src:. python benchmarks/ptx_forms_h200.py [--dry-run] [--out DIR]

Each opcode is put together with all modifiers and types that might go with it. What the assembler takes is PTX, and
runs on the GPU and on the emulator, on edges and random operands, unless the emulator refuses it. NaNs count as equal;
approximations by definition are compared by their relative error. ``--dry-run`` launches nothing: it needs no GPU. Exit
status 1 where results differ. Writes ptx-forms.json, in half a minute.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from ptx_round_trip_h200 import Gpu

from warploom.checking.foreign import check_ptx
from warploom.core.errors import PtxError
from warploom.isa.form import TYPE_BITS
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

THREADS, COUNT = 128, 512
INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
NARROW = ("u8", "s8", "e4m3x2", "e5m2x2", "tf32", "u16x2", "s16x2", "f32x2", "pred")
ALL = (*INTEGERS, *BITS, *FLOATS, *NARROW)
COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "lo",
    "ls",
    "hi",
    "hs",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
    "num",
    "nan",
)
FTZ = ("", ".ftz")
TOLERANCE = {"f32": 2e-6, "f64": 1e-5, "f16": 2e-3, "bf16": 2e-2, "f16x2": 2e-3, "bf16x2": 2e-2}
NUMPY: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "f16x2": np.float16,
    "bf16x2": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "f32x2": np.float32,
}
EDGES = (
    0.0,
    -0.0,
    1,
    -1,
    0.5,
    1.5,
    2.5,
    -2.5,
    1e-6,
    65504,
    65520,
    3e38,
    -3e38,
    2.0**31,
    2.0**31 - 128,
    -(2.0**31),
    2.0**32,
    2.0**63,
    255.5,
    256,
    -128.5,
    300,
    448,
    464,
    57344,
    1e-40,
    -1e-41,
    np.inf,
    -np.inf,
    np.nan,
)


@dataclass(frozen=True)
class Case:
    """A form: the type of what it writes, those of what it reads, and its operands where they are not just these."""

    form: str
    result: str
    given: tuple[str, ...]
    operands: str = ""

    @property
    def text(self) -> str:
        """The instruction: it writes %out and reads %in0, %in1 …, whose elements lie at %at0, %at1 …"""
        return f"{self.form} {self.operands or ', '.join(('%out', *(f'%in{i}' for i in range(len(self.given)))))};"

    @property
    def stores(self) -> bool:
        """Whether it writes to memory itself, at %to."""
        return "%to" in self.operands


def cases() -> Iterator[Case]:
    """All forms to try."""
    how = ("", ".rn", ".rz", ".rm", ".rp", ".approx", ".full", ".lo", ".hi")
    for op, (mode, more), t in product(
        ("add", "sub", "mul", "div", "rem", "min", "max"), _mixed(how, (".ftz", ".sat", ".NaN", ".ftz.sat", ".cc")), ALL
    ):
        yield Case(f"{op}{mode}{more}.{t}", t, (t, t))
    for t in ALL:
        wide = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}.get(t, "b64")
        yield Case(f"mul.wide.{t}", wide, (t, t))
        yield Case(f"mad.wide.{t}", wide, (t, t, wide))
        yield Case(f"mad24.lo.{t}", t, (t, t, t))
        for op in ("sad", "min", "max", "add"):
            yield Case(f"{op}.{t}", t, (t, t, t))
    for op, (mode, more), t in product(("mad", "fma"), _mixed(how, (".ftz", ".sat", ".relu", ".ftz.sat")), ALL):
        yield Case(f"{op}{mode}{more}.{t}", t, (t, t, t))
    for op, mode, ftz, t in product(
        (
            "neg",
            "abs",
            "not",
            "cnot",
            "popc",
            "clz",
            "brev",
            "bfind",
            "ex2",
            "lg2",
            "rcp",
            "rsqrt",
            "sqrt",
            "sin",
            "cos",
            "tanh",
        ),
        ("", ".approx", ".rn", ".rz", ".rm", ".rp"),
        FTZ,
        ALL,
    ):
        yield Case(f"{op}{mode}{ftz}.{t}", "u32" if op in ("popc", "clz", "bfind") else t, (t,))
    for op, mode, t in product(("mul24",), (".lo", ".hi"), ALL):
        yield Case(f"{op}{mode}.{t}", t, (t, t))
    for t in ALL:
        for op in ("and", "or", "xor", "copysign"):
            yield Case(f"{op}.{t}", t, (t, t))
        for op in ("shl", "shr"):
            yield Case(f"{op}.{t}", t, (t, "shift"))
            yield Case(f"{op}.{t}", t, (t,), "%out, %in0, 40")
        yield Case(f"bfe.{t}", t, (t, "shift", "shift"))
        yield Case(f"bfi.{t}", t, (t, t, "shift", "shift"))
        yield Case(f"selp.{t}", t, (t, t, "pred"))
        for by in ("s32", "f32", "u32", "s64"):
            yield Case(f"slct.{t}.{by}", t, (t, t, by))
            yield Case(f"slct.ftz.{t}.{by}", t, (t, t, by))
        for clamp in ("wrap", "clamp"):
            yield Case(f"szext.{clamp}.{t}", t, (t, "shift"))
            yield Case(f"bmsk.{clamp}.{t}", t, ("shift", "shift"))
            for way in "lr":
                yield Case(f"shf.{way}.{clamp}.{t}", t, (t, t, "shift"))
        yield Case(f"prmt.{t}", t, (t, t, t))
        yield Case(f"lop3.{t}", t, (t, t, t), "%out, %in0, %in1, %in2, 0x3b")
    for a, c in product(ALL, ALL):
        yield Case(f"dp4a.{a}.{c}", "s32", (a, c, "s32"))
        yield Case(f"dp2a.hi.{a}.{c}", "s32", (a, c, "s32"))
    yield from _comparisons()
    yield from _conversions()
    yield from _memory()
    yield from _warps()


def _mixed(modes: tuple[str, ...], extra: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each mode alone, and the first ones of those that are common with something more."""
    return [(mode, "") for mode in modes] + [(mode, more) for more in extra for mode in ("", ".rn", ".rzi")]


def _comparisons() -> Iterator[Case]:
    for op, ftz, t in product(COMPARISONS, FTZ, ALL):
        yield Case(f"setp.{op}{ftz}.{t}", "pred", (t, t))
        for d in ("u32", "s32", "f32", "u16", "s16", "f16", "bf16", "f16x2", "bf16x2"):
            yield Case(f"set.{op}{ftz}.{d}.{t}", d, (t, t))
    for op, ftz, t in product(COMPARISONS, FTZ, ("f16x2", "bf16x2")):
        yield Case(f"setp.{op}{ftz}.{t}", "pred", (t, t), "%out|%two, %in0, %in1")
    for op, both, t in product(COMPARISONS[:6], ("and", "or", "xor"), ("s32", "f32", "f16")):
        yield Case(f"setp.{op}.{both}.{t}", "pred", (t, t, "pred"), "%out|%two, %in0, %in1, %in2")
        yield Case(f"setp.{op}.{both}.{t}", "pred", (t, t, "pred"), "%out, %in0, %in1, !%in2")


def _conversions() -> Iterator[Case]:
    modes = ("", ".rn", ".rz", ".rm", ".rp", ".rna", ".rni", ".rzi", ".rmi", ".rpi")
    for (mode, more), to, of in product(
        _mixed(modes, (".ftz", ".sat", ".satfinite", ".relu", ".satfinite.relu")), ALL, ALL
    ):
        pair = to.endswith("x2") and of == "f32"
        yield Case(f"cvt{mode}{more}.{to}.{of}", to, (of, of) if pair else (of,))
    for to, of, out in product(
        ("u8", "s8", "u16", "s16", "u32", "s32"), ("u8", "s8", "s16", "u16", "s32", "s64", "f32"), ("b32", "b64")
    ):
        mode = ".rzi" if of == "f32" else ""
        yield Case(f"cvt{mode}.{to}.{of}", out, (of,))


def _memory() -> Iterator[Case]:
    for t, size in product((*ALL, "b8", "b128"), BITS):
        yield Case(f"ld.global.{t}", size, (size,), "%out, [%at0]")
        yield Case(f"ld.global.relaxed.gpu.{t}", size, (size,), "%out, [%at0]")
        yield Case(f"st.global.{t}", size, (size,), "[%to], %in0")
    for op, t in product(("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec"), ALL):
        noftz = ".noftz" if op == "add" and t in FLOATS[:4] else ""
        yield Case(f"atom.global.{op}{noftz}.{t}", t, (t, t), "%out, [%at0], %in1")
        yield Case(f"red.global.{op}{noftz}.{t}", t, (t, t), "[%at0], %in1")
    for t in ALL:
        yield Case(f"atom.global.cas.{t}", t, (t, t, t), "%out, [%at0], %in1, %in2")


def _warps() -> Iterator[Case]:
    for mode, limit, t in product(
        ("up", "down", "bfly", "idx"), ("0x1f", "0", "0x1c03", "0x181f", "0x1800", "0x0f"), ALL
    ):
        yield Case(f"shfl.sync.{mode}.{t}", t, (t, "lane"), f"%out|%two, %in0, %in1, {limit}, 0xffffffff")
    for t in ALL:
        for op in ("add", "min", "max", "and", "or", "xor"):
            yield Case(f"redux.sync.{op}.{t}", t, (t,), "%out, %in0, 0xffffffff")
        yield Case(f"match.any.sync.{t}", "b32", (t,), "%out, %in0, 0xffffffff")
        yield Case(f"match.all.sync.{t}", "b32", (t,), "%out|%two, %in0, 0xffffffff")
        for mode in ("all", "any", "uni", "ballot"):
            yield Case(
                f"vote.sync.{mode}.{t}", "b32" if mode == "ballot" else "pred", ("pred",), "%out, !%in0, 0xffffffff"
            )


# -- kernels and operands --------------------------------------------------------------------------------------------


def size(kind: str) -> int:
    """Bytes of a type's elements in memory; predicates and shifts are words, bytes lie in halves."""
    return max(2, (32 if kind in ("pred", "shift", "lane") else TYPE_BITS[kind]) // 8)


def entry(case: Case, name: str) -> str:
    """A kernel around one instruction: arrays of its operands, then of its results."""
    kinds = (*case.given, case.result)
    places = [*(f"%at{i}" for i in range(len(case.given))), "%to"]
    parts = [
        ".reg .pred %two;",
        ".reg .b32 %i<4>;",
        "mov.u32 %i0, %ctaid.x;",
        "mov.u32 %i1, %tid.x;",
        f"mad.lo.u32 %i0, %i0, {THREADS}, %i1;",
        "setp.ne.u32 %two, %i0, %i0;",
    ]
    for n, (kind, place) in enumerate(zip(kinds, places, strict=True)):
        register = "%out" if place == "%to" else f"%in{n}"
        width = 8 * size(kind)
        parts += [
            f".reg .{'pred' if kind == 'pred' else f'b{width}'} {register};",
            f".reg .b64 {place};",
            f"ld.param.u64 {place}, [p{n}];",
            f"mad.wide.u32 {place}, %i0, {width // 8}, {place};",
        ]
        if place != "%to" and kind == "pred":
            parts += [f"ld.global.u32 %i2, [{place}];", f"setp.lt.s32 {register}, %i2, 0;"]
        elif place != "%to":
            parts.append(f"ld.global.b{width} {register}, [{place}];")
    parts.append(case.text)
    if case.result == "pred":
        parts += [
            "selp.u32 %i2, 1, 0, %out;",
            "selp.u32 %i3, 2, 0, %two;",
            "add.u32 %i2, %i2, %i3;",
            "st.global.u32 [%to], %i2;",
        ]
    elif not case.stores and "%out" in case.text:
        parts.append(f"st.global.b{8 * size(case.result)} [%to], %out;")
    listed = ", ".join(f".param .u64 p{i}" for i in range(len(kinds)))
    return f".visible .entry {name}({listed})\n{{\n" + "\n".join(parts) + "\nret;\n}\n"


HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def operands(case: Case) -> list[np.ndarray[Any, Any]]:
    """Edges and random patterns of each operand, and an empty result."""
    rng = np.random.default_rng(len(case.form))
    arrays = [_patterns(kind, rng) for kind in case.given]
    if re.match(r"div|rem", case.form) and case.result not in FLOATS:  # what these give for 0 is not defined, nor the
        arrays[1][np.isin(arrays[1] + np.array(1, arrays[1].dtype), (0, 1))] = 3  # least integer by -1
    if case.form.startswith(("sin", "cos")):  # they are approximations of small angles
        angles = arrays[0].view(np.float32)
        angles[np.isfinite(angles) & (np.abs(angles) > 3)] = 3
    return [*arrays, np.zeros(COUNT, f"u{size(case.result)}")]


def _patterns(kind: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    width = size(kind)
    made = rng.integers(0, 1 << 63, COUNT, np.uint64) << np.uint64(1) | rng.integers(0, 2, COUNT, np.uint64)
    if kind in ("shift", "lane"):
        counts = (0, 1, 5, 7, 8, 15, 16, 17, 24, 31, *((32, 33, 40, 63, 64, 65, 100, 255) if kind == "shift" else ()))
        made = rng.choice(np.array(counts, np.uint64), COUNT)
    elif kind in NUMPY:
        one = np.dtype(NUMPY[kind])
        count = COUNT * (width // one.itemsize)
        with np.errstate(all="ignore"):
            flat = (rng.standard_normal(count) * 2.0 ** rng.integers(-8, 9, count)).astype(one)
            at = rng.permutation(count)[: count // 3]
            flat[at] = rng.choice(np.array(EDGES), at.size).astype(one)
        made = flat.view(f"u{width}").astype(np.uint64)
    else:
        bits = 8 * width
        near = (0, 1, 2, 31, 32, 127, 128, 255, 256, 1 << bits - 1)
        edges = np.array([v % (1 << bits) for e in near for v in (e, -e)], np.uint64)
        at = rng.permutation(COUNT)[: COUNT // 3]
        made[at] = rng.choice(edges, at.size)
        at = rng.permutation(COUNT)[: COUNT // 4]
        made[at] = rng.integers(0, 300, at.size).astype(np.uint64)
    return made.astype(f"u{width}")


# -- verdicts --------------------------------------------------------------------------------------------------------


def assembled() -> tuple[Any, dict[str, Case]]:
    """The cubin of all cases that are PTX for the assembler, and these by the names of their kernels."""
    core: Any = importlib.import_module("cuda.core")
    found = {f"form_{number}": case for number, case in enumerate(dict.fromkeys(cases()))}
    texts = {name: entry(case, name) for name, case in found.items()}
    while True:
        try:
            options = core.ProgramOptions(arch="sm_90a")
            return core.Program(HEAD + "".join(texts.values()), "ptx", options).compile("cubin"), found
        except Exception as error:
            lines = {int(n) for n in re.findall(r"line (\d+); error", str(error))}
            if not lines:
                raise
        at = HEAD.count("\n") + 1
        for name, body in list(texts.items()):
            end = at + body.count("\n")
            if not lines.isdisjoint(range(at, end)):
                del texts[name], found[name]
            at = end


def equal(case: Case, mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> str:
    """'' where the results are the same, else what differs."""
    kind = case.result if case.result in NUMPY else ""
    a, c = (x.view(NUMPY[kind]) if kind else x for x in (mine, theirs))
    same = a.view(f"u{a.itemsize}") == c.view(f"u{c.itemsize}")
    if kind:
        same |= np.isnan(a) & np.isnan(c)
    if kind and re.search(r"approx|div\.full", case.form):
        with np.errstate(all="ignore"):
            x, y = a.astype(np.float64), c.astype(np.float64)
            least = max(
                float(ml_dtypes.finfo(np.dtype(NUMPY[kind])).tiny), 0.5 * bool(re.match("sin|cos|lg2", case.form))
            )
            same |= np.abs(x - y) <= (5e-4 if "tanh.approx.f32" in case.form else TOLERANCE[kind]) * np.maximum(
                np.abs(y), least
            )
    if same.all():
        return ""
    i = int(np.flatnonzero(~same)[0])
    return f"{int((~same).sum())} of {same.size}, the first at {i}: {a[i]} is {c[i]} on the GPU"


def main() -> int:
    """Read, assemble, run and compare."""
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="assemble and emulate, launch nothing")
    options = parser.parse_args()
    code, found = assembled()
    gpu = None if options.dry_run else Gpu()
    differing: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, case in found.items():
        given = operands(case)
        mine = [x.copy() for x in given]
        try:
            run = check_ptx(HEAD + entry(case, name), COUNT // THREADS, THREADS, mine)
        except PtxError as error:
            refused[case.text] = str(error).rsplit(": ", 1)[-1]
            continue
        except Exception as error:
            differing[case.text] = repr(error)[:200]
            continue
        why = [str(finding) for finding in run.findings]
        if gpu is not None:
            kernel = code.get_kernel(name)
            theirs = gpu.run(lambda a, k=kernel: gpu.launch(k, COUNT // THREADS, THREADS, 0, a), run.program, given)
            why += [equal(case, a, c.view(a.dtype)) for a, c in zip(mine, theirs, strict=True)]
        if any(why):
            differing[case.text] = next(filter(None, why))
    print(f"{len(found)} forms: {len(refused)} refused, {len(differing)} differ")
    for text, why in differing.items():
        print(f"{text} {why}")
    write(options.out / "ptx-forms.json", {"forms": len(found), "differing": differing, "refused": refused})
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
