"""CUDA C++ of packages: nvcc compiles headers as installed, with g++ and without a GPU; the PTX is checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .trial import launch


def packages() -> Path:
    """The folder into which pip has put the packages of this process."""
    return Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])


def cuda(
    headers: str,
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Any],
    *,
    options: Sequence[str] = (),
    target: str = "sm_90a",
    shared_bytes: int = 0,
    cluster: int | None = None,
    seed: int | None = None,
) -> None:
    """Check a kernel, named with its namespace and template arguments, of ``headers``, lines of a source file."""
    import warploom

    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc is missing: pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm")
    plain = kernel.partition("<")[0].rpartition("::")[2]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(f"{headers}\n__attribute__((used)) const void *audited = (const void *)&{kernel};\n")
        command = [nvcc, "-ptx", f"-arch={target}", "-lineinfo", "-std=c++20", "--expt-relaxed-constexpr"]
        command += ["-w", *options, "-o", f"{folder}/kernel.ptx", str(source)]
        made = subprocess.run(command, capture_output=True, encoding="utf-8")
        if made.returncode:
            raise RuntimeError(made.stderr[-3000:] or made.stdout[-3000:])
        ptx = (Path(folder) / "kernel.ptx").read_text(encoding="utf-8")
    entries = [name for name in re.findall(r"\.entry (\w+)", ptx) if re.search(rf"\d{plain}(?=[A-Z_])", name)]
    found = next((line for line in re.findall(r'\.file\s+\d+ "([^"]*)"', ptx) if str(packages()) in line), "kernel.cu")
    arguments = list(arguments)

    def checked() -> Any:
        given = {"shared_bytes": shared_bytes, "cluster": cluster, "seed": seed}
        names = [f"argument {i}" for i in range(len(arguments))]
        return warploom.check_ptx(ptx, grid, block, arguments, kernel=entries[0], names=names, **given)

    launch(plain, found, checked)
