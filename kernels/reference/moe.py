"""Mixture of experts: which experts a token goes to, and the product with the experts' weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .precision import wide

# DeepSeek V3's guard of the division when every chosen sigmoid is zero.
_TINY_SUM = 1e-20


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    bias: Tensor | None = None,
    scaling: float = 1.0,
    group_score: str = "max",
) -> tuple[Tensor, Tensor]:
    """Logits [T,E] -> (weights float32 [T,k], expert ids int32 [T,k]), best first; of equal ones the lower id.

    ``scoring``      scores are the ``softmax`` over E, or ``sigmoid`` of each logit.
    ``bias``         float32 [E], added to the scores for the choice only (DeepSeek V3).
    ``num_groups``   the experts are so many equal groups, and only the best ``top_groups`` of them are eligible. A
                     group is worth its best choice (``group_score`` "max", DeepSeek V2) or the sum of its best two
                     ("top2_sum", V3).
    ``renormalize``  the weights of a token sum to 1.
    ``scaling``      multiplies the weights at the end.
    """
    assert scoring in ("softmax", "sigmoid"), f"unknown scoring {scoring}"
    scores = torch.softmax(wide(logits), -1) if scoring == "softmax" else torch.sigmoid(wide(logits))
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        choice = _within_best_groups(choice, num_groups, top_groups, group_score)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY_SUM)
    return (weights * scaling).float(), ids.to(torch.int32)


def _within_best_groups(choice: Tensor, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    """Minus infinity outside the best groups of each token."""
    assert group_score in ("max", "top2_sum"), f"unknown group score {group_score}"
    groups = choice.unflatten(-1, (num_groups, -1))
    worth = groups.amax(-1) if group_score == "max" else groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, :top_groups]
    hidden = torch.ones_like(worth, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(hidden[..., None], float("-inf")).flatten(-2)


def expert_linear(
    x: Tensor, weights: Sequence[Tensor] | Tensor, expert_ids: Tensor, routing_weights: Tensor | None = None
) -> Tensor:
    """Row (t, j) of the result is x times ``weights[expert_ids[t, j]]`` [N,K], transposed.

    x [T,K], or [T,k,K] with a row for each choice; ``expert_ids`` int32 [T,k]. The result is [T,k,N], or with
    ``routing_weights`` float32 [T,k] the weighted sum over k, [T,N]. An id of -1 is no expert and gives zeros.
    """
    choices = x if x.dim() == 3 else x[:, None].expand(-1, expert_ids.shape[1], -1)
    choices = wide(choices)
    rows = choices.new_zeros(*expert_ids.shape, weights[0].shape[0])
    for expert, weight in enumerate(weights):
        product = choices @ weight.to(choices.dtype).T
        rows = torch.where((expert_ids == expert)[..., None], product, rows)
    if routing_weights is not None:
        rows = (rows * routing_weights.to(rows.dtype)[..., None]).sum(1)
    return rows.to(x.dtype)
