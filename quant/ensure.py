"""Quantize once, keep the result in the cache, and find it again by content."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .. import env, storage
from ..engine.sources import ModelFiles, resolve_model
from ..log import get_logger
from .calibration.spec import CalibrationSpec
from .checked_model import check_model
from .fingerprint import content_key
from .formats.writers import writer_for
from .manifest import damage, write_manifest
from .pipeline import quantize_model
from .progress import layer_progress
from .spec import QuantizeSpec, parse_quantize_spec

log = get_logger(__name__)


def ensure_quantized(model: str, spec: str | QuantizeSpec, calibration: CalibrationSpec | None = None) -> Path:
    """The folder of ``model`` quantized with ``spec`` (``rtn:4:32``), made with a progress bar the first time.

    Another model, spec, format or calibration text is another folder. A process that comes while another makes the same
    result waits for it. A folder whose files are not those that were written is made anew. StorageError when the cache
    cannot keep it.
    """
    parsed = parse_quantize_spec(spec) if isinstance(spec, str) else spec
    writer_for(parsed)  # Refuses what no format can hold before anything is fetched.
    files = resolve_model(model)
    check_model(files, parsed)  # The key below reads every byte.
    label = str(parsed).replace(":", "-")
    folder = env.cache_dir() / "quantized" / f"{_slug(files)}-{label}-{content_key(files, parsed, calibration)}"
    if _is_whole(folder):
        return folder
    lock = folder.with_name(f".{folder.name}.lock")
    with storage.writing(folder.parent), storage.turn(lock, folder, is_made=lambda: _is_whole(folder)):
        if not _is_whole(folder):
            _remove_damaged(folder)
            with layer_progress(f"quantizing {model} ({parsed})") as progress:
                source = str(files.path)
                report = quantize_model(
                    source, parsed, folder, progress, calibration=calibration, finish=write_manifest
                )
            log.info(
                "quantized %s to %.3f bits per weight of its linear layers, error %.4f, in %.1f s; kept in %s",
                model, report.linear_bits, report.mean_error, report.seconds, folder,
            )  # fmt: skip
            if report.note:
                log.warning("%s", report.note)
    return folder


def _is_whole(folder: Path) -> bool:
    return folder.is_dir() and damage(folder) is None


def _remove_damaged(folder: Path) -> None:
    if os.path.lexists(folder):
        log.warning("%s is damaged: %s; quantizing again", folder, damage(folder))
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()


def _slug(files: ModelFiles) -> str:
    name = Path(files.name.rstrip("/")).name or files.path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-").lower() or "model"
