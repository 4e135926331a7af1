"""Workload: one operation at a size that a model has, with the least that any kernel must move and compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...platforms.fp8 import FP8_MAX
from ..registry import Candidate

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Sizes of one dense decoder, and of its experts for the operations that need them."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    group_size: int = 128
    num_experts: int = 8
    top_k: int = 2


MODELS = {
    "tiny": ModelShapes("tiny", 256, 512, 4, 2, 64, 512, group_size=32, num_experts=4),
    "135m": ModelShapes("135m", 576, 1536, 9, 3, 64, 49152, group_size=32),
    "1b": ModelShapes("1b", 2048, 8192, 32, 8, 64, 128256),
    "8b": ModelShapes("8b", 4096, 14336, 32, 8, 128, 128256),
    "70b": ModelShapes("70b", 8192, 28672, 64, 8, 128, 128256),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine: the new tokens and the context of each request."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


STEPS = (
    Step("decode 1", (1,), (4096,)),
    Step("decode 16", (1,) * 16, (2048,) * 16),
    Step("mixed", (512, *(1,) * 15), (1024, *(2048,) * 15)),
    Step("prefill", (2048,), (2048,)),
)
# For a CPU and for the interpreter, which is about a million times slower than a GPU.
SMALL_STEPS = (Step("decode 4", (1,) * 4, (33, 48, 17, 64)), Step("mixed", (24, 1, 1), (24, 40, 33)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``bind(candidate)`` prepares what a candidate wants once and returns the call to measure.

    ``num_bytes`` and ``operations``  the least that any kernel must move and compute: every input read once, every
                  output written once; a multiply-add counts as two.
    ``peer``      makes the call of torch's own way to the same result, ``peer_name`` says which; None: there is none.
    ``cached``    pointer arguments of the Triton kernels that several programs read and a cache serves: the static
                  cost counts what they touch, once, where it counts every read of the others.
    ``allowance`` how much of ``num_bytes`` the static cost may reach at the sizes of ``SMALL_STEPS``; above 1.05 only
                  where the kernel writes intermediate results on purpose.
    """

    op: str
    label: str
    problem: Any
    bind: Callable[[Candidate], Call]
    num_bytes: int
    operations: int
    peer_name: str = ""
    peer: Callable[[], Call] | None = None
    cached: frozenset[str] = frozenset()
    allowance: float = 1.05


@dataclass(frozen=True, slots=True)
class Inputs:
    """Makes random tensors on a device; ``dtype`` is the activations', ``fp8`` the kind of 8-bit float, or None."""

    device: torch.device
    dtype: torch.dtype
    fp8: torch.dtype | None = None

    def randn(self, *shape: int) -> Tensor:
        """Normal values of the activations' dtype."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uniform integers from ``low`` up to, not including, ``high``."""
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        """float32 values from 0 to 1."""
        return torch.rand(*shape, device=self.device)

    def fp8_codes(self, *shape: int) -> Tensor:
        """Random codes of the 8-bit float."""
        assert self.fp8 is not None, "a device without fp8 has no such workload"
        limit = FP8_MAX[self.fp8]
        return torch.randn(*shape, device=self.device).mul(limit / 8).clamp(-limit, limit).to(self.fp8)
