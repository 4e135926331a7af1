"""AWQ checkpoints in AutoAWQ's ``gemm`` packing (``awq.py`` says how it lies)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..canonical import CanonicalWeight
from ..scheme import Scheme, WeightOnly
from .awq_packing import pack_interleaved
from .integer_parts import SCALE_DTYPE, all_zeros, codes_in_order, group_misfit, packed
from .write_format import Layout, WriteFormat

BITS = 4
PER_WORD = 8


class AWQWriter(WriteFormat):
    """4 bits, one group size for all. Zeros are stored as they are, those of symmetric weights too."""

    name = "awq"
    mixes = False

    def cannot_hold(self, scheme: Scheme) -> str | None:
        if not isinstance(scheme, WeightOnly) or scheme.bits != BITS:
            return f"AWQ files hold integer weights of {BITS} bits, not {scheme}"
        return "AWQ files have no act-order" if scheme.act_order else None

    def does_not_fit(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        assert isinstance(scheme, WeightOnly), f"AWQ files hold integer weights, not {scheme}"
        rows, columns = shape
        if misfit := group_misfit(columns, scheme):
            return misfit
        return None if rows % PER_WORD == 0 else f"{rows} output features do not fill whole words of {PER_WORD}"

    def tensor_layout(self, shape: tuple[int, int], scheme: Scheme) -> Layout:
        assert isinstance(scheme, WeightOnly), f"AWQ files hold integer weights, not {scheme}"
        (rows, columns), groups = shape, scheme.num_groups(shape[1])
        return {
            "qweight": (torch.int32, (columns, rows // PER_WORD)),
            "qzeros": (torch.int32, (groups, rows // PER_WORD)),
            "scales": (SCALE_DTYPE, (groups, rows)),
        }

    def to_tensors(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, Tensor]:
        weight = packed(weight)
        return {
            "qweight": pack_interleaved(codes_in_order(weight).T),
            "qzeros": pack_interleaved(all_zeros(weight).T),
            "scales": weight.scales.T.to(SCALE_DTYPE).contiguous(),
        }

    def config(
        self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str, kv_cache: str | None = None
    ) -> dict[str, Any]:
        """ConfigError where the name of a plain module is a part of a quantized one's: readers go by parts."""
        for part in plain:
            if inside := next((module for module in schemes if part in module), None):
                raise ConfigError(
                    f"{part} stays plain; AWQ files name such modules by parts of names, and {inside} has that part; "
                    f"write --format gptq or compressed-tensors"
                )
        (group_size,) = {scheme.group_size for scheme in schemes.values() if isinstance(scheme, WeightOnly)}
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(plain) or None,
        }
