"""CUDA C++ of packages: nvcc compiles headers as installed, with g++ and without a GPU; the PTX is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .trial import launch


def packages() -> Path:
    """The folder into which pip has put the packages of this process."""
    return Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])


def module_of(path: str, **stand_ins: Any) -> Any:
    """A module of a package by its file, without what the package imports first; ``stand_ins`` are modules by name."""
    for name, members in stand_ins.items():
        sys.modules[name.replace("__", ".")] = SimpleNamespace(**members)  # pyright: ignore[reportArgumentType]
    spec: Any = importlib.util.spec_from_file_location(Path(path).stem, packages() / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        source.write_text(f'{headers}\nextern "C" __device__ auto audited = &{kernel};\n')
        command = [nvcc, "-ptx", f"-arch={target}", "-lineinfo", "-std=c++20", "--expt-relaxed-constexpr"]
        command += ["-w", *options, "-o", f"{folder}/kernel.ptx", str(source)]
        made = subprocess.run(command, capture_output=True, encoding="utf-8")
        if made.returncode:
            raise RuntimeError(made.stderr[-3000:] or made.stdout[-3000:])
        ptx = (Path(folder) / "kernel.ptx").read_text(encoding="utf-8")
    named = re.search(r"^.* audited = (?:generic\()?(\w+).*;$", ptx, re.M)
    if named is None:
        raise ValueError(f"the PTX does not say which entry {kernel} is")
    ptx, entry = ptx.replace(named[0], ""), named[1]
    found = next((line for line in re.findall(r'\.file\s+\d+ "([^"]*)"', ptx) if str(packages()) in line), "kernel.cu")
    arguments = list(arguments)

    def checked() -> Any:
        given = {"shared_bytes": shared_bytes, "cluster": cluster, "seed": seed}
        names = [f"argument {i}" for i in range(len(arguments))]
        return warploom.check_ptx(ptx, grid, block, arguments, kernel=entry, names=names, **given)

    launch(plain, found, checked)
