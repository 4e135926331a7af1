"""GPTQ checkpoints as Twofold writes them: tensors of one linear, and the config that describes them all.

Which version? Symmetric weights are written as version 1, which every reader takes: their zero is never 0, the value
that readers of version 1 disagree on. Asymmetric weights are written as version 2: a zero of 0 is legal there, and
GPTQModel (and transformers through it) refuses asymmetric version 1 files that it did not write itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...version import __version__
from ..canonical import PackedWeight
from ..packing import num_words, pack
from ..scheme import WeightOnly

SCALE_DTYPE = torch.float16


def cannot_store(shape: tuple[int, ...], scheme: WeightOnly) -> str | None:
    """Why a matrix [N, K] cannot be stored with ``scheme``, in words; None when it can."""
    rows, columns = shape
    if scheme.group_size != -1 and columns % scheme.group_size:
        return f"{columns} input features are not divisible by the group size {scheme.group_size}"
    if columns * scheme.bits % 32:
        return f"{columns} input features of {scheme.bits} bits do not fill whole 32-bit words"
    if rows * scheme.bits % 32:
        return f"{rows} output features of {scheme.bits} bits do not fill whole 32-bit words"
    return None


def tensor_layout(shape: tuple[int, int], scheme: WeightOnly) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a linear [N, K], by its last name."""
    (rows, columns), groups = shape, scheme.num_groups(shape[1])
    return {
        "qweight": (torch.int32, (num_words(columns, scheme.bits), rows)),
        "qzeros": (torch.int32, (groups, num_words(rows, scheme.bits))),
        "scales": (SCALE_DTYPE, (groups, rows)),
        "g_idx": (torch.int32, (columns,)),
    }


def to_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors of one linear, by their last name. Groups must be contiguous (no gather)."""
    assert weight.perm is None, "a gathered weight needs its own g_idx"
    bits = weight.scheme.bits
    middle = 2 ** (bits - 1)
    zeros = torch.full_like(weight.scales, middle, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    group_of_column = torch.arange(weight.shape[1], dtype=torch.int32) // weight.group_size
    return {
        "qweight": weight.qweight.T.contiguous(),
        "qzeros": encode_zeros(zeros.T, bits, zeros_minus_one=weight.scheme.symmetric),
        "scales": weight.scales.T.to(SCALE_DTYPE).contiguous(),
        "g_idx": group_of_column,
    }


def encode_zeros(zeros: Tensor, bits: int, *, zeros_minus_one: bool) -> Tensor:
    """Zeros [G, N] to stored qzeros [G, N * bits / 32]; version 1 stores zero - 1 and cannot hold a zero of 0."""
    stored = zeros.to(torch.int16)
    if zeros_minus_one:
        assert int(stored.min()) >= 1, "version 1 stores zero - 1: a zero of 0 needs version 2"
        stored = stored - 1
    return pack(stored, bits)


def quantization_config(scheme: WeightOnly, method: str, plain_modules: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config``; ``plain_modules`` are the linear layers of the decoder that stay dense.

    The head and the embedding are plain by the format's own default and need no rule.
    """
    version = "gptq" if scheme.symmetric else "gptq_v2"
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": False,
        "static_groups": False,
        "lm_head": False,
        "checkpoint_format": version,
        "format": version,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"twofold:{__version__}"], "method": method},
    }
    rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in plain_modules}
    return {**config, "dynamic": rules} if rules else config
