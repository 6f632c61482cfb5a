"""``warploom show`` and ``warploom bench``."""

import json
import re

import pytest

from warploom.cuda.device import has_gpu


def test_the_cuda_of_a_rung(invoke):
    text = invoke("show", "attention", "--rung", "2").stdout
    assert 'extern "C" __global__' in text
    assert "ldmatrix" in text
    assert "ladder_kernel.py" in text, "comments point to the Python"


def test_the_program_and_the_flags(invoke):
    assert invoke("show", "attention", "--what", "program").stdout.startswith("kernel attention")
    flags = invoke("show", "attention", "--rung", "best", "--what", "config", "--set", "stages=3").stdout
    assert "num_warps" in flags
    assert re.search(r"stages +3", flags)


def test_a_rung_of_gemm(invoke):
    assert "cp.async.wait_group" in invoke("show", "gemm", "--rung", "03").stdout
    assert "kernel gemm_64x128x64" in invoke("show", "gemm", "--what", "program", "--set", "BM=64").stdout
    flags = invoke("show", "gemm", "--rung", "02", "--what", "config", "--accumulate", "f32").stdout
    assert "BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=1,BLOCK_STRIDE=0,accumulate=f32,ldmatrix,swizzle" in flags
    assert "block_stride" in flags
    for wrong in (["--what", "sass"], ["--rung", "2"], ["--set", "WM=24"], ["--accumulate", "bf16"]):
        assert invoke("show", "gemm", *wrong).exit_code == 2


@pytest.mark.parametrize("arguments", [["--what", "sass"], ["--rung", "none"], ["--set", "stages=5"]])
def test_bad_input(invoke, arguments):
    result = invoke("show", "attention", *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.skipif(has_gpu(), reason="for machines without a GPU")
@pytest.mark.parametrize("family", ["attention", "gemm"])
def test_bench_needs_a_gpu(invoke, family):
    result = invoke("bench", family)
    assert result.exit_code == 2
    assert "GPU" in result.stderr


@pytest.mark.skipif(has_gpu(), reason="for machines without a GPU")
@pytest.mark.parametrize("command", ["ladder", "bench"])
def test_a_search_of_tiles_needs_a_gpu(invoke, command):
    result = invoke(command, "gemm", "--tuned", "--rung", "03")
    assert result.exit_code == 2
    assert "GPU" in result.stderr


@pytest.mark.parametrize("option", ["--data", "--load"])
def test_what_products_are_timed_on_and_how_has_names(invoke, option):
    result = invoke("bench", "gemm", option, "zeros")
    assert result.exit_code == 2
    assert f"{option} takes" in result.stderr
    assert "'zeros'" in result.stderr


@pytest.mark.parametrize("family", ["attention", "gemm"])
def test_a_broken_targets_file_is_named(invoke, tmp_path, family):
    file = tmp_path / "targets.json"
    file.write_text("{")
    result = invoke("bench", family, "--targets", str(file))
    assert result.exit_code == 2
    assert "targets.json" in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "rung", "peer", "size", "where"),
    [
        ("attention", "2", "torch_flash", ["--gpu-seq", "512"], {"seq": 512}),
        ("gemm", "02", "cublas", ["--gpu-n", "1024"], {"n": 1024}),
    ],
)
def test_bench_writes_evidence_and_a_missed_target_is_exit_code_1(invoke, tmp_path, family, rung, peer, size, where):
    pytest.importorskip("torch")
    targets, out = tmp_path / "targets.json", tmp_path / "result.json"
    for at_least, code in ((0.01, 0), (100.0, 1)):
        figure = {"rung": rung, "peer": peer, "where": where, "at_least": at_least}
        targets.write_text(json.dumps({family: [figure]}))
        result = invoke("bench", family, "--rung", rung, *size, "--out", str(out), "--targets", str(targets))
        assert result.exit_code == code, result.output
    assert "target missed" in result.stderr
    assert json.loads(out.read_text())["rows"][0]["gpu"]["peers"][peer]
