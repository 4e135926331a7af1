"""What a model's folder says about its embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from twofold.engine.pooling import Pooling, pooling_of
from twofold.engine.sources import ModelFiles


def read(folder: Path, kinds: list[str], config: Any = None) -> Pooling:
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"a.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config) if config is not None else "{")
    return pooling_of(ModelFiles(name="m", path=folder, kind="directory"))


PLAIN = ["Transformer", "Pooling"]


@pytest.mark.parametrize(
    ("kinds", "config", "pooling"),
    [
        ([*PLAIN, "Normalize"], {"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}, Pooling("last", True)),
        (PLAIN, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling("mean", False)),
        (PLAIN, {"pooling_mode": "cls"}, Pooling("cls", False)),
        (["Transformer"], {}, Pooling("last", False)),
    ],
)
def test_read(tmp_path: Path, kinds: list[str], config: Any, pooling: Pooling) -> None:
    assert read(tmp_path, kinds, config) == pooling


@pytest.mark.parametrize(
    ("kinds", "config", "word"),
    [
        ([*PLAIN, "Dense"], {"pooling_mode_mean_tokens": True}, "Dense"),
        (PLAIN, {"pooling_mode_max_tokens": True}, "max_tokens"),
        (PLAIN, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "and"),
        (PLAIN, {}, "none"),
        (PLAIN, {"pooling_mode_mean_tokens": True, "include_prompt": False}, "prompt"),
        (PLAIN, None, "cannot be read"),
    ],
)
def test_not_served(tmp_path: Path, kinds: list[str], config: Any, word: str) -> None:
    error = read(tmp_path, kinds, config).error
    assert error is not None and word in error


def test_nothing_said(tmp_path: Path) -> None:
    assert pooling_of(ModelFiles(name="m", path=tmp_path, kind="directory")) == Pooling("last", True)
