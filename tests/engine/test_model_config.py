"""Configs: families, defaults, older and newer spellings, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twofold.engine.hf_config import parse_config
from twofold.engine.model_config import ModelConfig, load_model_config
from twofold.engine.sources import ModelFiles
from twofold.errors import ConfigError, UnsupportedError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def parse(**changes: Any) -> ModelConfig:
    return parse_config({**LLAMA, **changes}, source="config.json")


def test_defaults_of_absent_keys() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_size, config.norm_eps, config.hidden_act) == (4, 16, 1e-6, "silu")
    assert (config.rope.theta, config.rope.kind, config.rope.rotary_size) == (10000.0, "default", 16)
    assert not config.tie_word_embeddings and not config.qkv_bias and config.dtype == "float32"
    assert parse(num_key_value_heads=None).num_kv_heads == 4


def test_family_from_model_type_when_architectures_is_absent() -> None:
    assert parse(architectures=None, model_type="qwen3", num_key_value_heads=2).qk_norm


@pytest.mark.parametrize(
    ("architecture", "extra", "expected"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
        ("Qwen2MoeForCausalLM", {}, (True, False, False, False)),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}, (False, False, False, False)),
        ("OlmoeForCausalLM", {}, (False, False, False, True)),
        ("Gemma3ForCausalLM", {}, (False, False, False, True)),
    ],
)
def test_parts_of_each_family(architecture: str, extra: dict[str, Any], expected: tuple[bool, ...]) -> None:
    config = parse(architectures=[architecture], num_key_value_heads=2, **extra)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    ("architecture", "extra", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None,) * 3 + (8,),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
        (
            "MinistralForCausalLM",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (8, None, 8, None),
        ),
        ("MixtralForCausalLM", {}, (None,) * 4),
        ("MixtralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (8,) * 4),
        (
            "Qwen2MoeForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (8, None, None, None),
        ),
        ("Gemma2ForCausalLM", {}, (4096, None, 4096, None)),
        ("Gemma3ForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
    ],
)
def test_windows_per_layer(architecture: str, extra: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(architectures=[architecture], num_key_value_heads=2, **extra).layer_windows == windows


class TestExperts:
    @pytest.mark.parametrize(
        ("architecture", "expected"),
        [
            ("MixtralForCausalLM", (8, 2, 96, True)),
            ("Qwen2MoeForCausalLM", (60, 4, 1408, False)),
            ("Qwen3MoeForCausalLM", (128, 8, 768, False)),
            ("OlmoeForCausalLM", (64, 8, 96, False)),
        ],
    )
    def test_defaults(self, architecture: str, expected: tuple[object, ...]) -> None:
        experts = parse(architectures=[architecture], num_key_value_heads=2).experts
        assert experts is not None and all(experts.layers)
        assert (experts.num_experts, experts.top_k, experts.intermediate_size, experts.renormalize) == expected

    def test_both_names_of_their_number(self) -> None:
        for key in ("num_experts", "num_local_experts"):
            experts = parse(architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=2, **{key: 12}).experts
            assert experts is not None and experts.num_experts == 12

    def test_which_layers_have_them(self) -> None:
        changes = {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}
        experts = parse(**changes, decoder_sparse_step=2, mlp_only_layers=[3]).experts
        assert experts is not None and experts.layers == (False, True, False, False)
        assert parse(**changes, num_experts=0).experts is None

    def test_more_chosen_than_there_are(self) -> None:
        with pytest.raises(ConfigError, match="num_experts_per_tok is 9, but there are 8 experts"):
            parse(architectures=["MixtralForCausalLM"], num_key_value_heads=2, num_experts_per_tok=9)


class TestGemma:
    def test_what_a_config_of_the_first_generation_leaves_out(self) -> None:
        """google/gemma-2b says hidden_act gelu and means the approximation by tanh."""
        config = parse(architectures=["GemmaForCausalLM"], num_key_value_heads=1, head_dim=256, hidden_act="gelu")
        assert config.hidden_act == "gelu_pytorch_tanh" and config.tie_word_embeddings
        assert (config.norm_offset, config.embedding_scale, config.post_norms) == (1.0, 8.0, False)
        assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)

    def test_defaults_of_the_second(self) -> None:
        config = parse(architectures=["Gemma2ForCausalLM"])
        assert (config.attention_soft_cap, config.logit_soft_cap, config.query_scalar) == (50.0, 30.0, 256.0)
        assert config.post_norms and config.tie_word_embeddings and config.head_size == 256
        off = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        config = parse(architectures=["Gemma2ForCausalLM"], **off)
        assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_theta": 1e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                }
            },
        ],
    )
    def test_two_rotary_embeddings_in_both_spellings(self, changes: dict[str, Any]) -> None:
        config = parse(architectures=["Gemma3ForCausalLM"], **changes)
        assert (config.rope.theta, config.rope.kind, config.rope.options["factor"]) == (1e6, "linear", 8.0)
        assert config.local_rope is not None
        assert (config.local_rope.theta, config.local_rope.kind) == (3e4, "default")

    def test_rotary_embeddings_of_a_config_without_them(self) -> None:
        config = parse(architectures=["Gemma3ForCausalLM"])
        assert config.local_rope is not None and (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)

    def test_float16_is_computed_in_bfloat16(self) -> None:
        """Gemma's activations exceed float16."""
        assert parse(architectures=["Gemma2ForCausalLM"], torch_dtype="float16").dtype == "bfloat16"
        assert parse(torch_dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_scaling": None},
    ],
)
def test_old_and_new_spelling_of_rope(changes: dict[str, Any]) -> None:
    rope = parse(**changes).rope
    assert (rope.theta, rope.kind, rope.options["factor"]) == (5e5, "linear", 2.0)


def test_trained_length_of_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert parse(rope_scaling=yarn).rope.options["original_max_position_embeddings"] == 512
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert parse(rope_scaling=yarn).rope.options["factor"] == 4.0


def test_partial_rotary_factor() -> None:
    assert parse(partial_rotary_factor=0.5).rope.rotary_size == 8
    with pytest.raises(ConfigError, match="rotary size is 3"):
        parse(partial_rotary_factor=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_attention_heads": 3}, "hidden_size 64 is not a multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is None"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor of longrope has 1 numbers; it must have 8",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 0},
            "sliding_window is 0",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types has 1 entries for num_hidden_layers 4",
        ),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert message in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not served; served are LlamaForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "served is causal attention"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["chunked_attention"] * 4,
            },
            "'chunked_attention'",
        ),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse(**changes)
    assert part in str(caught.value)


class TestFolder:
    def test_eos_ids_of_all_three_places(self, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
        raw = json.loads((tiny_model("llama") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 5}))
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7], "temperature": 0.6, "top_k": 20}')
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
        (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 8, "content": "<end>"}]}')
        config = load_model_config(ModelFiles("x", tmp_path, "directory"))
        assert config.eos_token_ids == {5, 6, 7, 8}
        assert config.generation == {"temperature": 0.6, "top_k": 20}

    @pytest.mark.parametrize(("eos", "warned"), [([5, 256], "256"), (255, ""), (None, ""), (-1, "")])
    def test_an_end_beyond_the_vocabulary_is_a_warning(
        self, tiny_model: Callable[..., Path], tmp_path: Path, eos: object, warned: str
    ) -> None:
        raw = json.loads((tiny_model("llama") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": eos, "vocab_size": 256}))
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("twofold").addHandler(handler)
        for _ in range(2):
            load_model_config(ModelFiles("x", tmp_path, "directory"))
        logging.getLogger("twofold").removeHandler(handler)
        found = [message for message in messages if f"eos_token_id {warned} (" in message and "256 tokens" in message]
        assert len(found) == len(messages) == bool(warned)

    def test_older_tools_write_the_quantization_beside_the_config(
        self, tiny_model: Callable[..., Path], tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
        (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
        config = load_model_config(ModelFiles("x", tmp_path, "directory"))
        assert config.quantization == {"bits": 4, "group_size": 32}

    @pytest.mark.parametrize("text", ["{", "[]", ""])
    def test_damaged_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model_config(ModelFiles("x", tmp_path, "directory"))
