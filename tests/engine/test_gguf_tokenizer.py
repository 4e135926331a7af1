"""Vocabularies of GGUF files of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chain_model import byte_alphabet
from gguf_files import write_vocabulary
from tokenizer_zoo import sample_texts
from twofold.engine.gguf_tokenizer import SPLITS
from twofold.engine.sources import ModelFiles
from twofold.engine.tokenizer import Tokenizer, load_tokenizer
from twofold.errors import UnsupportedError


def load_vocabulary(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(path.name, path, "gguf"))


def byte_level(target: Path, pre: str, merges: list[str], **extra: object) -> Tokenizer:
    tokens = [*byte_alphabet().values(), *(merge.replace(" ", "") for merge in merges), "<s>", "<think>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()},
    }
    return load_vocabulary(write_vocabulary(target / f"{pre}.gguf", values, tokens))


def pieces(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.token_text(index) for index in tokenizer.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "numbers"), [("gpt-2", ["123", "4"]), ("smollm", list("1234")), ("qwen2", list("1234"))]
)
def test_digits_are_split_as_the_pre_tokenizer_says(tmp_path: Path, pre: str, numbers: list[str]) -> None:
    tokenizer = byte_level(tmp_path, pre, ["1 2", "12 3", "3 4"])
    assert pieces(tokenizer, "1234") == numbers


def test_llama3_groups_of_three_and_whole_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "llama-bpe", ["1 2", "12 3", "3 4", "34 5"])
    assert pieces(tokenizer, "1234", add_special_tokens=False) == ["123", "4"]
    assert pieces(tokenizer, "345", add_special_tokens=False) == ["345"]
    assert pieces(tokenizer, "1")[0] == "<s>"
    silent = byte_level(tmp_path, "llama-bpe", ["1 2"], ggml__add_bos_token=False)
    assert pieces(silent, "1") == ["1"]


@pytest.mark.parametrize("pre", SPLITS)
def test_every_text_comes_back(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(tmp_path, pre, ["t h", "th e", "Ġ a"])
    for text in sample_texts(40):
        if pre not in ("qwen2", "deepseek-r1-qwen"):  # these normalize
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2", ["t h"])
    ids = tokenizer.encode("<think>1<s>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "<think>1"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>1<s>"


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'viking'"):
        byte_level(tmp_path, "viking", [])
    path = write_vocabulary(tmp_path / "t5.gguf", {"tokenizer.ggml.model": "t5"}, ["a"])
    with pytest.raises(UnsupportedError, match="'t5'"):
        load_vocabulary(path)


def test_named_chat_templates(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2", ["t h"], chat_template="plain", chat_template__tool_use="with tools")
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "with tools"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real SentencePiece BPE with byte fallback, trained here."""
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(sample_texts(300, seed=5)) + "\nthe cat sat on the mat with the other cats\n" * 20)
    library.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "spm"),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def test_sentencepiece_vocabulary_matches_sentencepiece(sentencepiece: Any, tmp_path: Path) -> None:
    size = sentencepiece.vocab_size()
    types = [6 if sentencepiece.is_byte(i) else 2 if i == 0 else 3 if i < 3 else 1 for i in range(size)]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [sentencepiece.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokens = [sentencepiece.id_to_piece(i) for i in range(size)]
    tokenizer = load_vocabulary(write_vocabulary(tmp_path / "spm.gguf", values, tokens))
    for text in ["the cat sat", "mats, 你好 😀!", "  two spaces", "x\ny", *sample_texts(60)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sentencepiece.encode(text), text
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == sentencepiece.decode(ids)
    assert tokenizer.token_bytes(tokenizer.encode("é", add_special_tokens=False)[-1])[-1:] == "é".encode()[-1:]
