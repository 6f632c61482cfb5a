"""The table of ``wgmma``: the asynchronous matrix multiply-accumulate of a warpgroup (sm_90a).

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, bf16, f16, f32
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, braces, waits_for_groups
from warploom.isa.effects import AsyncMatrix, CommitGroup, Effect, WaitGroup, WarpgroupFence, WarpSync
from warploom.isa.form import Formed, form, named
from warploom.isa.matrix import FragmentSlot
from warploom.layout.catalogue import wgmma_accumulator, wgmma_operand
from warploom.layout.wgmma import element_addresses

M, K = 64, 16


@lru_cache(maxsize=64)
def _accumulator_slot(n: int, first: int) -> FragmentSlot:
    layout = wgmma_accumulator(n)
    return FragmentSlot(layout, f32, first, layout.registers)


@lru_cache(maxsize=8)
def _a_slot(inputs: DType) -> FragmentSlot:
    layout = wgmma_operand(inputs.bits)
    return FragmentSlot(layout, inputs, 0, layout.registers)


@dataclass(frozen=True, slots=True)
class WarpgroupProduct:
    """D = A·B (+ D) of four warps, m64n{n}k16: f16 or bf16 in, f32 out.

    Operands: A (a descriptor, or four registers), B's descriptor, whether to accumulate, D's registers; results: the
    same registers. ``transposed_b``: B's rows of K are not contiguous in shared memory (N is); ``transposed_a``: nor
    are A's (M is), which only an A in shared memory may be. Reads and writes happen at any time until the warpgroup
    waits for the committed group.
    """

    n: int
    inputs: DType
    a_source: Literal["shared", "registers"]
    transposed_b: bool
    transposed_a: bool

    @property
    def a_count(self) -> int:
        """Operands that make up A."""
        return 1 if self.a_source == "shared" else 4

    @property
    def a_slot(self) -> FragmentSlot:
        """A as a fragment, when it is in registers."""
        return _a_slot(self.inputs)

    @property
    def accumulator_slot(self) -> FragmentSlot:
        """D as a fragment among the operands."""
        return _accumulator_slot(self.n, self.a_count + 2)

    def a_addresses(self, descriptor: int) -> Array:
        """Shared byte addresses of A's elements, int64 [64, 16]."""
        return element_addresses(descriptor, M, K, k_contiguous=not self.transposed_a)

    def b_addresses(self, descriptor: int) -> Array:
        """Shared byte addresses of B's elements, int64 [n, 16]."""
        return element_addresses(descriptor, self.n, K, k_contiguous=not self.transposed_b)

    def multiply(self, a: Array, b: Array, c: Array) -> Array:
        """D from A (groups, 64, 16), B (groups, n, 16), C (groups, 64, n), in float32; see ``mma.sync`` on rounding."""
        return np.matmul(a, b.transpose(0, 2, 1)) + c


def _product(i: Formed) -> dict[str, Any]:
    if (i.scale_a, i.scale_b) != (1, 1):
        raise VerifyError("factors other than 1 are not supported")
    n, transposed_a = int(i.shape[4:-3]), i.fields.get("transposed_a")
    source = "registers" if transposed_a is None else "shared"
    product = WarpgroupProduct(n, DTYPES[i.ab], source, bool(i.transposed_b), bool(transposed_a))
    first = product.a_count + 2
    return {"half": n // 2, "warpgroup_product": product, "optional_operands": range(first, first + n // 2)}


def _inline(i: Formed) -> str:
    """The line on D's registers, then A, B and the predicate that says whether to accumulate."""
    d, a = i.half, i.warpgroup_product.a_count
    at, transpose = d + a, f"{i.transposed_b}" if a == 4 else f"{i.transposed_a}, {i.transposed_b}"
    of_a = f"%{d}" if a == 1 else braces(d, 4)
    line = f"{i.mnemonic} {braces(0, d)}, {of_a}, %{at}, p, 1, 1, {transpose};"
    return f"{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0; {line} }}"


WARPGROUP: dict[str, Any] = {"since": "sm_90a", "asm": "volatile memory"}
PRODUCT = "wgmma.mma_async.sync.aligned.{shape}.f32.{ab}.{ab}"
for a, of_a in (("a:b64", "#transposed_a, "), ("a*4:b32", "")):
    form(
        f"{PRODUCT} d*half:f32, {a}, b:b64, adds:pred, #scale_a, #scale_b, {of_a}#transposed_b, ^sums*half:f32",
        shape=" ".join(f"m64n{n}k16" for n in range(8, 257, 8)),
        ab="f16 bf16",
        name=PRODUCT,
        let=_product,
        inline=_inline,
        tied="sums",
        effects=(WarpSync(aligned=True), AsyncMatrix()),
        **WARPGROUP,
    )
form("wgmma.fence.sync.aligned", effects=(WarpSync(aligned=True), WarpgroupFence()), **WARPGROUP)
form("wgmma.commit_group.sync.aligned", effects=(WarpSync(aligned=True), CommitGroup("wgmma")), **WARPGROUP)


def _waits(i: Formed) -> tuple[Effect, ...]:
    waits_for_groups(i.pending)
    return WarpSync(aligned=True), WaitGroup("wgmma", i.pending)


# Operands and results are the registers that are complete from here on: naming them keeps the compiler from moving
# their uses above the wait.
form(
    "wgmma.wait_group.sync.aligned ^d*registers:f32, ^done*registers:f32, #pending, #^registers",
    name="wgmma.wait_group.sync.aligned",
    default={"registers": 0},
    inline=lambda i: f"{i.mnemonic} {i.pending};",
    tied="done",
    effects=_waits,
    **WARPGROUP,
)


def wgmma(
    n: int,
    inputs: DType,
    a_source: Literal["shared", "registers"] = "shared",
    transposed_b: bool = False,
    transposed_a: bool = False,
) -> Formed:
    """``wgmma.mma_async`` m64n{n}k16; the parameters are fields of :class:`WarpgroupProduct`."""
    if transposed_a and a_source != "shared":
        raise VerifyError("wgmma transposes A only where it reads it from shared memory")
    if n % 8 or not 8 <= n <= 256:
        raise VerifyError(f"wgmma takes n = 8, 16 … 256, not {n}")
    if inputs not in (f16, bf16):
        raise VerifyError(f"wgmma here takes f16 or bf16, not {inputs}")
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{inputs}.{inputs}"
    numbers = {"scale_a": 1, "scale_b": 1, "transposed_a": int(transposed_a), "transposed_b": int(transposed_b)}
    return named(name, numbers=tuple(numbers.items()), operands=(3 if a_source == "shared" else 6) + n // 2)


def wgmma_wait(pending: int, registers: int) -> Formed:
    """``wgmma.wait_group``: at most ``pending`` groups stay unfinished. Operands and results: completed registers."""
    numbers = (("pending", pending), ("registers", registers))
    return named("wgmma.wait_group.sync.aligned", numbers=numbers)
