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


def check(folder: Path) -> set[str]:
    """Compares stored logits with ours; the kernels chosen for linear layers."""
    kernels = KernelSet(gpu_spec("sm_90"))
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
    packed = "fp8" not in name
    assert ("triton" if packed else "torch_unpacking_emulated") in check(CHECKPOINTS / name)


@pytest.mark.slow
@pytest.mark.parametrize("folder", MANY, ids=lambda path: path.name)
def test_all(folder: Path) -> None:
    check(folder)
