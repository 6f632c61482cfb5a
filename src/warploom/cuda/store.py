"""The disk cache of compiled kernels: one folder that any number of processes share.

A kernel is two files: the raw cubin (nvdisasm reads it as it is), and a *note* with the cubin's digest and ptxas's log,
so that a hit still tells the spills. A third file is a *pointer*: from what a kernel is traced from to the kernel that
came out of it, with what a launch must know. It spares a later process the trace, the printing and the compiler.

Notes and pointers are sealed with the name of their file, so none counts under another key; files appear by an atomic
rename; those not read for longest go when the folder is full. ``docs/reference/caches.md`` says what the folder
promises.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from warploom.core.errors import warn_caller
from warploom.core.files import UNFINISHED, make_private_folder, open_private, parse_json, put_file
from warploom.cuda.cubin import Resources, resources

LIMIT_BYTES = 1 << 30
"""What the files may take together; least recently read ones go first."""
_LARGEST = 1 << 26  # bytes of one file: no kernel comes near
_DAY = 86400.0
T = TypeVar("T")


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel.

    ``log`` is what NVRTC and ptxas said when it was compiled (on a cache hit too); ``seconds`` is what this call took;
    ``from_cache`` tells whether it came from memory or disk; ``key`` is that of its entry in the store, empty where it
    has none.
    """

    name: str
    arch: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    resources: Resources
    from_cache: bool
    seconds: float
    key: bytes = field(default=b"", repr=False)


class KernelStore:
    """The cache of one folder. Whatever is wrong with the folder costs speed, never a result."""

    _opened: dict[Path, KernelStore | None] = {}  # noqa: RUF012 - shared by all instances on purpose
    _lock = threading.Lock()

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        self._folder = folder
        self._bytes = LIMIT_BYTES  # of all files: unknown, so the first that is written has them counted
        self._warned = False

    @classmethod
    def open(cls, folder: Path) -> KernelStore | None:
        """The store of ``folder``, or None after one warning where it cannot be made or is not private."""
        with cls._lock:
            if folder not in cls._opened:
                try:
                    cls._opened[folder] = cls(folder)
                except OSError as error:
                    cls._opened[folder] = None
                    _warn(folder, error)
            return cls._opened[folder]

    def load(self, key: bytes, name: str, arch: str) -> CompiledKernel | None:
        """The kernel under ``key``; None where its entry is absent or not whole, which the next save mends."""
        cubin, note = self._read(_cubin_file(key)), self._read(_note_file(key))
        try:
            facts = _unseal(_note_file(key), note)
            if facts["sha256"] != _digest(cubin):
                raise ValueError("not the cubin that was written")
            log = str(facts["log"])
            return CompiledKernel(name, arch, cubin, log, resources(cubin, name, log=log), True, 0.0, key)
        except (ValueError, KeyError, TypeError):
            return None

    def save(self, key: bytes, kernel: CompiledKernel) -> CompiledKernel:
        """Write the entry; the kernel with its key, where that worked."""
        note = _seal(_note_file(key), {"sha256": _digest(kernel.cubin), "log": kernel.log})
        kept = self._write(_cubin_file(key), kernel.cubin) and self._write(_note_file(key), note)
        return replace(kernel, key=key) if kept else kernel

    def load_pointer(self, key: bytes, arch: str, read: Callable[[Any], T]) -> tuple[CompiledKernel, T] | None:
        """The kernel that :meth:`save_pointer` pointed to, and ``read`` of its facts.

        None where either is absent or damaged. ``read`` raises ValueError for what it did not write.
        """
        try:
            found = _unseal(_pointer_file(key), self._read(_pointer_file(key)))
            facts = read(found["facts"])
            kernel = self.load(bytes.fromhex(found["kernel"]), found["name"], arch)
            return (kernel, facts) if kernel is not None and _digest(kernel.cubin) == found["sha256"] else None
        except (ValueError, KeyError, TypeError):
            return None

    def save_pointer(self, key: bytes, kernel: CompiledKernel, facts: Any) -> None:
        """Let ``key`` lead to ``kernel``, which has an entry, with ``facts`` (JSON-able) for who finds it."""
        found = {"kernel": kernel.key.hex(), "name": kernel.name, "sha256": _digest(kernel.cubin), "facts": facts}
        self._write(_pointer_file(key), _seal(_pointer_file(key), found))

    def _read(self, name: str) -> bytes:
        """The content of a file, empty where there is none that can be trusted."""
        path = self._folder / name
        try:
            with open(path, "rb", opener=open_private) as file:
                content = file.read(_LARGEST)
                used = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return b""
        except OSError as error:
            self._warn_once(error)
            return b""
        if time.time() - used > _DAY:
            with contextlib.suppress(OSError):  # a cache that can only be read serves too
                os.utime(path)
        return content

    def _write(self, name: str, data: bytes) -> bool:
        """Put a file in place, whole or not at all; whether that worked."""
        try:
            put_file(self._folder / name, data)
            self._bytes += len(data)
            if self._bytes > LIMIT_BYTES:
                self._bytes = _trim(self._folder, LIMIT_BYTES)
        except OSError as error:
            self._warn_once(error)
            return False
        return True

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _warn(self._folder, error)


def _trim(folder: Path, limit: int) -> int:
    """Remove what was read least recently if the files pass ``limit`` bytes, and what killed writers left; bytes left.

    Once something must go, a tenth of the limit does, so that this is rarely repeated.
    """
    found: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process removed it just now
                at = entry.stat(follow_symlinks=False)
                found.append((at.st_mtime, at.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    kept = total if total <= limit else limit * 9 // 10
    for used, size, path in sorted(found):
        abandoned = os.path.basename(path).startswith(UNFINISHED) and time.time() - used > _DAY
        if total > kept or abandoned:
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
    return total


def _cubin_file(key: bytes) -> str:
    return f"{key.hex()}.cubin"


def _note_file(key: bytes) -> str:
    return f"{key.hex()}.note"


def _pointer_file(key: bytes) -> str:
    return f"{key.hex()}.traced"


def _seal(name: str, value: Any) -> bytes:
    """The content of the file ``name``: a digest of that name and the value, and the value."""
    text = json.dumps(value).encode()
    return _digest(name.encode() + b"\n" + text).encode() + b"\n" + text


def _unseal(name: str, content: bytes) -> Any:
    """Return the content that :func:`_seal` wrote. Raises ValueError for content that is not of the file ``name``."""
    digest, _, text = content.partition(b"\n")
    if digest != _digest(name.encode() + b"\n" + text).encode():
        raise ValueError(f"{name} is damaged, or another file's content")
    return parse_json(text)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _warn(folder: Path, error: OSError) -> None:
    path = error.filename or folder
    warn_caller(
        f"the kernel cache {folder} cannot be used as it is: {path}: {error.strerror or error}. Kernels are compiled "
        "anew. Mend that, free some room there, or set WARPLOOM_CACHE to a folder of yours.",
        RuntimeWarning,
    )
