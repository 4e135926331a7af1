"""Loading: how fast a safetensors model loads beside a plain read of its files, and how much memory that takes at most.

    python benchmarks/loading.py path/to/model

Prints one JSON object. ``grown_at_peak`` is the growth of the process's resident memory at its highest point while
loading, ``memory_bytes`` the final weights. A first, small model (``--warm-up``) keeps libraries out of both. Speeds
are in bytes of the files per second: of loading, of a plain read of the files, and of the first write to as much memory
as the weights take, which a virtual machine may have to get from its host.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from pathlib import Path

import torch
from twofold.engine.config import DEVICES, QUANTIZATIONS, EngineConfig
from twofold.engine.models import Decoder, load_model
from twofold.engine.models.survey import survey_model
from twofold.engine.sources import resolve_model
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import Platform, select_platform

# Writing this there makes VmHWM start anew.
CLEAR_REFS, RESET_PEAK = Path("/proc/self/clear_refs"), "5"


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


def first_write(num_bytes: int) -> float:
    """Seconds to write once to fresh memory in large pages, which is given back."""
    start = time.perf_counter()
    with mmap.mmap(-1, max(num_bytes, 1)) as area:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(area)
        block = bytes(1 << 20)
        for first in range(0, num_bytes, len(block)):
            memory[first : first + len(block)] = block[: num_bytes - first]
        memory.release()
    return time.perf_counter() - start


def load(name: str, platform: Platform, quantization: str | None = None) -> Decoder:
    config = EngineConfig(model=name, quantization=quantization)
    model = load_model(resolve_model(name), config, platform, KernelSet(platform.spec))
    assert isinstance(model, Decoder)
    return model


def survey_memory(name: str, platform: Platform, quantization: str | None) -> int:
    """Bytes that the weights will take, from headers."""
    kernels, files = KernelSet(platform.spec), resolve_model(name)
    dtype = platform.preferred_dtype(torch.bfloat16)
    return survey_model(files, kernels, dtype, block_size=16, quantization=quantization).model.memory_bytes


def measure(name: str, platform: Platform, quantization: str | None) -> dict[str, float]:
    """Figures of one load; sizes in bytes, speeds in bytes of the files per second."""
    files = sorted(resolve_model(name).path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    read_seconds = plain_read(files)
    write_seconds = first_write(survey_memory(name, platform, quantization))
    CLEAR_REFS.write_text(RESET_PEAK)
    before, start, cpu_start = resident("VmRSS"), time.perf_counter(), time.process_time()
    model = load(name, platform, quantization)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "file_bytes": size,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "speed": size / seconds,
        "plain_read_speed": size / read_seconds,
        "first_write_speed": size / write_seconds,
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
