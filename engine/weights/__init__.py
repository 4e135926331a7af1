"""Checkpoints on disk, and (in ``loader``) what fills a model from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sources.model_files import ModelFiles
from .weight_files import is_pickled

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["open_checkpoint"]


def open_checkpoint(files: ModelFiles, *, allow_pickle: bool = False) -> Checkpoint:
    """The tensors of a model under their Hugging Face names.

    CheckpointError names the file and a tensor when a shard is missing or cut off. A folder that has pickles only is
    refused unless ``allow_pickle``; even then only tensors are read of them. The readers are imported here, so
    that a process that only needs the tokenizer of a GGUF file does without torch.
    """
    if files.kind == "gguf":
        from .gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(files.path)
    if allow_pickle and is_pickled(files.path):
        from .pickle_checkpoint import PickleCheckpoint

        return PickleCheckpoint(files.path)
    from .safetensors_dir import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
