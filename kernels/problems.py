"""Problems: what a kernel is asked to be good at. A candidate reads the problem and says whether it can run.

Each is frozen and hashable, so that one choice is made per distinct problem, and prints short for the kernel report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PlainProblem:
    """Norms, activations, rotary embedding and copies: only the activation dtype matters."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return dtype_name(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProblem:
    """``y [T,N] = x [T,K] @ weight[N,K].T``; ``scheme`` is quant.scheme's, ``dtype`` the activations'.

    ``is_sensitive``: where a kernel rounds inputs, those of this layer cost answers more than most.
    """

    scheme: Any
    in_features: int
    out_features: int
    dtype: torch.dtype
    is_sensitive: bool = False

    def __str__(self) -> str:
        shape = f"{self.out_features}x{self.in_features} {self.scheme} {dtype_name(self.dtype)}"
        return f"{shape}, sensitive" if self.is_sensitive else shape


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWriteProblem:
    """New keys and values in ``dtype`` into a cache of ``kv_dtype``."""

    dtype: torch.dtype
    kv_dtype: torch.dtype

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}, cache {dtype_name(self.kv_dtype)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """Attention over a block table. ``sliding_window`` in tokens or None; ``soft_cap`` 0.0 means none.

    ``kv_dtype`` is the cache's; int8 and fp8 caches have scales. ``value_head_size`` None: as keys.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sliding_window: int | None = None
    soft_cap: float = 0.0
    value_head_size: int | None = None
    has_sinks: bool = False
    has_alibi: bool = False

    @property
    def value_size(self) -> int:
        """Features of a value head, and of a head of the output."""
        return self.head_size if self.value_head_size is None else self.value_head_size

    def __str__(self) -> str:
        extras = [f"window {self.sliding_window}"] if self.sliding_window is not None else []
        extras += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        extras += [word for word, has in (("sinks", self.has_sinks), ("ALiBi", self.has_alibi)) if has]
        size = f"{self.head_size}" + (f" and {self.value_size}" if self.value_size != self.head_size else "")
        shape = f"{self.num_heads}/{self.num_kv_heads} heads of {size}, blocks of {self.block_size}"
        types = f"{dtype_name(self.dtype)}, cache {dtype_name(self.kv_dtype)}"
        return ", ".join([shape, types, *extras])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRouteProblem:
    """The choice of ``top_k`` of ``num_experts`` experts for each token; ``dtype`` is the logits'."""

    num_experts: int
    top_k: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.top_k} of {self.num_experts} experts, {dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinearProblem:
    """A linear layer that each of ``num_experts`` experts has, all of one scheme; every token goes to ``top_k``."""

    scheme: Any
    num_experts: int
    top_k: int
    in_features: int
    out_features: int
    dtype: torch.dtype

    def __str__(self) -> str:
        shape = f"{self.out_features}x{self.in_features} {self.scheme}"
        return f"{self.top_k} of {self.num_experts} experts, {shape} {dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingProblem:
    """Argmax, draws and edits over rows of ``vocab_size`` logits of ``dtype``."""

    vocab_size: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.vocab_size} tokens, {dtype_name(self.dtype)} logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeProblem:
    """Values of ``dtype`` quantized as ``activation`` (quant.scheme's) says, to codes of ``codes_dtype``.

    ``activation`` None: values that are rounded to ``codes_dtype``, without scales.
    """

    activation: Any
    codes_dtype: torch.dtype
    dtype: torch.dtype

    def __str__(self) -> str:
        what = "values" if self.activation is None else self.activation
        return f"{what} of {dtype_name(self.dtype)} in {dtype_name(self.codes_dtype)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraProblem:
    """A layer's shrinking (``in_features`` to ``rank``) and expanding product with many adapters."""

    rank: int
    in_features: int
    out_features: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.out_features}x{self.in_features} {dtype_name(self.dtype)}"
