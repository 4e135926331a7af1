"""Models: the mathematics of each family, and how one is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels.kernel_set import KernelSet
from ...platforms.interface import Platform
from ...quant.formats import detect_format
from ..config import EngineConfig
from ..model_config import load_model_config
from ..sources.model_files import ModelFiles
from ..weights import open_checkpoint
from ..weights.loader import Loader
from ..weights.preflight import check_servable
from .decoder import Decoder
from .model import Model

__all__ = ["Decoder", "Model", "load_model"]


def load_model(
    files: ModelFiles,
    config: EngineConfig,
    platform: Platform,
    kernels: KernelSet,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a model onto the platform's device; ``progress(done, total)`` counts layers.

    CheckpointError when a parameter is missing or has the wrong shape; UnsupportedError when the architecture, the
    quantization or a kernel is not served.
    """
    model_config = load_model_config(files)
    dtype = _compute_dtype(config.dtype, model_config.dtype, platform)
    checkpoint, quant_format = open_checkpoint(files), detect_format(model_config.quantization)
    check_servable(checkpoint, quant_format, kernels, dtype)
    loader = Loader(checkpoint, quant_format, kernels, dtype, platform.device)
    num_positions = max(config.max_model_len or 0, model_config.max_position_embeddings)
    model = Decoder(model_config, loader, block_size=config.block_size, num_positions=num_positions, progress=progress)
    loader.finish()
    return model


def _compute_dtype(wanted: str, stored: str, platform: Platform) -> torch.dtype:
    return platform.preferred_dtype(getattr(torch, stored)) if wanted == "auto" else getattr(torch, wanted)
