"""The fragments of ``wmma``, which the PTX ISA leaves open: what GPUs were seen to use.

``wmma_maps.json`` beside this file is written by ``warploom discover --on gpu --write``: one entry per fragment with
the basis vectors fitted to what the tracer showed, and the GPU it was seen on. A fragment never traced has no map.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from warploom.core.dtypes import DType
from warploom.core.errors import LayoutError
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap

MAPS_FILE = Path(__file__).with_name("wmma_maps.json")

StorageOrder = Literal["row", "col"]

WMMA_SHAPES: dict[str, tuple[str, ...]] = {
    "m16n16k16": ("f16", "bf16", "s8", "u8"),
    "m32n8k16": ("f16", "bf16", "s8", "u8"),
    "m8n32k16": ("f16", "bf16", "s8", "u8"),
    "m16n16k8": ("tf32",),
    "m8n8k4": ("f64",),
}
"""The shapes of ``wmma`` from sm_80 on and the element types of A and B in each."""

WMMA_ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "s8": ("s32",),
    "u8": ("s32",),
    "f64": ("f64",),
}
"""The accumulator types of each type of A and B."""


def wmma_sizes(shape: str) -> tuple[int, int, int]:
    """(m, n, k) of ``"m16n16k16"``. Raises LayoutError for a shape ``wmma`` does not have."""
    if shape not in WMMA_SHAPES:
        raise LayoutError(f"wmma has no shape {shape}; it has {', '.join(WMMA_SHAPES)}")
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def operand_shape(shape: str, operand: str) -> tuple[int, int]:
    """(rows, columns) of operand "A" (m, k), "B" (k, n), "C" or "D" (m, n)."""
    m, n, k = wmma_sizes(shape)
    return {"A": (m, k), "B": (k, n), "C": (m, n), "D": (m, n)}[operand]


def wmma_elements(shape: str, operand: str, dtype: DType) -> int:
    """Elements a thread holds of a fragment, as the PTX ISA counts its registers.

    Each is held once, but for f16 A and B: their 16 elements hold the matrix of m16n16k16 twice over.
    """
    rows, cols = operand_shape(shape, operand)
    if operand in "AB" and dtype.name == "f16":
        return 16
    return rows * cols // 32


def wmma_name(shape: str, operand: str, dtype: DType, order: StorageOrder) -> str:
    """The name of a fragment: ``wmma.m16n16k16.A.bf16.row``; accumulators have no order: ``wmma.m16n16k16.C.f32``."""
    role = "C" if operand == "D" else operand
    return f"wmma.{shape}.{role}.{dtype.name}" + (f".{order}" if role != "C" else "")


@lru_cache(maxsize=1)
def discovered() -> dict[str, Any]:
    """Read ``wmma_maps.json``: ``{"gpu": …, "fragments": {name: {"shape", "bits", "register", "lane"}}}``."""
    if not MAPS_FILE.exists():
        return {"gpu": "", "fragments": {}}
    found: dict[str, Any] = json.loads(MAPS_FILE.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=256)
def wmma_fragment(shape: str, operand: str, dtype: DType, order: StorageOrder = "row") -> FragmentLayout:
    """The fragment of ``operand`` ("A", "B", "C", "D") of ``wmma``, as it was seen on a GPU.

    ``order`` is the order in memory that A or B was loaded from: it may change the map. Raises LayoutError for a
    fragment that was never traced.
    """
    operand_shape(shape, operand)  # names the shapes there are
    name = wmma_name(shape, operand, dtype, order)
    entry = discovered()["fragments"].get(name)
    if entry is None:
        raise LayoutError(
            f"{name} is open in the PTX ISA and has not been traced yet: run `warploom discover --on gpu --write` on a "
            "GPU; kernels that use it run there without"
        )
    rows, cols = entry["shape"]
    atom = LinearMap({"register": entry["register"], "lane": entry["lane"]}, {"row": rows, "col": cols})
    return FragmentLayout(name, atom, dtype.bits)
