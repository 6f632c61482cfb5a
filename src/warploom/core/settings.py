"""Where warploom keeps what it caches, and the few switches a user can set from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled kernels and tuned configurations: ``$WARPLOOM_CACHE``, or the platform's user cache.

    Where neither leads anywhere, because the user has no home, a place where nothing can be kept: who tries warns.
    """
    try:
        return _cache_folder()
    except RuntimeError:  # of pathlib: "Could not determine home directory"
        return Path(os.devnull) / "no-home-folder"


def pack_files() -> list[Path]:
    """The packs of compiled kernels that ``$WARPLOOM_PACK`` names, with the system's separator of paths between."""
    return [Path(name) for name in os.environ.get("WARPLOOM_PACK", "").split(os.pathsep) if name]


def _cache_folder() -> Path:
    chosen = os.environ.get("WARPLOOM_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "warploom"
