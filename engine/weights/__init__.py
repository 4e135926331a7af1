"""Checkpoints on disk, and (in ``loader``) what fills a model from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sources.model_files import ModelFiles

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["open_checkpoint"]


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The tensors of a model under their Hugging Face names.

    CheckpointError names the file and a tensor when a shard is missing or cut off. The readers are imported here, so
    that a process that only needs the tokenizer of a GGUF file does without torch.
    """
    if files.kind == "gguf":
        from .gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(files.path)
    from .safetensors_dir import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
