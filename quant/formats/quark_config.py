"""AMD Quark's quantization config: which module has which scheme."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedError
from ..scheme import Activation, Dense, Element, Fp8, Int8, MicroScaled, Scheme, WeightOnly
from .config_values import mapping, names
from .names import same_layer

SERVED = (
    "served are fp8_e4m3 and int8 per tensor or channel, int4 and uint4 per group, and fp4 in groups of 32 with e8m0 "
    "scales, with activations of the same type that are static per tensor or dynamic"
)
_INTEGERS = {"int4": True, "uint4": False}


@dataclass(frozen=True, slots=True)
class QuarkConfig:
    """``layers`` maps patterns of module names to configs that replace the global one; ``exclude`` stays dense.

    ``interleaved``: 4-bit codes lie in AWQ's order within their words (``pack_method: reorder``).
    """

    everywhere: dict[str, Any]
    layers: dict[str, Any]
    linear: dict[str, Any]
    exclude: tuple[str, ...]
    interleaved: bool

    def scheme(self, module: str) -> Scheme:
        """The module's scheme; UnsupportedError names it when that is not served."""
        if any(_matches(entry, name) for entry in self.exclude for name in same_layer(module)):
            return Dense()
        return _scheme(self._of(module), module)

    def weight_dtype(self, module: str) -> str:
        """What the config calls the type of the module's weight."""
        return str(mapping(self._of(module).get("weight"), f"quark weight of {module}").get("dtype"))

    def _of(self, module: str) -> dict[str, Any]:
        known = same_layer(module)
        own = next((c for p, c in self.layers.items() if any(_matches(p, name) for name in known)), None)
        config = own if own is not None else self.linear or self.everywhere
        return mapping(config, f"quark config of {module}")


def parse_quark_config(raw: Mapping[str, Any]) -> QuarkConfig:
    """ConfigError names a wrong value, UnsupportedError weights that are not stored quantized."""
    export = mapping(raw.get("export"), "quark export")
    if export.get("weight_format", "real_quantized") != "real_quantized":
        raise UnsupportedError(
            f"quark weight_format {export['weight_format']!r} is not served; export the model with real_quantized"
        )
    return QuarkConfig(
        everywhere=mapping(raw.get("global_quant_config"), "quark global_quant_config"),
        layers=mapping(raw.get("layer_quant_config"), "quark layer_quant_config"),
        linear=mapping(
            mapping(raw.get("layer_type_quant_config"), "quark layer_type_quant_config").get("Linear"), "it"
        ),
        exclude=names(raw.get("exclude"), "quark exclude"),
        interleaved=export.get("pack_method", "reorder") == "reorder",
    )


def _matches(entry: str, module: str) -> bool:
    return fnmatch.fnmatchcase(module, entry)


def _scheme(config: dict[str, Any], module: str) -> Scheme:
    weight, inputs = config.get("weight"), config.get("input_tensors")
    if not weight:
        return Dense()
    if not isinstance(weight, Mapping) or not isinstance(inputs, Mapping | None):
        raise UnsupportedError(f"{module}: quark weights quantized in several steps are not served; {SERVED}")
    kind, grain = str(weight.get("dtype")), str(weight.get("qscheme"))
    activation = _activation(inputs, module) if inputs else None
    block = {"per_tensor": (-1, -1), "per_channel": (1, -1)}.get(grain)
    if kind == "fp8_e4m3" and block and _matching(activation, Element.FP8):
        return Fp8(block, activation)
    if kind == "int8" and block and activation is not None and activation.element is Element.INT8:
        return Int8(block, activation, symmetric=bool(weight.get("symmetric", True)))
    if kind == "int8" and block and activation is None:
        return WeightOnly(8, -1, symmetric=bool(weight.get("symmetric", True)))
    if kind in _INTEGERS and grain in ("per_group", "per_channel") and activation is None:
        size = int(weight.get("group_size") or -1) if grain == "per_group" else -1
        return WeightOnly(4, size, symmetric=bool(weight.get("symmetric", _INTEGERS[kind])))
    micro_scaled = kind == "fp4" and grain == "per_group" and weight.get("scale_format") == "e8m0"
    if micro_scaled and _matching(activation, Element.FP4):
        return MicroScaled(Element.FP4, int(weight.get("group_size") or 32), True, activation)
    raise UnsupportedError(
        f"{module}: quark weights of type {kind} {grain} with activations {activation or inputs} are not served; "
        f"{SERVED}"
    )


def _matching(activation: Activation | None, element: Element) -> bool:
    return activation is None or activation.element is element


def _activation(inputs: Mapping[str, Any], module: str) -> Activation:
    kind, grain, dynamic = str(inputs.get("dtype")), str(inputs.get("qscheme")), bool(inputs.get("is_dynamic"))
    element = {"fp8_e4m3": Element.FP8, "int8": Element.INT8, "fp4": Element.FP4}.get(kind)
    symmetric = bool(inputs.get("symmetric", True))
    if element is Element.FP4 and grain == "per_group" and dynamic and inputs.get("scale_format") == "e8m0":
        return Activation(element, int(inputs.get("group_size") or 32), power_of_two=True)
    # Per channel along axis 1 of [tokens, features] is per token.
    per_token = grain in ("per_token", "per_tensor") or (grain == "per_channel" and inputs.get("ch_axis") in (1, -2))
    static = not dynamic and grain == "per_tensor"
    if element in (Element.FP8, Element.INT8) and (static or (dynamic and per_token)):
        return Activation(element, -1 if dynamic else 0, dynamic=dynamic, symmetric=symmetric)
    raise UnsupportedError(
        f"{module}: quark activations of type {kind} {grain}, {'dynamic' if dynamic else 'static'}, are not served; "
        f"{SERVED}"
    )
