"""From a body's fields to the form that its output must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.structured_output import KINDS, StructuredOutput
from ..errors import RequestError
from .schema import GenerationBody

# Fields that give a form outright -> what StructuredOutput calls it. Several names, for clients of several servers.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_output(body: GenerationBody) -> StructuredOutput | None:
    """The form that the body asks for, None for free text. RequestError for two forms, or one that is malformed."""
    found = [name for name in ("response_format", "structured_outputs", *_ALIASES) if getattr(body, name) is not None]
    if _is_text(body.response_format):
        found = [name for name in found if name != "response_format"]
    if not found:
        return None
    if len(found) > 1:
        raise RequestError(f"{' and '.join(found)} each give a form for the output; give one of them", param=found[1])
    name = found[0]
    value = getattr(body, name)
    if name == "response_format":
        return _from_format(value)
    if name == "structured_outputs":
        return _from_structured_outputs(value)
    return _make(name, **{_ALIASES[name]: value})


def _is_text(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text"


def _from_format(value: Any) -> StructuredOutput:
    name = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        return _make(name, json_object=True)
    if kind == "structural_tag":
        return _make(name, structural_tag=value)
    if kind != "json_schema":
        raise RequestError(f"response_format has type {kind!r}; it must be one of {', '.join(_FORMATS)}", param=name)
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        path = f"{name}.json_schema" if not isinstance(described, Mapping) else f"{name}.json_schema.schema"
        raise RequestError(f"{path} must be an object", param=path)
    return _make(name, json=schema)


def _from_structured_outputs(value: Any) -> StructuredOutput:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object with one of {', '.join(KINDS)}", param=name)
    given = {key: part for key, part in value.items() if part is not None and part is not False}
    unknown = sorted(set(given) - set(KINDS))
    if unknown:
        raise RequestError(f"{name} has {unknown[0]!r}; served: {', '.join(KINDS)}", param=name)
    if value.get("json") is False:
        given["json"] = False
    return _make(name, **given)


def _make(param: str, **form: Any) -> StructuredOutput:
    return StructuredOutput(param=param, **form)
