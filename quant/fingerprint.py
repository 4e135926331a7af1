"""A key that changes with a model's content and with what is done to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ..engine.sources import ModelFiles
from .calibration.spec import CalibrationSpec
from .calibration.texts import CALIBRATION_SAMPLE, sample_path
from .formats.writers import default_format
from .spec import QuantizeSpec

# Part of the key: raise it when the same arguments give other weights.
RESULT_VERSION = 8
# Files up to this size count with all their bytes, larger ones with samples, size and modification time.
MAX_HASHED_BYTES = 256 << 20
NUM_SAMPLES = 32
SAMPLE_BYTES = 64 << 10


def content_key(files: ModelFiles, spec: QuantizeSpec, calibration: CalibrationSpec | None = None) -> str:
    """16 hexadecimal digits that change with the model's files, the spec, its format, the quantizer, and where text is
    looked at, with that text and what is taken of it."""
    digest = hashlib.sha256(f"{RESULT_VERSION}\0{spec!r}\0{spec.format or default_format(spec)}".encode())
    if spec.is_calibrated:
        calibration = calibration or CalibrationSpec()
        digest.update(f"\0{calibration.num_sequences}\0{calibration.length}\0{calibration.seed}\0".encode())
        digest.update((calibration.source or sample_path(CALIBRATION_SAMPLE)).read_bytes())
    paths = [files.path] if files.kind == "gguf" else sorted(path for path in files.path.iterdir() if path.is_file())
    for path in paths:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        for part in _parts(path):
            digest.update(part)
    return digest.hexdigest()[:16]


def _parts(path: Path) -> Iterator[bytes]:
    status = path.stat()
    with path.open("rb") as stream:
        if status.st_size <= MAX_HASHED_BYTES:
            while part := stream.read(1 << 20):
                yield part
            return
        yield str(status.st_mtime_ns).encode()
        for index in range(NUM_SAMPLES):
            stream.seek((status.st_size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)
