"""DeviceSpecs of GPUs that are not here, from the architecture's name: what planning and the support matrix ask for."""

from __future__ import annotations

import difflib
import re

import torch

from ..errors import ConfigError
from .arch_table import AMD_ARCHES, NVIDIA_ARCHES, amd_facts, nvidia_facts
from .spec import DeviceSpec

_HALF = (torch.float16, torch.bfloat16)
_GFX = re.compile(r"gfx[0-9a-f]{3,4}(?::|$)")
_SM = re.compile(r"sm_([0-9]+)([0-9])a?\Z")


def spec_of_arch(arch: str, memory_bytes: int = 0) -> DeviceSpec:
    """A GPU of an architecture such as ``gfx942`` or ``sm_90``, with triton installed.

    ConfigError for a name that is none, with the closest; UnsupportedError for an architecture that is not served.
    """
    match = _SM.match(arch)
    if match is None and _GFX.match(arch) is None:
        raise ConfigError(f"arch is {arch!r}; write a GPU architecture such as gfx942, gfx1201, sm_80 or sm_90")
    facts = amd_facts(arch) if match is None else nvidia_facts(int(match[1]), int(match[2]))
    if facts.arch not in AMD_ARCHES + NVIDIA_ARCHES:
        known = AMD_ARCHES if match is None else NVIDIA_ARCHES
        closest = difflib.get_close_matches(facts.arch, known, n=4, cutoff=0.0)
        raise ConfigError(f"there is no GPU architecture {arch!r}; the closest are {', '.join(closest)}")
    return DeviceSpec(
        vendor="amd" if match is None else "nvidia",
        arch=facts.arch,
        name=facts.arch,
        device_type="cuda",
        wave_size=facts.wave_size,
        shared_memory_per_block=facts.shared_memory,
        num_cores=0,
        fp8=facts.fp8,
        matrix_dtypes=facts.matrix_dtypes,
        memory_bytes=memory_bytes,
        has_triton=True,
    )


def preferred_gpu_dtype(spec: DeviceSpec, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """16 bits as the checkpoint says, else bfloat16, or float16 where the device has no bfloat16 matrix unit."""
    if checkpoint_dtype in _HALF and (checkpoint_dtype is torch.float16 or "bf16" in spec.matrix_dtypes):
        return checkpoint_dtype
    return torch.bfloat16 if "bf16" in spec.matrix_dtypes else torch.float16


def preferred_dtype_of(spec: DeviceSpec, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """What ``Platform.preferred_dtype`` says on such a device."""
    return torch.float32 if spec.device_type == "cpu" else preferred_gpu_dtype(spec, checkpoint_dtype)
