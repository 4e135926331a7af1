"""Case: one operation on one problem, with the answer; and what makes the numbers of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..registry import Candidate

ACTIVATIONS = ("exact", "int8", "bf16")
Answer = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a case is; letters as in attention_batch.py."""

    num_tokens: int = 5
    in_features: int = 128
    out_features: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    vocab_size: int = 3000
    num_experts: int = 6
    top_k: int = 2


TYPICAL = Sizes()


@dataclass(frozen=True, slots=True)
class Case:
    """``run`` calls a candidate, ``expected`` is the definition's answer.

    ``activations``: under which ``--cpu-activations`` it is asked. ``tolerance`` None: that of the problem's dtype; it
    is relative to the largest value.
    """

    op: str
    problem: Any
    run: Callable[[Candidate], Answer]
    expected: Answer
    activations: str = "exact"
    tolerance: float | None = None

    def __str__(self) -> str:
        return f"{self.problem}" + (f", {self.activations} activations" if self.activations != "exact" else "")


@dataclass(frozen=True, slots=True)
class Source:
    """Makes seeded tensors on a device; ``dtype`` is the activations', ``fp8`` that of an 8-bit float cache."""

    device: torch.device
    dtype: torch.dtype
    fp8: torch.dtype = torch.float8_e4m3fn
    sizes: Sizes = TYPICAL
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def randn(self, *shape: int) -> Tensor:
        """Normal values of the activations' dtype."""
        return self.normal(*shape).to(self.dtype)

    def normal(self, *shape: int) -> Tensor:
        """Normal values in float32."""
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """float32 values from 0 to 1."""
        return torch.rand(*shape, generator=self.generator).to(self.device)

    def integers(self, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers from 0 up to, not including, ``high``."""
        return torch.randint(0, high, shape, generator=self.generator).to(self.device, dtype)
