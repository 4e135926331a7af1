"""``twofold serve --strict-kernels`` as a process: native kernels serve, a fallback ends it before a weight is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from real_checkpoints import CHECKPOINTS
from twofold.kernels.cpu.library import unavailable

NATIVE, EMULATED = "autogptq-w4-g32-llama-tied", "llmcompressor-nvfp4-mistral"

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no ../shared/checkpoints beside the repository")


def start(model: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twofold", "serve", str(model), "--strict-kernels", "--port", "0"]
    return subprocess.Popen(
        [*command, "--num-threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, **environment},
    )


def with_unreadable_numbers(folder: Path, copy: Path) -> Path:
    """The model with all of its weights NaN, so that to read one is another error."""
    shutil.copytree(folder, copy)
    file = copy / "model.safetensors"
    os.chmod(copy, 0o755)
    os.chmod(file, 0o644)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as stream:
        stream.seek(header)
        stream.write(b"\xff" * (file.stat().st_size - header))
    return copy


def test_a_fallback_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    """Without a compiler there is no native kernel for it."""
    process = start(with_unreadable_numbers(CHECKPOINTS / EMULATED, tmp_path / "model"), CC="no-such-compiler")
    _, errors = process.communicate(timeout=300)
    last = errors.strip().splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert re.match(r"twofold serve: model\.layers\.0\.\S+_proj is nvfp4 .*--strict-kernels.*would fall back", last), (
        last
    )
    assert "torch_emulated (emulated)" in last and "no-such-compiler" in last and "Leave the option out" in last


@pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")
def test_native_kernels_serve() -> None:
    process = start(CHECKPOINTS / NATIVE)
    try:
        assert process.stdout is not None
        shown = ""
        while not (url := re.search(r"http://127\.0\.0\.1:\d+", shown)):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            shown += line
        report = httpx.get(f"{url.group()}/v1/kernels", timeout=60).json()
        layers = [row for row in report["kernels"] if "layer" in row]
        assert layers and {row["quality"] for row in layers} == {"native"}, json.dumps(layers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
