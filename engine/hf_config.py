"""From a Hugging Face config dictionary to a ModelConfig: families, defaults and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, UnsupportedError
from .model_config import ModelConfig, RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture adds to the common decoder, and the values its config class assumes when a key is absent.

    ``windows(raw, num_layers)`` gives the sliding window of each layer.
    """

    model_type: str
    windows: Callable[[dict[str, Any], int], tuple[int | None, ...]]
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    head_size: int | None = None
    num_kv_heads: int | None = None


def _no_windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    return (raw.get("sliding_window", 4096),) * num_layers


def _qwen_windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _typed_windows(layer_types, window, num_layers)


def _ministral_windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    default = ["sliding_attention" if window is not None else "full_attention"] * num_layers
    return _typed_windows(raw.get("layer_types") or default, window, num_layers)


def _typed_windows(layer_types: list[str], window: int | None, num_layers: int) -> tuple[int | None, ...]:
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"layer_types names {unknown[0]!r}; served are full_attention and sliding_attention")
    if len(layer_types) != num_layers:
        raise ConfigError(f"layer_types has {len(layer_types)} entries for num_hidden_layers {num_layers}")
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError("layer_types names sliding_attention but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_type="llama", windows=_no_windows, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(model_type="mistral", windows=_mistral_windows, num_kv_heads=8),
    "MinistralForCausalLM": Family(model_type="ministral", windows=_ministral_windows, num_kv_heads=8),
    "Qwen2ForCausalLM": Family(model_type="qwen2", windows=_qwen_windows, qkv_bias=True, num_kv_heads=32),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        windows=_qwen_windows,
        reads_attention_bias=True,
        qk_norm=True,
        head_size=128,
        num_kv_heads=32,
    ),
}


def parse_config(
    raw: dict[str, Any],
    *,
    source: str,
    quantization: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer_eos: int | None = None,
) -> ModelConfig:
    """Read and check ``raw``; ``source`` names it in errors.

    ConfigError names a missing or impossible value, UnsupportedError an architecture or option that is not served.
    """
    try:
        config = _build(raw, quantization, generation or {}, tokenizer_eos)
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{source}: {error}") from None
    return config


def _build(
    raw: dict[str, Any], quantization: dict[str, Any] | None, generation: dict[str, Any], tokenizer_eos: int | None
) -> ModelConfig:
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    layers = _size(raw, "num_hidden_layers")
    kv_heads = _size(raw, "num_key_value_heads", _kv_default(raw, family, heads))
    head_size = _size(raw, "head_dim", family.head_size or _even_split(hidden, heads))
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    attention_bias = family.reads_attention_bias and bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=parse_rope(raw, head_size),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        layer_windows=_check_windows(family.windows(raw, layers)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        hidden_act=_choice(raw, "hidden_act", ACTIVATIONS, "silu"),
        dtype=_dtype(raw),
        eos_token_ids=_eos_ids(raw, generation, tokenizer_eos),
        quantization=quantization,
        generation={key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None},
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = names[0] if names else by_type.get(raw.get("model_type", ""), raw.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedError(f"architecture {name!r} is not served; served are {', '.join(FAMILIES)}")
    return str(name)


def _kv_default(raw: dict[str, Any], family: Family, heads: int) -> int:
    """An explicit null means as many as query heads; an absent key means the family's own default."""
    return heads if "num_key_value_heads" in raw or family.num_kv_heads is None else family.num_kv_heads


def _even_split(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no head_dim"
        )
    return hidden // heads


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{key} is {value!r}; it must be a number above 0")
    return float(value)


def _choice(raw: dict[str, Any], key: str, choices: tuple[str, ...], default: str) -> str:
    value = raw.get(key, default)
    if value not in choices:
        raise UnsupportedError(f"{key} is {value!r}; served are {', '.join(choices)}")
    return str(value)


def _dtype(raw: dict[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def _check_windows(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    for window in windows:
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigError(f"sliding_window is {window!r}; it must be a whole number of at least 1, or null")
    return windows


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any], tokenizer_eos: int | None) -> frozenset[int]:
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids.add(int(token_id))
    return frozenset(ids)


def parse_rope(raw: dict[str, Any], head_size: int) -> RopeConfig:
    """Rotary embedding from ``rope_parameters``, or from the older ``rope_theta`` and ``rope_scaling``."""
    options = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in options.values()):
        raise UnsupportedError("rope_parameters differ by layer type, which is not served")
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"rope_type is {kind!r}; served are {', '.join(ROPE_KINDS)}")
    theta = options.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    partial = options.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    rotary = int(head_size * _number({"partial_rotary_factor": partial}, "partial_rotary_factor"))
    if rotary % 2 or not 0 < rotary <= head_size:
        raise ConfigError(f"rotary size is {rotary}; it must be even and at most head_dim {head_size}")
    if kind == "default":
        return RopeConfig(theta=_number({"rope_theta": theta}, "rope_theta"), rotary_size=rotary)
    _check_rope_options(kind, options, raw)
    return RopeConfig(
        theta=_number({"rope_theta": theta}, "rope_theta"), kind=kind, rotary_size=rotary, options=options
    )


def _check_rope_options(kind: str, options: dict[str, Any], raw: dict[str, Any]) -> None:
    """Fill in the pretraining length and check that every number that the kind needs is there."""
    if kind in ("yarn", "llama3"):
        fallback = options.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
        options["original_max_position_embeddings"] = raw.get("original_max_position_embeddings") or fallback
    if kind == "yarn" and options.get("factor") is None:
        options["factor"] = raw["max_position_embeddings"] / options["original_max_position_embeddings"]
    needed = ["factor"] + (["low_freq_factor", "high_freq_factor"] if kind == "llama3" else [])
    for key in needed:
        _number(options, key)
