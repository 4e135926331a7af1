"""Quantization at load: the linear layers of a plain checkpoint are rounded one by one while they stream in.

int8 and fp8 keep one scale per output feature, from its largest magnitude; int4 is ``rtn`` in groups with zero points.
Activations stay as they are in all three. The head, the embedding and routers of experts stay plain, as in
checkpoints of other tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..platforms.fp8 import fp8_max
from .canonical import CanonicalWeight, DenseWeight, EightBitWeight, PackedWeight
from .eight_bit import int8_as_packed_fields
from .formats import Format, TensorSource, detect_format
from .formats.dense import DenseFormat
from .formats.gguf import GgufFormat, gives_blocks
from .formats.names import is_head, is_router
from .methods.rtn import quantize_rtn
from .scheme import Dense, Fp8, Scheme, WeightOnly

SCHEMES: dict[str, WeightOnly | Fp8] = {
    "int8": WeightOnly(8, -1),
    "int4": WeightOnly(4, 32, symmetric=False),
    "fp8": Fp8((1, -1)),
}
# Bytes of one scale in each.
SCALE_BYTES = {"int8": 4, "int4": 2, "fp8": 4}


def load_format(
    quantization: Mapping[str, Any] | None, at_load: str | None, source: TensorSource | None = None
) -> Format:
    """The format of a checkpoint; with ``at_load`` (int8, int4, fp8) its plain weights are rounded on the way in.

    Those of a GGUF file (``source``) are plain then, else they stay quantized. ConfigError when another checkpoint is
    quantized already.
    """
    stored = detect_format(quantization)
    if at_load is None:
        return GgufFormat() if gives_blocks(source) else stored
    if not isinstance(stored, DenseFormat):
        raise ConfigError(
            f"quantization is {at_load!r}, but the checkpoint is already quantized ({stored.name}); "
            f"leave the option out, or take the original 16-bit checkpoint"
        )
    return AtLoadFormat(at_load)


class AtLoadFormat(DenseFormat):
    """A plain checkpoint whose linear layers are quantized when they are read."""

    quantizes = True

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"quantized to {kind} at load"

    def scheme(self, module: str) -> Scheme:  # type: ignore[override]
        return Dense() if is_head(module) or is_router(module) else SCHEMES[self.kind]

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:  # type: ignore[override]
        rows, columns = source.shape(f"{module}.weight")
        return self.scheme(module), (rows, columns)

    def scale_bytes(self) -> int:
        """Bytes of one scale that ``load`` makes."""
        return SCALE_BYTES[self.kind]

    def quantized_modules(self, source: TensorSource) -> list[str]:
        """Matrices of the decoder's layers but routers; the embedding and the head are none."""
        names = (name.removesuffix(".weight") for name in source.names if name.endswith(".weight"))
        linear = (name for name in names if ".layers." in name and not is_router(name))
        return sorted(name for name in linear if len(source.shape(f"{name}.weight")) == 2)

    def from_rows(self, module: str, rows: DenseWeight, where: str) -> CanonicalWeight:
        return rows if isinstance(self.scheme(module), Dense) else quantize(rows, self.kind, where)

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:  # type: ignore[override]
        where = f"{module}.weight in {source.location(f'{module}.weight')}"
        return self.from_rows(module, super()._load(source, module, dtype), where)


def quantize(weight: DenseWeight, kind: str, name: str) -> CanonicalWeight:
    """Round one matrix. CheckpointError names a matrix with values that are not finite."""
    low, high = weight.weight.aminmax()
    if not bool(low.isfinite() & high.isfinite()):
        raise CheckpointError(f"{name} holds values that are not finite, which cannot be quantized")
    scheme = SCHEMES[kind]
    if kind == "int4":
        assert isinstance(scheme, WeightOnly), "int4 is weight-only"
        return quantize_rtn(weight.weight, scheme)
    if kind == "fp8":
        assert isinstance(scheme, Fp8), "fp8 codes belong to Fp8"
        codes, scales = _rounded(weight.weight, fp8_max(torch.float8_e4m3fn))
        return EightBitWeight(scheme, codes.to(torch.float8_e4m3fn), scales)
    codes, scales = _rounded(weight.weight, 127.0)
    packed_scheme, qweight, scales, zeros = int8_as_packed_fields(
        codes.round_().to(torch.int8), scales, None, (1, weight.shape[1])
    )
    return PackedWeight(packed_scheme, weight.shape, qweight, scales, zeros)


def _rounded(matrix: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(values over scales, scales [N, 1] float32), each row's largest magnitude becoming ``largest``."""
    values = matrix.to(torch.float32)
    scales = values.abs().amax(dim=1, keepdim=True).div_(largest)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (values / scales).clamp_(-largest, largest), scales
