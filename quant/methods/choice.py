"""From a spec to the method that carries it out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...engine.model_config import load_model_config
from ...engine.sources import ModelFiles
from ...engine.weights.checkpoint import Checkpoint
from ..calibration.spec import DEFAULT_MEMORY
from ..spec import QuantizeSpec
from .input_powers import InputPowers
from .layer_method import LayerMethod, ReadWeight
from .nearest import quantize_nearest
from .rounding import RoundedLayers

if TYPE_CHECKING:
    from torch import Tensor

    from ..plan import QuantizePlan
    from ..scheme import Scheme
    from .allocation import Progress
    from .calibrated import GroupQuantizer
    from .scaling import FindScale

# Tokens that ``auto`` measures on.
MEASURED_TOKENS = 4096


def layer_method(
    spec: QuantizeSpec,
    files: ModelFiles,
    checkpoint: Checkpoint,
    read: ReadWeight,
    windows: Tensor | None,
    memory: int = DEFAULT_MEMORY,
) -> LayerMethod:
    """The method of ``spec`` for a model. ``windows`` int64 [B, L] are what a calibrated one looks at, ``memory`` what
    its activations may take, in bytes."""
    if windows is None:
        rounding = partial(quantize_nearest, clips=spec.clips)
        # Only a search weighs errors, and powers cost reading some weights twice.
        weighs = spec.method == "rtn" and spec.clips
        return RoundedLayers(read, rounding, InputPowers(read, load_model_config(files)) if weighs else None)
    # transformers comes in only where a model is run.
    from ..calibration.block_model import BlockModel
    from .calibrated import CalibratedLayers

    quantizer, find_scale = _parts(spec)
    model = BlockModel(files, checkpoint)
    return CalibratedLayers(model, windows, quantizer, find_scale=find_scale, kv_cache=spec.kv_cache, memory=memory)


def choose_schemes(
    plan: QuantizePlan,
    files: ModelFiles,
    checkpoint: Checkpoint,
    windows: Tensor,
    budget: int,
    progress: Progress | None = None,
) -> dict[str, Scheme]:
    """The scheme of each module for ``auto``, which measures on some of the calibration ``windows`` int64 [B, L].

    ``progress`` is called with the decoder layers measured, and all.
    """
    from ..calibration.block_model import BlockModel
    from .allocation import allocate

    count = max(1, MEASURED_TOKENS // windows.shape[1])
    return allocate(BlockModel(files, checkpoint), windows[:count], plan, checkpoint, budget, progress)


def _parts(spec: QuantizeSpec) -> tuple[GroupQuantizer, FindScale | None]:
    """What rounds a layer, and what scales it before."""
    from .awq import ClippedGroups, search_scale
    from .fp8 import Fp8Groups
    from .gptq import GPTQOptions
    from .gptq_layers import GPTQGroups
    from .rounding import NearestGroups
    from .smoothquant import Int8Groups, search_smoothing

    options = GPTQOptions(order=spec.order)
    if spec.method == "rtn":
        return NearestGroups(clips=spec.clips), None
    if spec.method == "fp8":
        return Fp8Groups(), None
    if spec.method == "awq":
        return ClippedGroups(), search_scale
    if spec.method == "smoothquant":
        return Int8Groups(options), search_smoothing
    return GPTQGroups(options), None
