"""What is wrong with a model or its options, found from small files in a moment, without torch."""

from __future__ import annotations

from ..errors import ConfigError
from .config import EngineConfig
from .hf_config import parse_config
from .model_config import allowed_model_len, generation_config, raw_config
from .sources.model_files import ModelFiles
from .weights.weight_files import is_pickled, pickle_files, weight_files


def check_model(files: ModelFiles, config: EngineConfig) -> None:
    """Raise what loading would raise later: ConfigError, UnsupportedError or CheckpointError.

    Looks at the config, the architecture, the weight files' presence, ``max_model_len`` and ``quantize``; tensors and
    formats are the loader's.
    """
    raw = raw_config(files)
    source = files.path.name if files.kind == "gguf" else str(files.path / "config.json")
    model = parse_config(raw, source=source)
    generation_config(files)
    if files.kind == "directory":
        pickled = config.allow_pickle and is_pickled(files.path)
        pickle_files(files.path) if pickled else weight_files(files.path)
    allowed_model_len(config.max_model_len, model)
    if config.quantize is not None:
        _check_quantize(config, raw.get("quantization_config") is not None)


def _check_quantize(config: EngineConfig, quantized: bool) -> None:
    from ..quant.spec import parse_quantize_spec

    assert config.quantize is not None, "the caller has looked"
    parse_quantize_spec(config.quantize)
    if quantized:
        raise ConfigError(f"{config.model} is quantized already; give the original model")
