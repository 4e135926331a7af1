"""fp8 checkpoints under ``quant_method: fp8`` (``fp8.py`` says how they lie)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..canonical import CanonicalWeight
from ..eight_bit import EightBitWeight
from ..scheme import Activation, Element, Fp8, Int8, Scheme
from .write_format import Layout, WriteFormat

PER_TENSOR = (-1, -1)
HEAD = "lm_head"


class Fp8Writer(WriteFormat):
    """Square blocks with dynamic activations, or one scale per matrix with dynamic or static ones."""

    name = "fp8"
    mixes = False
    kv_caches = ("fp8",)

    def cannot_hold(self, scheme: Scheme) -> str | None:
        if not isinstance(scheme, Fp8):
            return f"fp8 files hold e4m3 weights, not {scheme}"
        if scheme.block == PER_TENSOR:
            fits = scheme.activation in (Activation(Element.FP8), Activation(Element.FP8, 0, dynamic=False))
        else:
            rows, columns = scheme.block
            fits = rows > 1 and columns > 1 and scheme.activation == Activation(Element.FP8, columns)
        if fits:
            return None
        return f"fp8 files have one scale per matrix, or square blocks with dynamic activations in groups, not {scheme}"

    def does_not_fit(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        assert isinstance(scheme, Fp8), f"fp8 files do not hold {scheme}"
        return ragged_block(shape, scheme)

    def tensor_layout(self, shape: tuple[int, int], scheme: Scheme) -> Layout:
        assert isinstance(scheme, Fp8), f"fp8 files do not hold {scheme}"
        layout: Layout = {"weight": (torch.float8_e4m3fn, shape)}
        if scheme.block != PER_TENSOR:
            return {**layout, "weight_scale_inv": (torch.float32, scheme.num_blocks(shape))}
        layout["weight_scale"] = (torch.float32, ())
        if scheme.activation is not None and not scheme.activation.dynamic:
            layout["input_scale"] = (torch.float32, ())
        return layout

    def to_tensors(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, Tensor]:
        weight = eight_bit_codes(weight)
        assert isinstance(scheme, Fp8), f"fp8 files do not hold {scheme}"
        tensors = {"weight": weight.codes.contiguous()}
        if scheme.block != PER_TENSOR:
            return {**tensors, "weight_scale_inv": weight.scales.float().contiguous()}
        tensors["weight_scale"] = weight.scales.float().reshape(())
        if scheme.activation is not None and not scheme.activation.dynamic:
            assert weight.input_scale is not None, "static activations have a scale"
            tensors["input_scale"] = weight.input_scale.float().reshape(())
        return tensors

    def config(
        self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str, kv_cache: str | None = None
    ) -> dict[str, Any]:
        scheme = next(iter(schemes.values()))
        assert isinstance(scheme, Fp8), f"fp8 files do not hold {scheme}"
        is_dynamic = scheme.activation is None or scheme.activation.dynamic
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if is_dynamic else "static",
        }
        if scheme.block == PER_TENSOR:
            # AutoFP8's names.
            config["ignored_layers"] = [HEAD, *plain]
            return {**config, "kv_cache_scheme": "static"} if kv_cache else config
        config["weight_block_size"] = list(scheme.block)
        return {**config, "modules_to_not_convert": [HEAD, *plain]}


def eight_bit_codes(weight: CanonicalWeight) -> EightBitWeight:
    """``weight``, which must hold 8-bit codes."""
    assert isinstance(weight, EightBitWeight), f"{weight.scheme} has no 8-bit codes"
    return weight


def ragged_block(shape: tuple[int, ...], scheme: Int8 | Fp8) -> str | None:
    """Why blocks do not divide a matrix: other readers refuse a short last one, or misread it."""
    rows, columns = scheme.block
    if rows in (-1, 1) and columns in (-1, 1):
        return None
    if shape[0] % max(rows, 1) == 0 and shape[1] % max(columns, 1) == 0:
        return None
    return f"{shape[0]} x {shape[1]} features are not divisible by blocks of {max(rows, 1)} x {columns}"
