"""Talking to a core in a process of its own."""

from .async_client import AsyncEngineClient

__all__ = ["AsyncEngineClient"]
