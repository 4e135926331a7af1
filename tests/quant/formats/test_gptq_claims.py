"""GPTQ configs that contradict their tensors: an error with both values and the remedy, before numbers go wrong."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from gptq_oracle import encode_linear
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError
from twofold.quant.canonical import CanonicalWeight, dequantize
from twofold.quant.formats import GPTQFormat, gptq_claims

COLUMNS, ROWS = 64, 32


def load(
    *, zeros: int | None = 8, size: int = 16, version: int = 2, shuffled: bool = False, **config: Any
) -> CanonicalWeight:
    """A module of random codes whose config, right by itself, is changed by ``config`` (None: the key is left out)."""
    random = np.random.default_rng(3)
    groups = COLUMNS // size
    g_idx = random.permutation(np.arange(COLUMNS) // size) if shuffled else None
    all_zeros = random.integers(1, 16, (groups, ROWS)) if zeros is None else np.full((groups, ROWS), zeros)
    codes = random.integers(0, 16, (COLUMNS, ROWS))
    scales = random.uniform(0.01, 0.1, (groups, ROWS)).astype(np.float16)
    tensors = encode_linear(codes, all_zeros, scales, g_idx, 4, version)
    right = {"bits": 4, "group_size": size, "desc_act": shuffled, "sym": zeros == 8}
    raw = {**right, "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **config}
    layout = GPTQFormat({key: value for key, value in raw.items() if value is not None})
    source = StoredTensors({f"model.layers.0.mlp.up_proj.{part}": tensor for part, tensor in tensors.items()})
    scheme, shape = layout.stored_scheme(source, "model.layers.0.mlp.up_proj")
    assert shape == (ROWS, COLUMNS) and scheme is not None
    return layout.load(source, "model.layers.0.mlp.up_proj", torch.float32)


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({}, {"bits": 8}, r"up_proj\.qweight in memory .* is 4 bits; the config says bits: 8.*dynamic"),
        ({}, {"group_size": 32}, r"up_proj\.scales in memory has 4 rows, .*group_size 16; .*group_size: 32, 2 rows"),
        ({}, {"group_size": -1}, r"has 4 rows, .*group_size 16; the config says group_size: -1, 1 rows"),
        ({"size": 64}, {"group_size": 16}, r"has 1 rows, .*group_size 64 or -1; .*group_size: 16, 4 rows"),
        ({}, {"group_size": None, "q_group_size": 32}, r"the config says group_size: 32"),
        ({}, {"dynamic": {".*up_proj": {"group_size": 8}}}, r"the config says group_size: 8, 8 rows"),
        ({"zeros": None}, {"sym": True}, r"up_proj\.qzeros in memory holds zeros of .*sym: true.*set sym to false"),
        ({"version": 1}, {"checkpoint_format": "gptq_v2"}, r"zeros of 7; .*set checkpoint_format to 'gptq'"),
        ({"version": 2}, {"checkpoint_format": "gptq"}, r"zeros of 9; .*set checkpoint_format to 'gptq_v2'"),
    ],
)
def test_a_contradiction_is_an_error(tensors: dict[str, Any], config: dict[str, Any], words: str) -> None:
    load(**tensors)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=words):
        load(**tensors, **config)


def test_what_the_config_does_not_say_is_read_from_the_tensors() -> None:
    right = dequantize(load(zeros=None))
    assert torch.equal(dequantize(load(zeros=None, sym=None, desc_act=None)), right)
    assert torch.equal(dequantize(load(zeros=8, sym=False)), dequantize(load(zeros=8)))


def test_a_group_index_out_of_order_is_used_and_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq_claims, "_warned", set())
    with caplog.at_level(logging.WARNING):
        right = dequantize(load(shuffled=True))
        assert not caplog.records
        for _ in range(2):
            assert torch.equal(dequantize(load(shuffled=True, desc_act=False)), right)
    assert [record.getMessage() for record in caplog.records if "desc_act: false" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "up_proj.g_idx in memory" in caplog.text
