"""What each GPU architecture can do: the one table that selection, compilation and number formats read.

Sources: CUDA C++ Programming Guide (technical specifications per compute capability), LLVM AMDGPU usage guide and the
CDNA/RDNA instruction set manuals. gfx11 has no FP8 conversions at all; gfx940-942 use the fnuz variants; gfx950 and
gfx12 use the OCP ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UnsupportedError
from .spec import Fp8Kind

_KIB = 1024
# Architectures that there are, of those whose facts are known here.
AMD_ARCHES = (
    "gfx900", "gfx902", "gfx904", "gfx906", "gfx908", "gfx909", "gfx90a", "gfx90c", "gfx940", "gfx941", "gfx942",
    "gfx950", "gfx1010", "gfx1011", "gfx1012", "gfx1013", "gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034",
    "gfx1035", "gfx1036", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    "gfx1200", "gfx1201", "gfx1250",
)  # fmt: skip
NVIDIA_ARCHES = (
    "sm_70", "sm_72", "sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90", "sm_100", "sm_101", "sm_103",
    "sm_110", "sm_120", "sm_121",
)  # fmt: skip
_GFX = re.compile(r"gfx([0-9]{1,2})([0-9a-f])([0-9a-f])\Z")


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """Facts that follow from the architecture alone; ``shared_memory`` is the most one block may use, in bytes."""

    arch: str
    wave_size: int
    shared_memory: int
    fp8: Fp8Kind
    matrix_dtypes: frozenset[str]


def nvidia_facts(major: int, minor: int) -> ArchFacts:
    """Facts of compute capability ``major.minor``; older than 7.0 raises UnsupportedError."""
    capability = major * 10 + minor
    if capability < 70:
        raise UnsupportedError(f"sm_{capability} is too old; Twofold serves NVIDIA GPUs from sm_70 (Volta) on")
    matrix = {"f16"}
    if capability >= 75:
        matrix.add("int8")
    if capability >= 80:
        matrix |= {"bf16", "tf32"}
    fp8 = Fp8Kind.OCP if capability >= 89 else Fp8Kind.NONE
    if fp8 is not Fp8Kind.NONE:
        matrix.add("fp8")
    return ArchFacts(f"sm_{capability}", 32, _nvidia_shared_memory(capability), fp8, frozenset(matrix))


def _nvidia_shared_memory(capability: int) -> int:
    if capability in (80, 87):
        return 163 * _KIB
    if 90 <= capability < 120:
        return 227 * _KIB
    if capability < 80:
        return (64 if capability == 75 else 96) * _KIB
    return 99 * _KIB


def amd_arch(name: str | None) -> str:
    """``gfx90a`` from ``gfx90a:sramecc+:xnack-``; "" when the name is no complete gfx target."""
    base = (name or "").split(":", 1)[0].strip().lower()
    return base if _GFX.match(base) else ""


def amd_fp8_kind(name: str | None) -> Fp8Kind:
    """Which FP8 the matrix instructions of a gfx target take; unknown or incomplete names have none."""
    arch = amd_arch(name)
    if arch in ("gfx940", "gfx941", "gfx942"):
        return Fp8Kind.FNUZ
    if arch == "gfx950" or arch.startswith("gfx12"):
        return Fp8Kind.OCP
    return Fp8Kind.NONE


def amd_wave_size(name: str | None) -> int:
    """Lanes per wave: 64 for the gfx9 family, 32 for gfx10 and later. An unknown name raises UnsupportedError."""
    match = _GFX.match(amd_arch(name))
    if match is None:
        raise UnsupportedError(f"unknown AMD architecture {name!r}; expected a gfx target such as gfx942 or gfx1201")
    return 64 if int(match[1]) <= 9 else 32


def amd_facts(name: str | None) -> ArchFacts:
    """Facts of a gfx target (feature suffixes allowed); an unknown name raises UnsupportedError."""
    wave_size = amd_wave_size(name)
    arch = amd_arch(name)
    fp8 = amd_fp8_kind(arch)
    matrix: set[str] = set()
    if arch == "gfx908" or arch == "gfx90a" or arch.startswith(("gfx94", "gfx95", "gfx11", "gfx12")):
        matrix |= {"f16", "bf16", "int8"}
    if arch.startswith("gfx94"):
        matrix.add("tf32")
    if fp8 is not Fp8Kind.NONE:
        matrix.add("fp8")
    shared = (160 if arch == "gfx950" else 64) * _KIB
    return ArchFacts(arch, wave_size, shared, fp8, frozenset(matrix))
