"""GGUF's blocks in the canonical layout: bit for bit what llama.cpp's own dequantization (the gguf package) gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_runner import load, logits_of
from torch import Tensor
from twofold.engine.models import Decoder, survey
from twofold.engine.sources import ModelFiles
from twofold.engine.weights import open_checkpoint
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.at_load import load_format
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize
from twofold.quant.formats import DenseFormat
from twofold.quant.formats.gguf import GgufFormat
from twofold.quant.formats.gguf_blocks import BLOCKS
from twofold.quant.scheme import Offset, WeightOnly

# Where each type's float16 numbers lie in a block.
HALVES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
HALVES |= {"Q6_K": [208]}
SCHEMES = {
    "Q4_0": WeightOnly(4, 32),
    "Q4_1": Offset(4, 32),
    "Q5_0": WeightOnly(8, 32),
    "Q5_1": Offset(8, 32),
    "Q8_0": WeightOnly(8, 32),
    "Q4_K": Offset(4, 32),
    "Q5_K": Offset(8, 32),
    "Q6_K": WeightOnly(8, 16),
}
TOKENS = [1, 9, 250, 32, 32, 7] * 6


class Blocks:
    """A matrix of stored blocks as a checkpoint that gives a few rows at a time."""

    names = frozenset({"m.weight"})

    def __init__(self, kind: str, stored: np.ndarray, columns: int) -> None:
        self._kind, self._stored, self._columns = kind, stored, columns

    def has(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape[0], self._columns

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def location(self, name: str) -> str:
        return "model.gguf"

    def get(self, name: str) -> Tensor:
        return torch.from_numpy(
            gguf.dequantize(self._stored, GGMLQuantizationType[self._kind]).reshape(self.shape(name))
        )

    def block_type(self, name: str) -> str:
        return self._kind

    def block_rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self._stored.shape[0], 2):
            yield first, torch.from_numpy(self._stored[first : first + 2].copy())


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Any bytes are codes; the float16 numbers are finite, some of them 0, subnormal, huge or negative."""
    random = np.random.default_rng(seed)
    stored = random.integers(0, 256, (rows * blocks, BLOCKS[kind].block_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        values = random.normal(size=(rows * blocks, 1)) * 10.0 ** random.integers(-8, 4, (rows * blocks, 1))
        stored[:, start : start + 2] = values.astype(np.float16).view(np.uint8)
    return stored.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_weights_are_bit_for_bit_the_dequantized_ones(kind: str, rows: int, blocks: int, seed: int) -> None:
    columns = blocks * (256 if kind.endswith("K") else 32)
    source = Blocks(kind, random_blocks(kind, rows, blocks, seed), columns)
    weight = GgufFormat().load(source, "m", torch.bfloat16)
    assert isinstance(weight, PackedWeight)
    assert (weight.scheme, weight.shape) == GgufFormat().stored_scheme(source, "m")
    if blocks > 1:
        assert weight.scheme == SCHEMES[kind]
    assert torch.equal(dequantize(weight), source.get("m.weight"))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL"])
def test_other_types_are_read_as_float32(kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    stored = np.zeros((3, 256 // block * size), dtype=np.uint8)
    source = Blocks(kind, stored, 256)
    assert GgufFormat().quantized_modules(source) == []
    assert isinstance(GgufFormat().load(source, "m", torch.float32), DenseWeight)


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, Decoder]:
    """The model as it is served, and with every weight dequantized at load."""
    packed = load(path)
    for module in ("twofold.engine.models", "twofold.engine.models.survey"):
        monkeypatch.setattr(f"{module}.load_format", lambda quantization, at_load, source: DenseFormat())
    return packed, load(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_models_give_the_logits_of_their_dequantized_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of q's and k's rows in llama files, biases, the tied head and the packed embedding are all in it."""
    path = write_gguf(tiny_model(family), tmp_path / "m.gguf", family.split("-")[0], quantization=kind)
    packed, plain = both(path, monkeypatch)
    assert packed.memory_bytes < 0.6 * plain.memory_bytes and packed.weight_bytes < 0.5 * plain.weight_bytes
    assert torch.equal(logits_of(packed, TOKENS), logits_of(plain, TOKENS))
    for token in (3, 70):
        assert torch.equal(logits_of(packed, [token]), logits_of(plain, [token]))


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_headers_say_what_loading_takes(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    path = write_gguf(tiny_model(family), tmp_path / "m.gguf", "llama", quantization="Q4_1")
    files, kernels = ModelFiles("m", path, "gguf"), KernelSet(CpuPlatform().spec)
    found, loaded = survey.survey_model(files, kernels, torch.float32, block_size=16), load(path)
    assert found.format_name == "gguf"
    assert (found.model.weight_bytes, found.model.memory_bytes) == (loaded.weight_bytes, loaded.memory_bytes)
    assert {row["scheme"] for row in found.kernels if row["op"] == "linear"} == {"w4g32 offset"}
    assert {row["kernel"] for row in found.kernels if row["op"] == "linear"} == {"c_low_bit_float32"}


def test_quantizing_reads_dequantized_values(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "llama", quantization="Q4_0")
    checkpoint = open_checkpoint(ModelFiles("m", path, "gguf"))
    assert load_format(None, None, checkpoint).name == "gguf"
    at_load = load_format(None, "int8", checkpoint).load(checkpoint, "model.layers.0.mlp.up_proj", torch.float32)
    assert isinstance(at_load, PackedWeight) and at_load.scheme == WeightOnly(8, -1)
    values = checkpoint.get("model.layers.0.mlp.up_proj.weight")
    step = values.abs().amax(dim=1, keepdim=True) / 127
    assert ((dequantize(at_load) - values).abs() <= step * 0.5001).all()
