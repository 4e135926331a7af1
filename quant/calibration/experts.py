"""Experts one by one: transformers keeps a layer's experts in two tensors, quantized checkpoints each matrix alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN


class Expert(nn.Module):
    """``down(act(gate(x)) * up(x))``; ``names`` are the checkpoint's own for the three."""

    def __init__(self, hidden: int, inner: int, activation: nn.Module, names: tuple[str, str, str]) -> None:
        super().__init__()
        self._names = names
        self._activation = [activation]  # In a list: it has no parameters to be found.
        gate, up, down = names
        self.add_module(gate, nn.Linear(hidden, inner, bias=False))
        self.add_module(up, nn.Linear(hidden, inner, bias=False))
        self.add_module(down, nn.Linear(inner, hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        return down(self._activation[0](gate(x)) * up(x))


class SplitExperts(nn.ModuleList):
    """In place of transformers' fused experts, called in the same way."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, K], experts and weights [T, k] -> [T, K]."""
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            tokens, places = torch.where(top_k_index == number)
            if len(tokens):
                weights = top_k_weights[tokens, places, None].to(hidden_states.dtype)
                output.index_add_(0, tokens, expert(hidden_states[tokens]) * weights)
        return output


def split_experts(layer: nn.Module, config: Any) -> nn.Module:
    """``layer``, on the meta device, with its fused experts replaced by single ones."""
    for name, module in list(layer.named_modules()):
        fused = getattr(module, "gate_up_proj", None)
        if not isinstance(fused, nn.Parameter) or fused.dim() != 3:
            continue
        count, inner, hidden = fused.shape[0], fused.shape[1] // 2, fused.shape[2]
        names = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        activation = ACT2FN[config.hidden_act]
        with torch.device("meta"):
            experts = SplitExperts(Expert(hidden, inner, activation, names) for _ in range(count))
        parent, _, last = name.rpartition(".")
        setattr(layer.get_submodule(parent), last, experts)
    return layer
