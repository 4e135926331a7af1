"""GGUF files written from tiny checkpoints: same config, same weights, same logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter, dequantize, quantize
from gguf_files import permute, write_gguf
from paged_runner import load, logits_of
from resident_pages import resident_kib
from safetensors.torch import load_file
from tiny_models import judge, judge_logits
from twofold.engine.model_config import load_model_config, raw_config
from twofold.engine.sources import ModelFiles
from twofold.engine.weights import open_checkpoint
from twofold.engine.weights.gguf_checkpoint import unpermute
from twofold.engine.weights.gguf_file import GgufFile, open_gguf
from twofold.engine.weights.gguf_rope import _llama3_divisors
from twofold.errors import CheckpointError, UnsupportedError

TinyModel = Callable[..., Path]
TOKENS = [1, 9, 250, 32, 32, 7] * 6


def files_of(path: Path) -> ModelFiles:
    return ModelFiles(path.name, path, "gguf")


@pytest.mark.parametrize(
    ("family", "arch"),
    [("llama", "llama"), ("llama-tied", "llama"), ("llama-bias", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_logits_match_transformers_on_the_original(
    tiny_model: TinyModel, tmp_path: Path, family: str, arch: str
) -> None:
    directory = tiny_model(family)
    path = write_gguf(directory, tmp_path / "model.gguf", arch)
    expected = judge_logits(judge(directory), TOKENS)
    torch.testing.assert_close(logits_of(load(path), TOKENS), expected, atol=1e-4, rtol=0)


def test_sliding_window_of_a_llama_file_is_mistrals(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("mistral")
    path = write_gguf(directory, tmp_path / "model.gguf", "llama", attention__sliding_window=24)
    expected = judge_logits(judge(directory), TOKENS)
    torch.testing.assert_close(logits_of(load(path), TOKENS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        ("llama-linear", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
        (
            "llama-yarn",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 128,
            },
        ),
    ],
)
def test_rope_scaling(tiny_model: TinyModel, tmp_path: Path, family: str, metadata: dict[str, object]) -> None:
    directory = tiny_model(family)
    path = write_gguf(directory, tmp_path / "model.gguf", "llama", **metadata)
    expected = judge_logits(judge(directory), TOKENS)
    torch.testing.assert_close(logits_of(load(path), TOKENS), expected, atol=1e-4, rtol=0)


def test_config_is_that_of_the_original(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("llama")
    path = write_gguf(directory, tmp_path / "model.gguf", "llama")
    ours = load_model_config(files_of(path))
    theirs = load_model_config(ModelFiles("x", directory, "directory"))
    for field in ("architecture", "vocab_size", "num_kv_heads", "head_size", "norm_eps", "rope", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.eos_token_ids == {256}
    assert raw_config(files_of(path))["eos_token_id"] == 256


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_tensors_are_what_the_gguf_package_says(
    tiny_model: TinyModel, tmp_path: Path, quantization: str
) -> None:
    directory = tiny_model("qwen2")
    checkpoint = open_checkpoint(
        files_of(write_gguf(directory, tmp_path / "m.gguf", "qwen2", quantization=quantization))
    )
    original = load_file(directory / "model.safetensors")
    assert checkpoint.names == set(original)
    kind = GGMLQuantizationType[quantization]
    for name, tensor in original.items():
        expected = tensor.numpy()
        if tensor.dim() == 2:
            expected = dequantize(quantize(expected, kind), kind).reshape(expected.shape)
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert np.array_equal(checkpoint.get(name).numpy(), expected)
    assert checkpoint.unused() == []


def test_tensors_may_be_written_to(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    before = path.read_bytes()
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        open_checkpoint(files_of(path)).get(name).fill_(3.0)
    assert path.read_bytes() == before


def test_unpermute_undoes_llama_cpp() -> None:
    weight = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32)
    assert np.array_equal(unpermute(permute(weight, 3), 3), weight)
    assert np.array_equal(unpermute(permute(weight[:, 0], 3), 3), weight[:, 0])


def test_llama3_divisors_match_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    np.testing.assert_allclose(_llama3_divisors(500000.0, 64, 32.0), (plain / scaled).numpy(), rtol=1e-4)


def test_cut_off_file_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "short.gguf", "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        open_checkpoint(files_of(path))
    path.write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        open_checkpoint(files_of(path))


@pytest.mark.parametrize("part", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_cut_off_anywhere_in_plain_words(tiny_model: TinyModel, tmp_path: Path, part: float) -> None:
    target = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    size = int(target.stat().st_size * part)
    with target.open("r+b") as stream:
        stream.truncate(size)
    with pytest.raises(CheckpointError) as refused:
        open_gguf(target)
    words = ("is not a GGUF file" if size < 4 else "cut off", "fetch", str(target), str(size))
    assert all(word in str(refused.value) for word in words)
    if part > 0.1:
        assert re.search(r"tensor (blk|token_embd|output)\S* and \d+ more cannot|tensor \S+ cannot", str(refused.value))


def edit_tensor(source: Path, name: str, *, kind: int | None = None, offset: int | None = None, to: str = "") -> Path:
    """The file with another type, place or name in a matrix's line of the header."""
    raw = bytearray(source.read_bytes())
    end = raw.index(name.encode()) + len(name)
    if to:
        raw[end - len(name) : end] = to.encode()
    for place, width, value in ((end + 20, 4, kind), (end + 24, 8, offset)):
        if value is not None:
            raw[place : place + width] = value.to_bytes(width, "little")
    source.write_bytes(raw)
    return source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": 1}, r"attn_q\.weight .*leave \d+ bytes between"),  # F16 in the place of F32
        ({"kind": 28}, r"attn_q\.weight .*share bytes"),  # F64
        ({"kind": 12}, r"attn_q\.weight .* in Q4_K, whose blocks of 256"),
        ({"kind": 99}, r"attn_q\.weight .*unknown type number 99.*Q8_0"),
        ({"offset": 0}, r"attn_q\.weight .*share bytes"),
        ({"offset": 33}, r"attn_q\.weight .*at byte 33 .*alignment 32"),
        ({"offset": 1 << 50}, r"attn_q\.weight cannot be read: fetch"),
        ({"to": "blk.1.attn_q.weight"}, r"blk\.1\.attn_q\.weight is twice"),
    ],
)
def test_tensors_that_lie_wrong(tiny_model: TinyModel, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    target = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    open_gguf(edit_tensor(target, "blk.0.attn_q.weight", offset=None))
    edit_tensor(target, "blk.0.attn_q.weight", **change)
    with pytest.raises((CheckpointError, UnsupportedError), match=words):
        GgufFile(target)


def test_another_version_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    target = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    raw = bytearray(target.read_bytes())
    raw[4] = 99
    target.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"GGUF version 99; read are 2, 3\."):
        open_gguf(target)


def test_more_layers_than_the_block_count(tiny_model: TinyModel, tmp_path: Path) -> None:
    target = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "llama")
    raw = bytearray(target.read_bytes())
    place = raw.index(b"llama.block_count") + len("llama.block_count") + 4
    raw[place : place + 4] = (1).to_bytes(4, "little")
    target.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..*beyond the 1 .*block_count"):
        load(target)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"<html>not found</html>")
    with pytest.raises(CheckpointError, match=r"is not a GGUF file: it begins with b'<htm' \(22 bytes\)"):
        open_gguf(target)


def test_what_is_not_served_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="'falcon'"):
        load_model_config(files_of(write_gguf(directory, tmp_path / "a.gguf", "falcon")))
    with pytest.raises(UnsupportedError, match="mixture of experts"):
        load_model_config(files_of(write_gguf(directory, tmp_path / "b.gguf", "llama", expert_count=8)))
    with pytest.raises(UnsupportedError, match="rope scaling 'longrope'"):
        odd = {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}
        load_model_config(files_of(write_gguf(directory, tmp_path / "c.gguf", "llama", **odd)))


@pytest.mark.parametrize("endian", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_metadata_is_what_the_package_reads(tmp_path: Path, endian: GGUFEndian) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(str(path), "llama", endianess=endian)
    writer.add_array("some.tokens", ["a", "", "ein längeres Wort", "\u2581x"])
    writer.add_array("some.scores", [0.5, -2.0, 3.25])
    writer.add_array("some.types", [1, 3, 1])
    writer.add_string("some.text", "hello")
    writer.add_bool("some.flag", True)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = GGUFReader(path)
    file = GgufFile(path)
    assert file.keys == list(expected.fields)
    assert {key: file.value(key) for key in file.keys} == {
        key: field.contents() for key, field in expected.fields.items()
    }
    assert file.value("some.tokens") == ["a", "", "ein längeres Wort", "\u2581x"]
    assert file.value("some.scores") == [0.5, -2.0, 3.25]
    assert file.value("some.nothing", 7) == 7


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0"])
def test_rows_in_runs_are_the_whole_tensor(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr("twofold.engine.weights.gguf_checkpoint.CHUNK_BYTES", 4096)
    checkpoint = open_checkpoint(
        files_of(write_gguf(tiny_model("llama"), tmp_path / "model.gguf", "llama", quantization=quantization))
    )
    for name in sorted(checkpoint.names):
        runs = list(checkpoint.rows(name))
        assert [first for first, _ in runs] == [
            sum(len(rows) for _, rows in runs[:index]) for index in range(len(runs))
        ]
        torch.testing.assert_close(torch.cat([rows for _, rows in runs]), checkpoint.get(name), rtol=0, atol=0)
    assert len(list(checkpoint.rows("model.embed_tokens.weight"))) > 1


def test_pages_that_were_used_leave_the_process_and_come_back(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", "llama")
    file = GgufFile(path)
    name = max(file.tensors, key=lambda name: file.tensors[name].n_bytes)
    before = file.read(name)
    assert resident_kib(path) > 0
    file.let_go_all()
    assert resident_kib(path) == 0
    np.testing.assert_array_equal(file.read(name), before)


def test_a_loaded_model_holds_no_page_of_its_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama-tied"), tmp_path / "model.gguf", "llama", quantization="Q8_0")
    model = load(path)
    assert model.memory_bytes > 0 and resident_kib(path) == 0
