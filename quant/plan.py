"""QuantizePlan: what will be done to each tensor, decided from headers alone, before any weight is read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..errors import ConfigError
from ..log import get_logger
from .formats import TensorSource
from .formats.write_format import WriteFormat
from .scheme import Scheme
from .spec import GROUP_SIZES, GROUPED, QuantizeSpec
from .tensor_writer import TensorSpec

log = get_logger(__name__)

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")
# Linear layers by name; other matrices of a layer (routers, low-rank factors) are small and sensitive: they stay dense.
_LINEAR = re.compile(r"\.(?:[a-z_]+_proj|w[123])$")
_NO_LINEAR = re.compile(r"embed|(?:^|\.)(?:lm_head|norm|wte|wpe)$")
_ATTENTION = re.compile(r"^(.*\.layers\.\d+\.(?:self_attn|attention|attn))\.")
SIDES = ("k_scale", "v_scale")


@dataclass(slots=True)
class LayerPlan:
    """The tensors of one decoder layer, or (``number`` None) those outside all layers.

    ``quantize``  modules whose ``.weight`` is quantized, each with its scheme.
    ``copy``      names of tensors that are stored dense.
    ``kv_scales`` names of scales for the KV cache, one number each.
    """

    number: int | None
    quantize: dict[str, Scheme] = field(default_factory=dict)
    copy: list[str] = field(default_factory=list)
    kv_scales: list[str] = field(default_factory=list)


@dataclass(slots=True)
class QuantizePlan:
    """All layers in order, those outside first; ``plain`` are linear layers left dense, with the reason."""

    spec: QuantizeSpec
    writer: WriteFormat
    layers: list[LayerPlan]
    plain: list[tuple[str, str]]

    @property
    def num_layers(self) -> int:
        return sum(layer.number is not None for layer in self.layers)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of every quantized module."""
        return {module: scheme for layer in self.layers for module, scheme in layer.quantize.items()}

    def tensors(self, source: TensorSource) -> Iterator[TensorSpec]:
        """Every tensor of the result."""
        for layer in self.layers:
            for name in layer.copy:
                yield TensorSpec(name, stored_dtype(source.dtype(name)), source.shape(name))
            for module, scheme in layer.quantize.items():
                rows, columns = source.shape(f"{module}.weight")
                for part, (dtype, shape) in self.writer.tensor_layout((rows, columns), scheme).items():
                    yield TensorSpec(f"{module}.{part}", dtype, shape)
            for name in layer.kv_scales:
                yield TensorSpec(name, torch.float32, (1,))

    def plain_modules(self, source: TensorSource) -> list[str]:
        """Every matrix that stays dense and that a reader could take for a linear layer: those of the decoder, and
        any outside it (a projector, a vision tower) but embeddings and the head."""
        outside = (name.removesuffix(".weight") for name in self.layers[0].copy if name.endswith(".weight"))
        linear = [name for name in outside if not _NO_LINEAR.search(name)]
        matrices = [name for name in linear if len(source.shape(f"{name}.weight")) == 2]
        return [module for module, _ in self.plain] + matrices


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """How a dense tensor is stored: 16-bit types stay, wider ones become float16, as readers of GPTQ files expect."""
    return torch.float16 if dtype in (torch.float32, torch.float64) else dtype


def make_plan(
    source: TensorSource, spec: QuantizeSpec, writer: WriteFormat, chosen: Mapping[str, Scheme] | None = None
) -> QuantizePlan:
    """Sort the tensors by layer and choose what is quantized: with the scheme ``chosen`` for a module, else with the
    first of the spec's that its matrix can be stored with.

    ConfigError when nothing can be, naming the group sizes that would fit.
    """
    layers: dict[int | None, LayerPlan] = {None: LayerPlan(None)}
    plain: list[tuple[str, str]] = []
    for name in sorted(source.names):
        match = _LAYER.match(name)
        number = int(match[1]) if match else None
        layer = layers.setdefault(number, LayerPlan(number))
        module = name.removesuffix(".weight")
        if number is None or module == name or len(source.shape(name)) != 2 or not source.dtype(name).is_floating_point:
            layer.copy.append(name)
            continue
        reason: str | None = "not a projection"
        scheme = (chosen or {}).get(module, spec.scheme)
        if _LINEAR.search(module):
            reason = writer.cannot_store(source.shape(name), scheme)
            others = storable(writer, source.shape(name), spec) if reason else []
            if others:
                scheme, reason = others[0], None
        if reason is None:
            layer.quantize[module] = scheme
        else:
            layer.copy.append(name)
            plain.append((module, reason))
    ordered = [layers.pop(None), *(layers[number] for number in sorted(key for key in layers if key is not None))]
    if spec.kv_cache is not None:
        for layer in ordered:
            layer.kv_scales = _kv_scales(layer)
    plan = QuantizePlan(spec, writer, ordered, plain)
    _check(plan, source)
    return plan


def storable(writer: WriteFormat, shape: tuple[int, ...], spec: QuantizeSpec) -> list[Scheme]:
    """Those of the spec's schemes that a matrix of ``shape`` can be stored with."""
    return [scheme for scheme in spec.schemes if writer.cannot_store(shape, scheme) is None]


def stored_bits(writer: WriteFormat, shape: tuple[int, ...], scheme: Scheme) -> int:
    """Bits of all tensors of a matrix [N, K] with ``scheme``."""
    rows, columns = shape
    layout = writer.tensor_layout((rows, columns), scheme)
    return 8 * sum(TensorSpec("", dtype, part).nbytes for dtype, part in layout.values())


def bit_budget(plan: QuantizePlan, source: TensorSource) -> int:
    """What the quantized modules may take for all linear ones to have the spec's target; plain ones are counted.

    ConfigError where that is less than they need at least.
    """
    target = plan.spec.target_bits
    assert target is not None, "only auto has a target"
    shapes = [source.shape(f"{module}.weight") for module in plan.schemes]
    plain = [f"{module}.weight" for module, _ in plan.plain]
    every = {*plan.schemes, *(module for module, _ in plan.plain)}
    biases = [name for name in source.names if name.endswith(".bias") and name.rpartition(".")[0] in every]
    dense = (*plain, *biases)
    spent = sum(8 * stored_dtype(source.dtype(name)).itemsize * math.prod(source.shape(name)) for name in dense)
    weights = sum(map(math.prod, (*shapes, *map(source.shape, plain))))
    least = sum(
        min(stored_bits(plan.writer, shape, scheme) for scheme in storable(plan.writer, shape, plan.spec))
        for shape in shapes
    )
    if target * weights < least + spent:
        raise ConfigError(
            f"target bits {target:g}: the linear layers of this model take at least {(least + spent) / weights:.3f} "
            "bits a weight, scales, zeros and layers left plain counted; ask for more"
        )
    return int(target * weights - spent)


def _kv_scales(layer: LayerPlan) -> list[str]:
    """Names of the scales of keys and of values in a decoder layer."""
    names = (_ATTENTION.match(name) for name in (*layer.quantize, *layer.copy))
    return [f"{module}.{side}" for module in sorted({name[1] for name in names if name}) for side in SIDES]


def _check(plan: QuantizePlan, source: TensorSource) -> None:
    misfits = [(module, reason) for module, reason in plan.plain if _LINEAR.search(module)]
    if any(layer.quantize for layer in plan.layers):
        if misfits:
            sizes = f"; sizes that fit all: {_fitting_sizes(plan, source)}" if plan.spec.method in GROUPED else ""
            log.warning("%d linear layers stay plain, such as %s: %s%s", len(misfits), *misfits[0], sizes)
        return
    if not misfits:
        raise ConfigError("the model has no linear layer to quantize: no projection matrix in any decoder layer")
    module, reason = misfits[0]
    sizes = f"; sizes that fit: {_fitting_sizes(plan, source)}" if plan.spec.method in GROUPED else ""
    raise ConfigError(f"nothing to quantize: {module}: {reason}{sizes}")


def _fitting_sizes(plan: QuantizePlan, source: TensorSource) -> str:
    """The group sizes at which every linear layer could be stored."""
    modules = [module for layer in plan.layers for module in layer.quantize]
    modules += [module for module, _ in plan.plain if _LINEAR.search(module)]
    shapes = {source.shape(f"{module}.weight") for module in modules}
    schemes = {size: dataclasses.replace(plan.spec, group_size=size).scheme for size in GROUP_SIZES}
    fitting = [
        size for size, s in schemes.items() if all(plan.writer.cannot_store(shape, s) is None for shape in shapes)
    ]
    return ", ".join(map(str, fitting)) or "none"
