"""Reading single values of a Hugging Face config, each with the error that names it."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, UnsupportedError


def size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1; null counts as absent. ConfigError when it is missing or something else."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value


def number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0; null counts as absent."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{key} is {value!r}; it must be a number above 0")
    return float(value)


def choice(raw: dict[str, Any], key: str, choices: tuple[str, ...], default: str) -> str:
    """One of ``choices``; UnsupportedError lists them."""
    value = raw.get(key, default)
    if value not in choices:
        raise UnsupportedError(f"{key} is {value!r}; served are {', '.join(choices)}")
    return str(value)
