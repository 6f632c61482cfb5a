"""The table of accesses to memory, and of addresses: loads, stores, atomics, prefetches; state spaces and clusters.

A load gives words of 32 bits or more in the type of its registers, and extends single bytes and halves to u32. Access
and registers have the same bits, whatever type the text names, so that Programs name them by their width.

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``ld``, ``ldu``, ``st``, ``prefetch``, cache operators
and eviction hints), "Parallel Synchronization and Communication Instructions" (``atom``, ``red``),
"Generic Addressing" (``cvta``, ``isspacep``), ``mapa``, ``st.async``.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from numbers import Integral
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, f32, s64, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.cpp import address
from warploom.isa.effects import Access, AsyncStore, GlobalWait, MemoryOrder, ReadSpecial, Scope, Space
from warploom.isa.form import REGISTER, TYPE_BITS, Array, common, form, viewed
from warploom.isa.instruction import Instruction, named
from warploom.isa.meanings import BINARY_MEANINGS, flush_subnormal
from warploom.isa.poison import unsigned_bits

MOST_BYTES = 16
"""What one thread moves in one access."""
CACHE_HINTS = {
    "": "",
    **{name: f".{name}" for name in ("ca", "cg", "cs", "lu", "cv", "nc", "wb", "wt")},
    **{name: f".L1::{name}" for name in ("no_allocate", "evict_first", "evict_last")},
    "nc.no_allocate": ".nc.L1::no_allocate",
}
"""Names of cache operators and L1 eviction hints → PTX qualifiers (``ld``: ca cg cs lu cv nc; ``st``: wb cg cs wt)."""
_ELEMENTS = "b8 u8 s8 b16 u16 s16 b32 u32 s32 b64 u64 s64 f32 f64"
_HALVES = "f16 bf16@sm_90 f16x2 bf16x2@sm_90"
_SPACES: dict[str, Space] = {"local": "local", **dict.fromkeys(("shared", "shared::cta", "shared::cluster"), "shared")}


def register_type(element: DType) -> DType:
    """The register type a loaded element of ``element`` arrives in: sub-word elements zero-extend into u32."""
    return u32 if element.bits < 32 else element


def _moved(i: Instruction) -> dict[str, Any]:
    count, bits = int((i.fields.get("vec") or "v1")[1:]), TYPE_BITS[i.type]
    if count * bits > 8 * MOST_BYTES:
        raise VerifyError(f"one access moves at most {MOST_BYTES} bytes, not {count} of .{i.type}")
    return {"count": count, "bytes": count * bits // 8, "element": i.home}


def _access(i: Instruction) -> tuple[Access, ...]:
    mode: Any = {"ld": "load", "ldu": "load", "st": "store"}.get(i.op, "atomic")
    access = Access(
        _SPACES.get(i.fields.get("space", ""), "global"),
        mode,
        0,
        i.bytes,
        i.offset,
        words=i.count,
        order=i.fields.get("order") or ("relaxed" if mode == "atomic" else "weak"),
        scope=i.fields.get("scope") or "gpu",
        read_only="nc" in i.words,
        volatile="volatile" in i.words,
        remote="shared::cluster" in i.words,
    )
    return (access,)


def _loaded(i: Instruction) -> Callable[[Array], tuple[Array, ...]]:
    """The registers, of the words that are read, shape (warps, lanes, words): by their sign where they are wider."""
    register, bits = i.element, TYPE_BITS[i.type]
    element = register.numpy if register.bits == bits else np.dtype(f"{'i' if i.type[0] == 's' else 'u'}{bits // 8}")

    def registers(words: Array) -> tuple[Array, ...]:
        parts = (np.ascontiguousarray(words[..., n]).view(element) for n in range(i.count))
        return tuple(part.astype(register.numpy, copy=False) for part in parts)

    return registers


def _stored(i: Instruction) -> Callable[..., Array]:
    """The words to write, shape (warps, lanes, words): the low bits of the registers."""
    word = np.dtype(f"u{TYPE_BITS[i.type] // 8}")

    def words(*registers: Array) -> Array:
        return np.stack([unsigned_bits(x).astype(word, copy=False) for x in registers], axis=-1)

    return words


# Loads and stores. What changes the cache's lines alone is not said of an access.

MEMORY = common(let=_moved, effects=_access, registers="width", asm="volatile memory")
SHARED = "shared shared::cta shared::cluster@sm_90"
ANYWHERE, ORDERED = f"global const {SHARED} local", f"global {SHARED}"
SCOPES = "cta gpu sys cluster@sm_90"
HINTS = common(
    type=_ELEMENTS,
    vec="v2 v4",
    scope=SCOPES,
    evict="L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    prefetch="L2::64B L2::128B L2::256B",
    hint="L2::cache_hint",
    moves_bits=True,
)
LOAD = common(choose=_loaded, space=ANYWHERE, order="relaxed acquire", **HINTS, **MEMORY)
READ, GLOBAL = "{.hint}{.prefetch}{.vec}.{type} d*vec:element, [at], policy:b64?hint", LOAD | {"space": "global"}
form("ld{.weak}.{space}{.vec}.{type} d*vec:element, [at]", LOAD, space=f"const {SHARED} local")
form("ld{.weak}{.space}.{cache}{.vec}.{type} d*vec:element, [at]", LOAD, cache="ca cg cs lu cv")
form(f"ld{{.weak}}{{.space}}{{.evict}}{READ}", GLOBAL)
form(f"ld.{{space}}.{{cache}}.nc{READ}", GLOBAL, cache="ca cg cs")
form(f"ld.{{space}}.nc{{.evict}}{READ}", GLOBAL)
form(f"ld.{{order}}.{{scope}}{{.space}}{{.evict}}{READ}", GLOBAL)
form("ld.{order}.{scope}.{space}{.vec}.{type} d*vec:element, [at]", LOAD, space=ORDERED.removeprefix("global "))
form("ld.volatile{.space}{.vec}.{type} d*vec:element, [at]", LOAD, space=ORDERED)
form("ld.param{.vec}.{type} d*vec:element, [at]", LOAD)
form("ldu{.space}{.vec}.{type} d*vec:element, [at]", GLOBAL)

STORE = common(choose=_stored, space=ANYWHERE.replace("const ", ""), **HINTS, **MEMORY)
STORE["order"] = "relaxed release"
form("st{.weak}.{space}{.vec}.{type} [at], a*vec:element", STORE, space=f"{SHARED} local")
form("st{.weak}{.space}.{cache}{.vec}.{type} [at], a*vec:element", STORE, cache="wb cg cs wt")
KEPT = "{.hint}{.vec}.{type} [at], a*vec:element, policy:b64?hint"
form(f"st{{.weak}}{{.space}}{{.evict}}{KEPT}", STORE, space="global")
form(f"st.{{order}}.{{scope}}{{.space}}{{.evict}}{KEPT}", STORE, space="global")
form("st.{order}.{scope}.{space}{.vec}.{type} [at], a*vec:element", STORE, space=ORDERED.removeprefix("global "))
form("st.volatile{.space}{.vec}.{type} [at], a*vec:element", STORE, space=ORDERED)


def check_vector(dtype: DType, count: int) -> None:
    """Raises VerifyError for so many elements as no access moves."""
    if not issubclass(type(count), Integral):  # a traced value has no truth value, so nothing is asked of it
        raise VerifyError(f"one access moves 1, 2 or 4 elements, a count known while tracing, not {count!r}")
    if count > 1 and dtype.bits < 32:
        words = f"1, 2 or 4 words of {32 // dtype.bits}"
        raise VerifyError(f"elements of {dtype} load and store one at a time; with dtype=u32 an access moves {words}")
    if count not in (1, 2, 4) or count * dtype.bytes > MOST_BYTES:
        raise VerifyError(f"one access moves 1, 2 or 4 elements and at most {MOST_BYTES} bytes, not {count} of {dtype}")


@lru_cache(maxsize=1 << 10, typed=True)
def _element_access(
    opcode: Literal["ld", "st"],
    space: Space,
    dtype: DType,
    count: int = 1,
    cache: str = "",
    order: MemoryOrder = "weak",
    scope: Scope = "gpu",
    volatile: bool = False,
    remote: bool = False,
) -> Instruction:
    """``ld`` or ``st`` of ``count`` consecutive elements.

    Operands: the address, u64 in global memory, else u32; for a store, then the registers of :func:`register_type`.
    ``volatile`` keeps an access as written: ptxas joins neighbouring ones of any other kind into wider ones. It orders
    nothing here (PTX gives it the ordering of a relaxed access, which no kernel should need). ``remote``: the address
    may lie in the shared memory of another CTA of the cluster, as ``mapa`` gives it.
    """
    check_vector(dtype, count)
    if cache not in CACHE_HINTS:
        raise VerifyError(f"{opcode} has no cache hint {cache!r}; there are {', '.join(filter(None, CACHE_HINTS))}")
    if cache and space == "shared":
        raise VerifyError(f"shared memory has no caches: leave out the hint {cache!r}")
    how = ".volatile" if volatile else "" if order == "weak" else f".{order}.{scope}"
    place = f"{'shared::cluster' if remote else space}{CACHE_HINTS[cache]}{f'.v{count}' if count > 1 else ''}"
    kind = f"{'b' if dtype.bits >= 32 else 'u'}{dtype.bits}"
    return named(f"{opcode}{how}.{place}.{kind}", register_type(dtype))


load = partial(_element_access, "ld")
store = partial(_element_access, "st")


# Atomics and reductions. The order in which lanes and warps apply is not defined; the emulator applies lanes in
# ascending order. Each element of a vector is one atomic operation.

_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    **BINARY_MEANINGS,
    "exch": lambda _, new: new,
    "inc": lambda old, most: np.where(old >= most, np.zeros_like(old), old + np.ones_like(old)),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - np.ones_like(old)),
}


def _swapped(old: Array, compare: Array, new: Array) -> Array:
    """``cas`` compares bits."""
    bits = f"u{old.dtype.itemsize}"
    return np.where(old.view(bits) == compare.view(bits), new, old)


def _combined(i: Instruction) -> Callable[..., Array]:
    """A function that gives an atomic's new value in memory, elementwise, of the old value and its operands.

    Sums of f32 in global memory flush subnormals to zero.
    """
    if "noftz" in i.words:
        half = DTYPES[i.type.removesuffix("x2")].numpy
        return lambda old, x: (viewed(old, half) + viewed(x, half)).view(old.dtype)
    if i.rmw == "add" and i.type == "f32" and "shared" not in i.fields.get("space", ""):
        return lambda old, x: flush_subnormal(flush_subnormal(old) + flush_subnormal(x))
    return _swapped if i.rmw == "cas" else _COMBINED[i.rmw]


def _atomic(i: Instruction) -> dict[str, Any]:
    if i.home is not None and i.home.is_float and i.rmw in ("and", "or", "xor"):
        raise VerifyError(f"atomic {i.rmw} takes integers, not {i.home}: convert the operand first")
    return {**_moved(i), "element": i.home or REGISTER[i.type], "combine": _combined(i)}


ATOMIC = MEMORY | common(scope=SCOPES, hint="L2::cache_hint", let=_atomic, registers="")
for opcode, d, orders in (("atom", "d, ", "relaxed acquire release acq_rel"), ("red", "", "relaxed release")):
    for space, hint, policy in (("{.space}", "{.hint}", ", policy:b64?hint"), (".{space}", "", "")):
        said = common(order=orders, space="global" if hint else SHARED, **ATOMIC)
        bits = said | {"registers": "width"}
        head, tail = f"{opcode}{{.order}}{{.scope}}{space}.{{rmw}}", f"{d}[at], a{policy}"
        form(f"{head}{hint}.{{type}} {tail}", said, rmw="add", type="u32 s32 f32 f64")
        form(f"{head}{hint}.{{type}} {tail}", bits, rmw="add", type="u64")
        form(f"{head}{hint}.{{type}} {tail}", said, rmw="min max", type="u32 s32 u64 s64")
        form(f"{head}{hint}.{{type}} {tail}", bits, rmw="and or xor exch" if d else "and or xor", type="b32 b64")
        form(f"{head}.{{type}} {d}[at], a", said, rmw="inc dec", type="u32")
        form(f"{head}.noftz{hint}.{{type}} {tail}", said, rmw="add", type=_HALVES)
    said = common(order=orders, space="global", rmw="add", vec="v2 v4 v8", since="sm_90", **ATOMIC)
    tail = f"{d.replace('d', 'd*vec:element')}[at], a*vec:element, policy:b64?hint"
    form(f"{opcode}{{.order}}{{.scope}}{{.space}}.{{rmw}}{{.hint}}.{{vec}}.{{type}} {tail}", said, type="f32")
    said["type"] = _HALVES
    form(f"{opcode}{{.order}}{{.scope}}{{.space}}.{{rmw}}.noftz{{.hint}}.{{vec}}.{{type}} {tail}", said)
form(
    "atom{.order}{.scope}{.space}.{rmw}.{type} d, [at], a, b",
    ATOMIC,
    rmw="cas",
    type="b16 b32 b64",
    order="relaxed acquire release acq_rel",
    space=ORDERED,
    registers="width",
)


def atomic(
    space: Space,
    op: str,
    dtype: DType,
    order: MemoryOrder = "relaxed",
    scope: Scope = "gpu",
    kind: str = "",
    remote: bool = False,
) -> Instruction:
    """``atom``: gives the old value. Operands: the address and the value (``cas``: what to compare with, the value).

    ``inc`` counts up to the value and from 0 again, ``dec`` down to 0 and from the value. ``kind`` is PTX's type where
    it is not that of the register: ``noftz.bf16x2`` and its like.
    """
    same = op in ("exch", "cas", "and", "or", "xor")
    kind = kind or (f"b{dtype.bits}" if same else "u64" if op == "add" and dtype is s64 else dtype.name)
    return named(f"atom.{order}.{scope}.{'shared::cluster' if remote else space}.{op}.{kind}", dtype)


def reduce_add(count: int = 1) -> Instruction:
    """``red.add`` of 1, 2 or 4 f32 in global memory, vectors from sm_90 on. Operands: the address, then the values."""
    check_vector(f32, count)
    return named(f"red.relaxed.gpu.global.add{f'.v{count}' if count > 1 else ''}.f32")


# Hints, and a wait for a counter


def _line(i: Instruction) -> dict[str, Any]:
    if i.size != 128:
        raise VerifyError(f"applypriority is for a line of 128 bytes, not {i.size}")
    return {}


# A policy that accesses with ``.L2::cache_hint`` name. Its bits are opaque, and what it says changes speed alone.
form(
    "createpolicy.fractional.{first}{.second}.b64 d, fraction:f32?",
    first="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
    second="L2::evict_first L2::evict_unchanged",
    meaning=lambda *_: np.zeros((1, 1)),
)
PREFETCH = common(asm="volatile", space="global local")
form("prefetch{.space}.{level} [at]:u64", PREFETCH, level="L1 L2")
form("prefetch.global.{level} [at]:u64", PREFETCH, level="L2::evict_last L2::evict_normal")
form("prefetch{.space}.tensormap [at]:u64", PREFETCH, space="const param", since="sm_90")
form("prefetchu.L1 [at]:u64", PREFETCH)
form("applypriority{.global}.L2::evict_normal [at]:u64, #size", PREFETCH, let=_line)

# A loop that blocks until a counter has reached a value. Whoever raises it must run without waiting for this thread.
form(
    "ld.acquire.gpu.global.u32 [at], least:u32",
    inline=lambda i: (
        f"{{ .reg .pred done; .reg .u32 seen; waiting: {i.mnemonic} seen, {address(0, i.offset)}; "
        "setp.ge.u32 done, seen, %1; @done bra reached; bra waiting; reached: }"
    ),
    effects=lambda i: (GlobalWait(0, i.offset, 1),),
    asm="volatile memory",
    ptx=False,
)


# Generic addresses. A global address is its own generic one. Within a space addresses of Programs have 32 bits.


Window = Literal["shared", "local"]
_MARK = {"shared": np.uint64(1 << 60), "local": np.uint64(1 << 61)}
"""What the emulator adds to addresses of a space to have generic ones: above all of global memory."""
_LOW_WORD = np.uint64(0xFFFFFFFF)


def _within(i: Instruction) -> Any:
    """A function from generic addresses to their low halves; others become one beyond all of the space."""

    def address(generic: Any) -> Any:
        inside = generic >> np.uint64(32) == _MARK[i.space] >> np.uint64(32)
        return np.where(inside, generic & _LOW_WORD, _LOW_WORD).astype(np.uint32)

    return address


WINDOW = common(let=lambda i: {"space": i.window.partition("::")[0]})
WINDOWS = "shared shared::cta shared::cluster@sm_90 local"
form("cvta{.to}.{space}.u64 d, a", space="global const", let=lambda _: {"copies": True}, meaning=lambda a: a)
form("cvta.param.u64 d, a", asm="plain", effects=(ReadSpecial("param_base"),))
form(
    "cvta.{window}.u64 d, a:u32=b64",
    WINDOW,
    window=WINDOWS,
    name="cvta.{space}.u64",
    choose=lambda i: lambda a: a.astype(np.uint64) | _MARK[i.space],
)
form(
    "cvta.to.{window}.u64 d:u32=b64, a",
    WINDOW,
    window=WINDOWS,
    name="cvta.to.{space}.u64",
    choose=_within,
    inline=lambda i: f"{{ .reg .u64 a; {i.ptx_name} a, %1; cvt.u32.u64 %0, a; }}",
)
form(
    "isspacep.{window} d:pred, a:u64",
    WINDOW,
    window="shared shared::cta local",
    name="isspacep.{space}",
    choose=lambda i: lambda a: (a & _MARK[i.space]) != 0,
)
form("isspacep.global d:pred, a:u64", meaning=lambda a: a < _MARK["shared"])


def from_generic(window: Window) -> Instruction:
    """``cvta.to``: the address within a state space of a generic address that lies in it."""
    return named(f"cvta.to.{window}.u64")


# The shared memory of other CTAs of a cluster


WINDOW_BITS = 24
"""The emulator's shared::cluster addresses: rank + 1 above this bit, the CTA's own shared address below it."""


def _mapped(address: Array, rank: Array) -> Array:
    """The address with the rank in its window; what the hardware returns is its own affair."""
    return (address & np.uint32((1 << WINDOW_BITS) - 1)) + (rank + np.uint32(1) << np.uint32(WINDOW_BITS))


def _mapped_generic(address: Array, rank: Array) -> Array:
    (own,) = from_generic("shared").meaning(address)
    return named("cvta.shared.u64").meaning(_mapped(own, rank))[0]


form("mapa.shared::cluster.u32 d, a, cta:u32", meaning=_mapped, let=lambda _: {"cta_rank": 1}, since="sm_90")
form("mapa.u64 d, a, cta:u32", meaning=_mapped_generic, let=lambda _: {"cta_rank": 1}, since="sm_90")
form(
    "st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.vec}.{type} "
    "[target]:u32, a*vec:element, [barrier]:u32",
    vec="v2 v4",
    type="b32 u32 s32 f32 b64 u64 s64 f64",
    name=lambda i: i.ptx_name.replace(".weak", "").replace(i.type, f"b{i.element.bits}"),
    let=lambda i: _moved(i) | {"element": {32: u32, 64: u64}[TYPE_BITS[i.type]]},
    operands="target barrier a",
    effects=lambda i: (AsyncStore(0, 1, tuple(i.positions("a")), i.element.bytes, i.target_offset, i.barrier_offset),),
    since="sm_90",
    asm="volatile memory",
)
