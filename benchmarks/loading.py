"""Loading: how fast a safetensors model loads beside what the machine can do, and how much memory that takes at most.

    python benchmarks/loading.py path/to/model [--cold] [--whole] [--repeats 3]

Prints one JSON object. Speeds are in bytes per second: of loading and of a plain read of the files, and of the first
write to as much memory as the weights take in our layout, which a virtual machine may have to get from its host.
``bound_seconds`` is that read and that write one after the other, ``share_of_bound`` how many of them loading
took: 1 is as fast, more is faster, since loading reads and writes at the same time. The write comes last and beside
the loaded model, so that neither gets pages that the other has just made ready.

``--cold`` drops the files from the system's cache before each reading, ``--whole`` times ``LLM(model)`` with tokenizer
and KV cache. ``grown_at_peak`` is the growth of the process's resident memory at its highest point while loading,
``memory_bytes`` the final weights. A first, small model (``--warm-up``) keeps libraries out of both.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from twofold import LLM
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


def first_write(num_bytes: int) -> tuple[float, mmap.mmap]:
    """Seconds to write once to fresh memory in large pages, and that memory."""
    start = time.perf_counter()
    area = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    memory, block = memoryview(area), bytes(1 << 20)
    for first in range(0, num_bytes, len(block)):
        memory[first : first + len(block)] = block[: num_bytes - first]
    memory.release()
    return time.perf_counter() - start, area


def load(name: str, platform: Platform, quantization: str | None = None) -> Decoder:
    config = EngineConfig(model=name, quantization=quantization)
    model = load_model(resolve_model(name), config, platform, KernelSet(platform.spec))
    assert isinstance(model, Decoder)
    return model


def load_whole(name: str, platform: Platform, quantization: str | None = None) -> LLM:
    return LLM(name, device=platform.device.type, quantization=quantization)


def sizes_of(name: str, platform: Platform, quantization: str | None) -> Decoder:
    """A model that has ``weight_bytes`` and ``memory_bytes`` alone, from headers."""
    kernels, files = KernelSet(platform.spec), resolve_model(name)
    dtype = platform.preferred_dtype(torch.bfloat16)
    return survey_model(files, kernels, dtype, block_size=16, quantization=quantization).model


def forget(files: list[Path]) -> None:
    """Drop files from the system's cache."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, platform: Platform, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Figures of one load after the other; sizes in bytes, speeds in bytes of the files per second.

    All that was loaded or written stays in memory until the end, so that nothing is made of pages that are ready.
    """
    files = sorted(resolve_model(name).path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    prepare = forget if args.cold else plain_read
    sizes = sizes_of(name, platform, args.quantization)
    kept: list[object] = []
    for _ in range(args.repeats):
        prepare(files)
        read_seconds = plain_read(files)
        prepare(files)
        CLEAR_REFS.write_text(RESET_PEAK)
        before, start, cpu_start = resident("VmRSS"), time.perf_counter(), time.process_time()
        kept.append((load_whole if args.whole else load)(name, platform, args.quantization))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        peak, grown = resident("VmHWM") - before, resident("VmRSS") - before
        write_seconds, area = first_write(sizes.memory_bytes)
        kept.append(area)
        yield {
            "file_bytes": size,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "speed": size / seconds,
            "plain_read_speed": size / read_seconds,
            "first_write_speed": sizes.memory_bytes / write_seconds,
            "bound_seconds": read_seconds + write_seconds,
            "share_of_bound": (read_seconds + write_seconds) / seconds,
            "grown_at_peak": peak,
            "grown": grown,
            "weight_bytes": sizes.weight_bytes,
            "memory_bytes": sizes.memory_bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with safetensors files")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--warm-up", metavar="MODEL", help="a small model to load first")
    parser.add_argument("--repeats", type=int, default=1, help="print medians of so many loads")
    parser.add_argument("--cold", action="store_true", help="with the files out of the system's cache")
    parser.add_argument("--whole", action="store_true", help="the whole LLM(model), not its weights alone")
    args = parser.parse_args()
    platform = select_platform(args.device)
    platform.set_threads(None, torch_too=args.quantization is not None)
    kept = load(args.warm_up, platform) if args.warm_up else None
    rows = list(measure(args.model, platform, args))
    print(json.dumps({key: statistics.median(row[key] for row in rows) for key in rows[0]}, indent=2))
    del kept


if __name__ == "__main__":
    main()
