"""What scripts share that check kernels of CuTe DSL: compiling for sm_90a without a GPU, a run's row, the written file.

CuTe DSL reads its settings from the environment when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.update(
    CUTE_DSL_ARCH="sm_90a",
    CUTE_DSL_KEEP_PTX="1",
    CUTE_DSL_LINEINFO="1",
    CUTE_DSL_NO_CACHE="1",
    CUTE_DSL_DUMP_DIR=tempfile.gettempdir(),
)

import numpy as np
from scripts import kept

import warploom
from warploom.core.dtypes import bf16
from warploom.layout.tensor_map import TensorMapSpec
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

Row = dict[str, Any]
Array = np.ndarray[Any, Any]
SHARED_BYTES = 227 * 1024
"""The shared memory that a CTA may have on sm_90."""


def cutlass() -> Any:
    """The package of CuTe DSL."""
    return importlib.import_module("cutlass")


def fake(dtype: Any, *shape: int) -> Any:
    """A tensor of this shape for the compiler, its last mode contiguous."""
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
    order = tuple(reversed(range(len(shape))))
    return runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def compiled(kernel: Any, *arguments: Any, **more: Any) -> str:
    """The PTX of a kernel for such arguments; ``stream`` is passed by its name where ``more`` has it."""
    cute: Any = importlib.import_module("cutlass.cute")
    return cute.compile(kernel, *arguments, **more).__ptx__


def stream() -> Any:
    """A stream for the compiler."""
    return importlib.import_module("cutlass.cute.runtime").make_fake_stream()


def heads_map(x: Array, rows: int) -> tuple[Array, TensorMapSpec]:
    """(1, sequence, heads, head_dim) in bf16 as a tensor map copies it: so many rows of 64 columns of a head."""
    _, sequence, heads, head_dim = x.shape
    return x, TensorMapSpec(bf16, (head_dim, sequence, heads), (2 * heads * head_dim, 2 * head_dim), (64, rows, 1), 128)


def by_heads(x: Array) -> Array:
    """(1, sequence, heads, head_dim) as (heads, sequence, head_dim) in float64."""
    return x[0].astype(np.float64).transpose(1, 0, 2)


def error_of(got: Array, wanted: Array) -> float:
    """The largest error over the largest element, in bf16's roundings; NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(got - wanted).max() / np.abs(wanted).max() * 2**8, nan=np.inf))


def checked(ptx: str, grid: tuple[int, int, int], arguments: list[Any], file: str, **how: Any) -> tuple[list[Any], Row]:
    """Run a kernel of 384 threads under all checks: its findings, and a row of them and the processor's seconds."""
    start = time.process_time()
    found = warploom.check_ptx(ptx, grid, 384, arguments, shared_bytes=SHARED_BYTES, file=file, **how)
    seconds = time.process_time() - start
    each = [f for cause in found.findings for f in (cause, *cause.follows)]
    findings = [{"kind": f.kind, "where": str(f.where), "message": f.message} for f in each]
    return each, {"findings": findings, "seconds": round(seconds, 2)}


def main(
    doc: str | None,
    file: str,
    runs: Iterable[Row],
    right: Callable[[Row], bool],
    packages: tuple[str, ...] = ("flash-attn-4", "nvidia-cutlass-dsl"),
    mutants: Callable[[], list[Row]] | None = None,
) -> int:
    """Print and write each run as it comes, then the ``mutants`` that are asked for; 1 where a run is wrong."""
    parser = parser_of(doc)
    if mutants is not None:
        parser.add_argument("--mutants", action="store_true")
    options = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in packages}
    result = kept(runs, options.out / file, "runs", versions=versions)
    if mutants is not None and options.mutants:
        write(options.out / file, result | {"mutants": mutants()})
    return int(not all(map(right, result["runs"])))
