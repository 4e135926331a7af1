"""Loading streams: beside the final weights memory holds one stored tensor at most, never a shard."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import twofold
from safetensors.torch import save_file
from sized_models import build_sized_model
from twofold.engine.config import EngineConfig
from twofold.engine.models import load_model
from twofold.engine.sources import resolve_model
from twofold.engine.weights.safetensors_dir import SafetensorsCheckpoint
from twofold.engine.weights.safetensors_read import MAPPED_BYTES, MAPPED_CHUNK_BYTES
from twofold.errors import CheckpointError
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

ROOT = Path(twofold.__file__).parent
PROGRAM = ROOT / "tests" / "support" / "measure_loading.py"
TinyModel = Callable[..., Path]
# Layers are large beside the slack: the buffer for rows, scales, and what an allocator rounds up or keeps.
SIZES = {"bf16": (2, 1024, 6144), "gptq": (5, 1024, 6144), "fp8": (2, 1024, 6144)}
SLACK = 14 << 20
# What a process grows by holds pages of all that was freed, too, more or less of them by chance.
FREED = 12 << 20
# Rounding at load has a run of rows in float32 beside it, and frees many times as much; its shards have 96 MB.
ROUNDED, FREED_ROUNDED = 2 * MAPPED_CHUNK_BYTES, 48 << 20


@pytest.fixture(scope="module")
def sized_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of two shards, 40 to 100 MB in bf16, gptq or fp8."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            layers, hidden, inner = SIZES[kind]
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = build_sized_model(folder, kind, layers=layers, hidden=hidden, inner=inner, vocab=1024)
        return made[kind]

    return make


def measure(model: Path, small: Path, quantization: str | None) -> dict[str, int]:
    command = [sys.executable, str(PROGRAM), str(model), str(small)]
    command += ["--quantization", quantization] if quantization else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("kind", "quantization"), [("bf16", None), ("bf16", "int8"), ("gptq", None), ("fp8", None)])
def test_peak_memory(
    sized_model: Callable[[str], Path], tiny_model: TinyModel, kind: str, quantization: str | None
) -> None:
    """Never more than the largest stored tensor beside the final weights, in any layer and altogether."""
    folder = sized_model(kind)
    checkpoint = SafetensorsCheckpoint(folder)
    stored = [math.prod(checkpoint.shape(name)) * checkpoint.dtype(name).itemsize for name in checkpoint.names]
    slack, freed = (SLACK + ROUNDED, FREED_ROUNDED) if quantization else (SLACK, FREED)
    # Large pages come by chance, what is held too long comes every time.
    for _ in range(4):
        figures = measure(folder, tiny_model("llama"), quantization)
        most = figures["memory_bytes"] + max(stored) + slack + freed
        if figures["beside"] < max(stored) + slack and figures["grown"] < most:
            break
    else:
        pytest.fail(f"{figures}, but at most {max(stored) + slack} beside and {most} in all")
    assert figures["calls"] >= 4
    assert sum(stored) > 3 * SLACK, "the model must be large beside the slack"


def test_the_benchmark_measures(tiny_model: TinyModel) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "loading.py"), str(tiny_model("llama")), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["file_bytes"] == (tiny_model("llama") / "model.safetensors").stat().st_size
    assert min(figures[name] for name in ("speed", "plain_read_speed", "first_write_speed", "memory_bytes")) > 0


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_large_tensors_come_from_the_mapped_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """In runs of rows and as a whole, at any place of the file; nothing that is done to them reaches it."""
    generator = torch.Generator().manual_seed(5)
    size = 2 * MAPPED_CHUNK_BYTES // dtype.itemsize
    tensors = {
        "before": torch.ones(3, dtype=torch.int8),
        "flat": torch.randint(-99, 99, (size // 700, 700), generator=generator).to(dtype),
        "long": torch.randint(-99, 99, (3, size // 3), generator=generator).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.get(name), expected)
        found = [(first, rows.clone()) for first, rows in checkpoint.rows(name)]
        assert torch.equal(torch.cat([rows for _, rows in found]), expected)
        assert [first for first, _ in found] == [sum(len(rows) for _, rows in found[:i]) for i in range(len(found))]
        checkpoint.get(name).zero_()
        assert torch.equal(checkpoint.get(name), expected)


def test_a_large_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(MAPPED_BYTES)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", MAPPED_BYTES)
    for read in (checkpoint.get, lambda name: list(checkpoint.rows(name))):
        with pytest.raises(CheckpointError, match="cut off while tensor w"):
            read("w")
