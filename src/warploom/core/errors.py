"""Every error warploom raises on purpose. Each message says what is wrong and what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Self, cast


class WarploomError(Exception):
    """Base of all errors that warploom raises on purpose."""

    where: Any = None
    """The author's line with which the message begins, if it is known: a ``warploom.ir.statements.SourceLine``."""

    def at(self, where: Any) -> Self:
        """Begin the message with the author's line, unless it has one, and end it with the calls that led there."""
        if self.where is None and where.line:
            self.where = where
            self.args = (f"{where}: {self.args[0]}{where.calls}", *self.args[1:])
        return self


class LayoutError(WarploomError, ValueError):
    """A layout cannot be built, inverted or derived as asked."""


class TraceError(WarploomError, TypeError):
    """A kernel function cannot be traced; the message names the author's line and the fix."""


class VerifyError(WarploomError, ValueError):
    """A Program breaks a rule that can be checked before it runs."""


class ConfigError(WarploomError, ValueError):
    """A kernel's configuration does not fit the problem or the target; every reason is listed."""


class ProblemError(WarploomError, ValueError):
    """The arrays or options of a call are not something the operation takes."""


class PtxError(WarploomError, ValueError):
    """PTX that cannot be read, or that has a form which cannot be run: the message names its line and the form."""


class UnsupportedDeviceError(WarploomError, RuntimeError):
    """No GPU, no driver, or a GPU or driver too old for what was asked."""


class CompileError(WarploomError, RuntimeError):
    """NVRTC or ptxas refused a generated kernel; carries the log and the source."""

    def __init__(self, message: str, *, log: str = "", source: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class EmulationError(WarploomError, RuntimeError):
    """The emulator found a defect and was asked to stop; carries the findings."""

    def __init__(self, message: str, findings: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class EmulationWarning(UserWarning):
    """A call runs on the emulator because there is no GPU: right, checked, and slow."""


@contextmanager
def located(where: Any) -> Generator[None, None, None]:
    """Begin the messages of errors within with the author's line, of those that have none."""
    try:
        yield
    except WarploomError as error:
        error.at(where)
        raise


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside this package that a call came from, however deep in the package the reason lies."""
    level, frame = 2, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "warploom":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


_SHOWN = 80


def shown(value: object) -> str:
    """A value as a message shows it: an array by its type and shape, and no more than some characters of others."""
    shape: object = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(cast('tuple[int, ...]', shape))}"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
