"""The demo model against transformers: logits, and greedy tokens of 32 prompts served together."""

from __future__ import annotations

import random

import pytest
import torch
from paged_runner import greedy_together, load, logits_of
from smollm2 import smollm2_files, smollm2_judge, transformers_own_reading
from twofold.engine.models import Model
from twofold.engine.tokenizer import load_tokenizer
from twofold.engine.weights import open_checkpoint

TEXT = (
    "The lighthouse keeper wrote in his log on 14 March 1893 that the fog had not lifted for 9 days. Ships passed "
    "unseen; he counted 27 horns by noon. def area(r): return 3.14159 * r ** 2\nWhat is the capital of France? "
    "It is Paris, of course, on the Seine, where 2 102 650 people live. "
    "Il pleut sur la ville, 你好, and so the story begins again.\n"
)
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Model:
    return load(smollm2_files().path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    ids = load_tokenizer(smollm2_files()).encode(TEXT * 3)
    rng = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 40, 100, *(rng.randint(3, 24) for _ in range(25))]
    return [ids[start : start + length] for length in lengths for start in [rng.randrange(len(ids) - length)]]


def test_logits_match_transformers(model: Model, prompts: list[list[int]]) -> None:
    longest = max(prompts, key=len)
    with torch.inference_mode():
        expected = smollm2_judge()(torch.tensor([longest])).logits[0]
    torch.testing.assert_close(logits_of(model, longest), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_match_transformers_in_a_mixed_batch(model: Model, prompts: list[list[int]]) -> None:
    together = greedy_together(model, prompts, NUM_TOKENS, budget=64)
    judge = smollm2_judge()
    for prompt, tokens in zip(prompts, together, strict=True):
        # Each token is the judge's best after all before it, so the whole continuation is the judge's own.
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.slow
def test_weights_are_those_that_transformers_reads() -> None:
    theirs = transformers_own_reading().state_dict()
    checkpoint = open_checkpoint(smollm2_files())
    assert set(theirs) - {"lm_head.weight"} == checkpoint.names
    for name in checkpoint.names:
        assert torch.equal(checkpoint.get(name), theirs[name]), name
