"""benchmarks/cpu_peers.py with a made-up peer: how it is found, asked, measured in pieces, shown, and found dead."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import twofold

SCRIPT = Path(twofold.__file__).parent / "benchmarks" / "cpu_peers.py"

# Tokens come 10 ms apart, the first after half a second, by its own account.
PEER = """
import json, sys
if sys.argv[1] == "-c":
    sys.exit(print("9.9"))
for line in sys.stdin:
    asked = json.loads(line)["requests"]
    print(json.dumps([
        {"started": 5.0, "arrivals": [5.5 + i / 100 for i in range(row["num_output"])], "tokens": row["prompt"]}
        for row in asked
    ]), flush=True)
    if len(asked) == DEADLY:
        break
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer that knows no word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def run(model: Path, *words: str, deadly: int = 0) -> subprocess.CompletedProcess[str]:
    python = model / "python"
    python.write_text(f"#!{sys.executable}\n" + PEER.replace("DEADLY", str(deadly)))
    python.chmod(0o755)
    (model / "exports" / "tiny").mkdir(parents=True, exist_ok=True)
    (model / "exports" / "tiny" / "openvino_model.xml").touch()
    places = {"OPENVINO_PYTHON": str(python), "OPENVINO_MODELS": str(model / "exports"), "TRANSFORMERS_PYTHON": "false"}
    command = [sys.executable, str(SCRIPT), str(model), "--no-machine", "--threads", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **places}, timeout=240)


def test_figures_follow_from_the_arrivals(model: Path) -> None:
    figures = model / "figures.json"
    words = ["--peers", "openvino:tiny", "--output", str(figures)]
    first = run(model, *words, "--workloads", "w1,w2")
    assert first.returncode == 0, first.stderr
    # 127 tokens in 1.27 s; 1,024 tokens of prompt in half a second.
    assert "| openvino:tiny | 500 | 100.0 | 500 | 2,048 | - |" in first.stdout
    assert "openvino 9.9" in first.stdout

    second = run(model, *words, "--workloads", "w3c8")
    row = next(line for line in second.stdout.splitlines() if line.startswith("| openvino:tiny"))
    assert row.startswith("| openvino:tiny | 500 | 100.0 | 500 | 2,048 |"), "the first piece is kept"
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[7:9] == ["500", "10"]
    assert set(json.loads(figures.read_text())["peers"]["openvino:tiny"]["runs"]) == {"w1", "w2", "w3c8"}
    assert run(model, *words, "--table").stdout == second.stdout


def test_a_peer_that_ends_is_named(model: Path) -> None:
    result = run(model, "--peers", "openvino:tiny", "--workloads", "w4,w4warm", deadly=16)
    assert result.returncode != 0
    assert "openvino:tiny ended" in result.stderr


def test_unknown_rows_are_named_with_the_known_ones(model: Path) -> None:
    result = run(model, "--peers", "vllm")
    assert result.returncode != 0
    assert "not installed: vllm; there are" in result.stderr and "openvino:tiny" in result.stderr
