"""Grammars that hold a model to its tools: forced calls, and arguments that follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...engine.grammar.grammar_text import check_structured
from ...engine.structured_output import StructuredOutput
from ...errors import RequestError
from .formats import Format, ToolFormat
from .request import Tool, ToolUse


def tool_grammar(use: ToolUse, tool_format: ToolFormat, answer: StructuredOutput | None) -> StructuredOutput | None:
    """The form of an output with tools; ``answer`` is the form of an answer without calls.

    Forced calls are the whole output. Otherwise a form for the answer allows calls beside it, and strict tools make
    every call follow its schema. None where the output is free. RequestError where a strict schema cannot be held to.
    """
    if not use.tools or (answer is not None and not use.forced and answer.kind not in ("json", "json_object")):
        return answer
    if not use.forced and answer is None and not use.is_strict:
        return None
    calls = _calls(use, tool_format)
    if use.forced:
        return _structured(calls)
    if answer is not None:
        schema = {"type": "object"} if answer.kind == "json_object" else json.loads(answer.text())
        return _structured({"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls]})
    begin, end = tool_format.around
    tags = [_tag(tool, tool_format) for tool in use.tools]
    if begin:
        tags = [{"type": "tag", "begin": begin, "content": calls["elements"][1], "end": end}]
    triggered = {
        "type": "triggered_tags",
        "triggers": [tool_format.trigger],
        "tags": tags,
        "stop_after_first": not use.parallel,
    }
    return _structured(triggered)


def _calls(use: ToolUse, tool_format: ToolFormat) -> Format:
    begin, end = tool_format.around
    calls = {
        "type": "tags_with_separator",
        "separator": tool_format.separator or "",
        "tags": [_tag(tool, tool_format) for tool in use.tools],
        "at_least_one": True,
        "stop_after_first": not use.parallel or tool_format.separator is None,
    }
    if not begin:
        return calls
    texts = [{"type": "const_string", "value": text} for text in (begin, end)]
    return {"type": "sequence", "elements": [texts[0], calls, texts[1]]}


def _tag(tool: Tool, tool_format: ToolFormat) -> Format:
    """One tool's call. A schema that no grammar can express is refused where it is strict, else any object will do."""
    schema: Mapping[str, Any] = tool.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **schema}
    try:
        check_structured(StructuredOutput(json=dict(schema), param="tools"))
    except RequestError as error:
        if tool.strict:
            raise RequestError(f"the tool {tool.name!r} is strict, and {error}", param="tools") from None
        schema = {"type": "object"}
    return tool_format.tag(tool, schema)


def _structured(tag: Format) -> StructuredOutput:
    return StructuredOutput(structural_tag={"format": tag}, param="tools")
