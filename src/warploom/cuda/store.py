"""The disk cache of compiled kernels: one folder that any number of processes share.

``cuda.core`` brings the files (they appear by an atomic rename, and the least recently read go when the folder is
full). An entry is the raw cubin (nvdisasm reads it as it is) and, beside it under a second key, ptxas's log and the
cubin's checksum: so a hit still tells the spills, and a damaged entry is noticed and removed.

A third kind of entry is a *pointer*: from what a kernel is traced from to the kernel that came out of it, with what a
launch must know. It spares a later process the trace, the printing and the compiler.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from warploom.core.errors import warn_caller
from warploom.cuda.cubin import Resources, resources

_LIMIT_BYTES = 1 << 30  # least recently read entries go first


@dataclass(frozen=True, slots=True)
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
        self._folder = folder
        self._cache: Any = importlib.import_module("cuda.core.utils").FileStreamProgramCache
        self._entries = self._cache(folder)
        self._warned = False

    @cached_property
    def _limited(self) -> Any:
        """The same entries, for writing: keeping the limit starts with a look at every file, 20 µs each."""
        return self._cache(self._folder, max_size_bytes=_LIMIT_BYTES)

    @classmethod
    def open(cls, folder: Path) -> KernelStore | None:
        """The store of ``folder``, or None after one warning where it cannot be made."""
        with cls._lock:
            if folder not in cls._opened:
                try:
                    cls._opened[folder] = cls(folder)
                except OSError as error:
                    cls._opened[folder] = None
                    _warn(folder, error)
            return cls._opened[folder]

    def load(self, key: bytes, name: str, arch: str) -> CompiledKernel | None:
        """The kernel under ``key``; an entry that is not whole is removed and counts as absent."""
        cubin, note = self._read(key), self._read(_note_key(key))
        if not cubin and not note:
            return None
        try:
            facts = json.loads(note)
            if facts["sha256"] != _checksum(cubin):
                raise ValueError("checksum differs")
            log = str(facts["log"])
            return CompiledKernel(name, arch, cubin, log, resources(cubin, name, log=log), True, 0.0, key)
        except (ValueError, KeyError, TypeError):
            self._remove(key)
            self._remove(_note_key(key))
            return None

    def save(self, key: bytes, kernel: CompiledKernel) -> CompiledKernel:
        """Write the entry; the kernel with its key, where that worked."""
        note = {"sha256": _checksum(kernel.cubin), "log": kernel.log}
        kept = self._write(key, kernel.cubin) and self._write(_note_key(key), json.dumps(note).encode())
        return replace(kernel, key=key) if kept else kernel

    def load_pointer(self, key: bytes, arch: str) -> tuple[CompiledKernel, dict[str, Any]] | None:
        """The kernel that :meth:`save_pointer` pointed to, and its facts; None where either is absent or damaged."""
        checksum, _, text = self._read(key).partition(b"\n")
        if not text:
            return None
        try:
            if checksum.decode() != _checksum(text):
                raise ValueError("checksum differs")
            found = json.loads(text)
            kernel = self.load(bytes.fromhex(found["kernel"]), found["name"], arch)
            if kernel is not None and _checksum(kernel.cubin) == found["sha256"]:
                return kernel, found["facts"]
        except (ValueError, KeyError, TypeError):
            self._remove(key)
        return None

    def save_pointer(self, key: bytes, kernel: CompiledKernel, facts: dict[str, Any]) -> None:
        """Let ``key`` lead to ``kernel``, which has an entry, with ``facts`` (JSON-able) for who finds it."""
        found = {"kernel": kernel.key.hex(), "name": kernel.name, "sha256": _checksum(kernel.cubin), "facts": facts}
        text = json.dumps(found).encode()
        self._write(key, _checksum(text).encode() + b"\n" + text)

    def _read(self, key: bytes) -> bytes:
        try:
            return self._entries.get(key) or b""
        except OSError as error:
            self._warn_once(error)
            return b""

    def _write(self, key: bytes, data: bytes) -> bool:
        try:
            self._limited[key] = data
        except OSError as error:
            self._warn_once(error)
            return False
        return True

    def _remove(self, key: bytes) -> None:
        try:
            del self._entries[key]
        except KeyError:
            return
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _warn(self._folder, error)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _note_key(key: bytes) -> bytes:
    return key + b"/note"


def _warn(folder: Path, error: OSError) -> None:
    warn_caller(
        f"the kernel cache {folder} cannot be used ({error.strerror or error}): kernels are compiled anew in every "
        "process. Free some room there or set WARPLOOM_CACHE to a folder you can write.",
        RuntimeWarning,
    )
