"""Pickled checkpoints: refused in plain words, and read as tensors alone when asked for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_runner import load, logits_of
from safetensors.torch import load_file
from twofold.cli import main
from twofold.engine.config import EngineConfig
from twofold.engine.model_check import check_model
from twofold.engine.models import Decoder, load_model
from twofold.engine.sources import resolve_model
from twofold.errors import CheckpointError
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

TOKENS = [5, 80, 255, 7]


@pytest.fixture
def pickled(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny model in two pickled shards with an index."""
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    folder = tmp_path / "model"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load_pickled(folder: Path) -> Decoder:
    platform, name = select_platform("cpu"), str(folder)
    config = EngineConfig(model=name, allow_pickle=True)
    check_model(resolve_model(name), config)
    model = load_model(resolve_model(name), config, platform, KernelSet(platform.spec))
    assert isinstance(model, Decoder)
    return model


def test_refused_unless_asked_for(pickled: Path) -> None:
    for refusing in (lambda: load(pickled), lambda: check_model(resolve_model(str(pickled)), EngineConfig(model="m"))):
        with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin, a pickle.*--allow-pickle"):
            refusing()


def test_same_logits_when_asked_for(pickled: Path, tiny_model: Callable[..., Path]) -> None:
    assert torch.equal(logits_of(load_pickled(pickled), TOKENS), logits_of(load(tiny_model("llama")), TOKENS))


def test_missing_shard(pickled: Path) -> None:
    (pickled / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        load_pickled(pickled)


class Program:
    """What a hostile pickle does: run a command when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_code_in_a_pickle_does_not_run(pickled: Path, tmp_path: Path) -> None:
    target = tmp_path / "made-by-the-pickle"
    torch.save({"w": Program(target)}, pickled / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.bin cannot be read as tensors alone \(it calls") as no:
        load_pickled(pickled)
    assert not target.exists()
    assert "mkdir" in str(no.value) and "weights_only" not in str(no.value)


def test_doctor_takes_the_option_that_it_names(pickled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(pickled), "--device", "cpu"]) == 1
    assert "--allow-pickle" in capsys.readouterr().out
    assert main(["doctor", str(pickled), "--device", "cpu", "--allow-pickle"]) == 0


def test_not_a_dictionary_of_tensors(pickled: Path) -> None:
    torch.save({"w": 3}, pickled / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match="not a dictionary of tensors"):
        load_pickled(pickled)
