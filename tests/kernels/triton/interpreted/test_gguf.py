"""A GGUF model that stays quantized, on the interpreted kernels: rows of q and k, packed embedding, tied head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from gpu_specs import gpu_spec
from paged_runner import PagedRunner, load, logits_of
from twofold.engine.config import EngineConfig
from twofold.engine.models import load_model
from twofold.engine.sources import ModelFiles
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

TOKENS = [1, 9, 250, 32, 7]


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_1", "w4g32 offset")])
def test_logits_are_those_of_the_c_kernels(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: str, scheme: str
) -> None:
    path = write_gguf(tiny_model("llama-tied"), tmp_path / "m.gguf", "llama", quantization=kind)
    kernels = KernelSet(gpu_spec("sm_90"))
    config = EngineConfig(model=str(path), device="cpu", dtype="float32")
    model = load_model(ModelFiles("m", path, "gguf"), config, select_platform("cpu"), kernels)
    rows = [row for row in kernels.report() if row["op"] == "linear"]
    assert {row["kernel"] for row in rows} == {"triton"} and {row["scheme"] for row in rows} == {scheme}
    actual = PagedRunner(model, num_blocks=4).step({"a": TOKENS})["a"]
    torch.testing.assert_close(actual, logits_of(load(path), TOKENS), atol=1e-4, rtol=0)
