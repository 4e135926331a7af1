"""Models from the Hugging Face hub, through huggingface_hub and its cache."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from ... import storage
from ...errors import ModelNotFoundError, UnsupportedError
from ...log import get_logger
from .model_files import ModelFiles

logger = get_logger(__name__)

HUB_TIMEOUT_SECONDS = 5.0
# Weights as safetensors, and every small file: configs, tokenizer, templates, licence.
ALLOW = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "additional_chat_templates/*"]
IGNORE = ["original/*", "consolidated*", "*.bin.index.json", "onnx/*"]
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST})
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of a hub id: ``owner/name`` or ``name``."""
    return REPO_ID.fullmatch(name) is not None


def fetch(name: str) -> ModelFiles:
    """The hub model ``name``; files that the hub's cache already holds are not fetched again.

    A hub that cannot be reached falls back to the cache; ModelNotFoundError in one sentence when it has no copy.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        _check_weights(name, [sibling.rfilename for sibling in info.siblings or []])
        logger.info("fetching %s at %s from %s", name, (info.sha or "main")[:8], constants.ENDPOINT)
        path = snapshot_download(name, revision=info.sha, allow_patterns=ALLOW, ignore_patterns=IGNORE)
    except GatedRepoError:
        raise ModelNotFoundError(
            f"the hub model {name!r} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"there is no model {name!r}: no such path, no such catalogue name, none on the hub"
        ) from None
    except UnsupportedError:
        raise
    except Exception as error:  # the hub client raises its transport's own errors, which change between releases
        return _from_cache(name, error)
    return ModelFiles(name, Path(path), "directory")


def _from_cache(name: str, error: Exception) -> ModelFiles:
    from huggingface_hub import constants, snapshot_download

    try:
        path = Path(snapshot_download(name, local_files_only=True))
    except Exception:
        if storage.is_full(str(error)) or (isinstance(error, OSError) and error.errno in _NOT_WRITABLE):
            raise storage.StorageError(
                f"{name} cannot be kept in {constants.HF_HUB_CACHE} ({error}); make room there, or set HF_HOME to a "
                "folder that can be written"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"there is no path or catalogue model {name!r}, and {constants.ENDPOINT} cannot be reached ({reason})"
        ) from None
    logger.warning("the hub cannot be reached; using the copy of %s in its cache", name)
    return ModelFiles(name, path, "directory")


def _check_weights(name: str, files: list[str]) -> None:
    if "config.json" not in files:
        raise UnsupportedError(f"the hub model {name!r} has no config.json; download its .gguf file and give that path")
    if not any(file.endswith(".safetensors") for file in files):
        raise UnsupportedError(f"the hub model {name!r} has no .safetensors weights; other weight files are not read")
