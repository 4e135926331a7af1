"""Platform: what the engine asks of the machine it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .graphs import GraphRecorder
from .spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory: ``total`` that may be used, ``free`` that really is free now."""

    total: int
    free: int


class Platform(ABC):
    """One device. Making one may initialize the device; importing this package never does."""

    spec: DeviceSpec
    device: torch.device

    @abstractmethod
    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute in when the user leaves it open, for weights stored as ``checkpoint_dtype``."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory of the device now; another process's and a container's share are not free."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    @abstractmethod
    def set_threads(self, num_threads: int | None, *, torch_too: bool = True) -> None:
        """Use that many CPU threads for the model; None means as many as this process really has.

        Without ``torch_too`` torch's own operations get one thread on the CPU: right for a model whose products and
        attention the platform's kernels compute, since torch's workers spin between operations and take cores away.
        """

    def graphs(self) -> GraphRecorder | str:
        """A recorder of steps, or why this device has none, in words."""
        return f"steps are not recorded on {self.spec.arch}"

    def describe(self) -> dict[str, str]:
        """Facts for ``twofold doctor``, in reading order."""
        spec = self.spec
        memory = self.memory()
        gib = 1 << 30
        recorder = self.graphs()
        return {
            "device": str(self.device),
            "name": spec.name,
            "architecture": spec.arch,
            "cores": str(spec.num_cores),
            "memory": f"{memory.free / gib:.1f} GiB free of {memory.total / gib:.1f} GiB",
            "matrix instructions": ", ".join(sorted(spec.matrix_dtypes)) or "none",
            "fp8": spec.fp8.value,
            "decode graphs": f"none: {recorder}" if isinstance(recorder, str) else recorder.name,
            "triton": "yes" if spec.has_triton else "no",
            "torch": torch.__version__,
        }
