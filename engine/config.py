"""EngineConfig: everything that a user can choose about an engine, each default in one place."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..errors import ConfigError
from ..quant.spec import parse_quantize_spec

DEVICES = ("auto", "cpu", "cuda", "rocm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4", "fp8")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "int8")
CPU_ACTIVATIONS = ("exact", "int8", "bf16")
_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "cpu_activations": CPU_ACTIVATIONS,
    "quantization": (None, *QUANTIZATIONS),
}
# A field's annotation -> the types that it takes, in Python and in words. bool is an int to Python, never here.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "True or False"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    ``model``                   directory, ``.gguf`` file, hub id or catalogue name.
    ``quantize``                ``METHOD:BITS:GROUP`` to quantize a plain checkpoint first (cached), or None.
    ``quantization``            int8, int4 or fp8: round a plain checkpoint's weights while they load, or None.
    ``max_model_len``           longest prompt plus output in tokens; None: what the model's config says.
    ``kv_cache_dtype``          bfloat16, fp8, int8, or auto: as activations, bfloat16 with ``cpu_activations`` bf16.
    ``cpu_activations``         on a CPU: exact; int8: inputs of integer weights are rounded to 8 bits; bf16: inputs and
                                weights of all products to bfloat16 (AMX).
    ``kv_cache_bytes``          size of the KV pool in bytes; None: ``memory_fraction`` of what is really free.
    ``max_num_batched_tokens``  token budget of one step.
    ``max_step_stretch``        how many times as long a step may last for the prompts in it while requests wait for
                                their next token; infinity: no bound.
    ``max_num_seqs``            rows of the persistent batch: requests computed at once.
    ``num_threads``             CPU threads for the model; None: the cores this process may use.
    ``enforce_eager``           compute every step operation by operation, without recorded graphs.
    ``allow_pickle``            read the tensors of a pickled checkpoint where there is no safetensors file.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    cpu_activations: str = "exact"
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_step_stretch: float = 10.0
    enable_prefix_caching: bool = True
    seed: int = 0
    num_threads: int | None = None
    strict_kernels: bool = False
    enforce_eager: bool = False
    allow_pickle: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "chat_template"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        self._check_types()
        self._check_values()

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind, _, optional = str(field.type).partition(" | ")
            types, words = _KINDS[kind]
            right = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
            if field.name in _CHOICES or right or (optional and value is None):
                continue  # the first ones have a fixed choice, which says more than a type
            raise ConfigError(f"{field.name} is {value!r}; it must be {words}{' or None' if optional else ''}")

    def _check_values(self) -> None:
        for name, accepted in _CHOICES.items():
            value = getattr(self, name)
            if value not in accepted:
                named = ", ".join(choice for choice in accepted if choice is not None)
                raise ConfigError(f"{name} is {value!r}; it must be one of {named}")
        if self.quantize is not None:
            parse_quantize_spec(self.quantize)
        if self.quantization is not None and self.quantize is not None:
            raise ConfigError(
                f"quantize {self.quantize!r} and quantization {self.quantization!r} exclude each other; choose one"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two, such as 16")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")
        if not self.max_step_stretch >= 1.0:
            raise ConfigError(f"max_step_stretch is {self.max_step_stretch}; it must be at least 1, or inf")
        for name in ("max_model_len", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")


def check_options(names: Iterable[str]) -> None:
    """ConfigError for the first of ``names`` that is no field of EngineConfig, with the one most like it."""
    known = [field.name for field in fields(EngineConfig)]
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"the options are {', '.join(known)}"
            raise ConfigError(f"there is no option {name!r}; {hint}")
