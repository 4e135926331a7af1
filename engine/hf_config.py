"""From a Hugging Face config dictionary to a ModelConfig: defaults and checks."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import ConfigError, UnsupportedError
from ..log import get_logger
from . import layer_windows
from .config_values import choice, number, size
from .families import FAMILIES, ExpertFamily, Family
from .model_config import ExpertsConfig, ModelConfig
from .rope_config import parse_rope, parse_ropes

logger = get_logger(__name__)

__all__ = ["FAMILIES", "parse_config", "parse_rope"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = ("float32", "float16", "bfloat16")

_CLASSIFIER = "ForSequenceClassification"


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
    beyond = tuple(sorted(token for token in config.eos_token_ids if token >= config.vocab_size))
    if beyond:
        _warn_of_eos(source, beyond, config.vocab_size)
    return config


@functools.cache
def _warn_of_eos(source: str, beyond: tuple[int, ...], vocab_size: int) -> None:
    """Once for each model, however often its config is read."""
    logger.warning(
        "%s: eos_token_id %s (in it, generation_config.json or the tokenizer's files) is beyond the vocabulary of %d "
        "tokens: no answer ends with it. Correct it, or take the files that came with the model",
        source,
        ", ".join(map(str, beyond)),
        vocab_size,
    )


def _build(
    raw: dict[str, Any], quantization: dict[str, Any] | None, generation: dict[str, Any], tokenizer_eos: int | None
) -> ModelConfig:
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    _refuse_variants(raw)
    hidden, heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    layers = size(raw, "num_hidden_layers")
    kv_heads = size(raw, "num_key_value_heads", _kv_default(raw, family, heads))
    head_size = size(raw, "head_dim", family.head_size or _even_split(hidden, heads))
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    attention_bias = family.reads_attention_bias and bool(raw.get("attention_bias", False))
    soft_caps = _soft_caps(raw, family)
    rope, local_rope = parse_ropes(raw, head_size, family.rope_theta, family.local_theta)
    return ModelConfig(
        architecture=architecture,
        vocab_size=size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        norm_eps=number(raw, "rms_norm_eps", family.norm_eps),
        rope=rope,
        local_rope=local_rope,
        max_position_embeddings=size(raw, "max_position_embeddings"),
        layer_windows=layer_windows.check(family.windows(raw, layers)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied)),
        qkv_bias=_qkv_bias(raw, family) or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        joint_qk_norm=family.joint_qk_norm,
        hidden_act=_activation(raw, family),
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        embedding_scale=hidden**0.5 if family.scales_embedding else 1.0,
        query_scalar=_query_scalar(raw, family, head_size),
        attention_soft_cap=soft_caps[0],
        logit_soft_cap=soft_caps[1],
        fused_projections=family.fused_projections,
        experts=None if family.experts is None else _experts(raw, family.experts, layers),
        num_labels=_num_labels(raw),
        dtype=_dtype(raw, family),
        eos_token_ids=_eos_ids(raw, generation, tokenizer_eos),
        quantization=quantization,
        generation={key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None},
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = names[0] if names else by_type.get(raw.get("model_type", ""), raw.get("model_type"))
    if _is_classifier(raw):
        # The same decoder; `num_labels` says that it has another head.
        name = str(name).removesuffix(_CLASSIFIER) + "ForCausalLM"
    if name not in FAMILIES and _is_classifier(raw):
        raise UnsupportedError(
            f"architecture {names[0]!r} is not served: classifiers are served on causal decoders "
            f"({', '.join(known.removesuffix('ForCausalLM') for known in FAMILIES)}), whose last token has seen the "
            "whole text; encoders such as BERT attend in both directions"
        )
    if name not in FAMILIES:
        raise UnsupportedError(f"architecture {name!r} is not served; served are {', '.join(FAMILIES)}")
    return str(name)


def _is_classifier(raw: dict[str, Any]) -> bool:
    return str((raw.get("architectures") or [""])[0]).endswith(_CLASSIFIER)


def _num_labels(raw: dict[str, Any]) -> int:
    """Labels of a classifier, 0 for a language model; configs name the labels, or count them, or mean two."""
    if not _is_classifier(raw):
        return 0
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else int(number(raw, "num_labels", 2))


def _refuse_variants(raw: dict[str, Any]) -> None:
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention is true; served is causal attention")
    if raw.get("clip_qkv") is not None:
        raise UnsupportedError(f"clip_qkv is {raw['clip_qkv']!r}; served are models that do not clip (null)")


def _kv_default(raw: dict[str, Any], family: Family, heads: int) -> int:
    """An explicit null means as many as query heads; an absent key means the family's own default."""
    return heads if "num_key_value_heads" in raw or family.num_kv_heads is None else family.num_kv_heads


def _even_split(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and there is no head_dim"
        )
    return hidden // heads


def _qkv_bias(raw: dict[str, Any], family: Family) -> bool:
    return bool(raw.get("qkv_bias", family.qkv_bias)) if family.reads_qkv_bias else family.qkv_bias


def _activation(raw: dict[str, Any], family: Family) -> str:
    """Gemma's configs call it hidden_activation; its first ones say hidden_act gelu and mean the tanh form of it."""
    if family.activation == "silu":
        return choice(raw, "hidden_act", ACTIVATIONS, "silu")
    if raw.get("hidden_activation") is not None:
        return choice(raw, "hidden_activation", ACTIVATIONS, family.activation)
    name = choice(raw, "hidden_act", ACTIVATIONS, family.activation)
    return family.activation if name == "gelu" else name


def _query_scalar(raw: dict[str, Any], family: Family, head_size: int) -> float:
    if family.query_scalar is None:
        return float(head_size)
    return number(raw, "query_pre_attn_scalar", family.query_scalar)


def _soft_caps(raw: dict[str, Any], family: Family) -> tuple[float, float]:
    """Caps of attention scores and of logits; 0.0 is none."""
    if family.soft_caps is None:
        return 0.0, 0.0
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    values = {key: raw.get(key, default) for key, default in zip(keys, family.soft_caps, strict=True)}
    scores, logits = (0.0 if values[key] is None else number(values, key) for key in keys)
    return scores, logits


def _experts(raw: dict[str, Any], family: ExpertFamily, num_layers: int) -> ExpertsConfig | None:
    stored = raw.get("num_local_experts")
    num_experts = raw.get("num_experts", family.num_experts) if stored is None else stored
    if num_experts == 0:
        return None
    count = size({"num_experts": num_experts}, "num_experts")
    top_k = size(raw, "num_experts_per_tok", family.top_k)
    if top_k > count:
        raise ConfigError(f"num_experts_per_tok is {top_k}, but there are {count} experts")
    renormalize = raw.get("norm_topk_prob", False) if family.renormalizes is None else family.renormalizes
    shared = family.shared_size
    return ExpertsConfig(
        num_experts=count,
        top_k=top_k,
        intermediate_size=size(raw, family.size_key, family.size),
        renormalize=bool(renormalize),
        layers=_expert_layers(raw, num_layers),
        shared_size=None if shared is None else size(raw, "shared_expert_intermediate_size", shared),
        block=family.block,
        projections=family.projections,
    )


def _expert_layers(raw: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every ``decoder_sparse_step``-th but those of ``mlp_only_layers``."""
    plain, step = set(raw.get("mlp_only_layers") or ()), size(raw, "decoder_sparse_step", 1)
    return tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))


def _dtype(raw: dict[str, Any], family: Family) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name == "float16" and family.avoids_float16:
        return "bfloat16"
    return name if name in DTYPES else "float32"


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any], tokenizer_eos: int | None) -> frozenset[int]:
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids.add(int(token_id))
    return frozenset(ids)
