"""Keyword arguments of the operations as plain values: what a call is looked up by must be hashable and fixed.

An array or tensor given for a number is read here, once: as part of a key it would be looked up by its identity, and
changing it would go unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from warploom.core.errors import ConfigError, ProblemError, shown
from warploom.interop.refusals import refuse_watched
from warploom.kernels.settings import broken_flags


def number(name: str, value: Any) -> float:
    """``value`` as a float: a number, or an array or tensor of one number. Raises ProblemError for anything else."""
    found = single(name, value)
    if not isinstance(found, Real) or isinstance(found, bool):
        raise ProblemError(f"{name} is a number, not {shown(value)}")
    try:
        return float(found) + 0.0  # -0.0 and 0.0 are one key of the calls that are kept
    except OverflowError:
        raise ProblemError(f"{name} must be a finite float32, not {shown(value)}") from None


def flag(name: str, value: Any) -> bool:
    """``value`` as True or False, given as such or as 0 or 1. Raises ProblemError for anything else."""
    found = single(name, value)
    if isinstance(found, Real | np.bool_) and found in (0, 1):
        return bool(found)
    raise ProblemError(f"{name} is True or False, not {shown(value)}")


def whole(name: str, value: Any) -> int:
    """``value`` as an int: an integer, or an array or tensor of one. Raises ProblemError for anything else."""
    found = single(name, value)
    if not isinstance(found, Integral):
        raise ProblemError(f"{name} is an integer, not {shown(value)}")
    return int(found)


def window_sides(name: str, value: Any) -> tuple[int | None, int | None]:
    """(left, right) as ints and None. Raises ProblemError for anything that is no pair of them."""
    refuse_watched(name, value)
    sides: Any = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(sides, tuple | list) and len(sides) == 2:  # pyright: ignore[reportUnknownArgumentType]
        found = [single(name, side) for side in sides]  # pyright: ignore[reportUnknownVariableType]
        if all(side is None or isinstance(side, Integral) for side in found):
            left, right = (None if side is None else int(side) for side in found)
            return left, right
    raise ProblemError(f"{name} is (left, right) counts of keys, None or -1 for an open side; not {shown(value)}")


def extra_matrices(extras: Any) -> tuple[Any, ...]:
    """The ``extras`` of a product as a tuple. Raises ProblemError for what is no tuple or list of matrices."""
    if extras is None:
        return ()
    if isinstance(extras, tuple | list):
        return tuple(extras)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise ProblemError(f"extras is a tuple of matrices, not {shown(extras)}: for one matrix write extras=(matrix,)")


def single(name: str, value: Any) -> Any:
    """The element of an array or tensor that has one; other values as they are.

    Raises ProblemError for one that carries a derivative or a trace, which reading it would lose.
    """
    refuse_watched(name, value)
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or not hasattr(value, "item") or any(size != 1 for size in shape):
        return value
    return value.item()


def refuse_unhashable(options: Mapping[str, Any]) -> None:
    """Raises ProblemError (for a configuration ConfigError) that names the first of ``options`` no key can hold."""
    for name, value in options.items():
        try:
            hash(value)
        except TypeError:
            problems = broken_flags(value) if is_dataclass(value) else []
            if problems:
                raise ConfigError(f"{value} does not fit: " + "; ".join(problems)) from None
            raise ProblemError(f"{name} cannot be {shown(value)}") from None
