"""KVCacheType: what the elements of a model's KV cache are, from the user's option, the device and the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..platforms.fp8 import fp8_dtype
from ..platforms.spec import DeviceSpec, Fp8Kind
from ..quant.kv_scales import calibrated_for


@dataclass(frozen=True, slots=True)
class KVCacheType:
    """``dtype`` of keys and values; ``calibrated``: scales that the checkpoint has were made for it."""

    dtype: torch.dtype
    calibrated: bool = False


def kv_cache_type(
    option: str,
    dtype: torch.dtype,
    spec: DeviceSpec,
    quantization: Mapping[str, Any] | None,
    cpu_activations: str = "exact",
) -> KVCacheType:
    """The type for an option (auto, bfloat16, fp8 or int8), activations' dtype and a checkpoint's quantization config.

    ``auto`` is the activations' dtype, whatever the checkpoint says; bfloat16 where products round to it
    (``cpu_activations`` bf16). ``fp8`` is the device's e4m3; where it has none,
    the kernels decode e4m3fn.
    """
    if option == "auto":
        return KVCacheType(torch.bfloat16 if cpu_activations == "bf16" else dtype)
    if option == "bfloat16":
        return KVCacheType(torch.bfloat16)
    calibrated = calibrated_for(quantization) == option
    if option == "int8":
        return KVCacheType(torch.int8, calibrated)
    kind = Fp8Kind.OCP if spec.fp8 is Fp8Kind.NONE else spec.fp8
    return KVCacheType(fp8_dtype(kind), calibrated)
