"""The hub: what is asked of its client, and a hub that is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from twofold.engine.sources import hub, resolve_model
from twofold.errors import ModelNotFoundError, UnsupportedError


@pytest.fixture(autouse=True)
def no_cached_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield


def pretend(monkeypatch: pytest.MonkeyPatch, files: list[str], fetched: list[dict[str, object]], folder: Path) -> None:
    info = SimpleNamespace(sha="0123456789", siblings=[SimpleNamespace(rfilename=name) for name in files])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: info)

    def snapshot_download(name: str, **options: object) -> str:
        fetched.append({"name": name, **options})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_snapshot_of_one_commit_without_other_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[dict[str, object]] = []
    pretend(monkeypatch, ["config.json", "model.safetensors", "pytorch_model.bin"], fetched, tmp_path)
    files = resolve_model("someone/some-model")
    assert (files.kind, files.path) == ("directory", tmp_path)
    assert fetched[0]["revision"] == "0123456789"
    assert not any("bin" in pattern for pattern in fetched[0]["allow_patterns"])


@pytest.mark.parametrize(
    ("files", "part"),
    [(["config.json", "pytorch_model.bin"], "no .safetensors"), (["model.gguf"], "no config.json")],
)
def test_models_that_cannot_be_read_are_refused_before_the_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], part: str
) -> None:
    fetched: list[dict[str, object]] = []
    pretend(monkeypatch, files, fetched, tmp_path)
    with pytest.raises(UnsupportedError, match=part):
        resolve_model("someone/some-model")
    assert not fetched


def test_unreachable_hub_is_one_sentence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(ModelNotFoundError, match="cannot be reached") as caught:
        resolve_model("someone/some-model")
    assert time.monotonic() - started < 2 * hub.HUB_TIMEOUT_SECONDS
    assert "\n" not in str(caught.value)


def test_unreachable_hub_with_a_cached_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, local_files_only: str(tmp_path))
    assert resolve_model("someone/some-model").path == tmp_path
