"""How a model's hidden states become one vector per text: what its folder says, in sentence-transformers' files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sources import ModelFiles

# sentence-transformers' names -> ours. Their older configs have one switch per mode, newer ones one name.
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """``kind``: last, mean or cls (the first token). ``error`` says why the model's own way is not served."""

    kind: str = "last"
    normalize: bool = True
    error: str | None = None


def pooling_of(files: ModelFiles) -> Pooling:
    """The way of the model's authors; a model that says nothing gets its last token, normalized."""
    if files.kind != "directory" or not (files.path / "modules.json").is_file():
        return Pooling()
    try:
        return _read(files.path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Pooling(error=f"its modules.json or the pooling config beside it cannot be read ({error})")


def _read(folder: Path) -> Pooling:
    modules = {str(module["type"]).rsplit(".", 1)[-1]: module for module in _json(folder / "modules.json")}
    for name in modules:
        if name not in _KNOWN_MODULES:
            return Pooling(error=f"its embeddings go through a {name} module")
    if "Pooling" not in modules:
        return Pooling(normalize="Normalize" in modules)
    config = _json(folder / modules["Pooling"]["path"] / "config.json")
    if not config.get("include_prompt", True):
        return Pooling(error="its pooling leaves the prompt out")
    switched = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else switched
    if len(modes) != 1 or modes[0] not in _MODES:
        return Pooling(error=f"its pooling is {' and '.join(modes) or 'none'}")
    return Pooling(_MODES[modes[0]], "Normalize" in modules)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
