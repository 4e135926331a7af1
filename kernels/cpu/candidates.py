"""The CPU platform's candidates, best first."""

from __future__ import annotations

from ..registry import Registry


def register_cpu_ops(registry: Registry) -> None:
    """Register the compiled kernels ahead of the torch ones."""
