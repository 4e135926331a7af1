"""The streaming writer, read back by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from twofold.errors import CheckpointError
from twofold.quant.tensor_writer import TensorSpec, TensorWriter

TENSORS = {
    "b": torch.randn(3, 5).half(),
    "a": torch.arange(7, dtype=torch.int32),
    "d": torch.randn(4, 2),
    "c": torch.randn(1, 3).bfloat16(),
    "e": torch.zeros(0, 4),
}


def specs() -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_tensors_in_any_order(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, specs(), 1 << 20) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    save_file(TENSORS, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").stat().st_size == (tmp_path / "library").stat().st_size


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, specs(), 1 << 20) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in TENSORS.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_shards_and_their_index(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, specs(), 60) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 1
    for name, tensor in TENSORS.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_a_forgotten_tensor_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="4 tensors were not written, such as a"),
        TensorWriter(tmp_path, specs(), 1 << 20) as writer,
    ):
        writer.write("b", TENSORS["b"])
