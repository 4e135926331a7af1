"""Three adapters, and a row without one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import reference
from ..problems import LoraProblem
from .case import Answer, Case, Source

RANK, NUM_ADAPTERS = 8, 3


def cases(source: Source) -> list[Case]:
    """Both products of a layer."""
    sizes = source.sizes
    problem = LoraProblem(rank=RANK, in_features=sizes.in_features, out_features=sizes.out_features, dtype=source.dtype)
    x = source.randn(sizes.num_tokens, sizes.in_features)
    a, b = source.randn(NUM_ADAPTERS, RANK, sizes.in_features), source.randn(NUM_ADAPTERS, sizes.out_features, RANK)
    out = source.randn(sizes.num_tokens, sizes.out_features)
    ids = (torch.arange(sizes.num_tokens, device=source.device) * 3 % (NUM_ADAPTERS + 1) - 1).to(torch.int32)
    scales = torch.tensor([0.5, 1.0, 2.0], device=source.device)
    shrunk = reference.lora_shrink(x, a, ids)

    def expand(run: Callable[..., None]) -> Answer:
        copy = out.clone()
        run(shrunk, b, ids, copy, scales)
        return copy

    return [
        Case("lora_shrink", problem, lambda candidate: candidate.run(x, a, ids), shrunk),
        Case("lora_expand", problem, lambda candidate: expand(candidate.run), expand(reference.lora_expand)),
    ]
