"""Fields of the published request shapes that are not honoured here: refused by name, never ignored in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import RequestError

# Field -> (why it is refused, values that ask for nothing and pass).
Refusals = Mapping[str, tuple[str, tuple[Any, ...]]]

# What OpenAI's APIs share.
COMMON: Refusals = {
    "moderation": ("the server judges no contents", (None,)),
    "service_tier": ("there are no tiers of service", (None, "auto", "default")),
    "prompt_cache_options": (
        "every prompt is cached while there is room, with no choice of places or times",
        (None, {}, {"mode": "implicit"}),
    ),
}


def check_refused(body: Any, refusals: Refusals, served: Collection[str] = ()) -> None:
    """RequestError for the first field of ``body`` that asks for something which is not done here."""
    for name, (why, harmless) in refusals.items():
        if name not in served and getattr(body, name) not in harmless:
            raise RequestError(f"{name}: {why}; leave the field out", param=name)


def check_keys(given: Mapping[str, Any] | None, name: str, refusals: Refusals) -> None:
    """The same for the object in the field ``name``."""
    for key, (why, harmless) in refusals.items():
        if given is not None and given.get(key) not in harmless:
            raise RequestError(f"{name}.{key}: {why}; leave the field out", param=f"{name}.{key}")
