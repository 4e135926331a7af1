"""The one module that reads the environment.

Every variable that changes Twofold's behaviour is a function here, so that ``twofold doctor`` can list them all and
nothing else in the package asks ``os.environ``.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for fetched models, quantized results and compiled kernels (``TWOFOLD_CACHE``, else XDG's)."""
    explicit = os.environ.get("TWOFOLD_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "twofold"


def log_level() -> str:
    """Level of Twofold's own log lines (``TWOFOLD_LOG_LEVEL``, default ``INFO``)."""
    return os.environ.get("TWOFOLD_LOG_LEVEL", "INFO").upper()


def compiler() -> str | None:
    """The C compiler for the CPU kernels (``CC``); None means the first of cc, gcc, clang on the path."""
    return os.environ.get("CC")


def api_keys() -> tuple[str, ...]:
    """Keys that clients of ``twofold serve`` must send one of (``TWOFOLD_API_KEY``, separated by commas)."""
    return tuple(key for key in os.environ.get("TWOFOLD_API_KEY", "").split(",") if key)
