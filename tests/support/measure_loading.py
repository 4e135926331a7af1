"""Run as a program: loads a model and prints, as JSON, what its layers took in memory beside their final weights.

    python measure_loading.py MODEL SMALL_MODEL [--quantization int8]

``beside`` is the largest excess of resident memory over what stays, among all calls that make a layer; ``grown`` what
the whole load added at its highest point. SMALL_MODEL is loaded first, so that libraries do not count.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twofold.engine.config import EngineConfig
from twofold.engine.models import load_model
from twofold.engine.sources import resolve_model
from twofold.engine.weights.loader import Loader
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def measured(method: Callable[..., Any], calls: list[tuple[int, int]]) -> Callable[..., Any]:
    """The method, noting (excess over what stays, highest) in bytes of each call."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        CLEAR_REFS.write_text("5")  # VmHWM starts anew
        result = method(*args, **kwargs)
        peak = resident("VmHWM")
        calls.append((peak - resident("VmRSS"), peak))
        return result

    return call


def main(model: str, small: str, *options: str) -> None:
    platform = select_platform("cpu")
    quantization = options[1] if options else None

    def load(name: str) -> Any:
        config = EngineConfig(model=name, quantization=quantization)
        return load_model(resolve_model(name), config, platform, KernelSet(platform.spec))

    kept = load(small)
    calls: list[tuple[int, int]] = []
    for name in ("linear", "embedding", "norm", "tied_head"):
        setattr(Loader, name, measured(getattr(Loader, name), calls))
    before = resident("VmRSS")
    loaded = load(model)
    figures = {
        "beside": max(excess for excess, _ in calls),
        "grown": max(peak for _, peak in calls) - before,
        "memory_bytes": loaded.memory_bytes,
        "calls": len(calls),
    }
    print(json.dumps(figures))
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
