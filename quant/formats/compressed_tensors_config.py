"""The compressed-tensors quantization config (llm-compressor): which module has which scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ..scheme import Activation, Dense, Element, Fp8, Int8, LowBit, MicroScaled, Scheme, WeightOnly
from .config_values import mapping, names, pattern
from .names import fused_parts, same_layer

# "dense" is a checkpoint with KV-cache scales only; "naive-quantized" is what older versions called the next two.
FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
LINEAR = "Linear"
SERVED = (
    "served are integer weights of 2 to 8 bits, W8A8 in int8, fp8 per tensor, channel, group or block, W4A8, MXFP4, "
    "MXFP8 and NVFP4, with activations that are not quantized, dynamic, or static per tensor"
)


@dataclass(frozen=True, slots=True)
class Group:
    """One entry of ``config_groups``."""

    targets: tuple[str, ...]
    weights: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompressedTensorsConfig:
    """Groups in the order of the config, and the modules that stay dense."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def scheme(self, module: str) -> Scheme:
        """The module's scheme; UnsupportedError names it when that is not served.

        ``ignore`` wins. Then an exact name, then a regular expression, then the class; within each, the first group. A
        fused module (qkv_proj) goes by its own name and by those of its parts before it goes by its class.
        """
        known = (*same_layer(module), *fused_parts(module))
        if any(_rank(entry, known) is not None for entry in self.ignore):
            return Dense()
        best: tuple[int, Group] | None = None
        for group in self.groups:
            ranks = [rank for rank in (_rank(target, known) for target in group.targets) if rank is not None]
            if ranks and (best is None or min(ranks) < best[0]):
                best = (min(ranks), group)
        return Dense() if best is None else _group_scheme(best[1], module)


def parse_compressed_tensors(raw: Mapping[str, Any]) -> CompressedTensorsConfig:
    """ConfigError names a wrong value, UnsupportedError a variant that no module of could be read."""
    _refuse_variants(raw)
    groups = [_group(name, group) for name, group in mapping(raw.get("config_groups"), "config_groups").items()]
    return CompressedTensorsConfig(tuple(groups), names(raw.get("ignore"), "compressed-tensors ignore"))


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    formats = [raw.get("format")]
    formats += [group.get("format") for group in mapping(raw.get("config_groups"), "config_groups").values()]
    for name in formats:
        if name is not None and name not in FORMATS:
            raise UnsupportedError(
                f"compressed-tensors format {name!r} is not served (served are {', '.join(FORMATS)}); "
                f"save the model in one of these"
            )
    sparsity = mapping(raw.get("sparsity_config"), "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(
            f"compressed-tensors sparsity format {sparsity['format']!r} is not served; save the model without sparse "
            f"compression (its zeros stay zeros)"
        )
    if mapping(raw.get("transform_config"), "transform_config").get("config_groups"):
        raise UnsupportedError(
            "compressed-tensors transform_config (rotations of activations at run time) is not served; quantize the "
            "model without transforms"
        )


def _group(name: str, raw: Any) -> Group:
    group = mapping(raw, f"config_groups.{name}")
    targets = names(group.get("targets"), f"config_groups.{name}.targets")
    for target in targets:
        if target.startswith("re:"):
            pattern(target[3:], f"config_groups.{name}.targets")
    parts = (mapping(group.get(key), f"config_groups.{name}.{key}") for key in _PARTS)
    return Group(targets, *parts)


_PARTS = ("weights", "input_activations", "output_activations")


def _rank(target: str, known: tuple[str, ...]) -> int | None:
    """How precisely a target names a module: 0 by its name, 1 by a pattern, 2 by its class; None: not at all."""
    if target in known:
        return 0
    if target.startswith("re:"):
        expression = pattern(target[3:], "compressed-tensors target")
        return 1 if any(expression.match(name) for name in known) else None
    return 2 if target == LINEAR else None


def _group_scheme(group: Group, module: str) -> Scheme:
    if not group.weights:
        if group.inputs:
            raise UnsupportedError(f"{module}: activations quantized without weights are not served; {SERVED}")
        return Dense()
    if group.outputs and not module.endswith(("k_proj", "v_proj", "qkv_proj")):
        raise UnsupportedError(f"{module}: quantized outputs are not served (but those of k_proj and v_proj)")
    kind, bits = group.weights.get("type", "int"), group.weights.get("num_bits")
    activation = _activation(group.inputs, module) if group.inputs else None
    if kind == "int" and isinstance(bits, int) and 2 <= bits <= 8:
        return _integer_scheme(group.weights, bits, activation, module)
    if kind == "float" and bits in (4, 8):
        return _float_scheme(group.weights, bits, activation, module)
    raise UnsupportedError(f"{module}: weights of type {kind!r} with {bits!r} bits are not served; {SERVED}")


def _integer_scheme(weights: dict[str, Any], bits: int, activation: Activation | None, module: str) -> Scheme:
    group_size = _columns(weights, module)
    symmetric, act_order = bool(weights.get("symmetric", True)), weights.get("actorder") == "group"
    if activation is None:
        return WeightOnly(bits, group_size, symmetric, act_order)
    if activation.element is Element.FP4:
        raise UnsupportedError(f"{module}: integer weights with fp4 activations are not served; {SERVED}")
    if bits == 8 and activation.element is Element.INT8 and not act_order:
        block = (-1, -1) if weights.get("strategy") == "tensor" else (1, group_size)
        return Int8(block, activation, symmetric)
    return LowBit(bits, group_size, symmetric, act_order, activation=activation)


def _float_scheme(weights: dict[str, Any], bits: int, activation: Activation | None, module: str) -> Scheme:
    if not weights.get("symmetric", True):
        raise UnsupportedError(f"{module}: asymmetric float weights are not served; {SERVED}")
    strategy, power_of_two = weights.get("strategy"), _is_power_of_two(weights)
    if bits == 4:
        if strategy == "tensor_group":
            return MicroScaled(Element.FP4, _columns(weights, module), False, activation)
        return MicroScaled(Element.FP4, _columns(weights, module), True, activation)
    if power_of_two:
        return MicroScaled(Element.FP8, _columns(weights, module), True, activation)
    if strategy == "block":
        rows, columns = weights.get("block_structure") or (128, 128)
        return Fp8((int(rows), int(columns)), activation)
    return Fp8((-1, -1) if strategy == "tensor" else (1, _columns(weights, module)), activation)


def _columns(args: dict[str, Any], module: str) -> int:
    """Input features that share a scale; -1: all."""
    strategy, size = args.get("strategy"), args.get("group_size")
    if strategy is None:
        strategy = "channel" if size in (None, -1) else "group"
    if strategy in ("group", "tensor_group"):
        if not isinstance(size, int) or (size < 1 and size != -1):
            raise ConfigError(f"{module}: group_size {size!r} must be positive")
        return size
    if strategy in ("tensor", "channel"):
        return -1
    raise UnsupportedError(f"{module}: weights with strategy {strategy!r} are not served; {SERVED}")


def _is_power_of_two(args: dict[str, Any]) -> bool:
    return str(args.get("scale_dtype")).removeprefix("torch.") in ("uint8", "float8_e8m0fnu")


def _activation(args: dict[str, Any], module: str) -> Activation:
    kind, bits, strategy = args.get("type", "int"), args.get("num_bits"), args.get("strategy")
    elements = {("int", 8): Element.INT8, ("float", 8): Element.FP8, ("float", 4): Element.FP4}
    element = elements.get((kind, bits))  # type: ignore[arg-type]
    symmetric, dynamic = bool(args.get("symmetric", True)), args.get("dynamic", False)
    grains = ("group", "tensor_group") if element is Element.FP4 else ("tensor", "token", "group", None)
    if element is None or (not symmetric and element is not Element.INT8) or strategy not in grains:
        raise UnsupportedError(
            f"{module}: activations of type {kind!r} with {bits!r} bits, strategy {strategy!r}, "
            f"{'symmetric' if symmetric else 'asymmetric'} are not served; {SERVED}"
        )
    if strategy == "tensor_group":
        return Activation(element, int(args.get("group_size") or 16), dynamic=False)
    if strategy == "group":
        _must_be_dynamic(dynamic, strategy, module)
        size = int(args.get("group_size") or 128)
        return Activation(
            element, size, symmetric=symmetric, power_of_two=element is Element.FP4 or _is_power_of_two(args)
        )
    if not dynamic and strategy == "token":
        _must_be_dynamic(dynamic, strategy, module)
    # One dynamic scale for a whole batch would let requests change each other's results: a scale per token is finer.
    return Activation(element, -1 if dynamic else 0, dynamic=bool(dynamic), symmetric=symmetric)


def _must_be_dynamic(dynamic: Any, strategy: str, module: str) -> None:
    if not dynamic:
        raise UnsupportedError(f"{module}: static activations per {strategy} are not served; {SERVED}")
