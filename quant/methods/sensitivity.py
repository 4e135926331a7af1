"""How much the model's predictions suffer from a layer's rounding: a backward pass, one decoder layer in memory.

For small errors e of a linear's output the divergence is e' F e / 2, F the Fisher information: the second moments of
the gradients of log-probabilities of tokens drawn from the model's own distribution. Its diagonal is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..calibration.block_model import BlockModel
from ..calibration.layer_inputs import observed
from ..calibration.stages import InputGroup, stages
from .statistics import InputStatistics

# Tokens whose logits are in memory at once.
CHUNK = 256
SEED = 0
# Part of the tokens that statistics are taken from; the rest judges what was fitted to them.
FITTED_SHARE = 0.75


@dataclass(slots=True)
class LayerSensitivity:
    """What is known of one decoder layer.

    ``weights``     of its modules, [N, K], by their names within the layer.
    ``groups``      of modules that read one input, and ``statistics`` of it by the group's first module;
                    ``held_out`` are those of the tokens that these have not seen.
    ``information`` of each module, float32 [N]: the mean over tokens of squared gradients at its output, times the
                    share of tokens that reach it.
    """

    index: int
    weights: dict[str, Tensor]
    groups: list[InputGroup]
    statistics: dict[str, InputStatistics]
    held_out: dict[str, InputStatistics]
    information: dict[str, Tensor] = field(default_factory=dict)


def layer_sensitivities(
    model: BlockModel, windows: Tensor, modules: Mapping[int, Sequence[str]]
) -> Iterator[LayerSensitivity]:
    """From the last layer to the first, for ``windows`` int64 [B, L]; ``modules`` by layer, names within the layer.

    Memory: one layer, and the input of every layer for all windows in float32.
    """
    inputs = [torch.cat([model.embed(window[None]) for window in windows])]
    for index in range(model.num_layers):
        layer = model.load_layer(index)
        inputs.append(torch.cat([model.run(index, layer, one[None]) for one in inputs[-1]]))
    gradients = _last_gradients(model, inputs.pop())
    for index in reversed(range(model.num_layers)):
        hidden = inputs.pop()
        layer = model.load_layer(index)
        found, gradients = _backward(model, index, layer, modules.get(index, ()), hidden, gradients)
        yield found


def _last_gradients(model: BlockModel, hidden: Tensor) -> Tensor:
    """Gradients of the drawn tokens' log-probabilities at the last layer's output [B, L, K]."""
    logits = model.logits()
    generator = torch.Generator(model.device).manual_seed(SEED)
    parts = []
    for chunk in hidden.flatten(0, 1).split(CHUNK):
        with torch.enable_grad():
            part = chunk.detach().requires_grad_()
            scores = logits(part[None])[0].log_softmax(-1)
            drawn = torch.multinomial(scores.detach().exp(), 1, generator=generator)
            scores.gather(1, drawn).sum().backward()
        assert part.grad is not None, "the loss depends on its input"
        parts.append(part.grad)
    return torch.cat(parts).view(hidden.shape)


def _backward(
    model: BlockModel, index: int, layer: nn.Module, names: Sequence[str], hidden: Tensor, gradients: Tensor
) -> tuple[LayerSensitivity, Tensor]:
    groups = [group for stage in stages(names) for group in stage]
    linears = {name: layer.get_submodule(name) for name in names}
    weights = {name: layer.get_parameter(f"{name}.weight").data for name in names}
    statistics, held_out = (
        {group.first: InputStatistics(weights[group.first].shape[1], model.device) for group in groups}
        for _ in range(2)
    )
    squares = {name: torch.zeros(weight.shape[0], device=model.device) for name, weight in weights.items()}

    def note(group: InputGroup, x: Tensor) -> None:
        tokens = x.detach().flatten(0, -2)
        fitted = math.ceil(len(tokens) * FITTED_SHARE)
        statistics[group.first].add(tokens[:fitted])
        held_out[group.first].add(tokens[fitted:])

    passed = []
    with observed(layer, groups, note), _squared_gradients(linears, squares):
        for one, gradient in zip(hidden, gradients, strict=True):
            with torch.enable_grad():
                x = one[None].detach().requires_grad_()
                model.call(index, layer, x).backward(gradient[None])
            assert x.grad is not None, "a layer depends on its input"
            passed.append(x.grad[0])
    num_tokens = hidden.shape[0] * hidden.shape[1]
    information = {name: square / num_tokens for name, square in squares.items()}
    return LayerSensitivity(index, weights, groups, statistics, held_out, information), torch.stack(passed)


class _squared_gradients:
    """Inside, squares of the gradients at the outputs of ``linears`` are added to ``squares``."""

    def __init__(self, linears: Mapping[str, nn.Module], squares: Mapping[str, Tensor]) -> None:
        self._linears = linears
        self._squares = squares
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        for name, module in self._linears.items():

            def watch(module: nn.Module, args: object, output: Tensor, name: str = name) -> None:
                if output.requires_grad:
                    output.register_hook(lambda gradient: self._add(name, gradient))

            self._handles.append(module.register_forward_hook(watch))

    def _add(self, name: str, gradient: Tensor) -> None:
        self._squares[name].add_(gradient.reshape(-1, gradient.shape[-1]).square().sum(0))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
