"""What a client needs of a model without its weights.

The imports wait for the call: a client that is given its tokenizer does without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import EngineConfig

if TYPE_CHECKING:
    from .sources import ModelFiles
    from .tokenizer import Tokenizer


def find_model(config: EngineConfig) -> ModelFiles:
    """The model's files, fetched where needed (ModelNotFoundError), and their small ones checked (`check_model`)."""
    from .model_check import check_model
    from .sources import resolve_model

    files = resolve_model(config.model)
    check_model(files, config)
    return files


def load_text_side(files: ModelFiles, config: EngineConfig) -> tuple[Tokenizer, dict[str, Any]]:
    """The model's tokenizer, and the sampling defaults that its authors ship."""
    from .model_config import generation_config
    from .tokenizer import load_tokenizer

    return load_tokenizer(files, config.chat_template), generation_config(files)
