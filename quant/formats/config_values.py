"""Reading values from quantization configs, with errors that name the key and the value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError


def group_size(value: Any, what: str) -> int:
    """A positive group size, or -1 for one group per output feature."""
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ConfigError(f"{what} {value!r} must be positive, or -1 for one group per output feature")
    return value


def names(value: Any, what: str) -> tuple[str, ...]:
    """A list of names; None is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(f"{what} {value!r} must be a list of names")
    return tuple(value)


def mapping(value: Any, what: str) -> dict[str, Any]:
    """An object; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} {value!r} must be an object")
    return dict(value)


def pattern(text: str, what: str) -> re.Pattern[str]:
    """A regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{what} {text!r} is not a regular expression: {error}") from None
