"""Arguments that are written as plain text between tags, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Templates print values that are no JSON as Python does, and models follow them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def argument_pair(parameters: Mapping[str, Any], key: str, value: str, *, first: bool) -> str:
    """The JSON of a name and its argument, after what stands between two pairs."""
    return f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: {argument_json(parameters, key, value)}"


def argument_json(parameters: Mapping[str, Any], key: str, value: str) -> str:
    """The JSON of one argument: a text stays text where the schema of the tool's ``parameters`` says so."""
    schema = (parameters.get("properties") or {}).get(key)
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            json.loads(value)
            return value.strip()
        except (ValueError, RecursionError):
            pass
        if value.strip() in _PYTHON:
            return _PYTHON[value.strip()]
    return json.dumps(value, ensure_ascii=False)
