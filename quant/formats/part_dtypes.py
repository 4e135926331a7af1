"""Which dtypes the parts of a quantized module may be stored in, whatever its config says."""

from __future__ import annotations

import torch

from ...errors import CheckpointError
from .base_source import TensorSource

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {
    "qweight": (torch.int32, torch.int16),  # int16: AWQ's gemv_fast
    "qzeros": (torch.int32, torch.int16, *_FLOATS),  # floats: gemv_fast's products
    "scales": _FLOATS,
    "g_idx": (torch.int32, torch.int64),
    "weight_packed": (torch.int32, torch.uint8),
    "weight_g_idx": (torch.int32, torch.int64),
    "weight_scale": (*_FLOATS, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8),
    "weight_scale_inv": (*_FLOATS, torch.float8_e8m0fnu, torch.uint8),
}


def check_dtypes(source: TensorSource, module: str) -> None:
    """CheckpointError for codes, scales or indices of a type that no tool writes: they would be read as numbers."""
    for part, known in _DTYPES.items():
        name = f"{module}.{part}"
        if source.has(name) and source.dtype(name) not in known:
            raise CheckpointError(
                f"{name} in {source.location(name)} is stored as {source.dtype(name)}; it must be one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in known)}: a damaged or converted file, "
                f"fetch it again"
            )
