"""Plan: what a model would take on a device and how many requests would fit, from config and headers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..kernels.kernel_set import KernelSet
from ..kernels.problems import dtype_name
from .config import KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from .core.kv_cache import (
    check_asked_bytes,
    kv_budget,
    model_block_bytes,
    useful_blocks,
    wanted_model_len,
    workspace_bytes,
)
from .cpu_bfloat16 import on_device
from .model_config import load_model_config
from .models.decoder import Decoder
from .models.survey import Survey, survey_model
from .sources.model_files import ModelFiles
from .target import Target

AS_STORED = "as stored"
LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePlan:
    """The weights in one scheme, with a KV cache of one type.

    ``weight_bytes``        parameters, each once, in the canonical layout.
    ``memory_bytes``        what the kernels of this device keep of them: more where they expand or copy.
    ``kv_cache_dtype``      auto, bfloat16, fp8 or int8; ``kv_dtype`` what that is here.
    ``kv_bytes_per_token``  keys, values and their scales in all layers.
    ``attention``           the kernel that reads the cache.
    ``kv_tokens``           what the KV cache holds beside the weights; ``num_blocks`` of it the engine would allocate.
    ``requests``            how many requests of a length (prompt plus output) fit at once.
    ``refused``             why this scheme or cache is not served here; the figures are 0 then.
    """

    quantization: str
    kv_cache_dtype: str
    schemes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    weight_bytes: int = 0
    memory_bytes: int = 0
    kv_dtype: str = ""
    kv_bytes_per_token: int = 0
    attention: str = ""
    kv_tokens: int = 0
    num_blocks: int = 0
    requests: dict[int, int] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One model on one device; bytes throughout."""

    model: str
    arch: str
    free_bytes: int
    dtype: str
    workspace_bytes: int
    max_model_len: int
    max_num_seqs: int
    plans: tuple[SchemePlan, ...]


def make_plan(
    files: ModelFiles, config: EngineConfig, target: Target, lengths: Sequence[int] | None = None
) -> ModelPlan:
    """Plan a model as stored and with each quantization at load, or only with ``config.quantization``.

    Each with every type of KV cache, or only with ``config.kv_cache_dtype`` where that is not ``auto``. Raises what
    loading the model as stored would, before any weight is read.
    """
    if target.free_bytes is None:
        raise ConfigError(f"how much memory has {target.spec.arch}? Say it as in --memory 192GiB")
    config = on_device(config, target.spec)
    dtype = target.compute_dtype(config.dtype, load_model_config(files).dtype)

    def survey(quantization: str | None, kv_cache_dtype: str) -> Survey:
        kernels = KernelSet(target.spec, strict=config.strict_kernels, cpu_activations=config.cpu_activations)
        return survey_model(
            files,
            kernels,
            dtype,
            block_size=config.block_size,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            allow_pickle=config.allow_pickle,
        )

    kinds = KV_CACHE_DTYPES if config.kv_cache_dtype == "auto" else (config.kv_cache_dtype,)
    first = survey(config.quantization, kinds[0])
    surveys: dict[str, Survey | str] = {config.quantization or AS_STORED: first}
    if config.quantization is None and first.format_name in ("dense", "gguf"):
        surveys |= {kind: _or_reason(survey, kind, kinds[0]) for kind in QUANTIZATIONS}
    # The caches do not depend on the weights' scheme.
    caches = {kind: _or_reason(survey, config.quantization, kind) for kind in kinds[1:]}
    max_model_len = wanted_model_len(config, first.model)
    wanted = lengths or [*(length for length in LENGTHS if length < max_model_len), max_model_len]
    return ModelPlan(
        model=files.name,
        arch=target.spec.arch,
        free_bytes=target.free_bytes,
        dtype=dtype_name(dtype),
        workspace_bytes=workspace_bytes(config, first.model),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        plans=tuple(
            _scheme_plan((name, kind), found, caches.get(kind, first), config, target, wanted)
            for name, found in surveys.items()
            for kind in kinds
        ),
    )


def _or_reason(
    survey: Callable[[str | None, str], Survey], quantization: str | None, kv_cache_dtype: str
) -> Survey | str:
    try:
        return survey(quantization, kv_cache_dtype)
    except (CheckpointError, UnsupportedError) as error:
        return str(error)


def _scheme_plan(
    names: tuple[str, str],
    survey: Survey | str,
    cache: Survey | str,
    config: EngineConfig,
    target: Target,
    lengths: Sequence[int],
) -> SchemePlan:
    """``names`` of the quantization and of the KV cache, ``survey`` of the weights, ``cache`` one with that cache."""
    plan = SchemePlan(quantization=names[0], kv_cache_dtype=names[1])
    for found in (survey, cache):
        if isinstance(found, str):
            return replace(plan, refused=found)
    assert isinstance(survey, Survey) and isinstance(cache, Survey), "both were surveyed"
    model, block_bytes = survey.model, model_block_bytes(config.block_size, cache.model)
    num_blocks = _num_blocks(config, model, target, block_bytes)
    allocated = min(num_blocks, useful_blocks(config, model))
    try:
        _check_asked(config, model, target, allocated * block_bytes)
    except ConfigError as error:
        return replace(plan, refused=str(error))
    layers = [row for row in survey.kernels if "layer" in row]
    return replace(
        plan,
        schemes=tuple(dict.fromkeys(row["scheme"] for row in layers)),
        kernels=_kernel_names(layers),
        weight_bytes=model.weight_bytes,
        memory_bytes=model.memory_bytes,
        kv_dtype=dtype_name(cache.model.kv_dtype),
        kv_bytes_per_token=block_bytes // config.block_size,
        attention=", ".join(_kernel_names([row for row in cache.kernels if row["op"] == "paged_attention"])),
        kv_tokens=num_blocks * config.block_size,
        num_blocks=allocated,
        requests={length: num_blocks // _blocks_of(length, config) for length in lengths},
    )


def _kernel_names(rows: Sequence[dict[str, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{row['kernel']} ({row['quality']})" for row in rows))


def _num_blocks(config: EngineConfig, model: Decoder, target: Target, block_bytes: int) -> int:
    assert target.free_bytes is not None, "make_plan has checked it"
    left = target.free_bytes - model.memory_bytes
    if left < workspace_bytes(config, model):
        return 0
    return kv_budget(config, model, left, target.spec.device_type) // block_bytes


def _check_asked(config: EngineConfig, model: Decoder, target: Target, pool_bytes: int) -> None:
    assert target.free_bytes is not None, "make_plan has checked it"
    check_asked_bytes(config, pool_bytes, max(0, target.free_bytes - model.memory_bytes))


def _blocks_of(length: int, config: EngineConfig) -> int:
    return -(-length // config.block_size)
