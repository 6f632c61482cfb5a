"""Flags of a configuration set by text, as ``--set FLAG=VALUE`` on the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from warploom.core.dtypes import DType, dtype_of
from warploom.core.errors import ConfigError

Config = TypeVar("Config")


def override(config: Config, settings: Mapping[str, str], family: str) -> Config:
    """The frozen dataclass ``config`` with fields set from text. Raises ConfigError for unknown names and values."""
    known: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in known:
            raise ConfigError(f"{name!r} is no flag of {family}; known: {', '.join(known)}")
        changes[name] = _value(name, text, known[name])
    return replace(config, **changes)  # type: ignore[type-var]


def _value(name: str, text: str, current: Any) -> Any:
    """``text`` as the type of the flag it sets."""
    if isinstance(current, bool):
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise ConfigError(f"{name} is true or false, not {text!r}")
    if isinstance(current, DType):
        try:
            return dtype_of(text)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is an integer, not {text!r}") from None
