"""Fixtures for the whole suite: small checkpoints made once per session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C need the usual state.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(family, **overrides)``: the folder of a small random checkpoint, built once per distinct call."""
    from tiny_models import build_tiny_model

    made: dict[str, Path] = {}

    def build(family: str = "llama", **overrides: object) -> Path:
        key = f"{family}-{sorted(overrides.items())!r}"
        if key not in made:
            made[key] = build_tiny_model(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return build
