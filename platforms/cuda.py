"""NVIDIA GPUs through torch's CUDA build."""

from __future__ import annotations

from typing import Any

from .arch_table import ArchFacts, nvidia_facts
from .torch_gpu import TorchGpuPlatform


class CudaPlatform(TorchGpuPlatform):
    vendor = "nvidia"

    def arch_facts(self, properties: Any) -> ArchFacts:
        return nvidia_facts(properties.major, properties.minor)
