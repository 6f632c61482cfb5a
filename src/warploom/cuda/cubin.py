"""Read what a cubin says about its kernel, and disassemble it.

A cubin is an ELF file. Registers, stack, barriers, static shared memory and the kernel's parameters are in its
section headers and in the ``.nv.info`` sections (attributes "EIATTR" as ``cuobjdump -elf`` names them), so no tool
and no GPU is needed for them. Spilled bytes are not stored there: they come from ptxas's log or, failing that, from the
SASS.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from warploom.core.errors import UnsupportedDeviceError

_EIATTR = {"kparam_info": 0x17, "frame_size": 0x11, "regcount": 0x2F, "num_barriers": 0x4C, "cta_per_cluster": 0x3D}
_FORMAT_WITH_PAYLOAD = 0x04  # EIFMT_SVAL: the entry's 16-bit value is the size of the payload that follows
_RESERVED_SHARED_SINCE_SM90 = 1024  # ptxas counts the system's kibibyte into .nv.shared from sm_90 on


class CubinParameter(NamedTuple):
    """One kernel parameter: its offset and size in the parameter buffer, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Resources:
    """The resources that a compiled kernel uses.

    ``registers`` are per thread; ``stack_bytes`` per thread (spills and local arrays live there);
    ``static_shared_bytes`` per block; ``barriers`` are named barriers per block. The spill figures count the bytes of
    the store and load instructions (as ptxas does), and are None where neither a ptxas log nor nvdisasm was at hand.
    ``cluster`` are the CTAs of a cluster along x, y and z that the kernel was compiled for.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    barriers: int
    parameters: tuple[CubinParameter, ...]
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def spill_bytes(self) -> int | None:
        """Spill stores plus loads in bytes, or None where unknown."""
        if self.spill_store_bytes is None or self.spill_load_bytes is None:
            return None
        return self.spill_store_bytes + self.spill_load_bytes


class _Section(NamedTuple):
    name: str
    flags: int
    offset: int
    size: int
    info: int
    has_bytes: bool


def resources(cubin: bytes, kernel_name: str, *, log: str = "") -> Resources:
    """The :class:`Resources` of ``kernel_name`` in ``cubin``.

    ``log`` is ptxas's ``-v`` output, if there is one: it gives the spills without a disassembler. Raises ValueError if
    ``cubin`` is not a whole ELF cubin that holds the kernel (a truncated file, say).
    """
    sections = {section.name: section for section in _sections(cubin)}
    text = sections.get(f".text.{kernel_name}")
    own_info = sections.get(f".nv.info.{kernel_name}")
    if text is None or own_info is None or text.size == 0:
        raise ValueError(f"the cubin holds no kernel named {kernel_name!r}")
    symbol = text.info & 0xFFFFFF
    registers = text.info >> 24  # up to sm_89; later architectures leave it to EIATTR_REGCOUNT
    stack = 0
    for code, payload in _attributes(cubin, sections.get(".nv.info")):
        if code in (_EIATTR["regcount"], _EIATTR["frame_size"]) and len(payload) == 8:
            index, value = struct.unpack("<II", payload)
            if index == symbol and code == _EIATTR["regcount"]:
                registers = value & 0xFFFF
            elif index == symbol:
                stack = value
    barriers = (text.flags >> 20) & 0x7F
    parameters: dict[int, CubinParameter] = {}
    cluster = (1, 1, 1)
    for code, payload in _attributes(cubin, own_info):
        if code == _EIATTR["num_barriers"]:
            barriers = payload[0]
        elif code == _EIATTR["cta_per_cluster"] and len(payload) == 12:
            x, y, z = struct.unpack("<III", payload)
            cluster = (x, y, z)
        elif code == _EIATTR["kparam_info"] and len(payload) == 12:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            parameters[ordinal] = CubinParameter(offset, packed >> 18)
    spills = spills_from_log(log, kernel_name)
    if spills is None and stack == 0:
        spills = (0, 0)
    if spills is None:
        spills = _spills_from_sass(cubin, kernel_name)
    return Resources(
        registers=registers,
        stack_bytes=stack,
        static_shared_bytes=_static_shared(cubin, sections.get(f".nv.shared.{kernel_name}")),
        barriers=barriers,
        parameters=tuple(parameters[i] for i in sorted(parameters)),
        spill_store_bytes=spills[0] if spills else None,
        spill_load_bytes=spills[1] if spills else None,
        cluster=cluster,
    )


def compute_capability(cubin: bytes) -> tuple[int, int]:
    """The compute capability ``(major, minor)`` a cubin was assembled for."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        raise ValueError("not an ELF cubin")
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    # CUDA 13 moved the number one byte up and marks such files with OS ABI 0x41.
    number = (flags >> 8) & 0xFF if cubin[7] == 0x41 else flags & 0xFF
    return number // 10, number % 10


def _sections(cubin: bytes) -> Iterator[_Section]:
    """The section headers of a little-endian ELF64 file, with every bound checked."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF" or cubin[4:6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF cubin")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    (segments,) = struct.unpack_from("<Q", cubin, 0x20)
    segment_size, segment_count, entry_size, count, names_index = struct.unpack_from("<HHHHH", cubin, 0x36)
    if entry_size != 64 or names_index >= count or table + entry_size * count > len(cubin):
        raise ValueError("the cubin's section table is damaged or cut off")
    if segments + segment_size * segment_count > len(cubin):  # the last part of a file that ptxas writes
        raise ValueError("the cubin's segment table is cut off")
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]
    names = headers[names_index]
    for name_offset, kind, flags, _, offset, size, _, info, _, _ in headers:
        has_bytes = kind != 8  # SHT_NOBITS: shared memory takes no room in the file
        if has_bytes and offset + size > len(cubin):
            raise ValueError("a section of the cubin is cut off")
        start = names[4] + name_offset
        end = cubin.find(b"\0", start)
        if end < 0:
            raise ValueError("a section name of the cubin is cut off")
        yield _Section(cubin[start:end].decode("ascii", "replace"), flags, offset, size, info, has_bytes)


def _attributes(cubin: bytes, section: _Section | None) -> Iterator[tuple[int, bytes]]:
    """(attribute code, payload) pairs of a ``.nv.info`` section; inline values come as two bytes."""
    if section is None or not section.has_bytes:
        return
    at, end = section.offset, section.offset + section.size
    while at + 4 <= end:
        form, code, value = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _FORMAT_WITH_PAYLOAD:
            yield code, cubin[at : at + value]
            at += value
        else:
            yield code, struct.pack("<H", value)


def _static_shared(cubin: bytes, section: _Section | None) -> int:
    if section is None:
        return 0
    reserved = _RESERVED_SHARED_SINCE_SM90 if compute_capability(cubin) >= (9, 0) else 0
    return max(0, section.size - reserved)


_LOG_SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


def spills_from_log(log: str, kernel_name: str) -> tuple[int, int] | None:
    """(spill store bytes, spill load bytes) of a kernel from a ``ptxas -v`` log, or None if the log does not say."""
    of_kernel = False
    for line in log.splitlines():
        if "Function properties for" in line:
            of_kernel = line.split("Function properties for", 1)[1].strip() == kernel_name
        elif of_kernel and (found := re.search(_LOG_SPILLS, line)):
            return int(found[2]), int(found[3])
    return None


_LOCAL_ACCESS = r"\b(STL|LDL)((?:\.[A-Z0-9]+)*)\s"
_WIDTHS = {".8": 1, ".U8": 1, ".S8": 1, ".16": 2, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}


def local_memory_bytes(sass: str, kernel_name: str) -> tuple[int, int]:
    """(bytes stored, bytes loaded) by the local-memory instructions (``STL``, ``LDL``) in a kernel's SASS.

    Each instruction counts once, as in ptxas's figures. Where a kernel has no array in local memory, these are its
    spills.
    """
    stored = loaded = 0
    inside = False
    for line in sass.splitlines():
        if line.startswith(".text.") and line.endswith(":"):
            inside = line == f".text.{kernel_name}:"
        elif inside and (found := re.search(_LOCAL_ACCESS, line)):
            modifiers = re.findall(r"\.[A-Z0-9]+", found[2])
            width = next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 4)
            if found[1] == "STL":
                stored += width
            else:
                loaded += width
    return stored, loaded


def _spills_from_sass(cubin: bytes, kernel_name: str) -> tuple[int, int] | None:
    try:
        return local_memory_bytes(disassemble(cubin), kernel_name)
    except UnsupportedDeviceError:
        return None


NO_NVDISASM = (
    "no nvdisasm, so no SASS: pip install nvidia-cuda-nvdisasm (it comes with the extras cu13 and cu12, and needs no "
    "driver), or put a CUDA toolkit's bin folder on PATH"
)


@lru_cache(maxsize=1)
def find_nvdisasm() -> Path | None:
    """The nvdisasm of the wheel ``nvidia-cuda-nvdisasm``, else the one on PATH, else None."""
    program = "nvdisasm.exe" if sys.platform == "win32" else "nvdisasm"
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        for file in files:
            if file.name == program and (path := Path(str(file.locate()))).is_file():
                return path
    except importlib.metadata.PackageNotFoundError:
        pass
    for toolkit in ("cu13", "cu12"):
        path = Path(sysconfig.get_path("platlib")) / "nvidia" / toolkit / "bin" / program
        if path.is_file():
            return path
    on_path = shutil.which(program)
    return Path(on_path) if on_path else None


@lru_cache(maxsize=64)
def disassemble(cubin: bytes, *, line_info: bool = False, encoding: bool = False) -> str:
    """The SASS of ``cubin`` as nvdisasm prints it (``-c``: code only).

    ``line_info`` adds the source lines (``-g``), ``encoding`` each instruction's 128 bits (``-hex``).

    Raises UnsupportedDeviceError where nvdisasm is missing, ValueError where it refuses the cubin.
    """
    program = find_nvdisasm()
    if program is None:
        raise UnsupportedDeviceError(NO_NVDISASM)
    with tempfile.TemporaryDirectory(prefix="warploom-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        options = [flag for flag, wanted in (("-g", line_info), ("-hex", encoding)) if wanted]
        command = [str(program), "-c", *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"nvdisasm refused the cubin: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
