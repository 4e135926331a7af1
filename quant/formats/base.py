"""Format: how quantized bytes lie on disk, and how to bring them into the canonical layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ..canonical import CanonicalWeight, DenseWeight, EightBitWeight, PackedWeight
from ..scheme import Fp8, Scheme, WeightOnly
from .base_source import TensorSource
from .dtypes import is_plain, is_stored_plain
from .names import stored_module
from .part_dtypes import check_dtypes

__all__ = ["Format", "TensorSource"]


class Format(ABC):
    """One on-disk format, set up by one checkpoint's quantization config.

    ``marks`` are last names of tensors that only quantized modules have. ``quantizes``: what is stored is plain, and
    gets its scheme when it is loaded.
    """

    name: str
    marks: tuple[str, ...] = ()
    quantizes = False

    @abstractmethod
    def scheme(self, module: str) -> Scheme:
        """The scheme that the config declares for one linear module (``model.layers.0.self_attn.q_proj``).

        UnsupportedError names a module whose scheme is not served.
        """

    @abstractmethod
    def tensor_names(self, module: str) -> tuple[str, ...]:
        """Every tensor name that the weight of ``module`` may use in this format, present or not, biases aside."""

    @abstractmethod
    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        """Scheme and shape (N, K) of a stored module, from headers alone.

        CheckpointError when its tensors do not fit each other, UnsupportedError when it cannot be served; both name it.
        """

    @abstractmethod
    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        """``load`` of a module under the name it is stored under."""

    def load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        """Read one linear module's weight [N, K]; ``dtype`` is that of a dense result.

        CheckpointError when tensors are missing or do not fit each other.
        """
        weight = self.load_as_stored(source, module, dtype)
        if isinstance(weight, DenseWeight):
            return DenseWeight(weight.weight.to(dtype))
        if isinstance(weight, PackedWeight):
            return replace(weight, qweight=weight.qweight.contiguous())
        return weight

    def load_as_stored(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        """``load`` without a copy where the canonical layout is a view of what is stored.

        A dense weight keeps its stored dtype unless it had to be computed, and ``qweight`` may have any strides.
        """
        stored = stored_module(source, module)
        check_dtypes(source, stored)
        weight = self._load(source, stored, dtype)
        _check_scales(weight, module)
        return weight

    def plain_tensor(self, source: TensorSource, module: str) -> str | None:
        """The tensor that is all there is of a module, so that ``from_rows`` can make the weight piece by piece."""
        stored = stored_module(source, module)
        present = [name for name in self.tensor_names(stored) if source.has(name)]
        if present != [f"{stored}.weight"] or not is_stored_plain(source, stored):
            return None
        return present[0] if len(source.shape(present[0])) == 2 else None

    def from_rows(self, module: str, rows: DenseWeight, where: str) -> CanonicalWeight:
        """The weight of some rows of ``plain_tensor``, which errors call ``where``; its large tensor may be a view."""
        return rows

    def load_bias(self, source: TensorSource, module: str, dtype: torch.dtype) -> Tensor | None:
        """The stored bias [N], or None when there is none or it is all zero.

        auto-gptq writes an all-zero bias for every layer it quantizes, whether the model has biases or not.
        """
        name = f"{stored_module(source, module)}.bias"
        if not source.has(name):
            return None
        bias = source.get(name).to(dtype)
        return bias if bool(bias.any()) else None

    def packed_embedding(self, source: TensorSource, module: str) -> PackedWeight | None:
        """The token embedding [V, K] where it is stored in packed integers that its rows can be looked up in."""
        return None

    def quantized_modules(self, source: TensorSource) -> list[str]:
        """Modules that have tensors only a quantized one has, or a weight that is made of codes, sorted."""
        found = set()
        for name in source.names:
            module, _, part = name.rpartition(".")
            if part in self.marks or (part == "weight" and not is_plain(source.dtype(name))):
                found.add(module)
        return sorted(found)

    def check(self, source: TensorSource) -> list[tuple[str, Scheme, tuple[int, int]]]:
        """(module, scheme, (N, K)) of every module that is stored quantized, from headers alone.

        The first one that cannot be served raises UnsupportedError or CheckpointError.
        """
        rows = []
        for module in self.quantized_modules(source):
            if module.endswith("embed_tokens") and not is_stored_plain(source, module):
                raise UnsupportedError(
                    f"{module} is stored quantized ({self.name}); token embeddings are served in 16 or 32 bits: "
                    f"quantize the model with the embedding ignored"
                )
            check_dtypes(source, module)
            rows.append((module, *self.stored_scheme(source, module)))
        return rows


def _check_scales(weight: CanonicalWeight, module: str) -> None:
    """CheckpointError for scales that no quantizer means: every number that they touch would be wrong."""
    if isinstance(weight, DenseWeight):
        return
    scales = weight.scales
    if scales.is_floating_point() and not bool(scales.float().isfinite().all()):
        raise CheckpointError(f"{module}: a weight scale is NaN or infinite; the checkpoint is damaged, make it again")
    if isinstance(weight, EightBitWeight):
        _check_eight_bit(weight, module)
    for name in ("input_scale", "divisor"):
        value = getattr(weight, name, None)
        if value is not None and not bool((value.isfinite() & (value > 0)).all()):
            found = value[~(value.isfinite() & (value > 0))].flatten()[0].item()
            kind = "global scale" if name == "divisor" else "input scale"
            raise CheckpointError(f"{module}: the {kind} is {found:g}; it must be above 0: the checkpoint is damaged")


def _check_eight_bit(weight: EightBitWeight, module: str) -> None:
    """CheckpointError for a scale of 0 where codes are not, which would wipe them out, or a negative one of fp8.

    Integers may have negative scales: AutoRound's symmetric ones do.
    """
    scales = weight.scales.float()
    is_wrong = scales < 0 if isinstance(weight.scheme, Fp8) else torch.zeros_like(scales, dtype=torch.bool)
    is_zero = scales == 0
    if bool(is_zero.any()):
        rows, columns = (-(-size // count) for size, count in zip(weight.codes.shape, is_zero.shape, strict=True))
        used = (weight.codes.view(torch.int8) & _magnitude(weight)) != 0
        spread = is_zero.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        lost = spread[: used.shape[0], : used.shape[1]] & used
        if bool(lost.any()):
            is_wrong = is_wrong | is_zero
    if bool(is_wrong.any()):
        raise CheckpointError(
            f"{module}: a weight scale is {scales[is_wrong][0].item():g}; it must be above 0: the checkpoint is "
            f"damaged, fetch or make it again"
        )


def _magnitude(weight: EightBitWeight) -> int:
    """The bits of a code that make it another number than 0: not the sign of a float."""
    return 0x7F if isinstance(weight.scheme, Fp8) else -1


def is_packed(source: TensorSource, module: str, declared: Scheme) -> bool:
    """Whether a module is read from ``qweight``: what is stored decides, and the config where neither form is there.

    CheckpointError for a module that is stored both ways.
    """
    packed, plain = source.has(f"{module}.qweight"), source.has(f"{module}.weight")
    if packed and plain:
        raise CheckpointError(
            f"{module} is stored twice, as .weight and as .qweight ({source.location(f'{module}.qweight')})"
        )
    return packed or (not plain and isinstance(declared, WeightOnly))
