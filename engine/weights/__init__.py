"""Checkpoints on disk, and (in ``loader``) what fills a model from one."""

from __future__ import annotations

from ..sources.model_files import ModelFiles
from .checkpoint import Checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The tensors of a model under their Hugging Face names.

    CheckpointError names the file and a tensor when a shard is missing or cut off.
    """
    if files.kind == "gguf":
        from .gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(files.path)
    from .safetensors_dir import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
