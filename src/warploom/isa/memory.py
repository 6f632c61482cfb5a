"""Synchronous memory instructions: loads and stores.

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``ld``, ``st``, cache operators and eviction hints).
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, Literal

import numpy as np

from warploom.core.dtypes import DType, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, Instruction, address, as_words, braces
from warploom.isa.effects import Access, Effect, GlobalWait, MemoryOrder, Scope, Space

CACHE_HINTS = {
    "": "",
    "ca": ".ca",
    "cg": ".cg",
    "cs": ".cs",
    "lu": ".lu",
    "cv": ".cv",
    "nc": ".nc",
    "wb": ".wb",
    "wt": ".wt",
    "no_allocate": ".L1::no_allocate",
    "evict_first": ".L1::evict_first",
    "evict_last": ".L1::evict_last",
    "nc.no_allocate": ".nc.L1::no_allocate",
}
"""Names of cache operators and L1 eviction hints → PTX qualifiers (``ld``: ca cg cs lu cv nc; ``st``: wb cg cs wt)."""


def register_type(element: DType) -> DType:
    """The register type a loaded element of ``element`` arrives in: sub-word elements zero-extend into u32."""
    return u32 if element.bits < 32 else element


def address_type(space: Space) -> DType:
    """The type of addresses in a state space."""
    return u64 if space == "global" else u32


def _ordering(order: MemoryOrder, scope: Scope) -> str:
    return "" if order == "weak" else f".{order}.{scope}"


def check_vector(dtype: DType, count: int) -> None:
    """Raises VerifyError for so many elements as no access moves."""
    if not issubclass(type(count), Integral):  # a traced value has no truth value, so nothing is asked of it
        raise VerifyError(f"one access moves 1, 2 or 4 elements, a count known while tracing, not {count!r}")
    if count > 1 and dtype.bits < 32:
        words = f"1, 2 or 4 words of {32 // dtype.bits}"
        raise VerifyError(f"elements of {dtype} load and store one at a time; with dtype=u32 an access moves {words}")
    if count not in (1, 2, 4) or count * dtype.bytes > MOST_BYTES:
        raise VerifyError(f"one access moves 1, 2 or 4 elements and at most {MOST_BYTES} bytes, not {count} of {dtype}")


_LOAD_CACHE = ("", "ca", "cg", "cs", "lu", "cv", "nc", "no_allocate", "evict_first", "evict_last", "nc.no_allocate")
_STORE_CACHE = ("", "wb", "cg", "cs", "wt", "no_allocate", "evict_first", "evict_last")
_EVICTION = ("", "no_allocate", "evict_first", "evict_last")


def _check_qualifiers(access: _VectorAccess) -> None:
    """What ptxas would refuse, or take for something else."""
    loads = access.action == "load"
    name, known = ("a load", _LOAD_CACHE) if loads else ("a store", _STORE_CACHE)
    if access.cache not in known:
        raise VerifyError(f"{name} has no cache hint {access.cache!r}; it takes {', '.join(known[1:])}")
    if access.order not in (orders := ("weak", "relaxed", "acquire" if loads else "release")):
        raise VerifyError(f"{name} is {', '.join(orders)}, not {access.order}")
    if access.volatile and (access.cache or access.order != "weak"):
        raise VerifyError("a volatile access takes no cache hint and no order")
    if access.order != "weak" and access.cache not in _EVICTION:
        raise VerifyError(f"an access with an order takes no cache hint {access.cache!r}: it goes past the L1")
    if access.space == "local" and (access.cache or access.order != "weak" or access.volatile):
        raise VerifyError("an access to local memory, a thread's own, takes no cache hint and no order")
    if access.remote and access.space != "shared":
        raise VerifyError("only shared memory is that of other CTAs")
    if access.space == "shared" and access.cache:
        raise VerifyError(f"shared memory has no caches: leave out the hint {access.cache!r}")


MOST_BYTES = 16
"""What one thread moves in one access."""


@dataclass(frozen=True, slots=True)
class _VectorAccess(Instruction):
    """``count`` consecutive elements at one address, between memory and registers of a thread.

    ``volatile`` keeps an access as written: ptxas joins neighbouring ones of any other kind into wider ones. It orders
    nothing here (PTX gives it the ordering of a relaxed access, which no kernel should need). ``remote``: the address
    may lie in the shared memory of another CTA of the cluster, as :class:`~warploom.isa.cluster.MapShared` gives it.
    """

    space: Space
    dtype: DType
    count: int = 1
    offset: int = 0
    cache: str = ""
    order: MemoryOrder = "weak"
    scope: Scope = "gpu"
    volatile: bool = False
    remote: bool = False
    moves_bits: ClassVar[bool] = True
    action: ClassVar[Literal["load", "store"]] = "load"

    def __post_init__(self) -> None:
        check_vector(self.dtype, self.count)
        _check_qualifiers(self)

    @property
    def mnemonic(self) -> str:
        ordering = ".volatile" if self.volatile else _ordering(self.order, self.scope)
        opcode = ("ld" if self.action == "load" else "st") + ordering
        vector = f".v{self.count}" if self.count > 1 else ""
        kind = f"{'b' if self.dtype.bits >= 32 else 'u'}{self.dtype.bits}"
        space = "shared::cluster" if self.remote else self.space
        return f"{opcode}.{space}{CACHE_HINTS[self.cache]}{vector}.{kind}"

    def effects(self) -> tuple[Effect, ...]:
        size = self.count * self.dtype.bytes
        return (
            Access(
                self.space,
                self.action,
                0,
                size,
                self.offset,
                words=self.count,
                order=self.order,
                scope=self.scope,
                read_only=self.cache.startswith("nc"),
                volatile=self.volatile,
                remote=self.remote,
            ),
        )


@dataclass(frozen=True, slots=True)
class Load(_VectorAccess):
    """``ld.{shared,global,local}``: ``count`` consecutive elements at an address (1, 2, 4, 8 or 16 bytes in all).

    Elements narrower than 32 bits load one at a time, zero-extended. ``order`` acquire/relaxed give ``ld.acquire``.
    """

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The address: u64 in global memory, u32 in the others."""
        return (address_type(self.space),)

    @property
    def result_types(self) -> tuple[DType, ...]:
        """``count`` registers of :func:`register_type`."""
        return (register_type(self.dtype),) * self.count

    @property
    def template(self) -> str:
        """Several elements are one vector."""
        target = braces(0, self.count) if self.count > 1 else "%0"
        return f"{self.mnemonic} {target}, {address(self.count, self.offset)};"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """``operands[0]``: words of ``dtype``'s width, shape (warps, lanes, count)."""
        words, kind = operands[0], register_type(self.dtype).numpy
        parts = [np.ascontiguousarray(words[..., i]) for i in range(self.count)]
        return tuple(p.astype(np.uint32) if self.dtype.bits < 32 else p.view(kind) for p in parts)


@dataclass(frozen=True, slots=True)
class Store(_VectorAccess):
    """``st.{shared,global,local}``: operands address, then ``count`` registers of ``dtype`` (of which the low bits)."""

    action: ClassVar[Literal["load", "store"]] = "store"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The address (u64 global, else u32), then ``count`` registers of :func:`register_type`."""
        return (address_type(self.space), *(register_type(self.dtype),) * self.count)

    @property
    def template(self) -> str:
        """Several elements are one vector."""
        source = braces(1, self.count) if self.count > 1 else "%1"
        return f"{self.mnemonic} {address(0, self.offset)}, {source};"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The words to write, shape (warps, 32, count); operands are the values without the address."""
        word = np.dtype(f"u{self.dtype.bytes}")
        if self.dtype.bits < 32:
            return (np.stack([v.astype(word) for v in operands], axis=-1),)
        return (as_words(operands, word),)


@dataclass(frozen=True, slots=True)
class WaitAtLeast(Instruction):
    """A loop on ``ld.acquire.gpu``: blocks until a counter in global memory has reached a value.

    Operands: address, the least value (u32). Whoever raises the counter must run without waiting for this thread.
    """

    offset: int = 0
    ptx = "ld.acquire.gpu.global.u32"
    inline = (
        "{{ .reg .pred done; .reg .u32 seen; waiting: {self.mnemonic} seen, {address}; setp.ge.u32 done, seen, %1; "
        "@done bra reached; bra waiting; reached: }}"
    )
    takes = (u64, u32)

    def effects(self) -> tuple[Effect, ...]:
        """Blocks each executing thread; what came before the release that it sees is known then."""
        return (GlobalWait(0, self.offset, 1),)


@dataclass(frozen=True, slots=True)
class Prefetch(Instruction):
    """``prefetch.global.L2``: a line of global memory to the L2, soon. A hint: nothing is read. Operand: address."""

    offset: int = 0
    ptx = "prefetch.global.L2"
    inline = "{self.mnemonic} {address};"
    takes = (u64,)
    clobbers_memory = False
