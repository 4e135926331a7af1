"""What ``dtype`` bfloat16 means on a CPU."""

from __future__ import annotations

from dataclasses import replace

from ..kernels.cpu import linear_bf16
from ..platforms.spec import DeviceSpec
from .config import EngineConfig


def on_device(config: EngineConfig, spec: DeviceSpec) -> EngineConfig:
    """The options as a device takes them.

    A CPU whose tiles multiply bfloat16 takes ``dtype`` bfloat16 as products in it, with sums and everything between in
    float32: so the compiled kernels compute it. Other devices, and other values, as they are.
    """
    if spec.device_type != "cpu" or config.dtype != "bfloat16" or linear_bf16.missing() is not None:
        return config
    activations = "bf16" if config.cpu_activations == "exact" else config.cpu_activations
    return replace(config, dtype="float32", cpu_activations=activations)
