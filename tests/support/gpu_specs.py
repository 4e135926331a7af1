"""DeviceSpecs of GPUs that are not here: what selection would see on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.platforms.arch_table import amd_facts, nvidia_facts
from twofold.platforms.spec import DeviceSpec


def gpu_spec(arch: str, **changes: Any) -> DeviceSpec:
    """A GPU of ``sm_90`` or ``gfx942`` with triton installed."""
    nvidia = arch.startswith("sm_")
    facts = nvidia_facts(int(arch[3:]) // 10, int(arch[3:]) % 10) if nvidia else amd_facts(arch)
    spec = DeviceSpec(
        vendor="nvidia" if nvidia else "amd",
        arch=arch,
        name=arch,
        device_type="cuda",
        wave_size=facts.wave_size,
        shared_memory_per_block=facts.shared_memory,
        num_cores=100,
        fp8=facts.fp8,
        matrix_dtypes=facts.matrix_dtypes,
        has_triton=True,
    )
    return replace(spec, **changes)
