"""Launch settings of the sampling kernels: warps of a program per chunk, and of one per row."""

from __future__ import annotations

from dataclasses import dataclass

from .launch_table import has_wide_waves


@dataclass(frozen=True, slots=True)
class SamplingLaunch:
    """Warps of ``row_maxima`` and ``chunk_masses`` (1,024 elements), and of ``draw_tokens`` (1,024 x 8 sums)."""

    chunk_warps: int
    row_warps: int


# ptxas spills there with fewer, though it has registers left.
_ROW_WARPS = {"sm_89": 32}


def sampling_row(arch: str) -> SamplingLaunch:
    """Half as many warps where a wave has 64 lanes. With 8 of 32 lanes the row's program spills on sm_80 and sm_120."""
    return SamplingLaunch(2, 8) if has_wide_waves(arch) else SamplingLaunch(4, _ROW_WARPS.get(arch, 16))
