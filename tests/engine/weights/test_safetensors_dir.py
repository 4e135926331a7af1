"""Folders of safetensors: single, sharded, damaged (B032)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from twofold.engine.sources import ModelFiles
from twofold.engine.weights import open_checkpoint
from twofold.engine.weights.checkpoint import Checkpoint
from twofold.errors import CheckpointError

TENSORS = {f"layer.{index}.weight": torch.full((4, 3), float(index)) for index in range(4)}
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def open_folder(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(str(path), path, "directory"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = list(TENSORS)
    parts = {SHARDS[0]: names[:2], SHARDS[1]: names[2:]}
    for file, members in parts.items():
        save_file({name: TENSORS[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_shards_read_as_one(sharded: Path) -> None:
    checkpoint = open_folder(sharded)
    assert checkpoint.names == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == ((4, 3), torch.float32)
        assert torch.equal(checkpoint.get(name), tensor)


def test_used_and_unused(sharded: Path) -> None:
    checkpoint = open_folder(sharded)
    checkpoint.get("layer.1.weight")
    assert checkpoint.unused() == ["layer.0.weight", "layer.2.weight", "layer.3.weight"]


def test_files_of_any_name_without_an_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "gptq_model-4bit-32g.safetensors")
    assert open_folder(tmp_path).names == set(TENSORS)


def test_missing_shard_names_file_and_tensor(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is missing.*layer\.2\.weight"):
        open_folder(sharded)


@pytest.mark.parametrize("keep", [0, 5, 40, -4])
def test_truncated_shard_names_the_file(sharded: Path, keep: int) -> None:
    shard = sharded / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=SHARDS[1]) as caught:
        open_folder(sharded)
    if keep == -4:
        assert "layer.3.weight" in str(caught.value)


def test_old_index_naming_a_shard_that_is_gone(sharded: Path) -> None:
    save_file({name: TENSORS[name] for name in list(TENSORS)[2:]}, sharded / "other.safetensors")
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        open_folder(sharded)


def test_tensor_that_is_not_in_its_shard(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["layer.9.weight"] = SHARDS[0]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"layer\.9\.weight"):
        open_folder(sharded)


def test_complete_single_file_beats_a_stale_index(sharded: Path) -> None:
    newer = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(newer, sharded / "model.safetensors")
    assert torch.equal(open_folder(sharded).get("layer.3.weight"), newer["layer.3.weight"])


def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    save_file({"layer.0.weight": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"layer\.0\.weight is in both"):
        open_folder(tmp_path)


def test_missing_tensor_and_missing_weights(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(CheckpointError, match=r"layer\.7\.weight is missing"):
        open_folder(sharded).get("layer.7.weight")
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        open_folder(empty)


def write_header(path: Path, header: str, data: int) -> None:
    raw = header.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))


ROW = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"w": {ROW}, "w": {ROW}}}', "tensor w is twice in the header"),
        (f'{{"w": {ROW}, "v": {ROW}}}', "tensors w and v in .* share bytes"),
        ('{"w": {"dtype": "F32", "shape": [2]}}', "does not say where tensor w lies"),
        ('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', "tensor w .* at bytes .*damaged"),
        ('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}', "tensor w .* at bytes .*damaged"),
        ('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}', r"cut off .*tensor w"),
    ],
)
def test_damaged_headers_name_file_and_tensor(tmp_path: Path, header: str, message: str) -> None:
    write_header(tmp_path / "model.safetensors", header, 8)
    with pytest.raises(CheckpointError, match=message) as refused:
        open_folder(tmp_path)
    assert "model.safetensors" in str(refused.value)


def test_a_mapped_tensor_is_the_file_itself(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.randn(37, 5) for index in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_folder(tmp_path)
    mapped = checkpoint.mapped("t1")
    assert mapped is not None
    assert torch.equal(mapped, tensors["t1"])
    assert checkpoint.taken == {"t1"}
    mapped.zero_()
    assert torch.equal(checkpoint.get("t1"), tensors["t1"]), "writing to it leaves the file as it is"


def test_a_tensor_that_lies_askew_is_not_mapped(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(9))
    checkpoint = open_folder(tmp_path)
    assert checkpoint.mapped("x") is None
    assert not checkpoint.taken
    assert torch.equal(checkpoint.get("x"), torch.zeros(2))
