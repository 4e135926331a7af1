"""Plan: what a model would take on a device and how many requests would fit, from config and headers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..kernels.kernel_set import KernelSet
from ..kernels.problems import dtype_name
from .config import QUANTIZATIONS, EngineConfig
from .core.kv_cache import (
    check_asked_bytes,
    kv_budget,
    model_block_bytes,
    useful_blocks,
    wanted_model_len,
    workspace_bytes,
)
from .model_config import load_model_config
from .models.decoder import Decoder
from .models.survey import Survey, survey_model
from .sources.model_files import ModelFiles
from .target import Target

AS_STORED = "as stored"
LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePlan:
    """The weights in one scheme.

    ``weight_bytes``  parameters, each once, in the canonical layout.
    ``memory_bytes``  what the kernels of this device keep of them: more where they expand or copy.
    ``kv_tokens``     what the KV cache holds beside them; ``num_blocks`` of it the engine would allocate.
    ``requests``      how many requests of a length (prompt plus output) fit at once.
    ``refused``       why this scheme is not served here; the figures are 0 then.
    """

    quantization: str
    schemes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    weight_bytes: int = 0
    memory_bytes: int = 0
    kv_tokens: int = 0
    num_blocks: int = 0
    requests: dict[int, int] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One model on one device; bytes throughout. The KV cache has the activations' dtype."""

    model: str
    arch: str
    free_bytes: int
    dtype: str
    kv_dtype: str
    kv_bytes_per_token: int
    workspace_bytes: int
    max_model_len: int
    max_num_seqs: int
    plans: tuple[SchemePlan, ...]


def make_plan(
    files: ModelFiles, config: EngineConfig, target: Target, lengths: Sequence[int] | None = None
) -> ModelPlan:
    """Plan a model as stored and with each quantization at load, or only with ``config.quantization``.

    Raises what loading the model as stored would, before any weight is read.
    """
    if target.free_bytes is None:
        raise ConfigError(f"how much memory has {target.spec.arch}? Say it as in --memory 192GiB")
    dtype = target.compute_dtype(config.dtype, load_model_config(files).dtype)

    def survey(quantization: str | None) -> Survey:
        kernels = KernelSet(target.spec, strict=config.strict_kernels)
        return survey_model(files, kernels, dtype, block_size=config.block_size, quantization=quantization)

    surveys: dict[str, Survey | str] = {}
    if config.quantization is not None:
        surveys[config.quantization] = first = survey(config.quantization)
    else:
        surveys[AS_STORED] = first = survey(None)
        surveys |= {kind: _or_reason(survey, kind) for kind in QUANTIZATIONS if first.format_name == "dense"}
    model = first.model
    max_model_len = wanted_model_len(config, model)
    wanted = lengths or [*(length for length in LENGTHS if length < max_model_len), max_model_len]
    return ModelPlan(
        model=files.name,
        arch=target.spec.arch,
        free_bytes=target.free_bytes,
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(model.dtype),
        kv_bytes_per_token=model_block_bytes(config, model) // config.block_size,
        workspace_bytes=workspace_bytes(config, model),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        plans=tuple(_scheme_plan(name, found, config, target, wanted) for name, found in surveys.items()),
    )


def _or_reason(survey: Callable[[str], Survey], kind: str) -> Survey | str:
    try:
        return survey(kind)
    except (CheckpointError, UnsupportedError) as error:
        return str(error)


def _scheme_plan(
    name: str, survey: Survey | str, config: EngineConfig, target: Target, lengths: Sequence[int]
) -> SchemePlan:
    if isinstance(survey, str):
        return SchemePlan(quantization=name, refused=survey)
    model = survey.model
    num_blocks = _num_blocks(config, model, target)
    allocated = min(num_blocks, useful_blocks(config, model))
    try:
        _check_asked(config, model, target, allocated)
    except ConfigError as error:
        return SchemePlan(quantization=name, refused=str(error))
    layers = [row for row in survey.kernels if "layer" in row]
    return SchemePlan(
        quantization=name,
        schemes=tuple(dict.fromkeys(row["scheme"] for row in layers)),
        kernels=tuple(dict.fromkeys(f"{row['kernel']} ({row['quality']})" for row in layers)),
        weight_bytes=model.weight_bytes,
        memory_bytes=model.memory_bytes,
        kv_tokens=num_blocks * config.block_size,
        num_blocks=allocated,
        requests={length: num_blocks // _blocks_of(length, config) for length in lengths},
    )


def _num_blocks(config: EngineConfig, model: Decoder, target: Target) -> int:
    assert target.free_bytes is not None, "make_plan has checked it"
    left = target.free_bytes - model.memory_bytes
    if left < workspace_bytes(config, model):
        return 0
    return kv_budget(config, model, left, target.spec.device_type) // model_block_bytes(config, model)


def _check_asked(config: EngineConfig, model: Decoder, target: Target, num_blocks: int) -> None:
    assert target.free_bytes is not None, "make_plan has checked it"
    left = max(0, target.free_bytes - model.memory_bytes)
    check_asked_bytes(config, num_blocks * model_block_bytes(config, model), left)


def _blocks_of(length: int, config: EngineConfig) -> int:
    return -(-length // config.block_size)
