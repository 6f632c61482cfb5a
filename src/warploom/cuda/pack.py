"""A pack: one file of compiled kernels, for machines that shall not compile, or have no compiler.

It is a zip archive. ``pack.json`` says what the kernels were traced from (the sources of this package, Python, NumPy);
each kernel is ``KEY.cubin`` and ``KEY.json``, by a digest of its architecture and of what it was traced from.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from warploom.core.errors import warn_caller
from warploom.core.files import open_private, parse_json, put_file
from warploom.core.settings import pack_files
from warploom.cuda.cubin import resources
from warploom.cuda.store import CompiledKernel

T = TypeVar("T")
_INDEX = "pack.json"
_FORMAT = "warploom pack 1"


class Pack:
    """The pack in a file that nobody but this user and root can write to; a damaged one is empty, after a warning."""

    def __init__(self, path: Path) -> None:
        self._path, self._refused = path, False

    @cached_property
    def _archive(self) -> zipfile.ZipFile | None:
        try:
            with open(self._path, "rb", opener=open_private) as file:
                return zipfile.ZipFile(io.BytesIO(file.read()))
        except (OSError, zipfile.BadZipFile) as error:
            why = getattr(error, "strerror", None) or error
            warn_caller(f"the pack {self._path} cannot be used: {why}. Make it anew: warploom pack", RuntimeWarning)
            return None

    @cached_property
    def _made_of(self) -> str:
        """The sources and versions that all kernels of the pack were traced from; empty for a damaged pack."""
        try:
            return str(parse_json(self._content(_INDEX))["made_of"])
        except (KeyError, TypeError, ValueError):
            return ""

    def _content(self, name: str) -> bytes:
        """The content of an entry. Raises KeyError where there is none, ValueError where it is damaged."""
        if self._archive is None:
            raise KeyError(name)
        try:
            return self._archive.read(name)
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from error

    def find(self, origin: str, arch: str, read: Callable[[Any], T]) -> tuple[CompiledKernel, T] | None:
        """The kernel that ``origin`` gives for an architecture, and ``read`` of its facts; None if it is not there."""
        if self._archive is None or self._refused:
            return None
        if self._made_of != _common(origin):
            self._refused = True
            warn_caller(
                f"no kernel of the pack {self._path} is used: it was made with another warploom, Python or NumPy. Make "
                "it anew with these: warploom pack",
                RuntimeWarning,
            )
            return None
        key = _key(origin, arch)
        try:
            note, cubin = parse_json(self._content(f"{key}.json")), self._content(f"{key}.cubin")
            needs = resources(cubin, note["name"], log=note["log"])
            return CompiledKernel(note["name"], arch, cubin, note["log"], needs, True, 0.0), read(note["facts"])
        except (KeyError, TypeError, ValueError):
            return None


def find_packed(origin: str, arch: str, read: Callable[[Any], T]) -> tuple[CompiledKernel, T] | None:
    """The kernel of the first pack in ``$WARPLOOM_PACK`` that has it, and its facts."""
    found = (pack.find(origin, arch, read) for pack in map(_opened, pack_files()))
    return next((x for x in found if x is not None), None)


def write_pack(path: Path, kernels: Iterable[tuple[str, CompiledKernel, Any]]) -> int:
    """Write kernels, with what each was traced from and its facts (JSON-able); the number of bytes.

    All were traced by one process. Raises OSError where the file cannot be written.
    """
    whole, made_of = io.BytesIO(), ""
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for origin, kernel, facts in kernels:
            key, made_of = _key(origin, kernel.arch), _common(origin)
            archive.writestr(f"{key}.cubin", kernel.cubin)
            archive.writestr(f"{key}.json", json.dumps({"name": kernel.name, "log": kernel.log, "facts": facts}))
        archive.writestr(_INDEX, json.dumps({"format": _FORMAT, "made_of": made_of}))
    path.parent.mkdir(parents=True, exist_ok=True)
    put_file(path, whole.getvalue())
    path.chmod(0o644)  # for whoever a service runs as
    return whole.tell()


_opened = lru_cache(Pack)


def _common(origin: str) -> str:
    """Return the part of an origin that all origins of one process share: sources, versions of Python and NumPy."""
    return "\0".join(origin.split("\0")[:2])


def _key(origin: str, arch: str) -> str:
    return hashlib.sha256("\0".join((_FORMAT, arch, origin)).encode()).hexdigest()
