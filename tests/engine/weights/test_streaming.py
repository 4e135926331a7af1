"""Loading streams: memory holds the final weights and a few matrices, never a shard."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import twofold
from safetensors.torch import load_file, save_file
from twofold.engine.config import EngineConfig
from twofold.engine.models import load_model
from twofold.engine.sources import resolve_model
from twofold.engine.weights.safetensors_dir import SafetensorsCheckpoint
from twofold.errors import CheckpointError
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

ROOT = Path(twofold.__file__).parent
TinyModel = Callable[..., Path]
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
# Besides the final weights: the parts of a fused matrix and their sum, each at most two of the largest tensor, and what
# the allocator keeps of freed memory for a while (for larger tensors it gives everything back at once).
NUM_LARGEST, SLACK = 4, 64 << 20


@pytest.fixture(scope="module")
def sharded(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """226 MB in two shards."""
    folder = tmp_path_factory.mktemp("sharded")
    source = tiny_model("llama", **SIZES)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {}
    for number, file in enumerate(files):
        part = {name: tensors[name].contiguous() for name in names[number::2]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_peak_memory(sharded: Path, tiny_model: TinyModel, quantization: str | None) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "loading.py"), str(sharded), "--device", "cpu"]
    command += ["--warm-up", str(tiny_model("llama")), *(["--quantization", quantization] if quantization else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    largest = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    bound = figures["memory_bytes"] + NUM_LARGEST * largest + SLACK
    assert figures["grown_at_peak"] < bound, figures
    assert figures["file_bytes"] > bound - figures["memory_bytes"], "the files must be larger than the allowance"
    assert figures["speed"] > 0 and figures["plain_read_speed"] > 0


def test_speed_is_logged(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("twofold")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    platform, path = select_platform("cpu"), str(tiny_model("llama"))
    load_model(resolve_model(path), EngineConfig(model=path), platform, KernelSet(platform.spec))
    assert any(line.startswith("read 1 files of") and line.endswith("GB/s") for line in lines)


def test_every_dtype_is_read_as_stored(tmp_path: Path) -> None:
    codes = torch.arange(96, dtype=torch.uint8)
    tensors = {
        str(dtype): codes.view(dtype).clone()
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }  # fmt: skip
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "matrix": torch.randn(5, 7)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, expected in tensors.items():
        found = checkpoint.get(name)
        assert found.dtype is expected.dtype and found.shape == expected.shape
        assert found.flatten().view(torch.uint8).tolist() == expected.flatten().view(torch.uint8).tolist()


def test_a_header_that_contradicts_itself(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(CheckpointError, match=r"tensor w .*\[2, 2\] but has 12 bytes"):
        SafetensorsCheckpoint(tmp_path).get("w")


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"w": torch.randn(64, 64)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(CheckpointError, match="cut off while tensor w"):
        checkpoint.get("w")
