"""Loading: how fast a safetensors model loads beside a plain read of its files, and how much memory that takes at most.

    python benchmarks/loading.py path/to/model

Prints one JSON object. ``grown_at_peak`` is the growth of the process's resident memory at its highest point while
loading, ``memory_bytes`` the final weights. A first, small model (``--warm-up``) keeps libraries out of both.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from twofold.engine.config import DEVICES, QUANTIZATIONS, EngineConfig
from twofold.engine.models import Decoder, load_model
from twofold.engine.sources import resolve_model
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import Platform, select_platform


def resident(key: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def plain_read(files: list[Path]) -> float:
    """Seconds to read all files once."""
    buffer = bytearray(1 << 22)
    start = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - start


def load(name: str, platform: Platform, quantization: str | None = None) -> Decoder:
    config = EngineConfig(model=name, quantization=quantization)
    model = load_model(resolve_model(name), config, platform, KernelSet(platform.spec))
    assert isinstance(model, Decoder)
    return model


def measure(name: str, platform: Platform, quantization: str | None) -> dict[str, float]:
    """Figures of one load; sizes in bytes, speeds in bytes of the files per second."""
    files = sorted(resolve_model(name).path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    read_seconds = plain_read(files)
    before, start = resident("VmRSS"), time.perf_counter()
    model = load(name, platform, quantization)
    seconds = time.perf_counter() - start
    return {
        "file_bytes": size,
        "seconds": seconds,
        "speed": size / seconds,
        "plain_read_speed": size / read_seconds,
        "grown_at_peak": resident("VmHWM") - before,
        "grown": resident("VmRSS") - before,
        "weight_bytes": model.weight_bytes,
        "memory_bytes": model.memory_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with safetensors files")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--warm-up", metavar="MODEL", help="a small model to load first")
    args = parser.parse_args()
    platform = select_platform(args.device)
    kept = load(args.warm_up, platform) if args.warm_up else None
    print(json.dumps(measure(args.model, platform, args.quantization), indent=2))
    del kept


if __name__ == "__main__":
    main()
