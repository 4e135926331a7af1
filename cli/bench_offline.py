"""Latency and throughput of the offline engine, with the memory and arithmetic rates beside tokens per second."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import fields
from typing import Any

from ..engine.config import EngineConfig
from ..engine.llm import LLM
from ..engine.model_config import ModelConfig
from ..engine.sampling_params import SamplingParams


def linear_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied with: projections, MLP and head, without the embedding's look-up."""
    attention = config.hidden_size * config.head_size * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def kv_bytes_per_token(config: ModelConfig, element_size: int) -> int:
    """Bytes of keys and values that one token keeps in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * element_size


class OfflineBench:
    """One engine and seeded random prompts; no prompt is used twice, so that the prefix cache serves none."""

    def __init__(self, config: EngineConfig) -> None:
        options = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "model"}
        self.llm = LLM(config.model, **options)
        self.rng = random.Random(config.seed)
        self.run(1, 8, 2)

    def run(self, num_prompts: int, input_len: int, output_len: int) -> float:
        """Seconds to complete ``num_prompts`` prompts together, greedily and to the full length."""
        vocabulary = self.llm.info.vocab_size
        prompts = [[self.rng.randrange(vocabulary) for _ in range(input_len)] for _ in range(num_prompts)]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start
