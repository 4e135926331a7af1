"""Quantizing with data: layer by layer, stage by stage, each on the outputs of what was quantized before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..calibration.activation_store import ActivationStore
from ..calibration.block_model import BlockModel
from ..calibration.layer_inputs import observed, run_until
from ..calibration.stages import InputGroup, stages
from ..canonical import CanonicalWeight, dequantize
from .statistics import InputStatistics

# Tokens that pass through a layer at once.
BATCH_TOKENS = 4096


@dataclass(slots=True)
class LayerWeights:
    """The outcome of one layer, by names within it: quantized modules, and dense tensors that were changed.

    ``errors`` are relative errors of the outputs; ``notes`` what a user must know.
    """

    quantized: dict[str, CanonicalWeight] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# Quantizes the modules of one group, given their stacked weights' inputs.
GroupQuantizer = Callable[[InputGroup, dict[str, Tensor], InputStatistics, LayerWeights], None]


class CalibratedLayers:
    """Walks the decoder layers of ``model`` with calibration ``windows`` int64 [B, L].

    Two streams of hidden states go through: the original model's and the quantized one's. ``memory`` bytes
    of them are kept in memory, more lies on disk.
    """

    def __init__(self, model: BlockModel, windows: Tensor, *, memory: int = 4 << 30) -> None:
        self._model = model
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

    def quantize(self, index: int, modules: Sequence[str], quantize: GroupQuantizer) -> LayerWeights:
        """Quantize the named modules of layer ``index`` (names within it); layers come in order."""
        original = self._model.load_layer(index)
        layer = copy.deepcopy(original)
        order = stages(modules)
        stores = self._original_inputs(index, original, [group for groups in order for group in groups])
        result = LayerWeights()
        for groups in order:
            statistics = self._statistics(index, layer, groups, stores)
            for group in groups:
                weights = {name: layer.get_submodule(name).weight for name in group.modules}
                quantize(group, weights, statistics[group.first], result)
                for name in group.modules:
                    layer.get_submodule(name).weight.copy_(dequantize(result.quantized[name]))
        self._states.update(self._batch, lambda hidden: self._model.run(index, layer, hidden))
        return result

    def _original_inputs(
        self, index: int, layer: nn.Module, groups: Sequence[InputGroup]
    ) -> dict[str, ActivationStore]:
        """Inputs of the original layer's groups; the original stream moves on to its output."""
        stores: dict[str, ActivationStore] = {}
        plain = [group for group in groups if not group.is_routed]
        share = self._memory // 2 // max(len(plain), 1)
        for start, hidden in self._originals.batches(self._batch):

            def keep(group: InputGroup, x: Tensor, start: int = start) -> None:
                if group.first not in stores:
                    stores[group.first] = ActivationStore((*self._shape[:2], x.shape[-1]), share)
                stores[group.first].put(start, x.reshape(-1, self._shape[1], x.shape[-1]))

            with torch.inference_mode(), observed(layer, plain, keep):
                self._originals.put(start, self._model.run(index, layer, hidden))
        return stores

    def _statistics(
        self, index: int, layer: nn.Module, groups: Sequence[InputGroup], originals: dict[str, ActivationStore]
    ) -> dict[str, InputStatistics]:
        statistics = {
            group.first: InputStatistics(
                layer.get_submodule(group.first).in_features,
                self._model.device,
                with_deviation=not group.is_routed,
            )
            for group in groups
        }
        for start, hidden in self._states.batches(self._batch):
            end = start + len(hidden)

            def add(group: InputGroup, x: Tensor, start: int = start, end: int = end) -> None:
                store = None if group.is_routed else originals[group.first]
                statistics[group.first].add(x, None if store is None else store.get(start, end))

            run_until(layer, groups, add, lambda hidden=hidden: self._model.run(index, layer, hidden))
        return statistics
