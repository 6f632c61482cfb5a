"""Errors as one message on standard error and exit code 2; a traceback only when asked for."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec

import typer

from warploom.checking.lines import excerpt

if TYPE_CHECKING:
    from warploom.core.errors import WarploomError

P = ParamSpec("P")
FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT
"""A disk, a file or a quota."""


@dataclass
class Settings:
    """Options that stand before the command."""

    debug: bool = False


settings = Settings()


def explains_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Decorator of a command: errors that warploom raises on purpose become a message and exit code 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from warploom.core.errors import WarploomError

        try:
            with ends_with_its_reader():
                command(*args, **kwargs)
        except WarploomError as error:
            if settings.debug:
                raise
            fail(explained(error))
        except OSError as error:
            if settings.debug or (error.filename is None and error.errno not in FULL):
                raise
            fail(f"{error.filename2 or error.filename or 'writing'}: {error.strerror or error}")

    return run


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """End with exit code 0 where standard output is closed: ``… | head`` has read what it wants."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_readers()
        raise typer.Exit(0) from None


@contextmanager
def outlives_its_reader() -> Iterator[None]:
    """Go on where standard output or standard error is closed: nothing that follows depends on who reads it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_readers()


def _forget_readers() -> None:
    """Let what is still written to a closed stream go nowhere; one that is open stays so."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def explained(error: WarploomError) -> str:
    """The message of an error, and the author's line with its neighbours where the error names one."""
    return str(error) if error.where is None else f"{error}\n{excerpt(error.where)}"


def fail(message: str) -> None:
    """Say what is wrong and end with exit code 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
