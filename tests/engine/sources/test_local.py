"""Models that are already here."""

from __future__ import annotations

from pathlib import Path

import pytest
from twofold.engine.sources import resolve_model
from twofold.errors import ModelNotFoundError


def test_folder_with_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = resolve_model(str(tmp_path))
    assert (files.kind, files.path, files.name) == ("directory", tmp_path, str(tmp_path))


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "tiny.GGUF"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)).kind == "gguf"
    file.rename(tmp_path / "tiny.gguf")
    assert resolve_model(str(tmp_path)).path == tmp_path / "tiny.gguf"


def test_existing_path_wins_over_a_catalogue_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model("smollm2-135m-instruct").path == folder


@pytest.mark.parametrize(
    ("make", "part"),
    [
        ([], "neither config.json nor a .gguf"),
        (["a.gguf", "b.gguf"], "name one of a.gguf, b.gguf"),
    ],
)
def test_unclear_folders_are_named(tmp_path: Path, make: list[str], part: str) -> None:
    for name in make:
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=part):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "missing.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_up_elsewhere(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        resolve_model(name)


def test_other_file(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", ["", "  ", "what is this?"])
def test_names_that_can_be_nothing(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(name)
