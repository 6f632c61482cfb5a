"""What an installed warploom must do: run by the interpreter that has it, in a folder that is not the project's.

    python smoke.py [plot|cu12|cu13]

Ends with a traceback if something does not work; nothing is needed beside the package and the extra.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np

import warploom

SCRIPT = Path(sys.executable).with_name("warploom")


def warploom_says(*arguments: str, status: int = 0) -> str:
    """Standard output of a command that ends with ``status``, standard error if that is not 0."""
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status, f"warploom {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stderr if status else done.stdout


def installed() -> None:
    """The package is the installed one, and its page on an index links to nothing that is not there."""
    assert Path(warploom.__file__).is_relative_to(sys.prefix)
    assert warploom_says("--version").split() == ["warploom", importlib.metadata.version("warploom")]
    page = str(importlib.metadata.metadata("warploom").get_payload())
    assert "## First minutes" in page
    assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []
    module = subprocess.run([sys.executable, "-m", "warploom", "--help"], capture_output=True, text=True, check=True)
    assert "ladder" in module.stdout
    json.loads(warploom_says("doctor", "--json"))


def emulated() -> None:
    """Attention on the emulator against float64, and commands that need nothing else."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 40, 2, 32)).astype(ml_dtypes.bfloat16) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = warploom.attention(q, k, v).astype(np.float64)
    q, k, v = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v))
    p = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(32))
    expected = ((p / p.sum(-1, keepdims=True)) @ v).swapaxes(1, 2)
    assert np.abs(out - expected).max() < 0.02
    assert "lane" in warploom_says("layout", "mma.m16n8k16.C.b32")
    assert "Missing argument" in warploom_says("check", status=2)


def compiled(extra: str) -> None:
    """A kernel is compiled for every target, and read back; without the extra a message says what to install."""
    rows = json.loads(warploom_says("ladder", "attention", "--rung", "2", "--on", "cpu", "--json", "-"))["rows"]
    targets = rows[0]["targets"]
    if extra not in ("cu12", "cu13"):
        assert importlib.util.find_spec("cuda") is None
        assert targets == {}
        assert "pip install" in warploom_says("inspect", "attention", "--rung", "2", status=2)
        return
    assert targets
    assert all(target["registers"] > 0 for target in targets.values())
    counts = json.loads(warploom_says("inspect", "attention", "--rung", "2", "--json", "-"))["counts"]
    assert counts["HMMA"] > 0
    nvrtc = json.loads(warploom_says("doctor", "--json"))["nvrtc"]
    assert nvrtc.startswith(extra.removeprefix("cu")), nvrtc


def plotted(extra: str) -> None:
    """A picture is drawn; without the extra a message says what to install."""
    if extra == "plot":
        warploom_says("layout", "mma.m16n8k16.C.b32", "--png", "layout.png")
        assert Path("layout.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "plot" in warploom_says("layout", "mma.m16n8k16.C.b32", "--png", "layout.png", status=2)


def main() -> None:
    """Try everything that the extra, or none, promises."""
    extra = sys.argv[1] if len(sys.argv) > 1 else ""
    installed()
    emulated()
    compiled(extra)
    plotted(extra)
    names = "numpy", "ml-dtypes", "typer", "click", "rich", "cuda-core", "matplotlib"
    found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    print("works with", ", ".join(f"{name} {found[name]}" for name in names if name in found))


if __name__ == "__main__":
    main()
