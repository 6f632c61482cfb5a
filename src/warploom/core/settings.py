"""Where warploom keeps what it caches, and the few switches a user can set from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled kernels and tuned winners: ``$WARPLOOM_CACHE``, or the platform's user cache."""
    chosen = os.environ.get("WARPLOOM_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "warploom"
