"""PTX of Triton and NVRTC on the GPU, as it is and by way of a Program: are the results the same, bit for bit?

    PYTHONPATH=src:. python benchmarks/ptx_round_trip_h200.py [--dry-run] [--out DIR]

The kernels are those of ``tests/ptx/cuda_cases.py`` and, where Triton is installed, of ``tests/with_triton``. Each is
read as a Program and run on the emulator; the Program is printed as CUDA C++, compiled, and launched beside the
original PTX on the same arrays. ``--dry-run`` compiles both and launches neither: it needs no GPU. Exit status 1 where
results differ. Writes ptx-round-trip.json after each kernel.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from scripts import kept
from tests.ptx.mutants import Subject, subjects

from warploom.cuda.buffers import DeviceCopy
from warploom.cuda.compile import compile_source
from warploom.cuda.device import check, require_driver
from warploom.cuda.launch import load, scalar
from warploom.cuda.names import entry_name
from warploom.cuda.printer import print_cuda
from warploom.ir.program import Program
from warploom_lab.bench.cells import parser_of


def triple(size: Any) -> tuple[int, int, int]:
    """Three sizes of one to three."""
    x, y, z = (*(size if isinstance(size, tuple | list) else (size,)), 1, 1)[:3]
    return int(x), int(y), int(z)


class Gpu:
    """Launches on one GPU, on copies of NumPy arrays."""

    def __init__(self) -> None:
        self.core: Any = importlib.import_module("cuda.core")
        self.device = self.core.Device()
        self.device.set_current()

    def run(self, launch: Any, program: Program, values: list[Any]) -> list[np.ndarray[Any, Any]]:
        """The bytes of the arrays after ``launch(arguments)``."""
        copies = {
            i: DeviceCopy(np.copy(x).reshape(-1).view(np.uint8), 0)
            for i, x in enumerate(values)
            if isinstance(x, np.ndarray)
        }
        arguments = [
            copies[i].pointer if i in copies else scalar(p.dtype, x)
            for i, (p, x) in enumerate(zip(program.parameters, values, strict=True))
        ]
        launch(arguments)
        for copy in copies.values():
            copy.download()
        return [copy.host for copy in copies.values()]

    def launch(self, kernel: Any, grid: Any, block: Any, shared_bytes: int, arguments: list[Any]) -> None:
        """Queue a kernel of ``cuda.core``."""
        driver = require_driver()
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = check(driver, driver.cuDeviceGet(0))
        check(driver, (*driver.cuKernelSetAttribute(most, shared_bytes, kernel.handle, device), None))
        config = self.core.LaunchConfig(grid=triple(grid), block=triple(block), shmem_size=shared_bytes)
        self.core.launch(self.device.default_stream, config, kernel, *arguments)


def original_kernel(subject: Subject, arch: str) -> Any:
    """The PTX of a subject, assembled."""
    core: Any = importlib.import_module("cuda.core")
    options = core.ProgramOptions(arch=arch)
    name = subject.call.options.get("kernel")
    return core.Program(subject.text, "ptx", options).compile("cubin"), name


def compared(subject: Subject, arch: str, gpu: Gpu | None) -> dict[str, Any]:
    """The results of one kernel, three times."""
    call = subject.call
    values = [np.copy(x) if isinstance(x, np.ndarray) else x for x in call.arguments]
    emulated = [np.copy(x) if isinstance(x, np.ndarray) else x for x in values]
    program = call.again(subject.text, None, emulated).program
    again = compile_source(print_cuda(program), entry_name(program.name), arch=arch)
    code, name = original_kernel(subject, arch)
    row: dict[str, Any] = {"kernel": subject.name, "registers": again.resources.registers}
    if gpu is None:
        return row
    flat = values[: len(program.parameters)]
    mine = load(again, 0)
    made = mine.configure(triple(call.grid), program.threads, shared_bytes=program.shared_bytes)
    shared_bytes, original = call.options.get("shared_bytes", 0), code.get_kernel(name)
    theirs = gpu.run(lambda a: gpu.launch(original, call.grid, call.block, shared_bytes, a), program, flat)
    ours = gpu.run(lambda a: made.queue(0, made.pack(a)), program, flat)
    cpu = [x.reshape(-1).view(np.uint8) for x in emulated if isinstance(x, np.ndarray)]
    return {
        **row,
        "equal": all(map(np.array_equal, ours, theirs)),
        "equal on the emulator": all(map(np.array_equal, cpu, theirs)),
    }


def rows(arch: str, gpu: Gpu | None) -> Iterator[dict[str, Any]]:
    """Every kernel that has arrays and numbers as arguments."""
    for name, make in subjects():
        subject = make()
        if not all(isinstance(x, np.ndarray | int | float) for x in subject.call.arguments):
            print(f"{name}: left out, as it takes tensor maps")
            continue
        try:
            yield compared(subject, arch, gpu)
        except RuntimeError as error:  # the driver's
            yield {"kernel": subject.name, "equal": False, "error": str(error)}


def main() -> int:
    """Compare all kernels."""
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="compile, and launch nothing")
    parser.add_argument("--arch", default="sm_90a", help="the GPU's architecture")
    options = parser.parse_args()
    gpu = None if options.dry_run else Gpu()
    found = kept(rows(options.arch, gpu), options.out / "ptx-round-trip.json", "kernels")
    return int(not all(row.get("equal", True) for row in found["kernels"]))


if __name__ == "__main__":
    sys.exit(main())
