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

# Real processes, sockets, signals and clocks. A busy machine can starve one of these once; the summary names each that
# needed its second try (RERUN), so that a race is seen and not hidden. Every other test has one try.
_REAL_TIME = (
    "cli",
    "server",
    "engine/client",
    "engine/sources",
    "engine/weights/test_streaming.py",
    "kernels/cpu/test_pinning.py",
    "kernels/cpu/test_team.py",
    "quant/test_memory.py",
    "quant/test_progress.py",
    "test_cold_start.py",
    "test_storage.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    real_time = tuple(folder / path for path in _REAL_TIME)
    for item in items:
        if any(path == item.path or path in item.path.parents for path in real_time):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(family, **overrides)``: the folder of a small random checkpoint, built once per distinct call."""
    from tiny_models import build_tiny_model

    made: dict[str, tuple[Path, dict[Path, int]]] = {}

    def build(family: str = "llama", **overrides: object) -> Path:
        key = f"{family}-{sorted(overrides.items())!r}"
        if key not in made:
            folder = build_tiny_model(tmp_path_factory.mktemp(family), family, **overrides)
            made[key] = folder, {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        folder, written = made[key]
        changed = [path for path, time in written.items() if path.stat().st_mtime_ns != time]
        assert not changed, f"a test has changed {changed}, which all share; copy the folder first"
        return folder

    return build
