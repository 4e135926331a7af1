"""Quantize a model layer by layer: from any source to a quantized checkpoint, one decoder layer in memory at a time."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.sources import ModelFiles, resolve_model
from ..engine.tokenizer import load_tokenizer
from ..engine.weights.checkpoint import Checkpoint
from ..engine.weights.safetensors_dir import SafetensorsCheckpoint
from ..errors import CheckpointError, ConfigError
from ..log import get_logger
from ..storage import writing
from .calibration import CalibrationSpec
from .calibration.texts import calibration_windows, shortage
from .canonical import dequantize
from .checked_model import CheckedModel, check_model
from .export import check_output, check_space, source_dtype, weight_bytes, write_side_files
from .fingerprint import content_key
from .finite import is_finite
from .formats import Format, detect_format
from .formats.writers import writer_for
from .methods.choice import choose_schemes, layer_method
from .methods.layer_method import LayerMethod, LayerWeights
from .plan import SIDES, LayerPlan, QuantizePlan, make_plan, stored_dtype
from .report import ModuleError, QuantizeReport
from .rotation import RotatedCheckpoint
from .spec import QuantizeSpec, parse_quantize_spec
from .tensor_writer import TensorSpec, TensorWriter
from .work_folder import WorkFolder

log = get_logger(__name__)

# (decoder layers done, decoder layers in all); called once before the first one too.
Progress = Callable[[int, int], None]
MAX_SHARD_BYTES = 4 << 30


def quantize_model(
    model: str,
    spec: QuantizeSpec | str,
    output: Path,
    progress: Progress | None = None,
    *,
    calibration: CalibrationSpec | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    finish: Callable[[Path], None] | None = None,
) -> QuantizeReport:
    """Write ``model`` (directory, .gguf file, catalogue name or hub id), quantized, to the folder ``output``.

    Everything wrong with the arguments raises ConfigError before a weight is read, and too small a disk StorageError;
    CheckpointError names a tensor that cannot be quantized. ``output`` appears complete or not at all; the same call
    after an interruption goes on behind the last finished layer. ``finish`` is called with the complete folder before
    it takes ``output``'s place.
    """
    from ..kernels.cpu.gptq import offer_gptq  # This room knows kernels by what they offer alone.

    started = time.perf_counter()
    offer_gptq()
    spec = parse_quantize_spec(spec) if isinstance(spec, str) else spec
    writer_for(spec)  # Refuses what no format can hold before anything is fetched.
    if max_shard_bytes < 1:
        raise ConfigError(f"weight files of {max_shard_bytes} bytes hold nothing; allow some GB")
    files = resolve_model(model)
    check_output(output, files.path, overwrite=overwrite)
    checked = check_model(files, spec)
    checkpoint, plan = checked.checkpoint, checked.plan
    check_space(output, max(sum(tensor.nbytes for tensor in plan.tensors(checkpoint)), checked.budget // 8))
    calibration = (calibration or CalibrationSpec()).for_model(checked.positions)
    windows = _windows(files, calibration) if spec.is_calibrated else None
    method = layer_method(
        spec, files, checkpoint, lambda name: _finite_weight(checkpoint, name), windows, calibration.memory
    )
    key = f"{content_key(files, spec, calibration)} {max_shard_bytes}"
    show = progress or _ignore
    with writing(output.parent), WorkFolder(output, key) as work:
        if spec.method == "auto":
            assert windows is not None, "auto looks at text"
            show, measure = _second_half(show), _first_half(show)
            plan = _chosen_plan(checked, files, windows, work, measure)
        tensors = list(plan.tensors(checkpoint))
        quantization = plan.writer.config(plan.schemes, plan.plain_modules(checkpoint), spec.method, spec.kv_cache)
        dtype = str(stored_dtype(getattr(torch, source_dtype(files)))).removeprefix("torch.")
        write_side_files(files, work.folder, quantization, dtype, plan.writer.side_config, _changes(checkpoint))
        run = _Run(checkpoint, plan, method, detect_format(quantization), work)
        run.notes += _shortage(calibration, windows)
        run.all_layers(tensors, max_shard_bytes, show)
        if finish is not None:
            finish(work.folder)
    looked_at = None if windows is None else calibration.describe(len(windows))
    return _report(model, files, output, run, tensors, looked_at, started)


def _windows(files: ModelFiles, calibration: CalibrationSpec) -> Tensor:
    return calibration_windows(load_tokenizer(files), calibration)


def _shortage(calibration: CalibrationSpec, windows: Tensor | None) -> list[str]:
    """What a user must know about too little text, logged too."""
    said = None if windows is None else shortage(calibration.source, windows, calibration.num_sequences)
    if said is None:
        return []
    log.warning("calibration: %s", said)
    return [f"calibration: {said}"]


def _first_half(progress: Progress) -> Progress:
    """The layers that ``auto`` measures count like those that it quantizes after."""
    return lambda done, total: progress(done, 2 * total)


def _second_half(progress: Progress) -> Progress:
    return lambda done, total: progress(total + done, 2 * total)


def _changes(checkpoint: Checkpoint) -> dict[str, Any]:
    """What config.json must say otherwise than the source's."""
    return {"tie_word_embeddings": False} if isinstance(checkpoint, RotatedCheckpoint) else {}


def _notes(run: _Run) -> list[str]:
    if isinstance(run.checkpoint, RotatedCheckpoint) and run.checkpoint.unties:
        return [*run.notes, "rotated: the head is stored apart from the embedding, which it was tied to"]
    return run.notes


def _chosen_plan(
    checked: CheckedModel, files: ModelFiles, windows: Tensor, work: WorkFolder, progress: Progress
) -> QuantizePlan:
    """The plan with the schemes that ``auto`` chooses; those of an interrupted work stay."""
    plan, checkpoint = checked.plan, checked.checkpoint
    offered = plan.spec.schemes
    if "schemes" not in work.kept:
        log.info("measuring which layers need more than %s", offered[0])
        progress(0, plan.num_layers)
        chosen = choose_schemes(plan, files, checkpoint, windows, checked.budget, progress)
        work.kept["schemes"] = {module: offered.index(scheme) for module, scheme in chosen.items()}
    chosen = {module: offered[index] for module, index in work.kept["schemes"].items()}
    return make_plan(checkpoint, plan.spec, plan.writer, chosen)


def _ignore(done: int, total: int) -> None:
    """No progress wanted."""


def _finite_weight(checkpoint: Checkpoint, module: str) -> Tensor:
    name = f"{module}.weight"
    weight = checkpoint.get(name).float()
    if not is_finite(weight):
        raise CheckpointError(f"{name} in {checkpoint.location(name)} holds NaN or infinity; nothing was written")
    return weight


def _finite(tensor: Tensor, name: str) -> Tensor:
    """``tensor``, scales above all: a result that is not finite is never written."""
    if tensor.is_floating_point() and tensor.itemsize > 1 and not is_finite(tensor):
        raise CheckpointError(f"{name} came out with NaN or infinity; nothing was written. Try another method")
    return tensor


@dataclass(slots=True)
class _Run:
    checkpoint: Checkpoint
    plan: QuantizePlan
    method: LayerMethod
    written: Format
    work: WorkFolder
    errors: list[ModuleError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @torch.inference_mode()
    def all_layers(self, tensors: list[TensorSpec], max_shard_bytes: int, progress: Progress) -> None:
        done, total = 0, self.plan.num_layers
        finished = len(self.work.steps)
        names = [name for layer in self.plan.layers[:finished] for name in self._names(layer)]
        if before := sum(layer.number is not None for layer in self.plan.layers[:finished]):
            log.info("an interrupted run finished %d of %d layers; going on behind them", before, total)
        progress(done, total)
        with TensorWriter(self.work.folder, tensors, max_shard_bytes, names) as writer:
            for index, layer in enumerate(self.plan.layers):
                if index < finished:
                    self._take_over(layer, self.work.steps[index])
                else:
                    self._layer(layer, writer)
                done += layer.number is not None
                progress(done, total)

    def _names(self, layer: LayerPlan) -> list[str]:
        parts = [
            f"{module}.{part}"
            for module, scheme in layer.quantize.items()
            for part in self.plan.writer.tensor_layout(self._shape(module), scheme)
        ]
        return [*layer.copy, *parts, *layer.kv_scales]

    def _shape(self, module: str) -> tuple[int, int]:
        rows, columns = self.checkpoint.shape(f"{module}.weight")
        return rows, columns

    def _layer(self, layer: LayerPlan, writer: TensorWriter) -> None:
        result = LayerWeights() if layer.number is None else self.method.quantize(layer)
        for name in layer.copy:
            writer.write(name, self._dense(name, result.changed.get(name)))
        errors = [self._error(module, result) for module in layer.quantize]
        for module, scheme in layer.quantize.items():
            for part, tensor in self.plan.writer.to_tensors(result.quantized[module], scheme).items():
                writer.write(f"{module}.{part}", _finite(tensor, f"{module}.{part}"))
        for name in layer.kv_scales:
            attention, _, side = name.rpartition(".")
            writer.write(name, result.kv_scales[attention][SIDES.index(side)].reshape(1).float())
        writer.flush()
        self.errors += errors
        self.notes += result.notes
        figures = [asdict(error) for error in errors]
        self.work.finish_step({"errors": figures, "notes": result.notes, "changed": list(result.changed)})

    def _take_over(self, layer: LayerPlan, step: dict[str, Any]) -> None:
        """A layer of an earlier run: its weights come from where that run left them."""
        self.errors += [ModuleError(**error) for error in step["errors"]]
        self.notes += step["notes"]
        if layer.number is not None:
            source = SafetensorsCheckpoint(self.work.folder)
            done = LayerWeights(changed={name: source.get(name) for name in step["changed"]})
            for module in layer.quantize:
                done.quantized[module] = self.written.load(source, module, torch.float32)
            self.method.skip(layer, done)

    def _dense(self, name: str, changed: Tensor | None) -> Tensor:
        tensor = self.checkpoint.get(name) if changed is None else changed.to(self.checkpoint.dtype(name))
        stored = tensor.to(stored_dtype(tensor.dtype))
        if stored.dtype != tensor.dtype and not is_finite(stored):
            location = self.checkpoint.location(name)
            raise CheckpointError(
                f"{name} in {location} holds values that float16 cannot; convert the model to bfloat16"
            )
        return stored

    def _error(self, module: str, result: LayerWeights) -> ModuleError:
        error = result.weight_errors.get(module)
        if error is None:
            weight = _finite_weight(self.checkpoint, module)
            error = float((dequantize(result.quantized[module]) - weight).norm() / weight.norm().clamp(min=1e-30))
        return ModuleError(module=module, relative_rms=error, output_error=result.output_errors.get(module))


def _report(
    model: str,
    files: ModelFiles,
    output: Path,
    run: _Run,
    tensors: list[TensorSpec],
    calibration: str | None,
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
        notes=tuple(_notes(run)),
        bits_per_weight=_bits(run.checkpoint, tensors, quantized),
        linear_bits=_bits(run.checkpoint, tensors, linear),
        model_bits=_bits(run.checkpoint, tensors, every),
        bytes_before=weight_bytes(files),
        bytes_after=sum(path.stat().st_size for path in output.glob("*.safetensors")),
        seconds=time.perf_counter() - started,
        format=plan.writer.name,
        calibration=calibration,
        peak_memory=peak_memory(),
    )


def peak_memory() -> int:
    """The most bytes of memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _bits(checkpoint: Checkpoint, tensors: list[TensorSpec], modules: set[str]) -> float:
    """Bits stored for ``modules`` (a tensor that is no weight counts as one) per element of the source."""
    stored = sum(t.nbytes for t in tensors if t.name in modules or t.name.rpartition(".")[0] in modules)
    names = (name for name in checkpoint.names if name.removesuffix(".weight") in modules)
    return stored * 8 / sum(math.prod(checkpoint.shape(name)) for name in names)
