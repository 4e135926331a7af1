"""GPTQ checkpoints as Twofold writes them: tensors of one linear, and the config that describes them all.

Version 1 stores zero - 1. Its readers disagree on a zero of 0, and GPTQModel (and transformers through it) refuses
asymmetric files of version 1 that it did not write itself. So version 1 is written for symmetric weights, whose zero is
never 0: every reader takes it. Version 2 stores zeros as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...version import __version__
from ..canonical import CanonicalWeight
from ..packing import num_words, pack
from ..scheme import Scheme, WeightOnly
from .integer_parts import SCALE_DTYPE, all_zeros, codes_in_order, group_misfit, packed
from .write_format import Layout, WriteFormat


class GPTQWriter(WriteFormat):
    """Version 1. Layers that differ from most become ``dynamic`` rules."""

    name: ClassVar[str] = "gptq"
    side_config = "quantize_config.json"
    zeros_minus_one: ClassVar[bool] = True

    def cannot_hold(self, scheme: Scheme) -> str | None:
        if not isinstance(scheme, WeightOnly):
            return f"GPTQ files hold integer weights, not {scheme}"
        if self.zeros_minus_one and not scheme.symmetric:
            return f"version 1 of GPTQ cannot store a zero point of 0, which {scheme} may have"
        return None

    def does_not_fit(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        assert isinstance(scheme, WeightOnly), f"GPTQ files hold integer weights, not {scheme}"
        rows, columns = shape
        if misfit := group_misfit(columns, scheme):
            return misfit
        if columns * scheme.bits % 32:
            return f"{columns} input features of {scheme.bits} bits do not fill whole 32-bit words"
        if rows * scheme.bits % 32:
            return f"{rows} output features of {scheme.bits} bits do not fill whole 32-bit words"
        return None

    def tensor_layout(self, shape: tuple[int, int], scheme: Scheme) -> Layout:
        assert isinstance(scheme, WeightOnly), f"GPTQ files hold integer weights, not {scheme}"
        (rows, columns), groups = shape, scheme.num_groups(shape[1])
        return {
            "qweight": (torch.int32, (num_words(columns, scheme.bits), rows)),
            "qzeros": (torch.int32, (groups, num_words(rows, scheme.bits))),
            "scales": (SCALE_DTYPE, (groups, rows)),
            "g_idx": (torch.int32, (columns,)),
        }

    def to_tensors(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, Tensor]:
        weight = packed(weight)
        bits, columns = weight.scheme.bits, weight.shape[1]
        group_of_column = torch.arange(columns, dtype=torch.int32) // weight.group_size
        qweight = weight.qweight
        if weight.perm is not None:
            # Stored in the order of the input features, each naming its group.
            group_of_column = group_of_column[weight.perm.long().argsort()]
            qweight = pack(codes_in_order(weight), bits)
        return {
            "qweight": qweight.T.contiguous(),
            "qzeros": encode_zeros(all_zeros(weight).T, bits, zeros_minus_one=self.zeros_minus_one),
            "scales": weight.scales.T.to(SCALE_DTYPE).contiguous(),
            "g_idx": group_of_column,
        }

    def config(
        self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str, kv_cache: str | None = None
    ) -> dict[str, Any]:
        """The head and the embedding are plain by the format's own default and need no rule."""
        most = Counter(_values(scheme) for scheme in schemes.values()).most_common(1)[0][0]
        bits, group_size, symmetric = most
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "sym": symmetric,
            "desc_act": any(isinstance(scheme, WeightOnly) and scheme.act_order for scheme in schemes.values()),
            "static_groups": False,
            "lm_head": False,
            "checkpoint_format": self.name,
            "format": self.name,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"twofold:{__version__}"], "method": method},
        }
        rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in plain}
        for module, scheme in schemes.items():
            if (values := _values(scheme)) != most:
                rule = dict(zip(("bits", "group_size", "sym"), values, strict=True))
                rules[f"+:^{re.escape(module)}$"] = rule
        return {**config, "dynamic": rules} if rules else config


class GPTQv2Writer(GPTQWriter):
    """Version 2: zeros as they are."""

    name = "gptq_v2"
    zeros_minus_one = False


def _values(scheme: Scheme) -> tuple[int, int, bool]:
    assert isinstance(scheme, WeightOnly), f"GPTQ files hold integer weights, not {scheme}"
    return scheme.bits, scheme.group_size, scheme.symmetric


def encode_zeros(zeros: Tensor, bits: int, *, zeros_minus_one: bool) -> Tensor:
    """Zeros [G, N] to stored qzeros [G, N * bits / 32]; version 1 stores zero - 1 and cannot hold a zero of 0."""
    stored = zeros.to(torch.int16)
    if zeros_minus_one:
        assert int(stored.min()) >= 1, "version 1 stores zero - 1: a zero of 0 needs version 2"
        stored = stored - 1
    return pack(stored, bits)
