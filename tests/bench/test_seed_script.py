"""The seed's kernels beside ours: its tuner's list is read from its source, and ours take the same tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.project import load

from warploom.kernels.matmul.ladder import LADDER

TUNER = """
inline std::vector<TuneConfig> GetMMAMultistageVariants() {
    return {
        TUNE_CONFIG_MULTISTAGE(Kernel, 256, 128, 64, 64, 32, 2),
    };
}
inline std::vector<TuneConfig> GetMMAFinalVariants() {
    return {
        TUNE_CONFIG_FINAL(Kernel, 256, 128, 64, 64, 64, 3, false, 16),
        TUNE_CONFIG_FINAL(Kernel, 128, 128, 64, 64, 64, 2, true,  16),
    };
}
"""


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "autotune.cuh").write_text(TUNER)
    return tmp_path


def test_the_tuners_list_is_the_seeds_and_ours_take_its_tiles_and_order(seed: Path) -> None:
    script, config = load("seed_gemm_h200"), LADDER.rung("05").config
    assert [str(v) for v in script.variants(seed, "04")] == ["256x128x64_64x32_S2"]
    plain, grouped = script.variants(seed, "05")
    assert (plain.threads, plain.grid(4096), plain.shared_bytes) == (256, (32, 16, 1), 3 * 384 * 64 * 2)
    assert (grouped.threads, grouped.grid(4096), grouped.shared_bytes) == (128, (1024, 1, 1), 2 * 256 * 64 * 2)
    assert plain.like(config) == replace(config, tile_m=256, block_stride=0)
    assert grouped.like(config) == replace(config, stages=2, block_stride=16)
