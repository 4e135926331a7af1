"""The settings worth measuring for a launch row: a grid, without what cannot fit the architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ...platforms.spec import DeviceSpec
from .launch_attention import LATENT_SIZES
from .launch_table import AttentionLaunch, LinearLaunch, family
from .tuned import Key

# A lane has 255 registers (512 on CDNA); half of them for sums leaves room for the operands.
MAX_SUMS_PER_LANE = 128
MAX_LANES = 1024


def attention_grid(key: Key, spec: DeviceSpec, current: AttentionLaunch) -> Iterator[AttentionLaunch]:
    """Tiles of cached tokens, warps and stages; for prefill the height of the query tile too."""
    phase, head_size, element_size = key
    assert isinstance(head_size, int) and isinstance(element_size, int)
    heights = (16,) if phase == "decode" else (64, 128)
    for block_m, tile, warps, stages in itertools.product(heights, (16, 32, 64, 128), (2, 4, 8), _stages(spec)):
        shared = (block_m * head_size + stages * 2 * tile * head_size) * element_size
        sums = block_m * (head_size + tile)
        if _fits(spec, warps, shared, sums):
            yield replace(current, block_m=block_m, tile=tile, num_warps=warps, num_stages=stages)


def latent_grid(key: Key, spec: DeviceSpec, current: AttentionLaunch) -> Iterator[AttentionLaunch]:
    """Latent attention: tiles of keys are loaded once and multiplied twice, and 512 features are summed."""
    for block_m, tile, warps, stages in itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2)):
        # Queries may stay in registers.
        shared = stages * tile * LATENT_SIZES[0] * 2
        if _fits(spec, warps, shared, block_m * (LATENT_SIZES[1] + tile)):
            yield replace(current, block_m=block_m, tile=tile, num_warps=warps, num_stages=stages)


_HEIGHTS = {"few": (16,), "some": (64,), "many": (64, 128)}
_WIDTHS = {"few": (16, 32, 64, 128), "some": (32, 64, 128), "many": (64, 128, 256)}
_DEPTHS = {"few": (64, 128, 256), "some": (32, 64, 128), "many": (32, 64, 128)}


def linear_grid(key: Key, spec: DeviceSpec, current: LinearLaunch) -> Iterator[LinearLaunch]:
    """Tiles of outputs and inputs, warps and stages. ``some`` rows stay in one tile: the weight is read once."""
    rows, element_size = key
    assert isinstance(rows, str) and isinstance(element_size, int)
    kind = rows.split()[0]  # "many grouped": with scales of its own for each step
    shapes = itertools.product(_HEIGHTS[kind], _WIDTHS[kind], _DEPTHS[kind], (2, 4, 8), _stages(spec))
    for block_m, block_n, block_k, warps, stages in shapes:
        shared = stages * (block_m + block_n) * block_k * element_size
        # The unpacked tile of the weight lives in registers as well.
        if _fits(spec, warps, shared, block_m * block_n + block_n * block_k * element_size // 4):
            yield replace(
                current, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages
            )


def _stages(spec: DeviceSpec) -> tuple[int, ...]:
    return (1, 2) if family(spec.arch).startswith(("cdna", "rdna")) else (2, 3, 4)


def _fits(spec: DeviceSpec, warps: int, shared: int, sums: int) -> bool:
    lanes = warps * spec.wave_size
    return lanes <= MAX_LANES and shared <= spec.shared_memory_per_block and sums / lanes <= MAX_SUMS_PER_LANE
