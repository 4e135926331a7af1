"""From a spec to the method that carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine.sources import ModelFiles
from ...engine.weights.checkpoint import Checkpoint
from ..calibration import CalibrationSpec
from ..spec import QuantizeSpec
from .layer_method import LayerMethod, ReadWeight
from .nearest import quantize_nearest
from .rounding import RoundedLayers

if TYPE_CHECKING:
    from .calibrated import GroupQuantizer
    from .scaling import FindScale


def layer_method(
    spec: QuantizeSpec, files: ModelFiles, checkpoint: Checkpoint, calibration: CalibrationSpec, read: ReadWeight
) -> LayerMethod:
    """The method of ``spec`` for a model. ConfigError where the calibration text does not do."""
    if not spec.is_calibrated:
        return RoundedLayers(read, quantize_nearest)
    # transformers comes in only where a model is run.
    from ...engine.tokenizer import load_tokenizer
    from ..calibration.block_model import BlockModel
    from ..calibration.texts import calibration_windows
    from .calibrated import CalibratedLayers

    windows = calibration_windows(load_tokenizer(files), calibration)
    quantizer, find_scale = _parts(spec)
    return CalibratedLayers(BlockModel(files, checkpoint), windows, quantizer, find_scale=find_scale)


def _parts(spec: QuantizeSpec) -> tuple[GroupQuantizer, FindScale | None]:
    from .awq import ClippedGroups, search_scale
    from .gptq import GPTQOptions
    from .gptq_layers import GPTQGroups

    if spec.method == "awq":
        return ClippedGroups(), search_scale
    return GPTQGroups(GPTQOptions(order=spec.order)), None
