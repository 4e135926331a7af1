"""What both GPU vendors share: torch drives either through ``torch.cuda``."""

from __future__ import annotations

import importlib.util

import torch

from .arch_spec import preferred_gpu_dtype
from .arch_table import ArchFacts
from .graphs import GraphRecorder
from .interface import MemoryInfo, Platform
from .spec import DeviceSpec
from .torch_gpu_graphs import TorchGpuRecorder


class TorchGpuPlatform(Platform):
    """One GPU that torch can drive; subclasses name the vendor and read the architecture."""

    vendor: str

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        facts = self.arch_facts(properties)
        self.spec = DeviceSpec(
            vendor=self.vendor,
            arch=facts.arch,
            name=properties.name,
            device_type="cuda",
            wave_size=facts.wave_size,
            shared_memory_per_block=facts.shared_memory,
            num_cores=properties.multi_processor_count,
            fp8=facts.fp8,
            matrix_dtypes=facts.matrix_dtypes,
            memory_bytes=properties.total_memory,
            bandwidth=_bandwidth(properties),
            has_triton=importlib.util.find_spec("triton") is not None,
        )

    def arch_facts(self, properties: object) -> ArchFacts:
        raise NotImplementedError

    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return preferred_gpu_dtype(self.spec, checkpoint_dtype)

    def memory(self) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryInfo(total, free + cached)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def set_threads(self, num_threads: int | None, *, torch_too: bool = True) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def graphs(self) -> GraphRecorder | str:
        return TorchGpuRecorder(self.device)


def _bandwidth(properties: object) -> float | None:
    """Peak bytes per second from memory clock (kHz, two transfers per cycle) and bus width (bits), if torch tells."""
    clock = getattr(properties, "memory_clock_rate", 0)
    width = getattr(properties, "memory_bus_width", 0)
    return clock * 1e3 * 2 * width / 8 if clock and width else None
