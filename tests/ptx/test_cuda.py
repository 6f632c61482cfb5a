"""CUDA C++ through NVRTC: results, findings at the author's lines, what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ptx.cuda_cases import HEADERS, PLAIN
from tests.ptx.text import kinds
from warploom.core.dtypes import f16, f32, u32
from warploom.core.errors import CompileError, ProblemError, PtxError, UnsupportedDeviceError
from warploom.cuda.printer import print_cuda
from warploom.layout.tensor_map import TensorMapSpec
from warploom.ptx.mangled import pointed_types, readable_name

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
from warploom.cuda.ptx import header_options, ptx_of

NO_HEADERS = len(header_options()) < 2


@pytest.mark.parametrize("name", sorted(set(PLAIN) - {"structures"}))
def test_kernels_are_right_and_free_of_findings(name: str) -> None:
    found, error = PLAIN[name].run()
    assert found.findings == ()
    assert error <= 1


def test_structures() -> None:
    case = PLAIN["structures"]
    given = case.arguments(np.random.default_rng(0))
    y, x = given[0][2:]
    before = y.copy()
    assert warploom.check_cuda(case.source, "k", 1, 64, given).findings == ()
    assert np.array_equal(y, np.r_[(2 * x + 3)[:40], before[40:]])
    with pytest.raises(PtxError, match="list of its members"):
        warploom.check_cuda(case.source, "k", 1, 64, [x, y])


@cache
def compiled_together(target: str) -> tuple[str, dict[str, str]]:
    """The PTX of all kernels on headers for a target, which most of NVRTC's time goes to, and their names in it."""
    cases = {name: case for name, case in HEADERS.items() if case.target == target}
    named = {name: f"k{number}" for number, name in enumerate(cases)}
    includes = dict.fromkeys(line for case in cases.values() for line in case.before.splitlines())
    kernels = (f'extern "C" __global__ void {named[name]}{case.body}' for name, case in cases.items())
    return ptx_of("\n".join([*includes, *kernels]), "kernel.cu", target, header_options()).text, named


@pytest.mark.skipif(NO_HEADERS, reason="needs the headers of CUDA and CCCL")
@pytest.mark.parametrize("name", HEADERS)
def test_kernels_on_the_headers_of_cuda(name: str) -> None:
    case = HEADERS[name]

    def check(_source: str, _kernel: str, *launch: Any, target: str, **options: Any) -> Any:
        text, named = compiled_together(target)
        return warploom.check_ptx(text, *launch, kernel=named[name], **options)

    found, error = case.run(check=check if case.target == "sm_80" else warploom.check_cuda)
    assert found.findings == ()
    assert error <= 1


def test_a_search_for_headers_that_is_cut_off_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    def cut_off(name: str) -> str:
        raise ChildProcessError(f"the search for {name} timed out")

    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", cut_off)
    assert header_options() == []


@pytest.mark.parametrize("name", ["local arrays", "generic pointers", "calls", "warps"])
def test_programs_compile_again(name: str) -> None:
    from warploom.cuda.compile import compile_source

    program = PLAIN[name].run()[0].program
    assert compile_source(print_cuda(program), program.name, arch="sm_80", cache=False).cubin


def test_findings_are_at_the_lines_of_the_source() -> None:
    source = PLAIN["two-dimensional blocks"].source
    found, _ = PLAIN["two-dimensional blocks"].run(source.replace("__syncthreads();", "", 1))
    assert kinds(found.findings) == {"race"}
    lines = source.splitlines()
    assert all("s[y][" in lines[f.where.line - 1] for f in found.findings)
    assert {f.where.file for f in found.findings} == {"kernel.cu"}


INLINED = """
__device__ float mirrored(const float *s) { return s[63 - threadIdx.x]; }
__device__ float twice(const float *s) { return 2.0f * mirrored(s); }
__global__ void k(const float *x, float *y) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = twice(s);
}
"""


def test_a_finding_in_inlined_functions_names_the_calls() -> None:
    (race,) = warploom.check_cuda(INLINED, "k", 1, 64, [np.ones(64, np.float32), np.ones(64, np.float32)]).findings
    assert race.where.line == 2
    assert [caller.line for caller in race.where.callers] == [3, 7]
    assert race.other is not None
    assert (race.other.line, race.other.callers) == (6, ())


def test_a_plain_read_beside_an_atomic_is_a_race() -> None:
    found, error = PLAIN["atomics"].run(PLAIN["atomics"].source.replace("atomicAdd(p, 0)", "*p"))
    assert kinds(found.findings) == {"race"}
    assert error <= 1


BEYOND = {
    "a[x[t] & 15]": ("a[(x[t] & 15) + 1]", "bounds"),
    "for (int i = 0; i < 16; i++) a[i]": ("for (int i = 1; i < 16; i++) a[i]", "uninitialised"),
}


@pytest.mark.parametrize("text", BEYOND)
def test_local_memory_is_checked(text: str) -> None:
    new, kind = BEYOND[text]
    case = PLAIN["local arrays"]
    given = [np.arange(64, dtype=np.int32), np.zeros(64, np.int32)]
    found = warploom.check_cuda(case.source.replace(text, new), "k", 1, 64, given)
    assert kind in kinds(found.findings)


def test_templates_and_namespaces() -> None:
    source = "namespace a { template <typename T, int N> __global__ void fill(T* x) { x[threadIdx.x] = N; } }"
    x = np.zeros(32, np.int16)
    warploom.check_cuda(source, "a::fill<short, 7>", 1, 32, [x]).raise_if_found()
    assert x.tolist() == [7] * 32


REFUSED = {
    "malloc": "__global__ void k(int** x) { *x = (int*)malloc(4); }",
    "themselves": """__noinline__ __device__ int f(int n) { return n < 2 ? n : f(n - 1) * f(n - 2) + f(n / 3); }
                     __global__ void k(int* x) { x[0] = f(x[0]); }""",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_run_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(PtxError, match=rf"kernel\.cu:\d+ \(PTX line \d+\).*{text}"):
        warploom.check_cuda(REFUSED[text], "k", 1, 32, [np.zeros(32, np.int32)])


def test_what_does_not_compile() -> None:
    with pytest.raises(CompileError, match=r"kernel\.cu"):
        warploom.check_cuda("__global__ void k(int* x) { y = 1; }", "k", 1, 32, [np.zeros(32, np.int32)])


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.cuda import device

    def missing() -> Any:
        raise UnsupportedDeviceError("cuda.core is missing: pip install 'warploom[cu13]'")

    monkeypatch.setattr(device, "cuda_core", missing)
    with pytest.raises(UnsupportedDeviceError, match="pip install"):
        warploom.check_cuda("", "k", 1, 32, [])


def test_headers_of_the_host_and_names_of_the_source() -> None:
    source = """
#include <cuda.h>
#include <cstdint>
#include <cstdio>
typedef struct CUtensorMap_st CUtensorMap;  // as <cuda/barrier> has it
template <int N> __global__ void last(std::uint32_t *out, const __grid_constant__ CUtensorMap) {
  __shared__ uint32_t kept[N];
  kept[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = kept[threadIdx.x ^ 32];
}"""
    spec = TensorMapSpec(f32, (32,), (), (32,))
    out, x = np.zeros(64, np.uint32), np.zeros(32, np.float32)
    checked = warploom.check_cuda(source, "last<64>", 1, 64, [out, (x, spec)], target="sm_90a")
    assert [f.kind for f in checked.findings] == ["race"]
    assert [tile.name for tile in checked.program.shared] == ["kept"]


NAMED = """
// __global__ void of_a_comment(float *a);
namespace mine {
template <typename T> __global__ void __launch_bounds__(64) fill(const T *x, float *y, const T *z, int n) {
  y[threadIdx.x + n] = x[threadIdx.x] + z[threadIdx.x];
}
}
extern "C" __global__ void plain(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x]; }
"""


def single(count: int = 32) -> Any:
    return np.zeros(count, np.float32)


def test_findings_name_the_kernel_and_its_parameters_as_the_source_does() -> None:
    checked = warploom.check_cuda(
        NAMED, "mine::fill<float>", 1, 32, {"x": single(), "y": single(), "z": single(), "n": 8}
    )
    (finding,) = checked.findings
    assert "y[32]" in finding.message
    assert "_Z" not in finding.message
    assert checked.program.name == "fill"
    assert "fill: 1 finding" in repr(checked)
    assert "y[32]" in repr(checked)
    assert len(repr(checked)) < 1000
    with pytest.raises(ProblemError, match=r"fill takes 4 arguments \(x, y, z, n\), not 1"):
        warploom.check_cuda(NAMED, "mine::fill<float>", 1, 32, [single()])


@pytest.mark.parametrize(
    ("element", "position", "array", "message"),
    [
        ("float", 0, np.zeros(32), r"x is float \*, the array is float64: pass x\.astype\(np\.float32\)"),
        ("float", 1, np.zeros(32, np.int32), r"y is float \*, the array is int32"),
        ("double", 2, single(), r"z is double \*, the array is float32"),
        ("int", 0, np.zeros(32, np.int64), r"x is int \*, the array is int64"),
        ("unsigned", 0, np.zeros(32, np.int32), None),
        ("unsigned", 0, np.zeros(64, np.float16), None),
        ("unsigned char", 0, np.zeros(32), None),
        ("int", 0, np.zeros(128, np.uint8), None),
    ],
)
def test_an_array_of_other_numbers_than_the_pointer_is_refused(
    element: str, position: int, array: Any, message: str | None
) -> None:
    given = [np.zeros(128, np.uint8), single(), np.zeros(128, np.uint8), 0]
    given[position] = array
    if message is None:
        warploom.check_cuda(NAMED, f"mine::fill<{element}>", 1, 32, given)
        return
    with pytest.raises(ProblemError, match=message):
        warploom.check_cuda(NAMED, f"mine::fill<{element}>", 1, 32, given)


@pytest.mark.parametrize(
    ("declared", "given", "refused"),
    [
        ("const float *", np.zeros(32), True),
        ("float* __restrict__ const", np.zeros(32), True),
        ("volatile unsigned int *", np.zeros(32), True),
        ("uint32_t *", np.zeros(32, np.int32), False),
        ("Mine *", np.zeros(32), False),
        ("float **", np.zeros(32), False),
        ("void *", np.zeros(32), False),
    ],
)
def test_types_of_a_kernel_without_a_mangled_name_are_those_of_its_text(
    declared: str, given: Any, refused: bool
) -> None:
    source = f'#include <cstdint>\nusing Mine = double; extern "C" __global__ void plain({declared} x, int n) {{}}'
    if not refused:
        assert not warploom.check_cuda(source, "plain", 1, 32, [given, 1]).findings
        return
    with pytest.raises(ProblemError, match="the array is float64"):
        warploom.check_cuda(source, "plain", 1, 32, [given, 1])


def test_a_number_for_a_pointer_is_refused_but_for_null() -> None:
    source = "__global__ void store(float *x, float *y) { if (y) *y = 1; }"
    with pytest.raises(ProblemError, match=r"x is float \*: pass an array, not 3"):
        warploom.check_cuda(source, "store", 1, 32, [3, 0])
    assert not warploom.check_cuda(source, "store", 1, 32, [single(), 0]).findings


def test_a_path_is_no_source(tmp_path: Any) -> None:
    for given in (tmp_path / "k.cu", "k.cu", "some/where.cu"):
        with pytest.raises(ProblemError, match="read_text"):
            warploom.check_cuda(given, "k", 1, 32, [])
    with pytest.raises(ProblemError, match="read_text"):
        warploom.check_ptx("k.ptx", 1, 32, [])


def test_mangled_ptx_is_told_by_the_names_of_its_source() -> None:
    compiled = ptx_of(NAMED, "k.cu", "sm_80", kernel="mine::fill<float>")
    given = [single(), single(), single(), 8]
    for name in (None, "mine::fill", compiled.entry):
        kernel = "mine::fill" if name is None else name
        checked = warploom.check_ptx(compiled.text, 1, 32, given, kernel=kernel)
        assert checked.program.name == "fill"
        assert "argument_1[32]" in checked.findings[0].message
    with pytest.raises(PtxError, match="no kernel fil; it has"):
        warploom.check_ptx(compiled.text, 1, 32, given, kernel="fil")


def test_readable_names() -> None:
    assert readable_name("_ZN4mine4fillIfEEvPKT_PS1_i") == "mine::fill"
    assert readable_name("_Z5totalPKfPfi") == "total"
    assert readable_name("plain") == "plain"


def test_a_misspelt_kernel_is_answered_with_those_of_the_source() -> None:
    with pytest.raises(ProblemError, match="no kernel fil; it has fill, plain"):
        warploom.check_cuda(NAMED, "fil", 1, 32, [])
    for source in ("namespace mine { __global__ void fill() {} }", "template <int N> __global__ void fill() {}"):
        with pytest.raises(ProblemError, match=r"mine::fill\).*fill<float, 128>"):
            warploom.check_cuda(source, "fill", 1, 32, [])


@pytest.mark.parametrize(
    ("mangled", "types"),
    [
        ("_Z5totalPKfPfi", [f32, f32, None]),
        ("_Z3addPKfS0_Pf", [f32, f32, f32]),
        ("_ZN1a1b1gEPKfS2_Pf1PPS4_PS2_S3_", [f32, f32, f32, None, None, None, f32]),
        ("_Z4scanI6__halfLi3EEvPT_PKjS1_S2_S4_", [f16, u32, None, f16, u32]),
        ("_Z3twoIffEvPT_PT0_S1_S3_S0_PfPKfPKS2_S4_", [f32, f32, f32, f32, None, f32, f32, f32, f32]),
        ("_Z1hPKfSt4pairIiiEPf", [f32]),
        ("_Z3oneI1PEvT_PS1_Pf", []),
        ("plain", []),
        ("_Z", []),
    ],
)
def test_pointed_types_are_read_from_mangled_names(mangled: str, types: list[Any]) -> None:
    assert pointed_types(mangled) == types


PARTIAL = """extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[128];
  int t = threadIdx.x + threadIdx.y * blockDim.x, n = blockDim.x * blockDim.y, at = t + n * blockIdx.x;
  s[t] = x[at]; MEET
  int v = s[n - 1 - t];
  __syncwarp();
  y[at] = v + 1000 * __syncthreads_count(t % 2);
}"""


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("block", [1, 20, 33, (24, 2), (3, 5)])
def test_the_last_warp_of_a_block_may_be_partial(block: Any, seed: int | None) -> None:
    """CUB's block-wide reductions take paths of their own there (NVIDIA/cccl#2699)."""
    n = int(np.prod(block))
    x, y = np.arange(2 * n, dtype=np.int32), np.zeros(2 * n, np.int32)
    for meet in ("", "__syncthreads();"):
        found = warploom.check_cuda(PARTIAL.replace("MEET", meet), "k", 2, block, [x, y], seed=seed)
        assert {finding.kind for finding in found.findings} == ({"race"} if n > 1 and not meet else set())
    assert y.tolist() == [v + 1000 * (n // 2) for part in np.split(x, 2) for v in part[::-1].tolist()]
