"""From a spec to the method that carries it out."""

from __future__ import annotations

from ...engine.sources import ModelFiles
from ...engine.weights.checkpoint import Checkpoint
from ..calibration import CalibrationSpec
from ..spec import QuantizeSpec
from .layer_method import LayerMethod, ReadWeight
from .rounding import RoundedLayers
from .rtn import quantize_rtn


def layer_method(
    spec: QuantizeSpec, files: ModelFiles, checkpoint: Checkpoint, calibration: CalibrationSpec, read: ReadWeight
) -> LayerMethod:
    """The method of ``spec`` for a model. ConfigError where the calibration text does not do."""
    if not spec.is_calibrated:
        return RoundedLayers(read, quantize_rtn)
    # transformers comes in only where a model is run.
    from ...engine.tokenizer import load_tokenizer
    from ..calibration.block_model import BlockModel
    from ..calibration.texts import calibration_windows
    from .calibrated import CalibratedLayers
    from .gptq import GPTQOptions
    from .gptq_layers import GPTQGroups

    windows = calibration_windows(load_tokenizer(files), calibration)
    return CalibratedLayers(BlockModel(files, checkpoint), windows, GPTQGroups(GPTQOptions(order=spec.order)))
