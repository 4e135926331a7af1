"""The options that every command which builds an engine shares; each default is EngineConfig's own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any

from ..engine.config import CPU_ACTIVATIONS, DEVICES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from .parser import byte_size, natural_int, number, positive_int

_FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}

# Field -> how its option is read and what it does. The option's name is the field's, with dashes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"choices": DEVICES, "help": "where to compute"},
    "dtype": {"choices": DTYPES, "help": "element type of activations and unquantized weights"},
    "quantize": {"metavar": "METHOD[:...]", "help": "quantize first, once, such as rtn:4:32, fp8 or auto:4.25"},
    "quantization": {
        "choices": QUANTIZATIONS,
        "help": "round the weights of a 16- or 32-bit checkpoint, or of a GGUF file, while they load",
    },
    "max_model_len": {
        "type": positive_int,
        "metavar": "N",
        "help": "tokens of prompt plus output (default: the model's)",
    },
    "block_size": {"type": positive_int, "metavar": "N", "help": "tokens in one block of the KV cache, a power of two"},
    "kv_cache_dtype": {
        "choices": KV_CACHE_DTYPES,
        "help": "how keys and values are stored; bfloat16 takes half of float32, fp8 and int8 a quarter "
        "(auto: as activations)",
    },
    "cpu_activations": {
        "choices": CPU_ACTIVATIONS,
        "help": "on a CPU, round the inputs of integer weights to 8 bits (int8), or inputs and weights of products to "
        "bfloat16 (bf16, needs AMX): faster and not exact",
    },
    "kv_cache_bytes": {
        "type": byte_size,
        "metavar": "SIZE",
        "help": "size of the KV cache, such as 4G (default: what --memory-fraction gives)",
    },
    "memory_fraction": {
        "type": number(0.0, 1.0, above=True),
        "metavar": "F",
        "help": "part of the free memory for the KV cache",
    },
    "max_num_seqs": {"type": positive_int, "metavar": "N", "help": "requests computed at once"},
    "max_num_batched_tokens": {"type": positive_int, "metavar": "N", "help": "tokens computed in one step"},
    "max_step_stretch": {
        "type": number(1.0, float("inf")),
        "metavar": "F",
        "help": "how many times as long prompts may make a step while requests wait for a token; inf: no bound",
    },
    "seed": {"type": natural_int, "metavar": "N", "help": "seed for requests that bring none"},
    "num_threads": {"type": positive_int, "metavar": "N", "help": "CPU threads (default: all usable cores)"},
    "chat_template": {"metavar": "FILE", "help": "chat template to use instead of the model's own"},
}

_SWITCHES = {
    "enable_prefix_caching": "reuse computed prompt blocks between requests",
    "allow_pickle": "read pytorch_model.bin and the like, tensors only, where there is no safetensors file",
    "strict_kernels": "fail where an operation would fall back to a slower kind of kernel",
    "enforce_eager": "compute every step operation by operation instead of replaying recorded ones",
}


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, model: bool = True, only: Collection[str] | None = None
) -> None:
    """Add the positional MODEL (unless told not to) and one option for each field of EngineConfig, or for ``only``."""
    if model:
        parser.add_argument("model", metavar="MODEL", help="directory, .gguf file, hub id or catalogue name")
    group = parser.add_argument_group("engine options")
    for name, options in _OPTIONS.items():
        if only is not None and name not in only:
            continue
        group.add_argument(_flag(name), default=_FIELDS[name].default, **options)
    for name, text in _SWITCHES.items():
        if only is not None and name not in only:
            continue
        action = argparse.BooleanOptionalAction if _FIELDS[name].default else "store_true"
        group.add_argument(_flag(name), action=action, default=_FIELDS[name].default, help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that parsed arguments describe (ConfigError where they do not fit together)."""
    return EngineConfig(**{name: getattr(args, name) for name in _FIELDS if hasattr(args, name)})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
