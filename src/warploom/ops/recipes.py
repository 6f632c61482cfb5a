"""Kernels by what they are traced from, so that a later process need not trace, print or compile them again.

What came out of a :class:`~warploom.kernels.source.KernelSource` is kept on disk under everything that decides it: the
sources of this package, the function, its arguments, the architecture and the compiler. Nothing of a trace is imported
where that is found.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from warploom.core import IMPORTED_NS
from warploom.core.identity import UnstableError, stable_text
from warploom.kernels.source import KernelSource

if TYPE_CHECKING:
    from warploom.ir.program import Program


def origin(source: KernelSource) -> str | None:
    """A text that determines the Program of a source in any process; None where there is none.

    There is none for kernels and configurations of other packages, for arguments that only this process knows (an
    epilogue that sees an object of the user's), and where the sources of the package are not at hand or have changed
    since they were imported.
    """
    sources = sources_digest()
    if sources is None or not _as_imported() or not source.function.startswith(f"{_PACKAGE.name}."):
        return None
    try:
        return "\0".join((sources, _PYTHON, stable_text(source)))
    except UnstableError:
        return None


@dataclass(frozen=True)
class Signature:
    """What a launch must know of a Program. Arrays (pointers and tensor maps) come first among its parameters."""

    threads: int
    shared_bytes: int
    arrays: tuple[str, ...]
    scalars: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> Signature:
        """The signature of a traced kernel."""
        arrays = tuple(p.name for p in program.parameters if p.kind != "scalar")
        scalars = tuple(p.name for p in program.parameters if p.kind == "scalar")
        return cls(program.threads, program.shared_bytes, arrays, scalars)

    @classmethod
    def read(cls, facts: Any) -> Signature:
        """What :func:`dataclasses.asdict` made, from JSON; raises ValueError for anything else."""
        match facts:
            case {"threads": int(threads), "shared_bytes": int(shared), "arrays": [*arrays], "scalars": [*scalars]}:
                if all(isinstance(name, str) for name in (*arrays, *scalars)):
                    return cls(threads, shared, tuple(arrays), tuple(scalars))
        raise ValueError(f"no signature of a kernel: {facts!r:.200}")


_PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = ("core", "layout", "isa", "ir", "lang", "tile", "kernels", "cuda", "ops")
"""The packages that decide what a kernel is and how it is launched."""
_PYTHON = f"{sys.implementation.cache_tag} numpy {np.__version__}"


def _source_files() -> Iterator[os.DirEntry[str]]:
    """Every file of those packages, in the order of their names."""
    folders = [str(_PACKAGE / name) for name in reversed(SOURCES)]
    while folders:
        with os.scandir(folders.pop()) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        folders += [e.path for e in entries if e.is_dir() and e.name != "__pycache__"]
        yield from (e for e in entries if e.is_file())


def _as_imported() -> bool:
    """Whether the sources are those that run here: none has changed since this process imported the first (1 ms)."""
    try:
        return all(_changed_ns(entry) < IMPORTED_NS for entry in _source_files())
    except OSError:  # the package does not lie in plain files
        return False


def _changed_ns(entry: os.DirEntry[str]) -> int:
    at = entry.stat()
    # A file's time of change cannot be set back, as that of its contents can; Windows keeps that of its creation there.
    return at.st_mtime_ns if os.name == "nt" else at.st_ctime_ns


@lru_cache(maxsize=1)
def sources_digest() -> str | None:
    """A hash of the sources' contents (3 ms), None where they cannot be read."""
    total = hashlib.sha256()
    try:
        for entry in _source_files():
            with open(entry.path, "rb", buffering=0) as file:
                content = file.read()
            total.update(f"{entry.path[len(str(_PACKAGE)) :]} {len(content)}\n".encode())
            total.update(content)
    except OSError:
        return None
    return total.hexdigest()
