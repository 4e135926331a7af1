"""AWQ checkpoints: AutoAWQ's three packings, and GPTQModel's and Quark's files in the first of them.

Per linear ``P`` of N output and K input features, G groups, 4-bit codes and zeros, ``W = (code - zero) * scale``:

    gemm       P.qweight int32 [K, N / 8]  eight columns to a word, interleaved
               P.qzeros  int32 [G, N / 8]  likewise
               P.scales  float [G, N]
    gemv       P.qweight int32 [N, K / 8]  along K, in order
               P.qzeros  int32 [N, Z]      along the groups, in order; Z words, padded
               P.scales  float [N, 8 Z]
    gemv_fast  P.qweight int16 [N / 4, K]  see ``unpack_gemv_fast``
               P.qzeros  float [8 Z, N]    -scale * zero, rounded
               P.scales  float [8 Z, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError, UnsupportedError
from ..canonical import CanonicalWeight, PackedWeight
from ..packing import pack, unpack
from ..scheme import Dense, Offset, Scheme, WeightOnly
from .awq_packing import stream_of_interleaved, unpack_gemv_fast, unpack_interleaved
from .base import Format, TensorSource, is_packed
from .config_values import group_size, names
from .dense import load_dense
from .missing import missing
from .names import is_head

BITS = 4
# What the config calls the packing; exllama and ipex are kernels that read the first one.
VERSIONS = {
    "gemm": "gemm",
    "gemv": "gemv",
    "gemv_fast": "gemv_fast",
    "exllama": "gemm",
    "exllamav2": "gemm",
    "ipex": "gemm",
}


@dataclass(frozen=True, slots=True)
class AWQConfig:
    """What the config declares; ``plain`` are parts of the names of modules that stay dense."""

    group_size: int
    zero_point: bool
    version: str
    plain: tuple[str, ...]


def parse_awq_config(raw: Mapping[str, Any]) -> AWQConfig:
    """ConfigError names a wrong value, UnsupportedError a packing that is not served."""
    bits = raw.get("bits", raw.get("w_bit", BITS))
    if bits != BITS:
        raise ConfigError(f"AWQ bits: {bits!r}; AWQ packings hold {BITS} bits")
    version = str(raw.get("version") or raw.get("checkpoint_format") or raw.get("format") or "gemm").lower()
    if version not in VERSIONS:
        raise UnsupportedError(
            f"AWQ version {version!r} is not served (weights rearranged for one kernel); "
            f"save the model as one of gemm, gemv, gemv_fast"
        )
    return AWQConfig(
        group_size=group_size(raw.get("group_size", raw.get("q_group_size", 128)), "AWQ group_size"),
        zero_point=bool(raw.get("zero_point", True)),
        version=VERSIONS[version],
        plain=names(raw.get("modules_to_not_convert"), "AWQ modules_to_not_convert"),
    )


class AWQFormat(Format):
    """gemm, gemv and gemv_fast; zeros as stored."""

    name = "awq"
    marks = ("qweight", "scales")

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.config = parse_awq_config(raw)

    def scheme(self, module: str) -> Scheme:
        if is_head(module) or any(part in module for part in self.config.plain):
            return Dense()
        return WeightOnly(BITS, self.config.group_size, symmetric=not self.config.zero_point)

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{part}" for part in ("weight", "qweight", "qzeros", "scales"))

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        reader = _Reader(source, module, self.config)
        return reader.scheme(symmetric=not reader.has_zeros), reader.shape

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        if is_packed(source, module, self.scheme(module)):
            return _Reader(source, module, self.config).read()
        return load_dense(source, module)


class _Reader:
    """Reads one module; the packing is the one that its shapes prove."""

    def __init__(self, source: TensorSource, module: str, config: AWQConfig) -> None:
        self.source, self.module, self.config = source, module, config
        self.has_zeros = source.has(f"{module}.qzeros")
        self.version = self._version()
        rows, columns = self._matrix("qweight")
        sizes = {"gemm": (columns * 8, rows), "gemv": (rows, columns * 8), "gemv_fast": (rows * 4, columns)}
        self.shape = sizes[self.version]
        self.group_size = self._group_size()
        self.num_groups = -(-self.shape[1] // self.group_size)
        self._check()

    def scheme(self, *, symmetric: bool) -> WeightOnly | Offset:
        kind = Offset if self.version == "gemv_fast" and not symmetric else WeightOnly
        return kind(BITS, -1 if self.num_groups == 1 else self.group_size, symmetric=symmetric)

    def read(self) -> PackedWeight:
        scales = self._get("scales")
        scales = (scales if self.version == "gemv" else scales.T)[:, : self.num_groups].contiguous()
        zeros = self._zeros(scales) if self.has_zeros else None
        if zeros is not None and torch.equal(zeros, _middle(zeros, scales)):
            zeros = None
        if zeros is not None and self.config.zero_point is False:
            name = f"{self.module}.qzeros"
            raise CheckpointError(
                f"{name} in {self.source.location(name)} holds zeros other than {2 ** (BITS - 1)}; the config says "
                f"zero_point: false. Take the config.json that was saved with these weights, or set it to true"
            )
        return PackedWeight(self.scheme(symmetric=zeros is None), self.shape, self._codes(), scales, zeros)

    def _codes(self) -> Tensor:
        words = self._get("qweight")
        if self.version == "gemv":
            return words.contiguous()
        if self.version == "gemm" and self.shape[1] % 8 == 0:
            return stream_of_interleaved(words).T
        codes = unpack_interleaved(words).T if self.version == "gemm" else unpack_gemv_fast(words)
        return pack(codes, BITS)

    def _zeros(self, scales: Tensor) -> Tensor:
        """Zeros [N, G]: uint8, or offsets where the packing stores the zeros' rounded products with the scales."""
        stored = self._get("qzeros")
        if self.version == "gemm":
            return unpack_interleaved(stored).T.contiguous()
        if self.version == "gemv":
            return unpack(stored, BITS, self.num_groups)
        return stored.T[:, : self.num_groups].to(scales.dtype).contiguous()

    def _version(self) -> str:
        """gemm's scales stand as wide as its words' columns, gemv's as tall as its words' rows."""
        if self.source.dtype(f"{self.module}.qweight") is torch.int16:
            return "gemv_fast"
        rows, columns = self._matrix("qweight")
        scale_rows, scale_columns = self._matrix("scales")
        fits = {"gemm": scale_columns == columns * 8, "gemv": scale_rows == rows}
        if fits["gemm"] != fits["gemv"]:
            return "gemm" if fits["gemm"] else "gemv"
        return "gemv" if self.config.version == "gemv" else "gemm"

    def _group_size(self) -> int:
        columns = self.shape[1]
        return columns if self.config.group_size == -1 else min(self.config.group_size, columns)

    def _check(self) -> None:
        if self.config.zero_point and not self.has_zeros:
            name = f"{self.module}.qzeros"
            raise CheckpointError(
                f"{name} is missing from {self.source.location(name)}; the config says zero_point: true. Fetch the "
                f"file again, or set it to false if the model was quantized symmetrically"
            )
        rows, columns = self.shape
        groups = self.num_groups
        scales = self._matrix("scales")
        zeros = self._matrix("qzeros") if self.has_zeros else None
        if self.version == "gemm":
            fits = scales == (groups, rows) and zeros in (None, (groups, rows // 8))
        elif self.version == "gemv":
            fits = scales[0] == rows and scales[1] >= groups and (zeros is None or zeros[1] * 8 >= groups)
        else:
            fits = scales[1] == rows and scales[0] >= groups and zeros in (None, scales) and columns % 64 == 0
        if not fits:
            raise CheckpointError(
                f"{self.module} in {self.source.location(f'{self.module}.qweight')}: qweight "
                f"{list(self._matrix('qweight'))}, scales {list(scales)} and qzeros {zeros and list(zeros)} do not fit "
                f"AWQ {self.version} with groups of {self.group_size}, the config's group_size: take the config.json "
                f"that was saved with these weights, or correct it"
            )

    def _matrix(self, part: str) -> tuple[int, int]:
        name = f"{self.module}.{part}"
        if not self.source.has(name):
            raise CheckpointError(missing(self.source, name))
        shape = self.source.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{name} in {self.source.location(name)} is {list(shape)}; it must be a matrix")
        return shape[0], shape[1]

    def _get(self, part: str) -> Tensor:
        return self.source.get(f"{self.module}.{part}")


def _middle(zeros: Tensor, scales: Tensor) -> Tensor:
    """What all zeros are, stored as ``zeros`` are, where the quantizer was symmetric."""
    middle = 2 ** (BITS - 1)
    return -scales * middle if zeros.is_floating_point() else torch.full_like(zeros, middle)
