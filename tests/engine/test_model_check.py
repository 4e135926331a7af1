"""What is refused before a core starts, and that finding it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twofold.engine.config import EngineConfig
from twofold.engine.text_side import find_model
from twofold.errors import CheckpointError, ConfigError, UnsupportedError

TinyModel = Callable[..., Path]


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    for path in tiny_model("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def find(folder: Path, **options: Any) -> None:
    find_model(EngineConfig(model=str(folder), **options))


def test_a_good_model_passes(folder: Path) -> None:
    find(folder, max_model_len=32, quantize="rtn:4:32")


def test_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read as JSON"):
        find(folder)


def test_generation_config_that_is_no_json(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config.json holds list"):
        find(folder)


def test_unknown_architecture(folder: Path) -> None:
    edit(folder, architectures=["OracleForCausalLM"])
    with pytest.raises(UnsupportedError, match="OracleForCausalLM"):
        find(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        find(folder)


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors is missing"):
        find(folder)


def test_max_model_len(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 999999; this model has positions for"):
        find(folder, max_model_len=999999)


def test_quantize(folder: Path) -> None:
    with pytest.raises(ConfigError, match="METHOD:BITS:GROUP"):
        find(folder, quantize="rtn:four:32")
    edit(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="quantized already"):
        find(folder, quantize="rtn:4:32")


def test_without_torch(folder: Path) -> None:
    code = (
        "import sys; from twofold.engine.config import EngineConfig; from twofold.engine.text_side import find_model\n"
        f"find_model(EngineConfig(model={str(folder)!r}, quantize='rtn:4:32'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
