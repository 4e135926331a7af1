"""Which format a config means, and where the config is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError, ConfigError, UnsupportedError
from twofold.quant.formats import DenseFormat, GPTQFormat, detect_format, read_quantization

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_config_is_dense(nothing: dict[str, object] | None) -> None:
    assert isinstance(detect_format(nothing), DenseFormat)


def test_method_by_name_and_by_keys() -> None:
    assert isinstance(detect_format({**GPTQ, "quant_method": "gptq"}), GPTQFormat)
    assert isinstance(detect_format(GPTQ), GPTQFormat)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"load_in_4bit": True}, "unknown"),
    ],
)
def test_methods_that_are_not_served_are_named(config: dict[str, object], name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}'.*gptq"):
        detect_format(config)


def test_config_json_wins_over_the_side_file(tmp_path: Path) -> None:
    assert read_quantization(tmp_path, {}) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert read_quantization(tmp_path, {}) == GPTQ
    assert read_quantization(tmp_path, {"quantization_config": {"bits": 8}}) == {"bits": 8}


def test_a_broken_side_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"quant_config\.json"):
        read_quantization(tmp_path, {})


def test_older_compressed_tensors_configs(tmp_path: Path) -> None:
    """llm-compressor's first versions called the key by another name and left the method out."""
    old = {"config_groups": {}, "format": "pack-quantized", "ignore": []}
    assert read_quantization(tmp_path, {"compression_config": old}) == old
    assert detect_format(old).name == "compressed-tensors"


def test_codes_without_a_config_are_named() -> None:
    source = StoredTensors({"m.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "n.weight": torch.zeros(4, 4)})
    with pytest.raises(CheckpointError, match=r"m\.weight.*float8_e4m3fn.*no quantization config"):
        DenseFormat().check(source)
    assert DenseFormat().check(StoredTensors({"n.weight": torch.zeros(4, 4)})) == []
