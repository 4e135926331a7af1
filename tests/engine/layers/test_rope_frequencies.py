"""Inverse frequencies of each kind against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from twofold.engine.hf_config import parse_rope
from twofold.engine.layers.rope_frequencies import attention_factor, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.7, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 1024},
]


@pytest.mark.parametrize("head_size", [32, 80, 128])
@pytest.mark.parametrize("parameters", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_matches_transformers(parameters: dict[str, Any], head_size: int) -> None:
    options = {"rope_theta": 50000.0, **parameters}
    config = LlamaConfig(head_dim=head_size, max_position_embeddings=1024, rope_parameters=dict(options))
    rope = parse_rope({"rope_parameters": options, "max_position_embeddings": 1024}, head_size)
    for seq_len in (10, 3000):
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=seq_len)
        torch.testing.assert_close(inverse_frequencies(rope, 1024, seq_len), expected, rtol=1e-6, atol=0)
        assert attention_factor(rope) == pytest.approx(factor)
