"""Checkpoints that real tools wrote, loaded as a GPU would load them, on the interpreted kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers judges other checkpoints")

from gpu_specs import gpu_spec
from paged_runner import PagedRunner
from real_checkpoints import CHECKPOINTS, folders, reference, row_errors, with_logits
from twofold.engine.config import EngineConfig
from twofold.engine.models import load_model
from twofold.engine.sources import resolve_model
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

NUM_TOKENS = 8
# One of each layout and scheme: the interpreter takes seconds for a model.
FEW = (
    "autoawq-gemm-g128-qwen2",
    "llmcompressor-w4a16-g32-asym-llama-tied",
    "llmcompressor0601-w4a16-g32-asym-actorder-group-llama-tied",
    "llmcompressor-fp8-static-qwen2",
)
ALL = with_logits(folders("*"))
# Its zeros overflow into neighbouring fields: no reading is right.
DAMAGED = ("autogptq-w4-g32-actorder-asym-llama-pos",)
MANY = [path for path in ALL if path.name not in (*FEW, *DAMAGED)]

pytestmark = pytest.mark.skipif(not ALL, reason="no ../shared/checkpoints beside the repository")


# 8-bit weights by the way they are multiplied on a chip.
EIGHT_BIT = (
    ("llmcompressor-fp8-static-qwen2", "gfx942", "triton_8bit"),
    ("llmcompressor-fp8-dynamic-llama-tied", "sm_80", "triton_fp8_emulated"),
    ("llmcompressor-int8-w8a8-asym-llama-tied", "gfx1100", "triton_8bit"),
    ("transformers-fp8block-ue8m0-mistral", "gfx950", "triton_8bit"),
)


def check(folder: Path, arch: str = "sm_90") -> set[str]:
    """Compares stored logits with ours; the kernels chosen for linear layers."""
    kernels = KernelSet(gpu_spec(arch))
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    model = load_model(resolve_model(str(folder)), config, select_platform("cpu"), kernels)
    stored = reference(folder)
    tokens = stored["input_ids"][0, :NUM_TOKENS].tolist()
    actual = PagedRunner(model, num_blocks=4).step({"a": tokens})["a"]
    weight_only = "logits_weights_acts" not in stored
    expected = stored["logits_weights_fp32" if weight_only else "logits_weights_acts"][0, :NUM_TOKENS]
    if weight_only:
        assert row_errors(actual, expected).max().item() < 1e-4
    else:
        assert row_errors(actual, expected).median().item() < 0.03
    return {row["kernel"] for row in kernels.report() if row["op"] == "linear"}


@pytest.mark.parametrize("name", FEW)
def test_each_layout(name: str) -> None:
    assert ("triton_8bit" if "fp8" in name else "triton") in check(CHECKPOINTS / name)


@pytest.mark.parametrize(("name", "arch", "kernel"), EIGHT_BIT[1:3])
def test_eight_bits(name: str, arch: str, kernel: str) -> None:
    assert kernel in check(CHECKPOINTS / name, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "kernel"), EIGHT_BIT)
def test_eight_bits_in_every_way(name: str, arch: str, kernel: str) -> None:
    assert kernel in check(CHECKPOINTS / name, arch)


@pytest.mark.slow
@pytest.mark.parametrize("folder", MANY, ids=lambda path: path.name)
def test_all(folder: Path) -> None:
    check(folder)
