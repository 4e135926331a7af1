"""Masks over logits, unpacked by numpy and on a device, against single bits; and marks of thoughts token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from chain_model import ChainTokenizer
from structured_models import Acceptor, vocabulary_of
from twofold.engine.grammar.masks import TokenMasks, unpack_banned
from twofold.engine.structured_output import ReasoningSpan, StructuredOutput

VOCAB = 75
THINK, END = "<think>", "</think>"


@pytest.mark.parametrize("places", [[0, 1, 2], [2, 0], [1], []])
def test_only_set_bits_remain(places: list[int]) -> None:
    rng = np.random.default_rng(0)
    allowed = rng.random((len(places), VOCAB)) < 0.3
    words = np.zeros((len(places), -(-VOCAB // 32)), dtype=np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    bits = words.view(np.int32)
    logits = torch.randn(3, VOCAB)
    expected = logits.clone()
    for place, row in zip(places, allowed, strict=True):
        expected[place, torch.from_numpy(~row)] = float("-inf")
    TokenMasks(places, bits).apply(logits)
    assert torch.equal(logits, expected)
    assert torch.equal(unpack_banned(torch.from_numpy(bits), VOCAB), torch.from_numpy(~allowed))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Acceptor, ChainTokenizer]:
    folder: Path = tmp_path_factory.mktemp("marks")
    tokenizer = ChainTokenizer([b"k>ay"], [THINK, END])
    tokenizer.save(folder)
    return Acceptor(vocabulary_of(folder), tokenizer.eos), tokenizer


def allowed(setting: tuple[Acceptor, ChainTokenizer], raw: list[bytes | str], **options: object) -> set[int] | None:
    """Ids that may follow these tokens; None: any."""
    acceptor, tokenizer = setting
    span = ReasoningSpan(start="<think>", end="</think>", **options)
    constraint = acceptor.constraint(structured=StructuredOutput(regex="[ab]c"), reasoning=span)
    for piece in raw:
        constraint.advance(tokenizer.id(piece))
    mask = np.zeros(-(-tokenizer.size // 32), dtype=np.int32)
    if not constraint.fill(mask):
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.size]
    return set(np.flatnonzero(bits).tolist())


def test_a_model_may_think_or_answer(setting: tuple[Acceptor, ChainTokenizer]) -> None:
    tokenizer = setting[1]
    think, end, a = tokenizer.id(THINK), tokenizer.id(END), ord("a")
    assert allowed(setting, []) == {a, ord("b"), think}
    assert allowed(setting, [b"a"]) == {ord("c")}
    thinking = allowed(setting, [THINK, b"a"])
    assert thinking == set(range(tokenizer.size)) - {tokenizer.eos}
    assert allowed(setting, [THINK, b"x", END]) == {a, ord("b"), ord("\n")}
    assert allowed(setting, [THINK, END, b"\n", b"\n"]) == {a, ord("b")}
    assert allowed(setting, [THINK, END, b"\n", b"a"]) == {ord("c")}
    assert allowed(setting, [], closed=True) == {a, ord("b")}
    assert allowed(setting, [THINK], budget=0) == {end}
    assert allowed(setting, [b"x"], opened=True, budget=1) == {end}


def test_an_end_that_other_tokens_spell(setting: tuple[Acceptor, ChainTokenizer]) -> None:
    spelled: list[bytes | str] = [bytes([byte]) for byte in b"</thin"] + [b"k>ay"]
    assert allowed(setting, spelled, opened=True) == {ord("a"), ord("b"), ord("\n")}
