"""CUDA C++ to PTX with NVRTC, without a GPU or a driver."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from warploom.core.errors import CompileError
from warploom.core.targets import target
from warploom.cuda.device import nvrtc_version


def compile_to_ptx(source: str, file: str, arch: str, options: Sequence[str] = ()) -> tuple[str, str]:
    """(PTX, log) of a source that messages and ``.loc`` call ``file``; the PTX is '' where NVRTC refuses it.

    ``arch`` is ``sm_90a`` or its like, ``options`` are further ones of NVRTC's. Lines of the source are in the PTX.
    """
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], [])
    if int(status) != 0:
        return "", f"NVRTC does not take the source ({status})"
    try:
        given = [f"--gpu-architecture={arch}", "-lineinfo", *options]
        nvrtc.nvrtcCompileProgram(program, len(given), [option.encode() for option in given])
        log = _text_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        return _text_of(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def ptx_of(source: str, file: str, arch: str, options: Sequence[str] = ()) -> str:
    """The PTX of a CUDA C++ source for an architecture.

    Raises CompileError with NVRTC's log, ConfigError for an unknown ``arch``, UnsupportedDeviceError where NVRTC is
    missing.
    """
    nvrtc_version()  # says what to install where the compiler is missing
    virtual = target(arch).name.replace("sm_", "compute_")
    ptx, log = compile_to_ptx(source, file, virtual, options)
    if not ptx:
        raise CompileError(f"{file} does not compile for {arch}:\n{log.strip()}", log=log, source=source)
    return ptx


def _text_of(program: Any, size_of: Any, read: Any) -> str:
    status, size = size_of(program)
    if int(status) != 0 or size == 0:
        return ""
    buffer = bytearray(size)
    (status,) = read(program, buffer)
    return buffer.decode(errors="replace").rstrip("\0") if int(status) == 0 else ""
