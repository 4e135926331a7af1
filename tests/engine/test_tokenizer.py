"""Tokenizers of model folders: special tokens, decoding without inventions (B064), one BOS (B065), files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_zoo import EOS, byte_level_tokenizer, metaspace_tokenizer, sample_texts
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from twofold.engine.sources import ModelFiles
from twofold.engine.tokenizer import Tokenizer, load_tokenizer, vocabulary_size
from twofold.errors import CheckpointError, ConfigError

USER = [{"role": "user", "content": "hi"}]


def write(folder: Path, pipeline: Pipeline, **settings: Any) -> Path:
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load(folder: Path, **options: Any) -> Tokenizer:
    return load_tokenizer(ModelFiles(str(folder), folder, "directory"), **options)


def with_bos(adds_bos: bool) -> Pipeline:
    """A byte-level pipeline with <bos>, whose own rule adds it or not."""
    pipeline = byte_level_tokenizer().backend
    pipeline.add_special_tokens([AddedToken("<bos>", special=True, normalized=False)])
    if adds_bos:
        bos = ("<bos>", pipeline.token_to_id("<bos>"))
        pipeline.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return pipeline


@pytest.mark.parametrize("style", ["byte", "llama", "metaspace"])
def test_agrees_with_transformers_and_the_vocabulary(tmp_path: Path, style: str) -> None:
    zoo = byte_level_tokenizer() if style == "byte" else metaspace_tokenizer(style)
    tokenizer = load(write(tmp_path, zoo.backend, eos_token=EOS, clean_up_tokenization_spaces=True))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in sample_texts(60):
        ids = tokenizer.encode(text)
        assert ids == theirs(text).input_ids
        assert tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert [tokenizer.token_bytes(i) for i in range(zoo.vocab_size)] == [
        zoo.token_bytes(i) for i in range(zoo.vocab_size)
    ]
    assert tokenizer.vocab_size == zoo.vocab_size
    assert tokenizer.special_ids == zoo.special_ids
    assert tokenizer.eos_token_id == zoo.backend.token_to_id(EOS)
    assert tokenizer.token_bytes(10**6) == b""


def test_no_spaces_around_added_tokens(tmp_path: Path) -> None:
    pipeline = byte_level_tokenizer().backend
    pipeline.add_special_tokens([AddedToken("<eot>", special=True, normalized=False)])
    tokenizer = load(write(tmp_path, pipeline, eos_token="<eot>"))
    ids = tokenizer.encode("<think>ok</think>1<eot>")
    assert tokenizer.decode(ids) == "<think>ok</think>1"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>ok</think>1<eot>"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
def test_add_bos_token_is_followed(tmp_path: Path, adds_bos: bool, setting: bool | None) -> None:
    settings = {} if setting is None else {"add_bos_token": setting}
    tokenizer = load(write(tmp_path, with_bos(adds_bos), bos_token="<bos>", **settings))
    bos, expected = tokenizer.bos_token_id, adds_bos if setting is None else setting
    assert tokenizer.encode("hi")[:1] == [bos] if expected else bos not in tokenizer.encode("hi")
    assert bos not in tokenizer.encode("hi", add_special_tokens=False)


def test_add_eos_token(tmp_path: Path) -> None:
    settings = {"bos_token": "<bos>", "eos_token": EOS, "add_eos_token": True}
    tokenizer = load(write(tmp_path, with_bos(True), **settings))
    ids = tokenizer.encode("hi")
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize(("template", "count"), [("{{ bos_token }}{{ messages[0].content }}", 1), ("plain", 0)])
def test_chat_has_exactly_the_templates_bos(tmp_path: Path, template: str, count: int) -> None:
    folder = write(tmp_path, with_bos(True), bos_token="<bos>", add_bos_token=True, chat_template=template)
    tokenizer = load(folder)
    ids = tokenizer.encode_chat(USER)
    assert ids.count(tokenizer.bos_token_id) == count
    assert ids == AutoTokenizer.from_pretrained(folder).apply_chat_template(USER, tokenize=True, return_dict=False)
    assert tokenizer.encode("hi").count(tokenizer.bos_token_id) == 1


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    pipeline = byte_level_tokenizer().backend
    index = pipeline.get_vocab_size()
    declared = {"content": "<|call|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    folder = write(tmp_path, pipeline, added_tokens_decoder={str(index): {**declared, "single_word": False}})
    tokenizer = load(folder)
    assert tokenizer.encode("<|call|>") == [index]
    assert index in tokenizer.special_ids and tokenizer.vocab_size == index + 1


def test_ids_with_holes_count_up_to_the_last(tmp_path: Path) -> None:
    pipeline = Pipeline(models.BPE(vocab={"a": 0, "b": 1, "c": 9}, merges=[]))
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.ByteLevel(use_regex=False), decoders.ByteLevel()
    assert load(write(tmp_path, pipeline)).vocab_size == 10
    assert vocabulary_size(ModelFiles("x", tmp_path, "directory")) == 10


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    pipeline = byte_level_tokenizer().backend
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=8)
    tokenizer = load(write(tmp_path, pipeline))
    text = "a much longer text than four tokens"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_files_without_tokenizer_json(tmp_path: Path) -> None:
    zoo = byte_level_tokenizer()
    model = json.loads(zoo.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("old line") == zoo.encode("old line")


def test_no_tokenizer_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load(tmp_path)


def test_save_copies_the_files_as_they_are(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    write(source, with_bos(True), bos_token="<bos>", unknown_key=[1, 2])
    (source / "chat_template.jinja").write_text("x")
    load(source).save(target)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == {
        path.name: path.read_bytes() for path in target.iterdir()
    }
