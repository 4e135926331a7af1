"""The script for machines with a GPU: its parts work on a CPU, and without the server's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import twofold

ROOT = Path(twofold.__file__).parent
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"starlette", "uvicorn", "uvloop", "httptools", "msgspec", "zmq"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
"""
MODULES = (
    "cli.bench_offline",
    "cli.bench_kernels",
    "cli.doctor",
    "cli.tune",
    "engine.core.engine_core",
    "engine.models",
    "engine.weights.loader",
    "kernels.benchmark",
    "kernels.triton.tune",
    "kernels.triton.static_cost",
    "quant.at_load",
)


@pytest.fixture
def without_server(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python finds none of the server's packages."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def test_nothing_of_the_server_is_imported(without_server: dict[str, str]) -> None:
    code = "\n".join(f"import twofold.{name}" for name in MODULES)
    code += "\ntry:\n    import msgspec\nexcept ImportError:\n    print('blocked')"
    result = subprocess.run([sys.executable, "-c", code], env=without_server, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "blocked\n"), result.stderr


def test_the_engine_runs_with_random_weights(without_server: dict[str, str]) -> None:
    words = ["--model", "tiny", "--device", "cpu", "--engine", "int4", "--batch-sizes", "2"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks/random_engine.py"),
        *words,
        "--input-len",
        "8",
        "--output-len",
        "3",
    ]
    result = subprocess.run(command, env=without_server, capture_output=True, text=True)
    (row,) = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert row["engine"] == "int4" and row["decode_tokens_per_second"] > 0, result.stderr


def measurement(**fields: object) -> dict[str, object]:
    row = {"op": "linear", "label": "w4", "kernel": "triton", "quality": "native", "seconds": None, "note": "",
           "bytes_per_second": 0.0, "operations_per_second": 0.0, "bound": 0.0, "peer": None,
           "failed": False}  # fmt: skip
    return {**row, **fields}


def table(tmp_path: Path, rows: list[dict[str, object]], runs: list[dict[str, object]]) -> tuple[int, str]:
    kernels, engine = tmp_path / "kernels.json", tmp_path / "engine.jsonl"
    kernels.write_text(json.dumps({"device": "a GPU", "copy": 2e12, "product": 5e14, "complete": False, "rows": rows}))
    engine.write_text("\n".join(map(json.dumps, runs)))
    command = [sys.executable, str(ROOT / "benchmarks/gpu_table.py"), str(kernels), str(engine)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert not result.stderr
    return result.returncode, result.stdout


def test_the_table_has_the_chosen_kernel_and_the_ratios(tmp_path: Path) -> None:
    timed = measurement(seconds=2e-5, bytes_per_second=1.5e12, bound=0.75, peer=3.0, note="torch: dense linear")
    rows = [
        measurement(note="refused"),
        timed,
        measurement(kernel="torch", seconds=1e-4),
        measurement(note="no time left"),
    ]
    runs = [
        {"engine": name, "batch_size": 1, "prefill_tokens_per_second": speed, "decode_tokens_per_second": 2 * speed}
        for name, speed in (("transformers", 100.0), ("int4", 250.0))
    ]
    code, text = table(tmp_path, rows, runs)
    assert code == 0
    assert "a GPU: copy 2000 GB/s, matrix product 500.0 TFLOP/s" in text
    assert "| linear w4 | triton | 20.0 | 1500 | 0.00 | 75 % | 3.00x dense linear |" in text
    assert "| linear w4 | torch" not in text
    assert "| decode, 1 requests | int4 | 500 |  |  |  | 2.50x |" in text
    assert "the kernels' time was over" in text


def test_failed_kernels_and_engines_are_named(tmp_path: Path) -> None:
    rows = [measurement(note="OutOfMemoryError: too large", failed=True), measurement(kernel="torch", seconds=1e-4)]
    code, text = table(tmp_path, rows, [{"engine": "fp8", "error": "no time left"}])
    assert code == 1
    assert "linear w4 triton: OutOfMemoryError: too large" in text and "engine fp8: no time left" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_script_on_a_cpu(without_server: dict[str, str]) -> None:
    command = ["bash", str(ROOT / "benchmarks/gpu_check.sh"), "--smoke"]
    result = subprocess.run(command, env=without_server, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "| rms_norm 4x256 |" in result.stdout and "| decode, 2 requests | fp8 |" in result.stdout
