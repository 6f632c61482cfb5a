"""What each command does not take is one clear message on standard error, without a traceback."""

import pytest

from warploom.cuda.device import has_gpu

KERNELS = """
import numpy as np
from warploom.lang import Global, Kernel, Launch, f32, kernel

@kernel(threads=lambda tile: tile)
def scaled(k: Kernel, y: Global[f32], *, tile: int = 64, factor: float = 2.0) -> None:
    y.store(factor, k.thread)

@scaled.example
def launch(rng):
    return Launch(1, [np.zeros(64, np.float32)])

@kernel(threads=32)
def unused(k: Kernel, y: Global[f32]) -> None:
    y.store(1.0, k.lane)
"""
REFUSED = [
    ("ladder attention --rung 99", "no rung '99'"),
    ("ladder attention --set speed=9", "no flag of attention"),
    ("ladder attention --set swizzle", "FLAG=VALUE"),
    ("ladder attention --set swizzle=maybe", "true or false"),
    ("ladder attention --set tile_n=seven", "integer"),
    ("ladder attention --rung 1 --set tile_n=24", "tile_n"),
    ("ladder attention --dtype f32", "bf16 or f16, not 'f32'"),
    ("ladder attention --set dtype=f32", "dtype f32"),
    ("ladder attention --set dtype=nonsense", "nonsense"),
    ("ladder attention --head-dim 7", "head_dim 7"),
    ("ladder attention --seq 0", "--seq"),
    ("ladder attention --on tpu", "cpu, gpu or auto"),
    ("ladder attention --on gpu --gpu-seq 4096,x", "numbers with commas" if has_gpu() else "GPU"),
    ("ladder attention --seed -1", "--seed"),
    ("ladder attention --plot a.gif", ".svg, .png, .pdf"),
    ("ladder gemm --on cpu --rung 1", "no rung '1'"),
    ("ladder gemm --on cpu --set speed=9", "no flag of gemm"),
    ("ladder gemm --on cpu --rung 02 --set WM=24", "warp_m 24"),
    ("ladder gemm --on cpu --accumulate f64", "f16 or f32"),
    ("ladder gemm --on cpu --set dtype=bf16", "does not accumulate in f16"),
    ("ladder gemm --on cpu --rung best32 --set split_k=8 --k 64", "fewer than 8 parts"),
    ("ladder gemm --on cpu --rung best32 --set split_k=2 --set stream_k=true", "takes no split_k"),
    ("ladder gemm --on cpu --m 0", "--m"),
    ("show attention --what sass", "config"),
    ("show attention --rung none", "no rung 'none'"),
    ("show attention --set stages=5", "stages"),
    ("show gemm --what sass", "config"),
    ("show gemm --rung 2", "no rung '2'"),
    ("show gemm --set WM=24", "warp_m 24"),
    ("show gemm --accumulate bf16", "f16 or f32"),
    ("show {kernels}", "scaled, unused"),
    ("show {kernels}:scaled --what config", "cuda or program"),
    ("show {kernels}:scaled --set tiles=64", "no trace-time parameter of scaled; it has tile, factor"),
    ("show {kernels}:scaled --set tile=many", "an integer"),
    ("check nowhere.py", "no file nowhere.py"),
    ("inspect nosuch.cubin", "neither 'attention' nor 'gemm' nor a file"),
    ("inspect attention --rung 99", "no rung '99'"),
    ("inspect attention --arch sm_10", "unknown architecture"),
    ("inspect attention --set nosuch=1", "no flag"),
    ("inspect gemm --rung 1", "no rung '1'"),
    ("inspect gemm --accumulate f64", "f16 or f32, not 'f64'"),
    ("tune attention --seq long", "numbers with commas"),
    ("tune attention --heads 6 --kv-heads 4", "no multiple of --kv-heads 4"),
    ("tune attention --dtype int4", "int4"),
    ("tune gemm 16 16", "Missing argument"),
    ("tune gemm 16 16 0", "1"),
    ("tune gemm 16 16 16 --b tn", "kn or nk"),
    ("tune gemm 16 16 16 --dtype int4", "int4"),
    ("tune gemm 16 16 16 --dtype bf16 --accumulate f16", "f32 (or f16 for f16)"),
    ("layout mma.m16n8k16.A", "did you mean mma.m16n8k16.A.b"),
    ("discover --on emulator --write", "--on gpu"),
]
NEED_A_GPU = [
    "ladder attention --on gpu",
    "tune attention",
    "tune {kernels}:scaled --try tile=32",
    "bench {kernels}:scaled",
    "profile {kernels}:scaled",
]


@pytest.fixture
def refused(invoke, tmp_path, monkeypatch):
    """What a command that is refused says."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "kernels.py").write_text(KERNELS)

    def run(line):
        result = invoke(*line.format(kernels=tmp_path / "kernels.py").split())
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        return " ".join(result.stderr.split())

    return run


@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_bad_input_is_one_clear_message(refused, line, says):
    said = refused(line)
    assert says in said
    assert "about" not in said, "how long it takes is said of what runs"


@pytest.mark.skipif(has_gpu(), reason="for machines without a GPU")
@pytest.mark.parametrize("line", NEED_A_GPU)
def test_what_measures_needs_a_gpu_and_says_so(refused, line):
    said = refused(line)
    assert "error:" in said
    assert "GPU" in said
