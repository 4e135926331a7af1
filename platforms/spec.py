"""DeviceSpec: the facts about one device that the rest of the package may ask for.

Nothing outside ``platforms/`` asks which vendor a device is from in order to decide what to do: it asks the spec for
the fact it needs (wave size, shared memory, kind of fp8, matrix instructions).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fp8Kind(str, enum.Enum):
    """Which 8-bit float the device computes with."""

    NONE = "none"
    FNUZ = "fnuz"
    OCP = "ocp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device, described by facts.

    ``arch`` is ``sm_90``, ``gfx942``, ``x86-64-v4`` and so on, without feature suffixes. ``memory_bytes`` is the whole
    memory that the device may use (a container's limit counts). ``bandwidth`` is in bytes per second, None if unknown.
    ``matrix_dtypes`` names the element types with matrix instructions: ``f16 bf16 fp8 int8 tf32``.
    """

    vendor: str
    arch: str
    name: str
    device_type: str
    wave_size: int
    shared_memory_per_block: int
    num_cores: int
    fp8: Fp8Kind = Fp8Kind.NONE
    matrix_dtypes: frozenset[str] = frozenset()
    memory_bytes: int = 0
    bandwidth: float | None = None
    has_triton: bool = False
