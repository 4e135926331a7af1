"""Whole models on the Triton kernels, chosen as on a GPU, against the same models on the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers writes the small checkpoints")

from gpu_specs import gpu_spec
from paged_runner import PagedRunner, load
from real_checkpoints import row_errors
from twofold.engine.config import EngineConfig
from twofold.engine.models import Model, load_model
from twofold.engine.sources import resolve_model
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform
from twofold.quant import quantize_model

STEPS = [{"a": [5, 9, 200], "b": [7]}, {"a": [31], "b": [4, 4, 90, 17, 250]}, {"a": [2], "b": [3], "c": [8] * 30}]


def on_triton(path: Path, **options: str) -> tuple[Model, KernelSet]:
    """The model as a GPU would run it, except that the tensors are on the CPU and the interpreter runs the kernels."""
    kernels = KernelSet(gpu_spec("sm_90"))
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", **options)
    return load_model(resolve_model(str(path)), config, select_platform("cpu"), kernels), kernels


def assert_same_logits(path: Path) -> dict[str, str]:
    """Compares three mixed steps; the kernel chosen for each operation."""
    model, kernels = on_triton(path)
    ours, theirs = PagedRunner(model, num_blocks=16), PagedRunner(load(path), num_blocks=16)
    for work in STEPS:
        expected = theirs.step(work)
        for name, logits in ours.step(work).items():
            torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=1e-4)
    return {row["op"]: row["kernel"] for row in kernels.report() if row["op"] != "linear" or "w4" in row["problem"]}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_dense_models(tiny_model: Callable[..., Path], family: str) -> None:
    chosen = assert_same_logits(tiny_model(family, num_hidden_layers=1))
    assert {"rms_norm", "add_rms_norm", "rope", "silu_and_mul", "write_kv", "paged_attention"} <= set(chosen)
    assert set(chosen.values()) == {"triton"}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_cache_in_eight_bits(tiny_model: Callable[..., Path], kind: str) -> None:
    """Both sides write and read codes of their own; one that stands on a tie may differ."""
    path = tiny_model("llama", num_hidden_layers=1)
    model, kernels = on_triton(path, kv_cache_dtype=kind)
    ours, theirs = (PagedRunner(which, num_blocks=16) for which in (model, load(path, kv_cache_dtype=kind)))
    for work in STEPS:
        expected = theirs.step(work)
        for name, logits in ours.step(work).items():
            assert row_errors(logits, expected[name]).median() < 1e-4
    chosen = {row["op"]: (row["kernel"], row["problem"]) for row in kernels.report()}
    kernel, problem = chosen["paged_attention"]
    assert kernel == "triton" and f"cache {'int8' if kind == 'int8' else 'float8_e4m3fn'}" in problem


@pytest.mark.parametrize("spec", ["rtn:4:32", "rtn:4:32:sym"])
def test_quantized_model(tiny_model: Callable[..., Path], tmp_path: Path, spec: str) -> None:
    quantize_model(str(tiny_model("llama", num_hidden_layers=1)), spec, tmp_path / "quantized")
    assert assert_same_logits(tmp_path / "quantized")["linear"] == "triton"
