"""compressed-tensors checkpoints as Twofold writes them (``compressed_tensors.py`` says how they lie)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..canonical import CanonicalWeight
from ..packing import num_words, pack
from ..scheme import Activation, Element, Fp8, Int8, Scheme, WeightOnly, activation_of
from .compressed_tensors_config import LINEAR
from .fp8_writer import eight_bit_codes, ragged_block
from .integer_parts import SCALE_DTYPE, all_zeros, codes_in_order, group_misfit, packed
from .write_format import Layout, WriteFormat

HEAD = "lm_head"
# A number on its own is stored as a vector, as the tool does.
ONE = (1,)
KV_CACHES = {"fp8": "float", "int8": "int"}


class CompressedTensorsWriter(WriteFormat):
    """``pack-quantized`` integers; ``int-quantized`` and ``float-quantized`` 8-bit weights with activations.

    Scales of packed integers are float16, those of 8-bit codes float32.
    """

    name = "compressed-tensors"
    kv_caches = tuple(KV_CACHES)

    def cannot_hold(self, scheme: Scheme) -> str | None:
        if isinstance(scheme, WeightOnly):
            return "compressed-tensors has no act-order any more" if scheme.act_order else None
        if not isinstance(scheme, Int8 | Fp8):
            return f"compressed-tensors files are written with integer and fp8 weights, not {scheme}"
        return None

    def does_not_fit(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        if isinstance(scheme, WeightOnly):
            return group_misfit(shape[1], scheme)
        assert isinstance(scheme, Int8 | Fp8), f"compressed-tensors files do not hold {scheme}"
        return ragged_block(shape, scheme)

    def tensor_layout(self, shape: tuple[int, int], scheme: Scheme) -> Layout:
        rows, columns = shape
        if isinstance(scheme, WeightOnly):
            groups = scheme.num_groups(columns)
            layout: Layout = {
                "weight_packed": (torch.int32, (rows, num_words(columns, scheme.bits))),
                "weight_scale": (SCALE_DTYPE, (rows, groups)),
                "weight_shape": (torch.int64, (2,)),
            }
            if not scheme.symmetric:
                layout["weight_zero_point"] = (torch.int32, (num_words(rows, scheme.bits), groups))
            return layout
        assert isinstance(scheme, Int8 | Fp8), f"compressed-tensors files do not hold {scheme}"
        scales = _stored_blocks(scheme, shape)
        layout = {
            "weight": (torch.int8 if isinstance(scheme, Int8) else torch.float8_e4m3fn, shape),
            "weight_scale": (torch.float32, scales),
        }
        if isinstance(scheme, Int8) and not scheme.symmetric:
            layout["weight_zero_point"] = (torch.int8, scales)
        if scheme.activation is not None and not scheme.activation.dynamic:
            layout["input_scale"] = (torch.float32, ONE)
            if not scheme.activation.symmetric:
                layout["input_zero_point"] = (torch.int8, ONE)
        return layout

    def to_tensors(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, Tensor]:
        if isinstance(scheme, WeightOnly):
            return _packed_tensors(weight, scheme)
        weight = eight_bit_codes(weight)
        assert isinstance(scheme, Int8 | Fp8), f"compressed-tensors files do not hold {scheme}"
        scales = _stored_blocks(scheme, weight.shape)
        tensors = {"weight": weight.codes.contiguous(), "weight_scale": weight.scales.float().reshape(scales)}
        if isinstance(scheme, Int8) and not scheme.symmetric:
            zeros = torch.zeros_like(weight.scales, dtype=torch.int8) if weight.zeros is None else weight.zeros
            tensors["weight_zero_point"] = zeros.reshape(scales)
        if scheme.activation is not None and not scheme.activation.dynamic:
            assert weight.input_scale is not None, "static activations have a scale"
            tensors["input_scale"] = weight.input_scale.float().reshape(ONE)
            if not scheme.activation.symmetric:
                zero = torch.zeros(ONE) if weight.input_zero is None else weight.input_zero.reshape(ONE)
                tensors["input_zero_point"] = zero.to(torch.int8)
        return tensors

    def config(
        self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str, kv_cache: str | None = None
    ) -> dict[str, Any]:
        """One group per scheme: of the class where all are alike, else of the names of its modules."""
        different = list(dict.fromkeys(schemes.values()))
        groups = {}
        for number, scheme in enumerate(different):
            members = [module for module, of_module in schemes.items() if of_module == scheme]
            groups[f"group_{number}"] = {
                "targets": [LINEAR] if len(different) == 1 else members,
                "weights": _weights(scheme),
                "input_activations": _inputs(activation_of(scheme)),
                "output_activations": None,
                "format": _layout_name(scheme),
            }
        names = {_layout_name(scheme) for scheme in different}
        return {
            "quant_method": "compressed-tensors",
            "format": names.pop() if len(names) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [HEAD, *plain],
            "kv_cache_scheme": None if kv_cache is None else _numbers(8, KV_CACHES[kv_cache], "tensor", dynamic=False),
        }


def _packed_tensors(weight: CanonicalWeight, scheme: WeightOnly) -> dict[str, Tensor]:
    weight = packed(weight)
    tensors = {
        "weight_packed": pack(codes_in_order(weight), scheme.bits),
        "weight_scale": weight.scales.to(SCALE_DTYPE).contiguous(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not scheme.symmetric:
        tensors["weight_zero_point"] = pack(all_zeros(weight).T, scheme.bits).T.contiguous()
    return tensors


def _stored_blocks(scheme: Int8 | Fp8, shape: tuple[int, int]) -> tuple[int, ...]:
    return ONE if scheme.block == (-1, -1) else scheme.num_blocks(shape)


def _layout_name(scheme: Scheme) -> str:
    if isinstance(scheme, WeightOnly):
        return "pack-quantized"
    return "int-quantized" if isinstance(scheme, Int8) else "float-quantized"


def _weights(scheme: Scheme) -> dict[str, Any]:
    if isinstance(scheme, WeightOnly):
        strategy = "channel" if scheme.group_size == -1 else "group"
        args = _numbers(scheme.bits, "int", strategy, symmetric=scheme.symmetric)
        return args if scheme.group_size == -1 else {**args, "group_size": scheme.group_size}
    assert isinstance(scheme, Int8 | Fp8), f"compressed-tensors files do not hold {scheme}"
    kind, symmetric = ("int", scheme.symmetric) if isinstance(scheme, Int8) else ("float", True)
    if scheme.block in ((-1, -1), (1, -1)):
        return _numbers(8, kind, scheme.grain(), symmetric=symmetric)
    if scheme.block[0] == 1:
        return {**_numbers(8, kind, "group", symmetric=symmetric), "group_size": scheme.block[1]}
    return {**_numbers(8, kind, "block", symmetric=symmetric), "block_structure": list(scheme.block)}


def _inputs(activation: Activation | None) -> dict[str, Any] | None:
    if activation is None:
        return None
    kind = "int" if activation.element is Element.INT8 else "float"
    strategy = {0: "tensor", -1: "token"}.get(activation.group_size, "group")
    args = _numbers(8, kind, strategy, symmetric=activation.symmetric, dynamic=activation.dynamic)
    return args if strategy != "group" else {**args, "group_size": activation.group_size}


def _numbers(bits: int, kind: str, strategy: str, *, symmetric: bool = True, dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": dynamic}
