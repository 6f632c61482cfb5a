"""The table of conversions and moves: between types, within a register's bits, packed pairs, special registers.

Registers of Programs move and convert by forms of C++ (``mov.f32``, ``mov.b32.f32.u32``, ``cvt.pred.u32``), all else by
PTX's. 8-bit integers are in registers of 16 (read) and 32 bits (written).

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``cvt``, ``mov``, ``prmt``),
"Special Registers".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, bf16, f16, pred, s8, s32, u8, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa import poison
from warploom.isa.cpp import ANY, EQUALITY, PREFIX, PRIMARY, SUM, Expression
from warploom.isa.effects import ReadSpecial
from warploom.isa.form import REGISTER, REGISTERS, Array, common, form, takes, viewed
from warploom.isa.instruction import Instruction, instruction, named
from warploom.isa.meanings import (
    DIRECTED,
    HALVES,
    ROUND_TO_INTEGRAL,
    UNARY_MEANINGS,
    f16_to_fp8,
    flush_subnormal,
    fp8_to_f16,
    half_to_f32,
    pack_halves,
    packed,
    pair_without_negatives,
    permute,
    saturated,
    single_to_odd,
    single_towards,
    to_fp8,
)

Rounding = Literal["rzi", "rni", "rmi", "rpi"]
_INTRINSIC = {"s32": "int", "u32": "uint", "s64": "ll", "u64": "ull"}
_BYTES = {"u8": (u16, u32, "unsigned char"), "s8": (u16, s32, "signed char")}
"""8-bit type → the registers that it is read from and written to, and C++'s name of it."""


# Numbers of one type as those of another


def _registers(i: Instruction) -> dict[str, DType]:
    source, to = DTYPES[i.source], DTYPES[i.to]
    if i.fields.get("sat") and source.is_integer and to.is_integer:
        own, most = np.iinfo(source.numpy), np.iinfo(to.numpy)
        if most.min <= own.min and own.max <= most.max:
            raise VerifyError(f"every {source} is a {to}: leave .sat out")
    from_byte, to_byte = _BYTES.get(i.source), _BYTES.get(i.to)
    return {
        "of_a": from_byte[0] if from_byte else REGISTER[i.source],
        "of_d": to_byte[1] if to_byte else REGISTER[i.to],
    }


def _integer(x: Array, to: np.dtype[Any], rounding: str, narrow: bool) -> Array:
    """Floats as integers: those beyond the range become its nearest end, where NumPy's casts are undefined.

    A NaN becomes 0 where both types have at most 32 bits (``narrow``), else the integer whose highest bit alone is set.
    """
    info = np.iinfo(to)
    whole = np.nan_to_num(ROUND_TO_INTEGRAL[rounding](x.astype(np.float64)), nan=0.0)
    clipped = np.clip(whole, float(info.min), float(info.max))
    at_top = clipped >= float(info.max)
    found = np.where(at_top, info.max, np.where(at_top, 0, clipped).astype(to))
    of_nan = 0 if narrow else info.min if info.min else info.max // 2 + 1
    return np.where(np.isnan(x), to.type(of_nan), found)


def _converted(i: Instruction) -> Callable[[Array], Array]:
    """``cvt``; ``.ftz`` flushes what is f32, ``.sat`` holds an f32 within 0 and 1 and an integer within its type."""
    source, to, half = DTYPES[i.source], DTYPES[i.to], HALVES.get(i.source)
    ftz, sat, rounding = (str(i.fields.get(name, "")) for name in ("ftz", "sat", "rnd"))

    def meaning(x: Array) -> Array:
        number = half_to_f32(x, half) if half is not None else x.astype(source.numpy, copy=False)
        number = flush_subnormal(number) if ftz and i.source == "f32" else number
        if to.is_integer:
            if source.is_float:
                return _integer(number, np.dtype(to.numpy), rounding, max(source.bits, to.bits) <= 32)
            if sat:
                own, most = np.iinfo(source.numpy), np.iinfo(to.numpy)
                number = np.clip(number, max(own.min, most.min), min(own.max, most.max))
            return number.astype(to.numpy)
        number = ROUND_TO_INTEGRAL[rounding](number) if rounding in ROUND_TO_INTEGRAL else number
        if rounding in DIRECTED:
            number = single_towards(number, rounding)
        if i.to in HALVES:
            exact = number if number.dtype == np.float32 else single_to_odd(number.astype(np.float64))
            return np.ascontiguousarray(exact).astype(to.numpy).view(np.uint16)
        number = number.astype(to.numpy)
        number = flush_subnormal(number) if ftz and i.to == "f32" else number
        return saturated(number) if sat else number

    return meaning


def _is_plain(i: Instruction) -> bool:
    """Whether C++ converts these types, and without more ado."""
    return not (i.fields.get("ftz") or i.fields.get("sat") or {i.source, i.to} & HALVES.keys())


def _cast(i: Instruction) -> Expression | None:
    """A C++ cast, or the function that rounds."""
    rounding = i.fields.get("rnd", "")
    if not _is_plain(i) or i.source == i.to or rounding in DIRECTED:
        return None
    if rounding in ("rni", "rmi", "rpi"):
        if i.to not in _INTRINSIC:
            return None
        way = {"rni": "rn", "rmi": "rd", "rpi": "ru"}[rounding]
        return Expression(f"__{DTYPES[i.source].cuda}2{_INTRINSIC[i.to]}_{way}({{0}})", PREFIX, (PREFIX,))
    byte = _BYTES.get(i.source) or _BYTES.get(i.to)
    return Expression(f"({i.of_d.cuda}){f'({byte[2]})' if byte else ''}{{0}}", PREFIX, (PREFIX,))


def _widens(i: Instruction) -> Any:
    """An integer that becomes one of a larger type stays as it is."""
    return (lambda x: x) if DTYPES[i.to].bits >= DTYPES[i.source].bits else None


def _extended(i: Instruction, *given: Any) -> tuple[Array, ...] | None:
    """Between integers the shadow converts as the value does: a poisoned sign poisons all bits it extends to."""
    return None if i.sat else poison.moved(1)(i, *given)


def _plain(i: Instruction) -> str:
    """Programs leave out the rounding that C++'s conversion has."""
    if not _is_plain(i):
        return ""
    return f"cvt.{i.to}.{i.source}" if i.rnd in ("rzi", "rn") else i.ptx_name


INTEGER, INTEGRAL, DIRECTIONS = "u8 s8 u16 s16 u32 s32 u64 s64", "rni rzi rmi rpi", "rn rz rm rp"
CONVERTED = common(let=_registers, choose=_converted, call=_cast)
PLACES = "d:of_d, a:of_a"
form(f"cvt{{.sat}}.{{to}}.{{source}} {PLACES}", CONVERTED, to=INTEGER, source=INTEGER, shadow=_extended, exact=_widens)
for rounds, flags, to, source in (
    (INTEGRAL, "{.ftz}{.sat}", INTEGER, "f32"),
    (INTEGRAL, "{.sat}", INTEGER, "f16 f64"),
    (INTEGRAL, "", "u16 s16 u32 s32 u64 s64", "bf16@sm_90"),
    (DIRECTIONS, "{.ftz}{.sat}", "f32", f"{INTEGER} f64"),
    ("rn", "", "f64 f16", INTEGER),
    ("rn", "", "bf16@sm_90", "u16 s16 u32 s32"),
    ("rn", "", "f16 bf16@sm_90", "f64"),
    ("rn", "", "f16 bf16", "f32"),
    ("rn", "", "bf16@sm_90", "f16"),
    ("rn", "", "f16@sm_90", "bf16"),
):
    form(f"cvt.{{rnd}}{flags}.{{to}}.{{source}} {PLACES}", CONVERTED, rnd=rounds, to=to, source=source, name=_plain)
for pattern, to, source in (
    ("cvt{.ftz}.{to}.{source}", "f64", "f32"),
    ("cvt.{to}.{source}", "f64", "f16 bf16@sm_90"),
    ("cvt{.ftz}{.sat}.{to}.{source}", "f32", "f16"),
    ("cvt.{to}.{source}", "f32", "bf16"),
    ("cvt{.rnd}{.ftz}{.sat}.{to}.{source}", "f32", "f32"),
    ("cvt{.rnd}.{to}.{source}", "f64", "f64"),
    ("cvt{.rnd}.{to}.{source}", "f16", "f16"),
):
    form(f"{pattern} {PLACES}", CONVERTED, rnd=INTEGRAL, to=to, source=source)
form("cvt.rna.tf32.f32 d:u32, a:f32", meaning=UNARY_MEANINGS["tf32"])

# Predicates
NUMBERS = "u16 s16 u32 s32 u64 s64 f32 f64"
TRUTH = common(choose=_converted, ptx=False)
form("cvt.{to}.{source} d:to, a:source", TRUTH, to=NUMBERS, source="pred", let=_registers, call=_cast)
form(
    "cvt.{to}.{source} d:to, a:source",
    to="pred",
    source=NUMBERS,
    meaning=lambda x: x.astype(np.bool_),
    call=lambda _: Expression("{0} != 0", EQUALITY, (SUM,)),
    ptx=False,
)


def convert(source: DType, dtype: DType, rounding: Rounding = "rzi") -> Instruction:
    """A conversion by value: integers widen, narrow (wrapping) or become floats; floats become integers.

    ``rounding`` is PTX's, and other than rzi of a float to an integer of 32 or 64 bits alone: rzi truncates, rni takes
    the nearest (of two the even one), rmi and rpi go down and up.
    """
    for t in (source, dtype):
        takes("a conversion", t, REGISTERS)
    if rounding != "rzi" and not (source.is_float and dtype.name in _INTRINSIC):
        raise VerifyError(f"{rounding} rounds f32 and f64 to s32, u32, s64 and u64, not {source} to {dtype}")
    if pred in (source, dtype):
        return named(f"cvt.{dtype}.{source}", ptx=False)
    if source.is_float:
        how = "" if dtype.bits > source.bits and dtype.is_float else "rn." if dtype.is_float else f"{rounding}."
    else:
        how = "rn." if dtype.is_float else ""
    return named(f"cvt.{how}{dtype}.{source}")


# Pairs of 16-bit floats and of fp8, bytes. PTX names the high part first, Programs the low one.


def _high_first(i: Instruction, results: Any, operands: Any) -> str:
    low, high, *more = zip(i.operand_types, operands, strict=True)
    places = ", ".join(f"%{n}" for n in range(1 + len(operands)))
    return i.statement(f"{i.mnemonic} {places};", results, (high, low, *more))


for pair, half in (("f16x2", f16), ("bf16x2", bf16)):
    form(
        f"cvt.rn.{pair}.f32 d:u32, high:f32, low:f32",
        operands="low high",
        meaning=lambda low, high, half=half: pack_halves(half, low, high),
        shadow=poison.packed,
        statement=_high_first,
    )
    form(f"cvt.rn.relu.{pair}.f32 d:u32, a:f32, b:f32", meaning=pair_without_negatives(half))
FP8 = {"fp8": "e4m3x2 e5m2x2", "since": "sm_90"}
form("cvt.rn.satfinite{.relu}.{fp8}.f32 d:fp8, a:f32, b:f32", FP8, choose=lambda i: to_fp8(i.fp8, bool(i.relu)))
form("cvt.rn.satfinite{.relu}.{fp8}.f16x2 d:fp8, a:f16x2", FP8, choose=lambda i: f16_to_fp8(i.fp8, bool(i.relu)))
form("cvt.rn{.relu}.f16x2.{fp8} d:f16x2, a:fp8", FP8, choose=lambda i: fp8_to_f16(i.fp8, bool(i.relu)))


def pack_pair(half: DType) -> Instruction:
    """Two f32 values (low, high) rounded to nearest even into one u32; beyond the range of f16 they are infinite."""
    return named(f"cvt.rn.{half}x2.f32")


def _packed_bytes(i: Instruction) -> Any:
    info = np.iinfo(DTYPES[i.byte].numpy)

    def pack(low: Array, high: Array, word: Array) -> Array:
        low, high = (np.clip(x, info.min, info.max).astype(np.uint32) & np.uint32(0xFF) for x in (low, high))
        return word << np.uint32(16) | high << np.uint32(8) | low

    return pack


form(
    "cvt.pack.sat.{byte}.s32.b32 d:u32, high:s32, low:s32, word:u32",
    byte="s8 u8",
    operands="low high word",
    choose=_packed_bytes,
    statement=_high_first,
)


def pack_bytes(byte: DType) -> Instruction:
    """Two s32 (low, high), clamped to s8 or u8, below the low half of a word that moves up by 16 bits."""
    takes("cvt.pack", byte, (s8, u8))
    return named(f"cvt.pack.sat.{byte}.s32.b32")


def _unpacked(i: Instruction) -> Expression | None:
    """bf16 is the upper half of an f32; f16 takes a ``cvt``."""
    bits = "{0} & 0xffff0000u" if i.part == "high" else "{0} << 16"
    return Expression(f"__uint_as_float({bits})", PRIMARY, (PREFIX,)) if i.type == "bf16" else None


def _widened(i: Instruction) -> Callable[[Array], Array]:
    shift, half = np.uint32(16 * (i.part == "high")), HALVES[i.type]
    return lambda x: half_to_f32((x >> shift).astype(np.uint16), half)


def _first_or_second(i: Instruction) -> str:
    return "{unused, half}" if i.part == "high" else "{half, unused}"


form(
    "cvt.f32.{type}.{part} d:f32, a:u32",
    type="f16 bf16",
    part="low high",
    choose=_widened,
    shadow=poison.unpacked,
    call=_unpacked,
    inline=lambda i: f"{{ .reg .b16 half, unused; mov.b32 {_first_or_second(i)}, %1; cvt.f32.f16 %0, half; }}",
    ptx=False,
)


def unpack_half(half: DType, which: int) -> Instruction:
    """One half (0 low, 1 high) of a packed pair as f32, exactly."""
    return named(f"cvt.f32.{half}.{'high' if which else 'low'}", ptx=False)


# Bits that move

MOVES = common(moves_bits=True, ptx=False)
form(
    "mov.{type} d, a",
    type=f"b16 b32 b64 {' '.join(t.name for t in REGISTERS)}",
    registers="width",
    name="mov.{home}",
    meaning=lambda x: x,
    let=lambda _: {"copies": True},
    call=lambda _: Expression("{0}", ANY, (PRIMARY,)),
    exact=lambda _: lambda x: x,
    gradient=lambda _: lambda k, y, g, x: (g,),
    moves_bits=True,
)
_BITCAST = {
    ("f32", "u32"): "__float_as_uint({0})",
    ("u32", "f32"): "__uint_as_float({0})",
    ("f32", "s32"): "__float_as_int({0})",
    ("s32", "f32"): "__int_as_float({0})",
    ("f64", "s64"): "__double_as_longlong({0})",
    ("s64", "f64"): "__longlong_as_double({0})",
    ("f64", "u64"): "(unsigned long long)__double_as_longlong({0})",
    ("u64", "f64"): "__longlong_as_double((long long)({0}))",
}


def _reinterpreted(i: Instruction) -> Expression:
    text = _BITCAST.get((i.source, i.to), f"({REGISTER[i.to].cuda}){{0}}")
    return Expression(text, PREFIX, (PREFIX,))


for bits, types in (("b16", "u16 s16"), ("b32", "u32 s32 f32"), ("b64", "u64 s64 f64")):
    form(
        f"mov.{bits}.{{source}}.{{to}} d:to, a:source",
        MOVES,
        source=types,
        to=types,
        choose=lambda i: lambda x: viewed(x, REGISTER[i.to].numpy),
        call=_reinterpreted,
    )


def move(dtype: DType) -> Instruction:
    """A copy of one register: how a mutable register is set and how its value is kept."""
    return named(f"mov.{dtype}")


def bitcast(source: DType, dtype: DType) -> Instruction:
    """``mov`` between registers of two types of one width, which keeps the bits."""
    for t in (source, dtype):
        takes("a conversion", t, REGISTERS)
    return named(f"mov.b{dtype.bits}.{source}.{dtype}", ptx=False)


def _joined(*parts: Array) -> Array:
    """Registers as the parts of one, the low one first."""
    if len(parts) > 2:
        return _joined(_joined(*parts[:2]), _joined(*parts[2:]))
    return packed(*parts)


def _split(i: Instruction) -> Any:
    part = i.result_types[0].numpy
    return lambda x: tuple(np.moveaxis(np.ascontiguousarray(x)[..., None].view(part), -1, 0))


for count, bits, part in ((2, "b32", "b16"), (2, "b64", "b32"), (4, "b64", "b16")):
    form(f"mov.{bits} d, a*{count}:{part}", name=f"mov.{bits}.combine", meaning=_joined, moves_bits=True)
    form(f"mov.{bits} d*{count}:{part}, a", choose=_split, moves_bits=True)


def _part_type(i: Instruction) -> dict[str, Any]:
    part = u16 if i.bits == "b32" else u32
    return {"part_type": part, "shift": REGISTER[i.bits].numpy.type(part.bits)}


form(
    "mov.{bits}.{part} d:part_type, a:bits",
    MOVES,
    bits="b32 b64",
    part="low high",
    let=_part_type,
    choose=lambda i: lambda x: (x >> i.shift if i.part == "high" else x).astype(i.part_type.numpy),
    inline=lambda i: (
        f"{{ .reg .b{i.part_type.bits} half, unused; mov.{i.bits} {_first_or_second(i)}, %1; "
        f"mov.b{i.part_type.bits} %0, half; }}"
    ),
)


def half_of(dtype: DType, which: int) -> Instruction:
    """One half (0 low, 1 high) of a register of type ``dtype``, u32 or u64."""
    return named(f"mov.b{dtype.bits}.{'high' if which else 'low'}", ptx=False)


def _picked(i: Instruction) -> Any:
    """Four bytes of two registers by the nibbles of an immediate: 0 to 3 of the first register, 4 to 7 of the second.

    Signs do not replicate.
    """
    if not 0 <= i.selector <= 0x7777 or i.selector & 0x8888:
        raise VerifyError(f"prmt picks four of the bytes 0 to 7, one a hex digit, not {i.selector:#x}")
    return lambda low, high: permute(low, high, np.array(i.selector, np.uint32))


form(
    "prmt.b32 d, a, b, #selector",
    MOVES,
    name=lambda i: f"prmt.b32.{i.selector:#06x}",
    choose=_picked,
    call=lambda i: Expression(f"__byte_perm({{0}}, {{1}}, {i.selector:#x})", PRIMARY, (ANY, ANY)),
)


# Special registers: who a thread is


FULL_MASK = 0xFFFFFFFF

SPECIAL_REGISTERS: dict[str, tuple[DType, str]] = {
    "tid.x": (u32, "threadIdx.x"),
    "ctaid.x": (u32, "blockIdx.x"),
    "ctaid.y": (u32, "blockIdx.y"),
    "ctaid.z": (u32, "blockIdx.z"),
    "nctaid.x": (u32, "gridDim.x"),
    "nctaid.y": (u32, "gridDim.y"),
    "nctaid.z": (u32, "gridDim.z"),
    "cluster_ctarank": (u32, "__clusterRelativeBlockRank()"),
    "cluster_nctarank": (u32, "__clusterSizeInBlocks()"),
    **{f"cluster_ctaid.{axis}": (u32, f"__clusterRelativeBlockIdx().{axis}") for axis in "xyz"},
    **{f"clusterid.{axis}": (u32, f"__clusterIdx().{axis}") for axis in "xyz"},
    "shared_base": (u32, "(unsigned)__cvta_generic_to_shared(shared_memory)"),
    "local_base": (u32, "(unsigned)__cvta_generic_to_local(local_memory)"),
    "smid": (u32, '[] {{ unsigned d; asm("mov.u32 %0, %%smid;" : "=r"(d)); return d; }}()'),
    "clock64": (u64, "(unsigned long long)clock64()"),
}
"""Name → (type, CUDA C++): what :func:`special` can read. ``shared_base`` is the address of dynamic shared memory,
``local_base`` of a thread's own. The emulator's ``smid`` is 0 for all, as every CTA may run on one SM.

``clusterid`` is the cluster's place in the grid of clusters, ``cluster_ctaid`` the CTA's in its cluster,
``cluster_ctarank`` the same as one number, x fastest.
"""


_SPECIAL = form(
    "special.{register} d:kind",
    register=" ".join(f"{name}@sm_90" if name.startswith("cluster") else name for name in SPECIAL_REGISTERS),
    let=lambda i: {"kind": SPECIAL_REGISTERS[i.register][0]},
    call=lambda i: Expression(SPECIAL_REGISTERS[i.register][1], PREFIX, ()),
    effects=lambda i: (ReadSpecial(i.register),),
    ptx=False,
)
form(
    "mov.u64.clock64 d",
    inline=lambda _: "mov.u64 %0, %%clock64;",  # volatile: it stays where it is written, and two are never joined
    effects=(ReadSpecial("clock64"),),
    asm="volatile memory",
    ptx=False,
)


def special(register: str) -> Instruction:
    """The value of a special register (a key of :data:`SPECIAL_REGISTERS`)."""
    return instruction(_SPECIAL, ("special", register))
