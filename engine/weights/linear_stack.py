"""LinearStack: modules become one prepared matrix while they stream in, each part going straight to its place."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import LinearProblem
from ...kernels.registry import Assembly, Candidate
from ...quant.canonical import CanonicalWeight, DenseWeight, EightBitWeight, MicroScaledWeight, PackedWeight, merge

# The field of each kind of weight that holds nearly all of its bytes.
_BIG = {DenseWeight: "weight", PackedWeight: "qweight", EightBitWeight: "codes", MicroScaledWeight: "codes"}


class LinearStack:
    """A matrix of ``num_rows`` rows on ``device``, made of modules along N.

    ``put`` modules one after the other, each as a whole or in runs of rows; then ``finish``. Beside the final matrix
    only what was put last is in memory, where the kernel can take parts, else the canonical matrix too.
    """

    def __init__(
        self, kernels: KernelSet, dtype: torch.dtype, device: torch.device, num_rows: int, *, is_sensitive: bool = False
    ) -> None:
        self._kernels, self._dtype, self._device, self._num_rows = kernels, dtype, device, num_rows
        self._is_sensitive = is_sensitive
        self._outline: CanonicalWeight | None = None
        self._next_row = 0
        self._candidate: Candidate | None = None
        self._assembly: Assembly | None = None
        self._matrix: Tensor | None = None
        self._dense_dtypes: set[torch.dtype] = set()

    def put(self, part: CanonicalWeight) -> bool:
        """The next rows, copied at once; False when they cannot share a matrix with those before them."""
        outline = outline_of(part, self._dtype)
        whole = outline if self._outline is None else self._joined(self._outline, outline)
        if whole is None:
            return False
        if self._outline is None:
            self._candidate = self._select(outline)
            if self._candidate.assemble is not None:
                self._assembly = self._candidate.assemble(self._problem(outline))
        self._outline = whole
        if isinstance(part, DenseWeight):
            self._dense_dtypes.add(part.weight.dtype)
        if self._assembly is not None:
            self._assembly.put(self._next_row, part)
        else:
            self._copy(_big(part), _big(outline).dtype)
        self._next_row += part.shape[0]
        return True

    def finish(self) -> tuple[CanonicalWeight, Any]:
        """The whole matrix's outline, and what its kernel runs on."""
        outline = self._outline
        assert outline is not None, "a matrix has parts"
        if self._assembly is not None:
            return outline_of(
                outline, kept_dtype(self._candidate, self._dense_dtypes, self._dtype)
            ), self._assembly.finish()
        assert self._matrix is not None, "a matrix has parts"
        weight = to_device(_with_big(outline, self._matrix), self._device)
        candidate = self._select(outline)
        assert candidate.prepare is not None, f"linear candidate {candidate.name} has no prepare"
        return outline, candidate.prepare(weight, self._dtype)

    def _joined(self, before: CanonicalWeight, outline: CanonicalWeight) -> CanonicalWeight | None:
        """One outline of both; None where they cannot share a matrix, or the kernel would be another one.

        Joined at once: small tensors of many runs of rows that all stay alive would keep the allocator from giving back
        what lay between them.
        """
        merged = merge([before, outline])
        fits = len(merged) == 1 and (self._assembly is None or self._select(merged[0]) is self._candidate)
        return merged[0] if fits else None

    def _copy(self, rows: Tensor, dtype: torch.dtype) -> None:
        if rows.shape[0] == self._num_rows:
            # A copy in any case: rows may lie in a buffer that the next tensor is read into.
            self._matrix = rows.to(device=self._device, dtype=dtype, copy=True).contiguous()
            return
        if self._matrix is None:
            self._matrix = torch.empty((self._num_rows, *rows.shape[1:]), dtype=dtype, device=self._device)
        self._matrix[self._next_row : self._next_row + rows.shape[0]].copy_(rows)

    def _select(self, outline: CanonicalWeight) -> Candidate:
        return self._kernels.select_candidate("linear", self._problem(outline))

    def _problem(self, outline: CanonicalWeight) -> LinearProblem:
        return LinearProblem(
            scheme=outline.scheme,
            in_features=outline.shape[1],
            out_features=self._num_rows,
            dtype=self._dtype,
            is_sensitive=self._is_sensitive,
        )


def kept_dtype(candidate: Candidate | None, stored: set[torch.dtype], dtype: torch.dtype) -> torch.dtype:
    """What a plain matrix whose parts are ``stored`` so stays in: their own 16-bit floats with a kernel that takes
    parts as they are, else ``dtype``."""
    takes_parts = candidate is not None and candidate.assemble is not None
    alike = next(iter(stored)) if len(stored) == 1 else dtype
    return alike if takes_parts and alike in (torch.bfloat16, torch.float16) else dtype


def outline_of(weight: CanonicalWeight, dtype: torch.dtype) -> CanonicalWeight:
    """The weight with its scales but without its large tensor; ``dtype`` is what a dense one will have."""
    tensor = _big(weight)
    kept = dtype if isinstance(weight, DenseWeight) else tensor.dtype
    hollow = torch.empty(tensor.shape, dtype=kept, device="meta")
    return _with_big(weight, hollow)


def to_device(weight: CanonicalWeight, device: torch.device) -> CanonicalWeight:
    """The weight with all its tensors on a device."""
    values = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(weight, **moved)  # type: ignore[arg-type]


def _with_big(weight: CanonicalWeight, tensor: Tensor) -> CanonicalWeight:
    return dataclasses.replace(weight, **{_BIG[type(weight)]: tensor})  # type: ignore[arg-type]


def _big(weight: CanonicalWeight) -> Tensor:
    tensor: Tensor = getattr(weight, _BIG[type(weight)])
    return tensor
