"""Models: the mathematics of each family, and how one is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels.kernel_set import KernelSet
from ...log import get_logger
from ...platforms.interface import Platform
from ...quant.at_load import load_format
from ...quant.kv_scales import calibrated_for, describe_kv_scales, scaled_layers, why_unused
from ..config import EngineConfig
from ..kv_cache_type import kv_cache_type
from ..model_config import load_model_config
from ..sources.model_files import ModelFiles
from ..weights import open_checkpoint
from ..weights.checkpoint import Checkpoint
from ..weights.loader import Loader
from .decoder import Decoder
from .model import Model
from .survey import survey_checkpoint

__all__ = ["Decoder", "Model", "load_model"]

logger = get_logger(__name__)


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
    checkpoint = open_checkpoint(files, allow_pickle=config.allow_pickle)
    quant_format = load_format(model_config.quantization, config.quantization, checkpoint)
    kv_cache = kv_cache_type(
        config.kv_cache_dtype, dtype, platform.spec, model_config.quantization, config.cpu_activations
    )
    fresh = kernels.fresh()
    survey = survey_checkpoint(model_config, checkpoint, quant_format, fresh, dtype, config.block_size, kv_cache)
    start = time.perf_counter()
    loader = Loader(checkpoint, quant_format, kernels, dtype, platform.device, kv_cache)
    num_positions = config.max_model_len or model_config.max_position_embeddings
    with kernels.weights_coming(survey.model.memory_bytes):
        model = Decoder(
            model_config, loader, block_size=config.block_size, num_positions=num_positions, progress=progress
        )
    platform.synchronize()
    _log_speed(checkpoint, time.perf_counter() - start)
    loader.finish(model_config.num_layers)
    checkpoint.let_go()
    _log_scales(checkpoint, loader, config.kv_cache_dtype, calibrated_for(model_config.quantization))
    return model


def _log_scales(checkpoint: Checkpoint, loader: Loader, option: str, made_for: str) -> None:
    """What becomes of the checkpoint's scales for the KV cache, if it has any."""
    if loader.kv_scales:
        logger.info("KV cache in %s, with %s", option, describe_kv_scales(loader.kv_scales))
    elif layers := scaled_layers(checkpoint):
        logger.info("%s", why_unused(len(layers), made_for, option))


def _log_speed(checkpoint: Checkpoint, seconds: float) -> None:
    files = {checkpoint.location(name) for name in checkpoint.names}
    size = sum(Path(file).stat().st_size for file in files)
    speed = size / max(seconds, 1e-9) / 1e9
    logger.info("read %d files of %.2f GB in %.2f s: %.2f GB/s", len(files), size / 1e9, seconds, speed)


def _compute_dtype(wanted: str, stored: str, platform: Platform) -> torch.dtype:
    return platform.preferred_dtype(getattr(torch, stored)) if wanted == "auto" else getattr(torch, wanted)
