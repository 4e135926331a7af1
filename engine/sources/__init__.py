"""Model sources: a folder, a ``.gguf`` file, the demo catalogue, the Hugging Face hub."""

from __future__ import annotations

from ...errors import ModelNotFoundError
from . import catalogue, hub
from .catalogue import CATALOGUE, CatalogueEntry
from .local import find_local
from .model_files import ModelFiles

__all__ = ["CATALOGUE", "CatalogueEntry", "ModelFiles", "pull", "resolve_model"]


def resolve_model(name: str) -> ModelFiles:
    """Find the model ``name`` and fetch it when it is not on this machine yet.

    An existing path wins over a catalogue name, and that over a hub id. ModelNotFoundError says in one sentence what
    was looked for.
    """
    if not name.strip():
        raise ModelNotFoundError("the model's name is empty; give a path, a catalogue name or a hub id")
    local = find_local(name)
    if local is not None:
        return local
    if name.lower() in CATALOGUE:
        return catalogue.fetch(name.lower())
    if not hub.is_hub_id(name):
        raise ModelNotFoundError(
            f"{name!r} is neither a path, nor a catalogue name ({', '.join(CATALOGUE)}), nor a hub id"
        )
    return hub.fetch(name)


def pull(name: str) -> ModelFiles:
    """Fetch the model ``name`` now, so that later starts need no network."""
    return resolve_model(name)
