"""CUDA C++ to PTX with NVRTC, without a GPU or a driver."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from warploom.core.errors import CompileError, ProblemError
from warploom.core.targets import target
from warploom.cuda.device import nvrtc_version
from warploom.cuda.signatures import kernels_in, plain_name

_INTEGERS = "".join(
    f"using int{bits}_t = signed {name}; using uint{bits}_t = unsigned {name};\n"
    for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
)
_STDINT = f"#pragma once\n{_INTEGERS}using intptr_t = int64_t; using uintptr_t = uint64_t;\n"
_NAMES = "".join(f"using ::{sign}int{bits}_t;\n" for sign in ("", "u") for bits in (8, 16, 32, 64))
_HOST_HEADERS = {
    "stdint.h": _STDINT,
    "cstdint": f"#include <stdint.h>\nnamespace std {{\n{_NAMES}}}\n",
    "cuda.h": "#pragma once\nstruct CUtensorMap_st { alignas(64) unsigned long long opaque[16]; };\n"
    "typedef struct CUtensorMap_st CUtensorMap;\n",  # CCCL declares it so, too
} | dict.fromkeys(("assert.h", "cassert", "cmath", "cstdio", "cstdlib", "math.h", "stdio.h", "stdlib.h"), "")
"""Headers of the host that CUDA sources include, as far as kernels use them: NVRTC has none of these."""


class Ptx(NamedTuple):
    """The result of compiling to PTX: ``text`` is '' on an error, ``entry`` is the kernel's mangled name."""

    text: str
    log: str
    entry: str


def compile_to_ptx(source: str, file: str, arch: str, options: Sequence[str] = (), kernel: str = "") -> Ptx:
    """The PTX of a source that messages and ``.loc`` call ``file``.

    ``arch`` is ``sm_90a`` or its like, ``options`` are further ones of NVRTC's, ``kernel`` is the C++ name of one
    of the kernels, with its template arguments. Lines of the source are in the PTX.
    """
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    texts, names = ([x.encode() for x in part] for part in (_HOST_HEADERS.values(), _HOST_HEADERS))
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(names), texts, names)
    if int(status) != 0:
        return Ptx("", f"NVRTC does not take the source ({status})", "")
    try:
        if kernel:
            nvrtc.nvrtcAddNameExpression(program, kernel.encode())
        given = [f"--gpu-architecture={arch}", "-lineinfo", *options]
        nvrtc.nvrtcCompileProgram(program, len(given), [option.encode() for option in given])
        log = _text_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = _text_of(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        lowered = nvrtc.nvrtcGetLoweredName(program, kernel.encode())[1] if kernel and text else None
        text = text.replace(f'"{os.path.abspath(file)}"', f'"{file}"')  # NVRTC puts the working directory before it
        return Ptx(text, log, lowered.decode() if lowered else "")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def ptx_of(source: str, file: str, arch: str, options: Sequence[str] = (), kernel: str = "") -> Ptx:
    """Compile CUDA C++ to PTX for ``arch``.

    Raises CompileError with NVRTC's log, ProblemError where the source has no such kernel but others, ConfigError for
    an unknown ``arch``, UnsupportedDeviceError where NVRTC is missing.
    """
    nvrtc_version()  # says what to install where the compiler is missing
    virtual = target(arch).name.replace("sm_", "compute_")
    found = compile_to_ptx(source, file, virtual, options, kernel)
    if not found.text:
        if set(re.findall(r"^(\S+)\(\d+\): error", found.log, re.MULTILINE)) == {"__nv_name_map"}:
            _refuse_name(source, file, kernel)
        raise CompileError(f"{file} does not compile for {arch}:\n{found.log.strip()}", log=found.log, source=source)
    return found


def _refuse_name(source: str, file: str, kernel: str) -> None:
    """Raises ProblemError for a name that NVRTC does not find, where the source's kernels are seen."""
    there, plain = kernels_in(source), plain_name(kernel)
    if plain in there:
        raise ProblemError(
            f"{file} has a kernel {plain}, which {kernel} does not name: a kernel in a namespace is named with it "
            f"(mine::{plain}), a template with its arguments ({plain}<float, 128>)"
        )
    if there:
        raise ProblemError(f"{file} has no kernel {kernel}; it has {', '.join(there)}")


def header_options() -> list[str]:
    """``-I`` of the headers of CUDA and CCCL (CUB, libcu++) that are installed, from wheels or a toolkit."""
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        found = [pathfinder.find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    except (ImportError, AttributeError, RuntimeError, OSError):  # the last: a search that a busy machine cuts off
        return []
    return [f"-I{folder}" for folder in found if folder]


def _text_of(program: Any, size_of: Any, read: Any) -> str:
    status, size = size_of(program)
    if int(status) != 0 or size == 0:
        return ""
    buffer = bytearray(size)
    (status,) = read(program, buffer)
    return buffer.decode(errors="replace").rstrip("\0") if int(status) == 0 else ""
