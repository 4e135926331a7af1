"""Pages of mapped files: let go when the load is over, and read again when they are used."""

from __future__ import annotations

from pathlib import Path

import torch
from resident_pages import resident_kib
from safetensors.torch import load_file, save_file
from twofold.engine.sources import ModelFiles
from twofold.engine.weights import open_checkpoint
from twofold.engine.weights.file_pages import rows_at_once


def test_mapped_tensors_come_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(600, 512), "b": torch.randn(3)}, path)
    checkpoint = open_checkpoint(ModelFiles("m", tmp_path, "directory"))
    mapped = checkpoint.mapped("a")
    assert mapped is not None
    total = mapped.double().sum()
    assert resident_kib(path) >= 600 * 512 * 4 // 1024
    checkpoint.let_go()
    assert resident_kib(path) == 0
    assert mapped.double().sum() == total
    torch.testing.assert_close(mapped, load_file(path)["a"], rtol=0, atol=0)


def test_rows_at_once_are_whole_panels_or_few() -> None:
    assert rows_at_once(1 << 20, 1024) == 1024
    assert rows_at_once(1 << 20, 9000) == 64
    assert rows_at_once(1 << 20, 100_000) == 10
    assert rows_at_once(1 << 20, 2 << 20) == 1
    assert rows_at_once(1 << 20, 0) == 1 << 20
