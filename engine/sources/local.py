"""Models that are already on this machine: a folder in Hugging Face layout or a ``.gguf`` file."""

from __future__ import annotations

from pathlib import Path

from ...errors import ModelNotFoundError
from .model_files import ModelFiles


def find_local(name: str) -> ModelFiles | None:
    """The model at the path ``name``; None when there is nothing there and ``name`` may mean something else."""
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(name, path)
    if path.is_dir():
        return _from_directory(name, path)
    if _looks_like_path(name):
        raise ModelNotFoundError(f"there is no file or folder {name!r}")
    return None


def _from_file(name: str, path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"{name!r} is a file but not a .gguf file; give the folder that holds config.json")
    return ModelFiles(name, path.resolve(), "gguf")


def _from_directory(name: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(name, path.resolve(), "directory")
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelFiles(name, gguf_files[0].resolve(), "gguf")
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelNotFoundError(f"folder {name!r} holds several .gguf files; name one of {names}")
    raise ModelNotFoundError(f"folder {name!r} holds neither config.json nor a .gguf file")


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~", "\\")) or name.lower().endswith(".gguf") or name.count("/") > 1
