"""What the checker says of bugs that other projects repaired: ``python benchmarks/real_bugs.py``.

Of each bug a kernel before and after its repair, on the CPU: compiled from two versions of its project's own package,
which pip puts into folders of their own (two gigabytes at a time), and the miniatures of ``tests/real_bugs``. Writes
real-bugs.json. Three minutes of processor time; ``--only packages`` or ``--only miniatures`` for one of the tables, the
other one stays as it is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import linecache
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from scripts import kept, result_with, seconds

from warploom_lab.bench.cells import parser_of

Checked = tuple[Any, bool]
"""What was found, and whether the result is right."""


@dataclass(frozen=True)
class Pair:
    """A bug in a package: ``check`` runs its kernel in the folder of one; ``at`` is in lines that are to blame."""

    thread: str
    was: str
    kernel: str
    kinds: str
    at: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    check: Callable[[Path], Checked]


# -- FlashInfer: the headers of its wheel, compiled by NVRTC without the functions that launch kernels
_LAUNCHERS = re.compile(r"^(template <[^{};]*?>\n)?((inline|static) )*(cudaError_t|size_t|bool) .*?^\}", re.M | re.S)
_EMPTY = ("cstring", "limits", "numeric", "tuple", "type_traits")
_GUARDS = ("ALLOCATOR_H", "EXCEPTION_H", "UTILS_CUH")  # headers for the host
_HEAD = """
#include <cuda/std/type_traits>
#include <cuda_fp16.h>
typedef unsigned short ushort;
namespace std { using namespace cuda::std; char* getenv(const char*) { return 0; } int strcmp(...) { return 1; } }
namespace flashinfer {
template <class A, class B> constexpr auto ceil_div(A a, B b) { return (a + b - 1) / b; }
template <class A, class B> constexpr auto round_up(A a, B b) { return ceil_div(a, b) * b; }
}
#include <flashinfer/sampling.cuh>
"""
_BLOCKS = "".join(
    f"#include <cub/block/block_{x}.cuh>\n" for x in ("reduce", "scan", "adjacent_difference", "radix_sort")
)


def _flashinfer(folder: Path, kernel: str, grid: int, block: int, arguments: Sequence[Any], shared: int) -> Any:
    from warploom import check_ptx
    from warploom.cuda.ptx import header_options, ptx_of

    headers, host = folder / "flashinfer" / "data" / "include", folder / "host"
    for name in ("topk.cuh", "sampling.cuh"):
        file = headers / "flashinfer" / name
        text = file.read_text(encoding="utf-8")
        file.write_text(_LAUNCHERS.sub(lambda found: "\n" * found[0].count("\n"), text), encoding="utf-8")
    for name, text in {**dict.fromkeys(_EMPTY, ""), "cub/cub.cuh": "#pragma once\n" + _BLOCKS}.items():
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text(text)
    options = [f"-I{host}", *header_options(), f"-I{headers}", f"-I{folder / 'nvidia' / 'cu13' / 'include'}"]
    options += ["-default-device", "-std=c++17", *(f"-DFLASHINFER_{guard}_" for guard in _GUARDS)]
    ptx = ptx_of(_HEAD, "kernel.cu", "sm_90", options, kernel=f"flashinfer::sampling::{kernel}")
    return check_ptx(ptx.text, grid, block, arguments, kernel=ptx.entry, shared_bytes=shared, file="kernel.cu")


def _sampling(folder: Path) -> Checked:
    import numpy as np

    logits, out = np.full((1, 4096), -99, np.float32), np.full(1, -1, np.int32)
    logits[0, 3000] = 99
    kernel = "SamplingFromLogitsKernel<128, cub::BLOCK_SCAN_WARP_SCANS, cub::BLOCK_REDUCE_WARP_REDUCTIONS, 4, true, "
    found = _flashinfer(folder, kernel + "float, int>", 1, 128, [logits, out, 0, 4096, 0, 7, 0, 0], 4096)
    return found, out[0] == 3000


def _filtered(folder: Path) -> Checked:
    """More candidates than its buffer holds: all in one bin of the first histogram."""
    import numpy as np

    count = 17 * 1024
    scores = (1 + np.random.default_rng(1).permutation(count) / count / 4.001).astype(np.float32)
    out, values = np.zeros(32, np.int32), np.zeros(32, np.float32)
    kernel = "FilteredTopKUnifiedKernel<float, int, 4, false, flashinfer::sampling::FilteredTopKMode::Plain, "
    given = [scores, out, values, 0, 0, 0, 0, 0, 1, 32, count]
    found = _flashinfer(folder, f"{kernel}flashinfer::sampling::TopKTieBreak::None>", 1, 1024, given, 131072)
    return found, np.array_equal(np.sort(values), np.sort(scores)[-32:])


def _renormed(folder: Path, flags: str) -> Checked:
    """A row shared by two CTAs."""
    import numpy as np

    given = np.random.default_rng(1).random(1024).astype(np.float32)
    out, rows = np.zeros_like(given), np.zeros(1 << 14, np.uint32)
    kernel = f"RadixTopKRenormProbKernel_MultiCTA<256, 1, {flags}, float, int>"
    found = _flashinfer(folder, kernel, 2, 256, [given, out, 0, 32, 1024, 1, rows, 512, 2], 8192)
    wanted = np.where(given >= np.sort(given)[-32], given, 0)
    return found, np.allclose(out, wanted / wanted.sum(), 1e-4)


# -- Triton, and kernels of flash-linear-attention under two versions of it
def _triton(name: str, _: Path) -> Checked:
    import numpy as np
    from tests.with_triton.cases import HOPPER

    import warploom

    case = HOPPER[name](np.random.default_rng(1))
    found = warploom.check_triton(case.kernel, case.grid, case.arguments, target="sm_90", **case.meta)
    return found, case.error() <= 1


def _wy_backward(_: Path) -> Checked:
    import ml_dtypes
    import numpy as np
    from fla.ops.delta_rule.wy_fast import prepare_wy_repr_bwd_kernel  # pyright: ignore

    import warploom

    rng, length, dim = np.random.default_rng(0), 128, 64
    k, v, dw, du, a = (rng.normal(0, 0.3, (length, dim)).astype(ml_dtypes.bfloat16) for _ in range(5))
    beta = rng.random(length).astype(ml_dtypes.bfloat16)
    dk, dv, dbeta = np.full_like(k, np.nan), np.full_like(v, np.nan), np.full_like(beta, np.nan)
    given = [k, v, beta, a, dw, du, dk, dv, dbeta, None, None, length, 1, dim, dim]
    meta = {"BT": 64, "BK": 64, "BV": 64, "IS_VARLEN": False, "num_warps": 4, "num_stages": 2}
    found = warploom.check_triton(prepare_wy_repr_bwd_kernel, (length // 64, 1), given, target="sm_90", **meta)
    # dV = diag(β) A dU, in chunks of 64 rows; A is read transposed
    chunks = [slice(i, i + 64) for i in range(0, length, 64)]
    wide = [x.astype(np.float64) for x in (a, du, beta)]
    wanted = np.concatenate([wide[2][i, None] * (wide[0][i].T @ wide[1][i]) for i in chunks])
    return found, np.abs(dv.astype(np.float64) - wanted).max() <= 0.02 * np.abs(wanted).max()


# -- TileLang: the CUDA C++ that it generates
def _tilelang_atomic(folder: Path) -> Checked:
    import ctypes

    import numpy as np

    import warploom

    for library in ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/lib/libcudart.so.12"):
        if (file := folder / "nvidia" / library).exists():
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
    tilelang: Any = importlib.import_module("tilelang")
    T: Any = importlib.import_module("tilelang.language")  # noqa: N806

    @T.prim_func
    def sums(x: T.Tensor((64,), "int32"), y: T.Tensor((64,), "int32")):  # pyright: ignore
        with T.Kernel(1, threads=64):
            shared = T.alloc_shared((64,), "int32")
            thread = T.get_thread_binding(0)
            shared[63 - thread] = 0
            T.atomic_add(shared[thread], x[thread])
            y[thread] = shared[63 - thread]

    generated = tilelang.lower(sums, target="cuda -arch=sm_80").kernel_source
    kernel = "\n".join(line for line in generated.splitlines() if not line.startswith("#"))
    words = "template <class T> __device__ void AtomicAdd(T* at, T x) { atomicAdd(at, x); }\n"
    file = folder / "generated.cu"
    file.write_text(words + kernel)
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    (name,) = re.findall(r"void (\w+)\(.*\);", kernel)
    found = warploom.check_cuda(words + kernel, name, 1, 64, [x, y], shared_bytes=256, file=str(file))
    return found, np.array_equal(y, x[::-1])


def _of_tilelang(version: str) -> tuple[str, ...]:
    others = (
        "torch-c-dlpack-ext cloudpickle psutil tqdm z3-solver==4.15.4.0 nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
    )
    return f"tilelang=={version}", "apache-tvm-ffi==0.1.8.post2", *others.split()


def _of_flashinfer(version: str) -> tuple[str, ...]:
    return f"flashinfer-python=={version}", "nvidia-curand"


PAIRS = {
    "sampling": Pair(
        "flashinfer-ai/flashinfer#3624",
        "the storage of a block's reduction is used again in the next step of the loop",
        "SamplingFromLogitsKernel",
        "race",
        r"BlockReduce<DataAndIndex",
        _of_flashinfer("0.6.12"),
        _of_flashinfer("0.6.13"),
        _sampling,
    ),
    "filtered": Pair(
        "flashinfer-ai/flashinfer#3529",
        "counts are cleared for the next round while slower warps read those of this one",
        "FilteredTopKUnifiedKernel",
        "race",
        r"s_histogram",
        _of_flashinfer("0.6.13"),
        _of_flashinfer("0.6.14"),
        _filtered,
    ),
    "renormed": Pair(
        "flashinfer-ai/flashinfer#5251",
        "thread 0 announces that its CTA has counted before the CTA's other threads have",
        "RadixTopKRenormProbKernel_MultiCTA",
        "race",
        r"hist",
        _of_flashinfer("0.6.14"),
        _of_flashinfer("0.7.1"),
        lambda folder: _renormed(folder, "false" if _version(folder) < (0, 7) else "false, false"),
    ),
    "matmul": Pair(
        "pytorch/pytorch#181248",
        "`wgmma` reads what `cp.async` wrote, with no fence of the proxies between",
        "a matmul by `tl.dot`",
        "proxy",
        r"tl\.dot",
        ("triton==3.7.0",),
        ("triton==3.7.1",),
        partial(_triton, "matmul"),
    ),
    "descriptors": Pair(
        "triton-lang/triton#11480",
        "a tensor map that one lane makes in shared memory is copied by its warp without `bar.warp.sync`",
        "a matmul by descriptors of its own",
        "race",
        r"tensor_descriptor",
        ("triton==3.8.0",),
        ("triton==3.9.0",),
        partial(_triton, "own_descriptors"),
    ),
    "wy": Pair(
        "fla-org/flash-linear-attention#984",
        "`wgmma` takes registers that were written since the last `wgmma.fence` (triton#9530)",
        "prepare_wy_repr_bwd_kernel of fla 0.5.0",
        "race",
        r"tl\.dot",
        ("triton==3.7.1", "fla-core==0.5.0", "einops"),
        ("triton==3.8.0", "fla-core==0.5.0", "einops"),
        _wy_backward,
    ),
    "tilelang": Pair(
        "tile-ai/tilelang#1257",
        "no barrier between an atomic addition to shared memory and the read of another thread's sum",
        "generated from six lines of TileLang",
        "race",
        r"AtomicAdd",
        _of_tilelang("0.1.7.post3"),
        _of_tilelang("0.1.8"),
        _tilelang_atomic,
    ),
}


def _version(folder: Path) -> tuple[int, ...]:
    (found,) = folder.glob("flashinfer_python-*.dist-info")
    return tuple(map(int, re.findall(r"\d+", found.name)[:2]))


# -- rows
def _row(
    checked: Callable[[], tuple[Sequence[Any], bool]], blames: Callable[[Any], bool], source: str
) -> dict[str, Any]:
    """What was found, and where: of a miniature's ``source`` its line, elsewhere the file and the line's number."""
    start = seconds()
    findings, right = checked()
    row = {"kinds": [f.kind for f in findings], "right": bool(right), "seconds": seconds() - start}
    if not findings:
        return row | {"blamed": False}
    where = findings[0].where
    place = [where, *where.callers][-1 if source else 0]
    lines = source.splitlines()
    at = lines[place.line - 1].partition("//!")[0].strip() if lines else f"{Path(place.file).name}:{place.line}"
    first = findings[0]
    return row | {"blamed": blames(first), "grade": first.grade, "at": at, "message": first.message}


def inside(name: str, folder: Path) -> dict[str, Any]:
    """What is found in a pair's kernel with the packages of this process."""
    pair = PAIRS[name]

    def blames(finding: Any) -> bool:
        both = [where for where in (finding.where, finding.other) if where is not None]
        lines = [linecache.getline(place.file, place.line) for where in both for place in (where, *where.callers)]
        return finding.kind in pair.kinds.split() and any(re.search(pair.at, line) for line in lines)

    def checked() -> tuple[Sequence[Any], bool]:
        found, right = pair.check(folder)
        return found.findings, right

    return _row(checked, blames, "")


def packages() -> Iterator[dict[str, Any]]:
    """A row for each pair of packages."""
    for name, pair in PAIRS.items():
        row: dict[str, Any] = {"thread": pair.thread, "was": pair.was, "kernel": pair.kernel}
        for side, requirements in (("faulty", pair.before), ("repaired", pair.after)):
            with tempfile.TemporaryDirectory() as folder:
                found = result_with(requirements, Path(folder), __file__, "--inside", name, "--folder", folder)
            row[side] = {"package": requirements[0].replace("==", " "), **found}
        yield row


def miniatures() -> Iterator[dict[str, Any]]:
    """A row for each miniature."""
    from tests.real_bugs.miniatures import MINIATURES

    for of in MINIATURES:
        row: dict[str, Any] = {"thread": of.thread, "was": of.was, "missed": of.missed}
        for side in ("faulty", "repaired"):
            row[side] = _row(partial(of.check, side == "repaired"), of.blames, of.source(side == "repaired"))
        yield row


def main() -> int:
    """Write the file; the exit code is 1 if fewer than nine tenths of the bugs are found."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=("packages", "miniatures"))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(options.inside, options.folder)))
        return 0
    tables = {"packages": packages, "miniatures": miniatures}
    asked = [name for name in tables if options.only in (None, name)]
    file = options.out / "real-bugs.json"
    before = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    rows = [row for row in before if row["table"] not in asked]
    made = ({"table": name, **row} for name in asked for row in tables[name]())
    found = kept(chain(rows, made), file)["rows"]
    return int(sum(row["faulty"]["blamed"] for row in found) < 0.9 * len(found))


if __name__ == "__main__":
    sys.exit(main())
