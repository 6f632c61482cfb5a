"""Folders and files that only this user can have written: code that a cache holds runs on the GPU.

The rule stands in ``docs/reference/caches.md``. Owners and permission bits are checked where the system has them
(Linux, macOS); on Windows the folder's access list says who can write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, NoReturn

UNFINISHED = ".new-"
"""How the name begins of a file that is being written, or whose writer was killed."""
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe is opened without waiting


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` and those around it with mode 0700 where they are missing, and require that it is private.

    Raises OSError where it cannot be made, PermissionError where others can write to it.
    """
    for each in (*reversed(folder.parents), folder):  # of mkdir's own parents the umask decides
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
    require_private_folder(folder)


def require_private_folder(folder: Path) -> None:
    """Raise PermissionError unless ``folder`` is a directory that only this user and root can write to.

    So must be the folder around it, which may be a symbolic link or have the sticky bit, as ``/tmp`` has. Raises
    FileNotFoundError where it is missing.
    """
    _require_private(folder.parent, os.stat(folder.parent), but_sticky=True)
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        raise _refused(folder, "it is a symbolic link")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a directory", str(folder))
    _require_private(folder, found)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An ``opener`` for :func:`open`: regular files only that nobody but this user and root can write to.

    New files get mode 0600. Raises PermissionError for links, pipes, devices and folders, and files of other users.
    """
    if os.path.islink(path):  # O_NOFOLLOW would say "too many levels of symbolic links", and Windows has none
        raise _refused(path, "it is a symbolic link")
    descriptor = os.open(path, flags | _OPEN_SAFELY, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(path, "it is not a regular file")
        _require_private(path, found)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def put_file(path: Path, data: bytes) -> None:
    """Put a file in place, whole or not at all. Raises OSError where its folder cannot be written."""
    descriptor, unfinished = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def parse_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else: NaN, Infinity and nesting too deep to read too."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def _require_private(path: str | os.PathLike[str], found: os.stat_result, *, but_sticky: bool = False) -> None:
    if not hasattr(os, "geteuid"):  # Windows
        return
    if found.st_uid not in (0, os.geteuid()):
        raise _refused(path, f"it belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS_CAN_WRITE and not (but_sticky and found.st_mode & stat.S_ISVTX):
        raise _refused(path, f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o})")


def _refused(path: str | os.PathLike[str], why: str) -> PermissionError:
    return PermissionError(errno.EPERM, why, os.fspath(path))


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
