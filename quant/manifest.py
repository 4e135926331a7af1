"""The list of a finished folder's files, written last: by it a damaged or half-written folder is noticed cheaply."""

from __future__ import annotations

import json
import os
from pathlib import Path

MANIFEST = ".manifest.json"


def write_manifest(folder: Path) -> None:
    """List all files below ``folder`` with their sizes, once their bytes are on disk."""
    sizes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())  # else a power failure could leave the right size and zeros
        sizes[str(path.relative_to(folder))] = path.stat().st_size
    with (folder / MANIFEST).open("w") as stream:
        json.dump(sizes, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a manifest, in words; None where every file has its size. Reads no file."""
    try:
        sizes = dict(json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return f"{MANIFEST}, which lists its files, is missing or broken"
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
    return None
