"""Where a scale of a linear's inputs can hide: in the norm, or the rows of the linear, that produces them.

``x / s`` times ``W * s`` is ``x W``: the features of ``x`` become smaller, the columns of ``W`` larger. A `Fold` names
all who read one input, so that none is left with inputs that it does not expect: routers and shared experts too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ATTENTION_NORMS = ("input_layernorm",)
# Gemma has a norm before and one after the MLP beside those around attention.
MLP_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")
QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
MLP_READERS = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Fold:
    """``source`` makes the input of ``readers``, matrices [N, K] of the layer by their parameters' names.

    ``block``    the module that all readers are in.
    ``repeats``  input features that share one of the source's rows: query heads of one KV head, in runs of
                 ``head_size``.
    """

    source: str
    readers: tuple[str, ...]
    block: str
    repeats: int = 1
    head_size: int = 0

    @property
    def is_norm(self) -> bool:
        return self.source.endswith("norm")

    def shared(self, scale: Tensor) -> Tensor:
        """``scale`` [K] with the same number wherever features share a row of the source (their geometric mean)."""
        if self.repeats == 1:
            return scale
        heads = scale.log().view(-1, self.repeats, self.head_size).mean(1, keepdim=True).exp()
        return heads.expand(-1, self.repeats, -1).flatten()


def find_folds(layer: nn.Module) -> Iterator[Fold]:
    """The folds of a decoder layer, in the order they compute."""
    names = dict(layer.named_modules())
    attention = next((name for name in names if name.endswith(("self_attn", "attention"))), None)
    mlps = [name for name in names if name in ("mlp", "feed_forward", "block_sparse_moe")]
    if attention is not None:
        yield from _norm_fold(layer, ATTENTION_NORMS, attention, QKV)
        yield from _value_fold(layer, attention)
    for mlp in mlps:
        yield from _norm_fold(layer, MLP_NORMS, mlp, MLP_READERS)
    for name, module in names.items():
        for up, down in (("up_proj", "down_proj"), ("w3", "w2")):
            parts = [getattr(module, part, None) for part in (up, down)]
            if all(isinstance(part, nn.Linear) for part in parts):
                yield Fold(f"{name}.{up}", (f"{name}.{down}.weight",), name)


def _norm_fold(layer: nn.Module, norms: tuple[str, ...], block: str, readers: tuple[str, ...]) -> Iterator[Fold]:
    norm = next((name for name in norms if hasattr(layer, name)), None)
    if norm is None:
        return
    width = layer.get_parameter(f"{norm}.weight").shape[0]
    found = tuple(
        f"{block}.{name}"
        for name, parameter in layer.get_submodule(block).named_parameters()
        if name.endswith(".weight")
        and name.split(".")[-2] in readers
        and parameter.dim() == 2
        and parameter.shape[1] == width
    )
    if found:
        yield Fold(norm, found, block)


def _value_fold(layer: nn.Module, attention: str) -> Iterator[Fold]:
    module = layer.get_submodule(attention)
    value, output = getattr(module, "v_proj", None), getattr(module, "o_proj", None)
    head_size = getattr(module, "head_dim", 0)
    if not isinstance(value, nn.Linear) or not isinstance(output, nn.Linear) or not head_size:
        return
    repeats, rest = divmod(output.in_features, value.out_features)
    if rest == 0 and value.out_features % head_size == 0:
        yield Fold(f"{attention}.v_proj", (f"{attention}.o_proj.weight",), attention, repeats, head_size)


def apply_fold(layer: nn.Module, fold: Fold, scale: Tensor) -> None:
    """Divide the readers' input features by ``scale`` [K], as made by ``fold.shared``, and multiply their columns."""
    for name in fold.readers:
        layer.get_parameter(name).data.mul_(scale)
    source = layer.get_submodule(fold.source)
    weight = source.get_parameter("weight").data
    bias = source._parameters.get("bias")
    if fold.is_norm:
        offset = norm_offset(source)
        weight.add_(offset).div_(scale).sub_(offset)
        rows = scale
    else:
        rows = scale if fold.repeats == 1 else scale.view(-1, fold.repeats, fold.head_size)[:, 0].flatten()
        weight.div_(rows[:, None])
    if bias is not None:
        bias.data.div_(rows)


def norm_offset(norm: nn.Module) -> float:
    """What a norm adds to its weight: 1 in Gemma's, whose weight of zero passes its input on."""
    weight = norm.get_parameter("weight").data
    kept = weight.clone()
    weight.zero_()
    try:
        with torch.inference_mode():
            return float(norm(torch.ones(1, 1, len(kept), device=kept.device)).abs().max() > 0.5)
    finally:
        weight.copy_(kept)
