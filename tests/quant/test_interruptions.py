"""Work that a signal ends, kill -9 too, goes on behind its last finished layer with the same bits."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from twofold.cli import main
from twofold.quant import quantize_model
from twofold.quant.export import check_space
from twofold.quant.methods.calibrated import CalibratedLayers
from twofold.quant.tensor_writer import TensorWriter
from twofold.storage import StorageError

TinyModel = Callable[..., Path]
CALIBRATION = ["--calibration-sequences", "8", "--calibration-length", "32"]
# The command, ended by a signal to itself when two layers are done.
SCRIPT = """
import os, sys
from twofold.cli import main
from twofold.quant import progress
class Lines(progress._Lines):
    def __call__(self, done, total):
        super().__call__(done, total)
        if done == 2:
            os.kill(os.getpid(), int(sys.argv[1]))
progress._Lines = Lines
sys.exit(main(sys.argv[2:]))
"""


def run(source: Path, output: Path, method: str, number: int | None = None) -> int:
    words = ["quantize", str(source), "--output", str(output), "--method", method, "--no-card"]
    words += [] if method == "rtn" else CALIBRATION
    if number is None:
        return main(words)
    command = [sys.executable, "-c", SCRIPT, str(number), *words]
    return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """The tensors of a run that nothing interrupted, made once for each method."""
    made: dict[str, dict[str, torch.Tensor]] = {}

    def tensors(method: str) -> dict[str, torch.Tensor]:
        if method not in made:
            folder = tmp_path_factory.mktemp("whole") / "out"
            assert run(tiny_model("llama", num_hidden_layers=3), folder, method) == 0
            made[method] = load_file(folder / "model.safetensors")
        return made[method]

    return tensors


@pytest.mark.parametrize(
    ("method", "number", "code"),
    [
        ("gptq", signal.SIGKILL, -signal.SIGKILL),
        ("smoothquant", signal.SIGTERM, 143),
        ("gptq", signal.SIGINT, 130),
        ("rtn", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signals(
    method: str,
    number: int,
    code: int,
    tiny_model: TinyModel,
    tmp_path: Path,
    whole: Callable[[str], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, output = tiny_model("llama", num_hidden_layers=3), tmp_path / "out"
    expected = whole(method)
    assert run(source, output, method, number) == code
    assert [path.name for path in tmp_path.iterdir()] == [".out-partial"]
    quantized: list[int | None] = []
    original = CalibratedLayers.quantize
    monkeypatch.setattr(
        CalibratedLayers, "quantize", lambda self, plan: (quantized.append(plan.number), original(self, plan))[1]
    )
    assert run(source, output, method) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert quantized == ([] if method == "rtn" else [2])
    written = load_file(output / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_disk_that_fills_up(
    tiny_model: TinyModel,
    tmp_path: Path,
    whole: Callable[[str], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Finished layers stay, and the work goes on behind them once there is room."""
    source, output, expected = tiny_model("llama", num_hidden_layers=3), tmp_path / "out", whole("rtn")
    write = TensorWriter.write

    def full(self: TensorWriter, name: str, tensor: torch.Tensor) -> None:
        if ".layers.2." in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "write", full)
        with pytest.raises(StorageError, match="is full; free some space, or choose a folder on another disk"):
            quantize_model(str(source), "rtn:4:32", output)
    assert [path.name for path in tmp_path.iterdir()] == [".out-partial"]
    with caplog.at_level(logging.INFO):
        quantize_model(str(source), "rtn:4:32", output)
    assert "an interrupted run finished 2 of 3 layers" in caplog.text
    written = load_file(output / "model.safetensors")
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_room_for_what_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on, on a disk that it filled itself."""
    partial = tmp_path / ".out-partial" / "new"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(bytes(1 << 20))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
    check_space(tmp_path / "out", 1 << 20)
    with pytest.raises(StorageError, match=r"needs 2\.1 MB and its disk has 1\.0 MB free"):
        check_space(tmp_path / "out", 2 << 20)
