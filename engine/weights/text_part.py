"""The text model inside a checkpoint that also reads images: its tensors under a text model's names, no others.

language_model.model.<name>, model.language_model.<name>  ->  model.<name>
language_model.lm_head.<name>                             ->  lm_head.<name>
"""

from __future__ import annotations

from .safetensors_header import TensorEntry

_RENAMED = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def text_part(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries of the text model, renamed; all of them as they are where there is nothing else."""
    if not any(name.startswith(("language_model.", "model.language_model.")) for name in entries):
        return entries
    text = {}
    for name, entry in entries.items():
        prefix = next((prefix for prefix in _RENAMED if name.startswith(prefix)), None)
        if prefix is not None:
            text[_RENAMED[prefix] + name.removeprefix(prefix)] = entry
    return text
