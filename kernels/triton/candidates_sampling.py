"""Argmax, draws and edits of logits as candidates of the registry."""

from __future__ import annotations

import torch

from ...platforms.spec import DeviceSpec
from ..problems import SamplingProblem, dtype_name
from ..registry import Registry
from ..sampling_options import MAX_COLUMNS
from .candidate_rules import Lazy, triton_candidate, why_not_here


def register_sampling_ops(registry: Registry) -> None:
    """Append the Triton candidates of the sampler's operations."""
    for op in ("argmax", "draw_tokens", "edit_logits"):
        registry.register(triton_candidate(op, can_run_sampling, Lazy("sampling", op)))


def can_run_sampling(spec: DeviceSpec, problem: SamplingProblem) -> str | None:
    """float32 logits, and a vocabulary whose weights sum up without overflow."""
    if problem.dtype is not torch.float32:
        return f"it reads float32 logits, not {dtype_name(problem.dtype)}"
    if problem.vocab_size > MAX_COLUMNS:
        return f"sums over {problem.vocab_size} tokens may overflow; it takes up to {MAX_COLUMNS}"
    return why_not_here(spec, problem.dtype)
