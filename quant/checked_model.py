"""What a model's config and headers say about a spec, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.model_config import load_model_config, raw_config
from ..engine.sources import ModelFiles
from ..engine.weights import open_checkpoint
from ..engine.weights.checkpoint import Checkpoint
from ..errors import ConfigError
from .formats.writers import writer_for
from .plan import QuantizePlan, bit_budget, make_plan
from .rotation import RotatedCheckpoint
from .spec import QuantizeSpec


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model whose headers say that a spec can be carried out.

    ``budget`` bits are what ``auto`` may spend, 0 for other methods; ``positions`` the longest sequence in tokens.
    """

    checkpoint: Checkpoint
    plan: QuantizePlan
    budget: int
    positions: int


def check_model(files: ModelFiles, spec: QuantizeSpec) -> CheckedModel:
    """Read a model's config and headers, no weight. ConfigError where ``spec`` cannot be carried out with it."""
    config = load_model_config(files)
    if config.quantization is not None:
        raise ConfigError(f"{files.name} is quantized already; give the original model")
    checkpoint = _checkpoint(files, spec)
    plan = make_plan(checkpoint, spec, writer_for(spec))
    budget = bit_budget(plan, checkpoint) if spec.method == "auto" else 0
    return CheckedModel(checkpoint, plan, budget, config.max_position_embeddings)


def _checkpoint(files: ModelFiles, spec: QuantizeSpec) -> Checkpoint:
    source = open_checkpoint(files)
    return RotatedCheckpoint(source, raw_config(files)) if spec.rotate else source
