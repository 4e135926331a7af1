"""Every family against transformers: logits within 1e-4 in float32, greedy tokens identical in mixed batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_runner import PagedRunner, greedy_together, load, logits_of
from tiny_models import FAMILIES, judge, judge_greedy, judge_logits

TOLERANCE = 1e-4
SAME_AT_ANY_LENGTH = [family for family in FAMILIES if family != "phi3-longrope"]


def random_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(tiny_model: Callable[..., Path], family: str) -> None:
    directory = tiny_model(family)
    token_ids = random_prompts(1, 1)[0] + [7, 3] * 75
    expected = judge_logits(judge(directory), token_ids)
    torch.testing.assert_close(logits_of(load(directory), token_ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", SAME_AT_ANY_LENGTH)
def test_greedy_tokens_match_transformers_in_a_mixed_batch(tiny_model: Callable[..., Path], family: str) -> None:
    directory = tiny_model(family)
    prompts = random_prompts(32, 70)
    together = greedy_together(load(directory), prompts, 6)
    reference = judge(directory)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens == judge_greedy(reference, prompt, 6)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window", "qwen3", "qwen2-moe", "gemma2", "gemma3"])
def test_chunks_and_batching_do_not_change_logits(tiny_model: Callable[..., Path], family: str) -> None:
    model = load(tiny_model(family))
    one, two = random_prompts(2, 90, seed=3)
    runner = PagedRunner(model, block_size=8)
    parts = [
        runner.step({"one": one[:5]})["one"],
        runner.step({"one": one[5:6], "two": two[:30]})["one"],
        runner.step({"two": two[30:], "one": one[6:]})["one"],
    ]
    torch.testing.assert_close(torch.cat(parts), logits_of(model, one), atol=TOLERANCE, rtol=0)


def test_head_size_and_block_size_need_not_be_powers_of_two(tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model("llama", hidden_size=72, num_attention_heads=6, num_key_value_heads=1)
    token_ids = random_prompts(1, 1)[0] + [9, 4, 1] * 20
    expected = judge_logits(judge(directory), token_ids)
    torch.testing.assert_close(logits_of(load(directory), token_ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_activations(tiny_model: Callable[..., Path], activation: str) -> None:
    directory = tiny_model("llama", hidden_act=activation)
    token_ids = [5, 200, 31, 7, 90] * 4
    expected = judge_logits(judge(directory), token_ids)
    torch.testing.assert_close(logits_of(load(directory), token_ids), expected, atol=TOLERANCE, rtol=0)


class TestLongRope:
    """transformers takes the length of a forward pass, this engine the longest sequence that it serves."""

    @pytest.mark.parametrize(("length", "max_model_len"), [(60, 64), (64, 64), (65, None), (200, None)])
    def test_short_and_long(self, tiny_model: Callable[..., Path], length: int, max_model_len: int | None) -> None:
        directory = tiny_model("phi3-longrope")
        token_ids = [(11 * i * i + 5) % 256 for i in range(length)]
        expected = judge_logits(judge(directory), token_ids)
        model = load(directory, max_model_len=max_model_len)
        torch.testing.assert_close(logits_of(model, token_ids), expected, atol=TOLERANCE, rtol=0)
        runner = PagedRunner(model)
        parts = [runner.step({"a": token_ids[:33]})["a"], runner.step({"a": token_ids[33:]})["a"]]
        torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


class TestDynamicRope:
    """Beyond the trained length the frequencies follow the sequence's length, as transformers computes them."""

    def test_prompt_longer_than_trained(self, tiny_model: Callable[..., Path]) -> None:
        directory = tiny_model("llama-dynamic", max_position_embeddings=64)
        token_ids = random_prompts(1, 1)[0] + [11, 5, 2] * 33
        expected = judge_logits(judge(directory), token_ids)
        model = load(directory, max_model_len=128)
        torch.testing.assert_close(logits_of(model, token_ids), expected, atol=TOLERANCE, rtol=0)

    def test_another_request_does_not_change_a_short_one(self, tiny_model: Callable[..., Path]) -> None:
        directory = tiny_model("llama-dynamic", max_position_embeddings=64)
        model = load(directory, max_model_len=128)
        short, long = [3, 1, 4, 1, 5], [11, 5, 2] * 33
        mixed = PagedRunner(model).step({"long": long, "short": short})
        torch.testing.assert_close(mixed["short"], judge_logits(judge(directory), short), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(mixed["long"], judge_logits(judge(directory), long), atol=TOLERANCE, rtol=0)

    def test_growing_past_the_trained_length_token_by_token(self, tiny_model: Callable[..., Path]) -> None:
        directory = tiny_model("llama-dynamic", max_position_embeddings=64)
        reference, runner = judge(directory), PagedRunner(load(directory, max_model_len=128))
        token_ids, cache = [11, 5, 2, 9] * 20, None
        for start, end in [(0, 60), *((i, i + 1) for i in range(60, 80))]:
            with torch.inference_mode():
                output = reference(torch.tensor([token_ids[start:end]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ours = runner.step({"only": token_ids[start:end]})["only"]
            torch.testing.assert_close(ours, output.logits[0], atol=TOLERANCE, rtol=0)
