"""``check_cuda``: a kernel in CUDA C++, compiled by NVRTC without a GPU and run on the emulator under all checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom.core.errors import ProblemError, shown
from warploom.ops.ptx import CheckedPtx, check_ptx


def check_cuda(
    source: str,
    name: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    target: str = "sm_80",
    shared_bytes: int = 0,
    cluster: int | Sequence[int] | None = None,
    options: Sequence[str] = (),
    file: str = "kernel.cu",
    seed: int | None = None,
) -> CheckedPtx:
    """Compile CUDA C++ with NVRTC for ``target`` and run one kernel on the CPU with all checks; no GPU is needed.

    ``name`` is the kernel's, with its namespace and template arguments: ``"scan<float, 128>"``. ``grid`` counts CTAs
    (blocks), ``block`` threads, along x, y and z; ``shared_bytes`` of dynamic shared memory, ``cluster`` the CTAs
    of a cluster where the launch gives them. ``arguments`` are those of
    :func:`warploom.check_ptx`: arrays of NumPy or of torch on the CPU for pointers, which are changed in place,
    numbers, and what it says of structures and tensor maps. ``options`` are NVRTC's (``-I``, ``-D``, ``-std=c++20``);
    headers of CUDA and of CCCL are found where their wheels are installed. With ``seed`` the warps run in an
    adversarial order.

    Findings name the lines of the source as those of ``file``, of its headers by their paths. Raises
    UnsupportedDeviceError without NVRTC, CompileError with its log, ProblemError for arguments that do not fit,
    PtxError for an instruction that cannot be run.
    """
    from warploom.cuda.ptx import header_options, ptx_of

    for what, given in (("source", source), ("name", name), ("target", target)):
        if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"check_cuda: the {what} is a text, not {shown(given)}")
    if isinstance(options, str):
        raise ProblemError(f"check_cuda: options are a list, [{options!r}]")
    found = ptx_of(source, file, target, [*header_options(), *options], kernel=name)
    return check_ptx(
        found.text,
        grid,
        block,
        arguments,
        kernel=found.entry,
        shared_bytes=shared_bytes,
        cluster=cluster,
        file=file,
        seed=seed,
    )
