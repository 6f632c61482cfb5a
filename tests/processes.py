"""Forked children that cannot hang a test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def holds_in_forked_child(claim: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether ``claim`` is true in a forked child that ends within ``seconds``; the child is killed if it does not."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if claim() else 1
        finally:
            os._exit(code)  # without what the parent has to do at its end
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
