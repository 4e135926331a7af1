"""Target: the device that a model is examined for, here or elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..platforms import select_platform
from ..platforms.arch_spec import preferred_dtype_of, spec_of_arch
from ..platforms.spec import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``free_bytes`` of memory are there for weights, workspace and KV cache; None where nobody said how much."""

    spec: DeviceSpec
    free_bytes: int | None

    def compute_dtype(self, wanted: str, stored: str) -> torch.dtype:
        """The dtype of activations for an option's value and a config's dtype."""
        if wanted == "auto":
            return preferred_dtype_of(self.spec, getattr(torch, stored))
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype


def find_target(device: str, arch: str | None = None, memory: int | None = None) -> Target:
    """This machine's ``device`` with what is free of it now, or a GPU of ``arch`` with ``memory`` bytes."""
    if arch is None:
        platform = select_platform(device)
        return Target(spec=platform.spec, free_bytes=platform.memory().free if memory is None else memory)
    if device not in ("auto", "cuda", "rocm"):
        raise ConfigError(f"device {device!r} and arch {arch!r} exclude each other; leave one out")
    return Target(spec=spec_of_arch(arch, memory or 0), free_bytes=memory)
