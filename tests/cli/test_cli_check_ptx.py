"""``warploom check`` on PTX, with a launch as JSON."""

import json

import numpy as np
import pytest
from tests.ptx.text import kernel

SWAP = """mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, tile; add.u32 %r3, %r2, %r1;
mul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;
ld.global.f32 %f1, [%d21];
st.shared.f32 [%r3], %f1;
BARRIER
xor.b32 %r4, %r1, 128; add.u32 %r5, %r2, %r4; ld.shared.f32 %f2, [%r5]; st.global.f32 [%d22], %f2;"""


@pytest.fixture
def swap(tmp_path):
    def write(barrier="bar.sync 0;", **changes):
        file, launch = tmp_path / "swap.ptx", tmp_path / "launch.json"
        body = SWAP.replace("BARRIER", barrier)
        file.write_text(kernel(body, ["u64", "u64"], ".shared .align 4 .b8 tile[256];"))
        x = np.arange(64, dtype=np.float32)
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", np.roll(x, 32))
        arguments = [
            {"file": "x.npy"},
            {"dtype": "f32", "shape": [64], "fill": "nan", "name": "out", "expect": "y.npy"},
        ]
        launch.write_text(json.dumps({"grid": 1, "block": [64], "arguments": arguments, **changes}))
        return str(file), "--launch", str(launch)

    return write


def test_a_right_kernel_and_a_wrong_result(invoke, swap, tmp_path):
    arguments = swap()
    result = invoke("check", *arguments)
    assert result.exit_code == 0, result.output
    assert "out is right" in result.stdout
    np.save(tmp_path / "y.npy", np.zeros(64, np.float32))
    result = invoke("check", *arguments)
    assert result.exit_code == 1
    assert "out is WRONG" in result.stdout


def test_a_missing_barrier_is_a_race_with_its_line_shown(invoke, swap):
    result = invoke("check", *swap(""))
    assert result.exit_code == 1
    assert "race" in result.stdout
    assert "st.shared.f32 [%r3], %f1;" in result.stdout
    (finding,) = json.loads(invoke("check", *swap(""), "--json").stdout)["kernels"][0]["findings"]
    assert finding["where"].startswith("swap.ptx:")


def test_what_a_compiler_relies_on_is_for_review_and_no_failure(invoke, swap, tmp_path):
    """Lanes of a warp swap words without a barrier: Triton's choice where its name for shared memory stands."""
    command = swap("")
    file = tmp_path / "swap.ptx"
    within_a_warp = file.read_text().replace("xor.b32 %r4, %r1, 128", "xor.b32 %r4, %r1, 4")
    np.save(tmp_path / "y.npy", np.arange(64, dtype=np.float32).reshape(32, 2)[:, ::-1].reshape(-1))
    file.write_text(within_a_warp)
    assert invoke("check", *command).exit_code == 1
    file.write_text(within_a_warp.replace("tile", "global_smem"))
    result = invoke("check", *command)
    assert result.exit_code == 0
    assert "race" in result.stdout
    assert "For review" in result.stdout
    checked = json.loads(invoke("check", *command, "--json").stdout)["kernels"][0]
    assert checked["ok"]
    (finding,) = checked["findings"]
    assert finding["grade"] == "review"
    assert "in step" in finding["relies_on"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shared": 5}, 'has no "shared": did you mean "shared_bytes": bytes of dynamic'),
        ({"xyz": 5}, "it may have grid, block"),
        ({"arguments": [{"dtype": "f32", "shap": [4]}, 1]}, 'did you mean "shape"'),
        ({"arguments": {"x": 1, "y": 2}}, "missing arguments ['p0', 'p1']"),
        ({"arguments": [{"dtype": "f32", "shape": [4], "fill": "ones"}, 1]}, "a number, not 'ones'"),
        ({"arguments": [1]}, "takes 2 arguments"),
        ({"arguments": ["x", 1]}, "argument 0"),
        ({"arguments": [{"file": "z.npy"}, 1]}, "z.npy: no such file"),
        ({"arguments": [{"dtype": "f32", "shape": [4], "tensor_map": 3}, 1]}, "argument 0: a tensor_map is an object"),
        ({"arguments": [{"dtype": "f12", "shape": [1]}, 1]}, "f12"),
        ({"kernel": "other"}, "other"),
        ({"arguments": None}, "arguments are a list, or an object"),
        ({"shared_bytes": "many"}, "shared_bytes counts"),
        ({"block": 2048}, "1024"),
        ({"arguments": [{"dtype": "u32", "shape": [4], "fill": "nan"}, 1]}, "has no NaN"),
        ({"cluster": 0}, "a cluster is"),
        ({"arguments": [{"dtype": "f32", "shape": [4], "tensor_map": {"size": 4}}, 1]}, "argument 0"),
    ],
)
def test_a_launch_that_does_not_fit(invoke, swap, changes, says):
    result = invoke("check", *swap(**changes))
    assert result.exit_code != 0
    assert says in result.output


def test_a_launch_that_lacks_a_key_or_is_no_file(invoke, swap, tmp_path):
    file, _, launch = swap()
    (tmp_path / "launch.json").write_text('{"grid": 1, "arguments": []}')
    assert 'a launch needs "block", threads' in invoke("check", file, "--launch", launch).output
    assert "none.json: no such file" in invoke("check", file, "--launch", str(tmp_path / "none.json")).output


def test_ptx_needs_a_launch_and_python_none(invoke, swap, tmp_path):
    file, _, launch = swap()
    assert "--launch" in invoke("check", file).output
    other = tmp_path / "kernels.py"
    other.write_text("")
    assert "--launch" in invoke("check", str(other), "--launch", launch).output
    assert "there is no file" in invoke("check", str(tmp_path / "none.ptx"), "--launch", launch).output


@pytest.fixture
def cuda(invoke, tmp_path):
    """Checks a kernel in CUDA with a launch."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")

    def run(source, **launch):
        (tmp_path / "k.cu").write_text(source)
        (tmp_path / "launch.json").write_text(json.dumps(launch))
        return invoke("check", str(tmp_path / "k.cu"), "--launch", str(tmp_path / "launch.json"))

    return run


def test_a_kernel_in_cuda(cuda):
    source = 'extern "C" __global__ void fill(float* x, int n) {\n  x[threadIdx.x] = n;\n}\n'
    launch = {"grid": 1, "block": 64, "arguments": [{"dtype": "f32", "shape": [64], "name": "x"}, 5]}
    assert cuda(source, kernel="fill", **launch).exit_code == 0
    result = cuda(source, kernel="fill", **launch | {"block": 96})
    assert result.exit_code == 1
    assert "x[threadIdx.x] = n;" in result.stdout
    assert "must name the kernel" in cuda(source, **launch).output


def test_arguments_by_name_and_options(cuda, tmp_path):
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "factor.h").write_text("#define FACTOR (N + 1)\n")
    source = '#include "factor.h"\n__global__ void fill(float *x, int n) {\n  x[threadIdx.x] = n * FACTOR;\n}\n'
    np.save(tmp_path / "x.npy", np.full(32, 20, np.float32))
    array = {"dtype": "float", "shape": [32], "expect": "x.npy"}
    launch = {"kernel": "fill", "grid": 1, "block": 32, "options": ["-Iheaders", "-DN=3"]}
    result = cuda(source, **launch, arguments={"n": 5, "x": array})
    assert result.exit_code == 0, result.output
    assert "x is right" in result.stdout
    assert "k.cu: fill: missing arguments ['x']" in cuda(source, **launch, arguments={"n": 5, "y": array}).output
    assert "the array is float64" in cuda(source, **launch, arguments=[array | {"dtype": "double"}, 5]).output
    assert "fill is" not in cuda(source, **launch, arguments=[array, 5]).output
    assert "no kernel fil; it has fill" in cuda(source, **launch | {"kernel": "fil"}, arguments=[array, 5]).output


def test_clusters_structures_and_tensor_maps(cuda, tmp_path):
    source = """#include <cuda.h>
struct Two { float scale; int more; };
extern "C" __global__ void ranks(int* out, Two two, const __grid_constant__ CUtensorMap) {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) out[blockIdx.x] = rank * two.more;
}"""
    np.save(tmp_path / "out.npy", np.array([0, 7], np.int32))
    box = {"dtype": "bf16", "shape": [64, 64], "tensor_map": {"box": [64, 32], "swizzle_bytes": 128}}
    arguments = [{"dtype": "s32", "shape": [2], "expect": "out.npy"}, [0.5, 7], box]
    result = cuda(source, kernel="ranks", grid=2, block=32, cluster=2, target="sm_90a", arguments=arguments)
    assert result.exit_code == 0, result.output
