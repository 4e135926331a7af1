"""Scaling a decoder layer before it is rounded: each fold gets the scale that a method finds, the function stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..scheme import Scheme
from .folds import Fold, apply_fold, find_folds

# A fold is taken back when it changes the layer's output by more than this: something else reads that input too.
TOLERANCE = 1e-3
# An expert that fewer sampled tokens reached keeps its scale.
FEWEST_TOKENS = 16


class FoldSample:
    """What a fold's readers see of some tokens: ``inputs`` float32 [T, K], and the block's output with other weights.

    ``schemes``  of those readers that are quantized, by parameter name.
    """

    def __init__(self, layer: nn.Module, fold: Fold, schemes: dict[str, Scheme]) -> None:
        self.fold = fold
        self.schemes = schemes
        self.weights = {name: layer.get_parameter(name).data for name in schemes}
        self.inputs = torch.empty(0)
        self._block = layer.get_submodule(fold.block)
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._layer = layer

    def hooks(self) -> Iterator[Any]:
        """Take in the next pass through the layer."""
        if self.fold.is_norm:
            yield self._block.register_forward_pre_hook(self._keep_call, with_kwargs=True)
            yield self._layer.get_submodule(self.fold.source).register_forward_hook(self._keep_output)
        else:
            reader = self.fold.readers[0].removesuffix(".weight")
            yield self._layer.get_submodule(reader).register_forward_pre_hook(self._keep_input)

    def _keep_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (args, kwargs)

    def _keep_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.inputs = output.reshape(-1, output.shape[-1])

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.inputs = args[0].reshape(-1, args[0].shape[-1])

    def output(self, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The block's output with ``weights`` in place of the readers' own."""
        if not self.fold.is_norm:
            name = self.fold.readers[0]
            return nn.functional.linear(self.inputs, (weights or self.weights)[name])
        args, kwargs = self._call
        with _replaced(self._layer, weights or {}):
            result = self._block(*args, **kwargs)
        return result[0] if isinstance(result, tuple) else result


class FindScale(Protocol):
    """The scale [K] of a fold's inputs, or None where none helps."""

    def __call__(self, sample: FoldSample) -> Tensor | None: ...


def scale_layer(
    layer: nn.Module, schemes: Mapping[str, Scheme], find: FindScale, run: Callable[[nn.Module], Tensor]
) -> list[str]:
    """Fold scales into ``layer`` in place; ``run`` passes some tokens through it and returns its output.

    ``schemes`` are the quantized modules' by name. Returns a note for each fold that had to be taken back.
    """
    samples = list(_samples(layer, schemes))
    with ExitStack() as stack:
        for sample in samples:
            for handle in sample.hooks():
                stack.callback(handle.remove)
        expected = run(layer)
    scales = [_scale(sample, find) for sample in samples]
    notes = []
    for sample, scale in zip(samples, scales, strict=True):
        if scale is not None:
            apply_fold(layer, sample.fold, scale)
    if _differs(run(layer), expected):
        notes = _take_back(layer, samples, scales, expected, run)
    return notes


def _samples(layer: nn.Module, schemes: Mapping[str, Scheme]) -> Iterator[FoldSample]:
    for fold in find_folds(layer):
        quantized = {
            name: schemes[name.removesuffix(".weight")]
            for name in fold.readers
            if name.removesuffix(".weight") in schemes
        }
        if quantized:
            yield FoldSample(layer, fold, quantized)


def _scale(sample: FoldSample, find: FindScale) -> Tensor | None:
    if len(sample.inputs) < FEWEST_TOKENS or not bool(sample.inputs.isfinite().all()):
        return None
    return find(sample)


def _take_back(
    layer: nn.Module,
    samples: Sequence[FoldSample],
    scales: Sequence[Tensor | None],
    expected: Tensor,
    run: Callable[[nn.Module], Tensor],
) -> list[str]:
    """Undo all folds, then apply again those that change nothing."""
    for sample, scale in zip(samples, scales, strict=True):
        if scale is not None:
            apply_fold(layer, sample.fold, 1 / scale)
    notes = []
    for sample, scale in zip(samples, scales, strict=True):
        if scale is None:
            continue
        apply_fold(layer, sample.fold, scale)
        if _differs(run(layer), expected):
            apply_fold(layer, sample.fold, 1 / scale)
            notes.append(f"{sample.fold.source} keeps its scale: more than {sample.fold.block} reads its output")
    return notes


def _differs(output: Tensor, expected: Tensor) -> bool:
    return float((output - expected).norm()) > TOLERANCE * float(expected.norm())


@contextmanager
def _replaced(layer: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    kept = {name: layer.get_parameter(name).data for name in weights}
    for name, weight in weights.items():
        layer.get_parameter(name).data = weight
    try:
        yield
    finally:
        for name, weight in kept.items():
            layer.get_parameter(name).data = weight
