"""SmolLM2's tokenizer, rebuilt from GGUF metadata, against its definition and against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from plain_bpe import PlainBpe
from smollm2 import smollm2_files
from twofold.engine.sources import ModelFiles
from twofold.engine.tokenizer import Tokenizer, load_tokenizer

WORDS = (
    "In 1984 the price of 12,345.67 fell by 3% to $9.99; call +44-20-7946-0958.",
    "pi=3.14159265, e=2.71828 and 0x1F or 1e-05",
    "version 4.4.7 (2026.11.19), pages 100-250, year2000 bug, 2nd 3rd 44th",
    "def f(x1, y2):\n    return x1**2 + y2 // 10  # 42\n",
    "½ cup, x² + y³, №5, Ⅳ and ٣٤٥ 六七八",
    "it's we've they'll I'm he'd 's 't ' re",
    "naïve façade, 你好世界 2024年, ñandú 😀👨‍👩‍👧 1️⃣",
    "  lead  double   triple\t\ttab \r\n\r\n\n end  ",
    "1 22 333 4444 55555",
    "\u00a0nbsp\u200bzero\u3000wide",
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return smollm2_files()


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return load_tokenizer(files)


def random_texts(count: int) -> list[str]:
    rng = random.Random(1)
    pieces = [piece for text in WORDS for piece in text.split(" ")] + [" ", "  ", "\n", "7", "42", "1999", " 3", ".5"]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 25))) for _ in range(count)]


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.encode("12345")] == ["1", "2", "3", "4", "5"]
    assert [tokenizer.token_text(i) for i in tokenizer.encode(" 12")] == [" ", "1", "2"]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("in 2024,")] == ["in", " ", "2", "0", "2", "4", ","]


def test_ids_follow_the_definition(files: ModelFiles, tokenizer: Tokenizer) -> None:
    plain = PlainBpe(files.path)
    for text in [*WORDS, *random_texts(150)]:
        ids = tokenizer.encode(text)
        assert ids == plain.encode(text), text
        assert tokenizer.decode(ids) == text


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in [*WORDS, *random_texts(30)]:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_control_tokens_are_matched_whole_and_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert {1, 2} <= tokenizer.special_ids
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_properties_follow_the_metadata(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.encode("") == []
    assert tokenizer.max_token_length == max(len(tokenizer.token_bytes(i)) for i in range(49152))


def test_chat_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "Hi 5"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 5<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi 5"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi 5<|im_end|>\n<|im_start|>assistant\n"
    )


def test_saved_files_give_transformers_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    again = load_tokenizer(ModelFiles("saved", tmp_path, "directory"))
    messages = [{"role": "user", "content": "1 and 23"}]
    for text in [*WORDS, *random_texts(40)]:
        assert tokenizer.encode(text) == theirs(text).input_ids == again.encode(text)
    assert again.render_chat(messages) == tokenizer.render_chat(messages)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == again.render_chat(
        messages
    )
