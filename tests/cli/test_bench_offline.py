"""bench latency and throughput: figures follow from times and sizes that were worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from twofold import cli
from twofold.cli.bench_offline import decode_weight_bytes, kv_bytes_per_token, latency_figures, matmul_operations

# SmolLM2 135M: the sizes that its card gives, counted out.
CONFIG = SimpleNamespace(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=49152,
    tie_word_embeddings=True,
)
MODEL = SimpleNamespace(
    config=CONFIG,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    kv_scales={},
    num_layers=30,
    kv_heads=3,
    head_size=64,
    weight_bytes=134_515_008 * 4,
)


def test_operations_are_two_per_parameter() -> None:
    # All of the model's 134,515,008 parameters but 61 norms of 576 are in matrices.
    assert matmul_operations(CONFIG, 1, 1) == 2 * (134_515_008 - 61 * 576)
    assert matmul_operations(CONFIG, 10, 0) == 20 * (134_515_008 - 61 * 576 - 49152 * 576)


def test_bytes() -> None:
    assert kv_bytes_per_token(MODEL) == 46_080
    assert decode_weight_bytes(MODEL) == 538_060_032
    untied = SimpleNamespace(
        **{**vars(MODEL), "config": SimpleNamespace(**{**vars(CONFIG), "tie_word_embeddings": False})}
    )
    assert decode_weight_bytes(untied) == 538_060_032 - 4 * 49152 * 576


def test_latency_figures() -> None:
    figures = latency_figures(MODEL, prefill=0.5, total=2.5, batch_size=2, input_len=100, output_len=21)
    assert figures["time_to_first_token_ms"] == 500
    assert figures["time_per_output_token_ms"] == pytest.approx(100)
    assert figures["prefill_tokens_per_second"] == pytest.approx(400)
    assert figures["decode_tokens_per_second"] == pytest.approx(20)
    assert figures["output_tokens_per_second"] == pytest.approx(42 / 2.5)
    assert figures["decode_gb_per_second"] == pytest.approx((538_060_032 + 2 * 110.5 * 46_080) / 0.1 / 1e9)
    assert figures["prefill_gflop_per_second"] == pytest.approx(matmul_operations(CONFIG, 200, 2) / 0.5 / 1e9)


def test_one_output_token_has_no_decode_figures() -> None:
    assert "decode_gb_per_second" not in latency_figures(MODEL, 0.5, 0.5, 1, 10, 1)


def test_latency_command(tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "figures.json"
    line = (
        f"bench latency {tiny_model('llama')} --device cpu --batch-size 2 --input-len 20 --output-len 4 --iterations 1"
    )
    assert cli.main([*line.split(), "--json", str(target)]) == 0
    assert "decode GB/s" in capsys.readouterr().out
    figures = json.loads(target.read_text())
    assert figures["batch_size"] == 2 and figures["device"] == "cpu"
    assert figures["decode_gb_per_second"] > 0


def test_throughput_command(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    line = f"bench throughput {tiny_model('llama')} --device cpu --num-prompts 3 --input-len 10 --output-len 5 --json -"
    assert cli.main(line.split()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["total_tokens_per_second"] == pytest.approx(45 / figures["seconds"])


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert cli.main(["bench", "latency", str(tmp_path / "none")]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
