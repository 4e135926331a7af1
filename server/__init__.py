"""OpenAI-compatible HTTP over the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import ServerConfig

if TYPE_CHECKING:
    from .app import create_app
    from .run import run_server

__all__ = ["ServerConfig", "create_app", "run_server"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line reads ServerConfig's defaults before it needs a server.
    if name == "create_app":
        from .app import create_app

        return create_app
    if name == "run_server":
        from .run import run_server

        return run_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
