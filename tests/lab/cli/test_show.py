"""``warploom show``."""

import re


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
