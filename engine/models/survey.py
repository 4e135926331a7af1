"""Survey: a model's sizes and kernels from config and headers, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.kernel_set import KernelSet
from ...quant.at_load import load_format
from ...quant.formats import Format
from ..kv_cache_type import KVCacheType, kv_cache_type
from ..model_config import ModelConfig, load_model_config
from ..sources.model_files import ModelFiles
from ..weights import open_checkpoint
from ..weights.checkpoint import Checkpoint
from ..weights.header_loader import HeaderLoader
from ..weights.preflight import check_servable
from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """``model`` has its shape, ``weight_bytes`` and ``memory_bytes``, and cannot compute; ``kernels`` is the report."""

    model: Decoder
    format_name: str
    kernels: list[dict[str, str]]


def survey_model(
    files: ModelFiles,
    kernels: KernelSet,
    dtype: torch.dtype,
    *,
    block_size: int,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    allow_pickle: bool = False,
) -> Survey:
    """Survey a model for a device. Raises what loading it would: CheckpointError, ConfigError, UnsupportedError.

    ``quantization`` is what would be done at load: int8, int4 or fp8; ``kv_cache_dtype`` auto, bfloat16, fp8 or int8;
    with ``allow_pickle`` the tensors' sizes may be read from pickles.
    """
    config = load_model_config(files)
    checkpoint = open_checkpoint(files, allow_pickle=allow_pickle)
    quant_format = load_format(config.quantization, quantization, checkpoint)
    kv_cache = kv_cache_type(kv_cache_dtype, dtype, kernels.spec, config.quantization, kernels.cpu_activations)
    return survey_checkpoint(config, checkpoint, quant_format, kernels, dtype, block_size, kv_cache)


def survey_checkpoint(
    config: ModelConfig,
    checkpoint: Checkpoint,
    quant_format: Format,
    kernels: KernelSet,
    dtype: torch.dtype,
    block_size: int,
    kv_cache: KVCacheType,
) -> Survey:
    """Survey an open checkpoint, none of whose tensors counts as taken; ``kernels`` remembers the choices."""
    check_servable(checkpoint, quant_format, kernels, dtype)
    loader = HeaderLoader(checkpoint, quant_format, kernels, dtype, kv_cache)
    model = Decoder(config, loader, block_size=block_size, num_positions=1)
    loader.finish(config.num_layers)
    return Survey(model=model, format_name=quant_format.name, kernels=kernels.report())
