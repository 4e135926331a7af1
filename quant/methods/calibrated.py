"""Quantizing with data: layer by layer, stage by stage, each on the outputs of what was quantized before it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..calibration.activation_store import ActivationStore
from ..calibration.block_model import BlockModel
from ..calibration.halting_passes import HaltingPasses
from ..calibration.layer_inputs import observed, run_until
from ..calibration.spec import DEFAULT_MEMORY
from ..calibration.stages import InputGroup, stages
from ..canonical import dequantize
from ..plan import LayerPlan, stored_dtype
from ..scheme import Scheme
from .kv_ranges import KVRanges
from .layer_method import LayerWeights
from .scaling import FindScale, scale_layer
from .statistics import InputStatistics

# Tokens that pass through a layer at once.
BATCH_TOKENS = 4096
# Hidden states that a token holds in the middle of a layer: its input, what is added to it, and a norm's output.
HELD_STATES = 3
# Tokens that scales are searched on.
SCALE_TOKENS = 1024


class GroupQuantizer(Protocol):
    """Quantizes modules that read the same input, given its statistics; all names are full ones.

    ``needs_products``: it looks at products of inputs, and not only at their ranges. ``needs_originals``: at the inputs
    of the original model as well.
    """

    needs_products: bool
    needs_originals: bool

    def __call__(
        self,
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None: ...


class CalibratedLayers:
    """Walks the decoder layers of ``model`` with calibration ``windows`` int64 [B, L].

    Two streams of hidden states go through: the original model's and the quantized one's. ``memory`` bytes
    of them are kept in memory, more lies on disk. With ``find_scale`` a layer is scaled before it is quantized.
    ``kv_cache`` (fp8, int8): the type that scales of keys and values are made for, where the plan asks for them.
    """

    def __init__(
        self,
        model: BlockModel,
        windows: Tensor,
        quantize: GroupQuantizer,
        *,
        find_scale: FindScale | None = None,
        kv_cache: str | None = None,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        self._model = model
        self._quantize = quantize
        self._find_scale = find_scale
        self._kv_cache = kv_cache
        self._memory = memory
        self._batch = max(1, BATCH_TOKENS // windows.shape[1])
        hidden = model.config.hidden_size
        self._shape = (windows.shape[0], windows.shape[1], hidden)
        self._states = ActivationStore(self._shape, memory // 4)
        self._originals = ActivationStore(self._shape, memory // 4)
        for start in range(0, len(windows), self._batch):
            embedded = model.embed(windows[start : start + self._batch])
            self._states.put(start, embedded)
            self._originals.put(start, embedded)

    def quantize(self, plan: LayerPlan) -> LayerWeights:
        """Quantize a decoder layer; layers come in order."""
        index = _number(plan)
        original = self._model.load_layer(index)
        layer = copy.deepcopy(original)
        modules = {self._local(index, name): name for name in plan.quantize}
        order = stages(modules)
        result = LayerWeights()
        if self._find_scale is not None:
            self._scale(index, original, plan, modules, self._find_scale, result)
            layer = copy.deepcopy(original)
        stores = self._original_inputs(index, original, [group for groups in order for group in groups])
        ranges = KVRanges() if plan.kv_scales else None

        def quantize(group: InputGroup, statistics: InputStatistics) -> None:
            self._group({modules[name]: _linear(layer, name) for name in group.modules}, plan, statistics, result)

        if self._fits_one_pass(order, layer):
            self._in_one_pass(index, layer, [group for groups in order for group in groups], stores, quantize, ranges)
        else:
            for groups in order:
                statistics = self._statistics(index, layer, groups, stores)
                for group in groups:
                    quantize(group, statistics[group.first])
            self._advance(index, layer, ranges)
        if ranges is not None and self._kv_cache is not None:
            attentions = {name.rpartition(".")[0] for name in plan.kv_scales}
            result.kv_scales = dict.fromkeys(attentions, ranges.scales(self._kv_cache))
        return result

    def _group(
        self, linears: Mapping[str, nn.Linear], plan: LayerPlan, statistics: InputStatistics, result: LayerWeights
    ) -> None:
        """Quantize modules that read one input, in place too."""
        weights = {name: linear.weight.data for name, linear in linears.items()}
        self._quantize(weights, {name: plan.quantize[name] for name in weights}, statistics, result)
        for name, weight in weights.items():
            quantized = dequantize(result.quantized[name])
            result.weight_errors[name] = float((quantized - weight).norm() / weight.norm().clamp(min=1e-30))
            weight.copy_(quantized)

    def _fits_one_pass(self, order: Sequence[Sequence[InputGroup]], layer: nn.Module) -> bool:
        """Whether what all batches hold in the middle of a layer fits memory; experts are not called by every batch."""
        if any(len(groups) > 1 or groups[0].is_routed for groups in order):
            return False
        widest = max((_linear(layer, groups[0].first).in_features for groups in order), default=0)
        batches, length, hidden = self._shape
        return 4 * batches * length * (HELD_STATES * hidden + widest) <= self._memory // 2

    def _in_one_pass(
        self,
        index: int,
        layer: nn.Module,
        groups: Sequence[InputGroup],
        originals: Mapping[str, ActivationStore],
        quantize: Callable[[InputGroup, InputStatistics], None],
        ranges: KVRanges | None,
    ) -> None:
        """Quantize group after group while all batches wait at it; the quantized stream moves on to the output."""
        batches = list(self._states.batches(self._batch))
        runs = [functools.partial(self._model.run, index, layer, hidden, cache=ranges) for _, hidden in batches]
        missing = list(groups)
        with HaltingPasses(layer, groups, runs) as passes:
            for group, inputs in passes:
                statistics = self._no_statistics(layer, group)
                store = originals.get(group.first)
                for (start, hidden), x in zip(batches, inputs, strict=True):
                    statistics.add(x, None if store is None else store.get(start, start + len(hidden)))
                quantize(group, statistics)
                missing.remove(group)
        for group in missing:
            quantize(group, self._no_statistics(layer, group))
        for (start, _), output in zip(batches, passes.outputs, strict=True):
            self._states.put(start, output)

    def _scale(
        self,
        index: int,
        layer: nn.Module,
        plan: LayerPlan,
        modules: Mapping[str, str],
        find: FindScale,
        result: LayerWeights,
    ) -> None:
        """Scale ``layer`` in place; what changes and stays dense is part of the result."""
        hidden = self._states.get(0, max(1, min(len(self._states), SCALE_TOKENS // self._shape[1])))
        before = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
        with torch.inference_mode():
            schemes = {local: plan.quantize[name] for local, name in modules.items()}
            prefix = self._model.layer_name(index)
            run = functools.partial(self._model.run, index, hidden=hidden)
            result.notes += [f"{prefix}.{note}" for note in scale_layer(layer, schemes, find, run)]
        for name, parameter in layer.named_parameters():
            if name.removesuffix(".weight") not in modules and not torch.equal(parameter.data, before[name]):
                stored = self._model.stored_name(f"{prefix}.{name}")
                # What is quantized next, and what an interrupted run goes on with, is what will be in the file.
                dtype = self._model.checkpoint.dtype(stored)
                parameter.data.copy_(parameter.data.to(dtype).to(stored_dtype(dtype)))
                result.changed[stored] = parameter.data

    def skip(self, plan: LayerPlan, done: LayerWeights) -> None:
        """Pass a layer that was quantized before."""
        index = _number(plan)
        layer = original = self._model.load_layer(index)
        if self._find_scale is not None and self._quantize.needs_originals:
            # The originals went through the scaled layer, which computes the same and rounds otherwise.
            original = copy.deepcopy(layer)
            modules = {self._local(index, name): name for name in plan.quantize}
            self._scale(index, original, plan, modules, self._find_scale, LayerWeights())
        self._originals.update(self._batch, functools.partial(self._model.run, index, original))
        for name, tensor in done.changed.items():
            layer.get_parameter(self._local(index, name)).data.copy_(tensor)
        for name, weight in done.quantized.items():
            _linear(layer, self._local(index, name)).weight.data.copy_(dequantize(weight))
        self._advance(index, layer)

    def _local(self, index: int, name: str) -> str:
        """The name within a layer, as transformers calls it."""
        return self._model.module_name(name).removeprefix(f"{self._model.layer_name(index)}.")

    def _advance(self, index: int, layer: nn.Module, ranges: KVRanges | None = None) -> None:
        self._states.update(self._batch, functools.partial(self._model.run, index, layer, cache=ranges))

    def _original_inputs(
        self, index: int, layer: nn.Module, groups: Sequence[InputGroup]
    ) -> dict[str, ActivationStore]:
        """Inputs of the original layer's groups; the original stream moves on to its output."""
        stores: dict[str, ActivationStore] = {}
        plain = [group for group in groups if self._quantize.needs_originals and not group.is_routed]
        share = self._memory // 2 // max(len(plain), 1)
        for start, hidden in self._originals.batches(self._batch):

            def keep(group: InputGroup, x: Tensor, start: int = start) -> None:
                if group.first not in stores:
                    stores[group.first] = ActivationStore((*self._shape[:2], x.shape[-1]), share)
                stores[group.first].put(start, x.reshape(-1, self._shape[1], x.shape[-1]))

            with torch.inference_mode(), observed(layer, plain, keep):
                self._originals.put(start, self._model.run(index, layer, hidden))
        return stores

    def _no_statistics(self, layer: nn.Module, group: InputGroup) -> InputStatistics:
        """To be filled."""
        return InputStatistics(
            _linear(layer, group.first).in_features,
            self._model.device,
            with_products=self._quantize.needs_products,
            with_deviation=self._quantize.needs_originals and not group.is_routed,
        )

    def _statistics(
        self, index: int, layer: nn.Module, groups: Sequence[InputGroup], originals: dict[str, ActivationStore]
    ) -> dict[str, InputStatistics]:
        statistics = {group.first: self._no_statistics(layer, group) for group in groups}
        for start, hidden in self._states.batches(self._batch):
            end = start + len(hidden)

            def add(group: InputGroup, x: Tensor, start: int = start, end: int = end) -> None:
                store = originals.get(group.first)
                statistics[group.first].add(x, None if store is None else store.get(start, end))

            run_until(layer, groups, add, functools.partial(self._model.run, index, layer, hidden))
        _lend_ranges(groups, statistics)
        return statistics


def _lend_ranges(groups: Sequence[InputGroup], statistics: Mapping[str, InputStatistics]) -> None:
    """Experts that no token reached take the range of inputs from the experts of their layer that some did."""
    kinds: dict[tuple[str, ...], list[InputStatistics]] = {}
    for group in groups:
        if group.is_routed:
            kind = tuple(name.rpartition(".")[2] for name in group.modules)
            kinds.setdefault(kind, []).append(statistics[group.first])
    for every in kinds.values():
        largest = torch.stack([one.max_abs for one in every]).amax(0)
        for one in every:
            if one.num_tokens == 0:
                one.max_abs = largest


def _number(plan: LayerPlan) -> int:
    assert plan.number is not None, "tensors outside the layers are not calibrated"
    return plan.number


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    module = layer.get_submodule(name)
    assert isinstance(module, nn.Linear), f"{name} is no linear module"
    return module
