"""The one module that reads the environment.

Every variable that changes Twofold's behaviour is a function here, so that ``twofold doctor`` can list them all and
nothing else in the package asks ``os.environ``.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
CPU_PINS = ("auto", "on", "off")


def cache_dir() -> Path:
    """Folder for models, quantized results, compiled kernels and launch settings (``TWOFOLD_CACHE``, else XDG's)."""
    explicit = os.environ.get("TWOFOLD_CACHE")
    base = explicit or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser()
    except RuntimeError:
        raise ConfigError(f"the cache folder {base!r} names a home that is not known; set TWOFOLD_CACHE") from None
    return folder if explicit else folder / "twofold"


def log_level() -> str:
    """Level of Twofold's own log lines (``TWOFOLD_LOG_LEVEL``, default ``INFO``)."""
    given = os.environ.get("TWOFOLD_LOG_LEVEL") or "INFO"
    if given.upper() not in LOG_LEVELS:
        raise ConfigError(f"TWOFOLD_LOG_LEVEL is {given!r}; it must be one of {', '.join(LOG_LEVELS)}")
    return given.upper()


def compiler() -> str | None:
    """The C compiler for the CPU kernels (``CC``); None means the first of cc, gcc, clang on the path."""
    return os.environ.get("CC")


def cpu_pin() -> str:
    """Whether computing threads are tied to CPUs: auto, on or off (``TWOFOLD_CPU_PIN``, default ``auto``)."""
    given = os.environ.get("TWOFOLD_CPU_PIN") or "auto"
    if given not in CPU_PINS:
        raise ConfigError(f"TWOFOLD_CPU_PIN is {given!r}; it must be one of {', '.join(CPU_PINS)}")
    return given


def api_keys() -> tuple[str, ...]:
    """Keys that clients of ``twofold serve`` must send one of (``TWOFOLD_API_KEY``, separated by commas)."""
    return tuple(key for key in os.environ.get("TWOFOLD_API_KEY", "").split(",") if key)
