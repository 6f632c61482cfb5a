"""Training on several processes: DDP with gradients that are added up, and FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    script = Path(__file__).with_name("parallel_training.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=300)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)
