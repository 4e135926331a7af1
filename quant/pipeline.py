"""Quantize a model layer by layer: from any source to a GPTQ checkpoint, one decoder layer in memory at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..engine.model_config import load_model_config
from ..engine.sources import ModelFiles, resolve_model
from ..engine.weights import open_checkpoint
from ..engine.weights.checkpoint import Checkpoint
from ..errors import CheckpointError, ConfigError
from .canonical import PackedWeight, dequantize
from .export import check_output, check_space, new_folder, source_dtype, weight_bytes, write_side_files
from .formats.gptq_writer import quantization_config, to_tensors
from .methods import WEIGHT_METHODS
from .plan import LayerPlan, QuantizePlan, make_plan, stored_dtype
from .report import ModuleError, QuantizeReport
from .spec import QuantizeSpec, parse_quantize_spec
from .tensor_writer import TensorSpec, TensorWriter

# (decoder layers done, decoder layers in all); called once before the first one too.
Progress = Callable[[int, int], None]
MAX_SHARD_BYTES = 4 << 30


def quantize_model(
    model: str,
    spec: QuantizeSpec | str,
    output: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> QuantizeReport:
    """Write ``model`` (directory, .gguf file, catalogue name or hub id), quantized, to the folder ``output``.

    Everything wrong with the arguments raises ConfigError before a weight is read; CheckpointError names a tensor that
    cannot be quantized. ``output`` appears complete or not at all.
    """
    started = time.perf_counter()
    spec = parse_quantize_spec(spec) if isinstance(spec, str) else spec
    files = resolve_model(model)
    check_output(output, files.path, overwrite=overwrite)
    if load_model_config(files).quantization is not None:
        raise ConfigError(f"{model} is quantized already; give the original model")
    checkpoint = open_checkpoint(files)
    plan = make_plan(checkpoint, spec)
    tensors = list(plan.tensors(checkpoint))
    check_space(output, sum(tensor.nbytes for tensor in tensors))
    with new_folder(output) as folder:
        quantization = quantization_config(spec.scheme, spec.method, [module for module, _ in plan.plain])
        dtype = stored_dtype(getattr(torch, source_dtype(files)))
        write_side_files(files, folder, quantization, str(dtype).removeprefix("torch."))
        run = _Run(checkpoint, plan)
        with TensorWriter(folder, tensors, max_shard_bytes) as writer:
            run.all_layers(writer, progress or _ignore)
    return _report(model, files, output, run, tensors, started)


def _ignore(done: int, total: int) -> None:
    """No progress wanted."""


@dataclass(slots=True)
class _Run:
    checkpoint: Checkpoint
    plan: QuantizePlan
    errors: list[ModuleError] = field(default_factory=list)

    @torch.inference_mode()
    def all_layers(self, writer: TensorWriter, progress: Progress) -> None:
        done, total = 0, self.plan.num_layers
        progress(done, total)
        for layer in self.plan.layers:
            self._layer(layer, writer)
            done += layer.number is not None
            progress(done, total)

    def _layer(self, layer: LayerPlan, writer: TensorWriter) -> None:
        for name in layer.copy:
            writer.write(name, self._dense(name))
        for module in layer.quantize:
            for part, tensor in to_tensors(self._quantized(module)).items():
                writer.write(f"{module}.{part}", tensor)

    def _dense(self, name: str) -> Tensor:
        tensor = self.checkpoint.get(name)
        stored = tensor.to(stored_dtype(tensor.dtype))
        if stored.dtype != tensor.dtype and not bool(stored.isfinite().all()):
            location = self.checkpoint.location(name)
            raise CheckpointError(
                f"{name} in {location} holds values that float16 cannot; convert the model to bfloat16"
            )
        return stored

    def _quantized(self, module: str) -> PackedWeight:
        name = f"{module}.weight"
        weight = self.checkpoint.get(name).float()
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{name} in {self.checkpoint.location(name)} holds NaN or infinity; nothing was written"
            )
        packed = WEIGHT_METHODS[self.plan.spec.method](weight, self.plan.spec.scheme)
        error = (dequantize(packed) - weight).norm() / weight.norm().clamp(min=1e-30)
        self.errors.append(ModuleError(module=module, relative_rms=float(error)))
        return packed


def _report(
    model: str,
    files: ModelFiles,
    output: Path,
    run: _Run,
    tensors: list[TensorSpec],
    started: float,
) -> QuantizeReport:
    plan = run.plan
    quantized = {error.module for error in run.errors}
    linear = quantized | {module for module, _ in plan.plain}
    every = {name.removesuffix(".weight") for name in run.checkpoint.names}
    return QuantizeReport(
        model=model,
        output=output,
        spec=plan.spec,
        num_layers=plan.num_layers,
        errors=tuple(run.errors),
        plain=tuple(plan.plain),
        bits_per_weight=_bits(run.checkpoint, tensors, quantized),
        linear_bits=_bits(run.checkpoint, tensors, linear),
        model_bits=_bits(run.checkpoint, tensors, every),
        bytes_before=weight_bytes(files),
        bytes_after=sum(path.stat().st_size for path in output.glob("*.safetensors")),
        seconds=time.perf_counter() - started,
    )


def _bits(checkpoint: Checkpoint, tensors: list[TensorSpec], modules: set[str]) -> float:
    """Bits stored for ``modules`` (a tensor that is no weight counts as one) per element of the source."""
    stored = sum(t.nbytes for t in tensors if t.name in modules or t.name.rpartition(".")[0] in modules)
    names = (name for name in checkpoint.names if name.removesuffix(".weight") in modules)
    return stored * 8 / sum(math.prod(checkpoint.shape(name)) for name in names)
