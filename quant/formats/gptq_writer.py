"""GPTQ checkpoints as Twofold writes them: tensors of one linear, and the config that describes them all.

Which version? Symmetric weights are written as version 1, which every reader takes: their zero is never 0, the value
that readers of version 1 disagree on. Asymmetric weights are written as version 2: a zero of 0 is legal there, and
GPTQModel (and transformers through it) refuses asymmetric version 1 files that it did not write itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...version import __version__
from ..canonical import CanonicalWeight, PackedWeight
from ..packing import num_words, pack, unpack
from ..scheme import Scheme, WeightOnly
from .write_format import Layout, WriteFormat

SCALE_DTYPE = torch.float16


class GPTQWriter(WriteFormat):
    """Versions 1 and 2 by the symmetry of the weights; layers that differ from most become ``dynamic`` rules."""

    name = "gptq"

    def cannot_store(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        if not isinstance(scheme, WeightOnly):
            return f"GPTQ files hold integer weights, not {scheme}"
        rows, columns = shape
        if scheme.group_size != -1 and columns % scheme.group_size:
            return f"{columns} input features are not divisible by the group size {scheme.group_size}"
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

    def to_tensors(self, weight: CanonicalWeight) -> dict[str, Tensor]:
        assert isinstance(weight, PackedWeight), f"GPTQ files hold integer weights, not {weight.scheme}"
        bits, columns = weight.scheme.bits, weight.shape[1]
        middle = 2 ** (bits - 1)
        zeros = torch.full_like(weight.scales, middle, dtype=torch.uint8) if weight.zeros is None else weight.zeros
        group_of_column = torch.arange(columns, dtype=torch.int32) // weight.group_size
        qweight = weight.qweight
        if weight.perm is not None:
            # Stored in the order of the input features, each naming its group.
            place = weight.perm.long().argsort()
            group_of_column = group_of_column[place]
            qweight = pack(unpack(qweight, bits, columns)[:, place], bits)
        return {
            "qweight": qweight.T.contiguous(),
            "qzeros": encode_zeros(zeros.T, bits, zeros_minus_one=weight.scheme.symmetric),
            "scales": weight.scales.T.to(SCALE_DTYPE).contiguous(),
            "g_idx": group_of_column,
        }

    def config(self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str) -> dict[str, Any]:
        """The head and the embedding are plain by the format's own default and need no rule."""
        most = Counter(_values(scheme) for scheme in schemes.values()).most_common(1)[0][0]
        bits, group_size, symmetric = most
        version = "gptq" if symmetric else "gptq_v2"
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "sym": symmetric,
            "desc_act": any(isinstance(scheme, WeightOnly) and scheme.act_order for scheme in schemes.values()),
            "static_groups": False,
            "lm_head": False,
            "checkpoint_format": version,
            "format": version,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"twofold:{__version__}"], "method": method},
        }
        rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in plain}
        for module, scheme in schemes.items():
            if (values := _values(scheme)) != most:
                rule = dict(zip(("bits", "group_size", "sym"), values, strict=True))
                rules[f"+:^{re.escape(module)}$"] = rule
        return {**config, "dynamic": rules} if rules else config


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
