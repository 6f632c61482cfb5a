"""Training on several processes: DDP with gradients that are added up, and FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parallel_training.py")), str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
