"""Texts as each family of models writes them, with what they mean."""

from __future__ import annotations

from typing import Any

from twofold.server.tools.events import CallArguments, CallStart, Event, Text, Thought, merged
from twofold.server.tools.request import Tool

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", PARAMETERS, False), Tool("now", {}, False))
PARIS = '{"city": "Paris, \\"x\\" {y}", "days": 2}'
NOW = "{}"


def calls(*pairs: tuple[str, str]) -> list[Event]:
    return [event for name, arguments in pairs for event in (CallStart(name), CallArguments(arguments))]


BOTH = calls(("weather", PARIS), ("now", NOW))
_SEP, _CALL, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _json(key: str = "arguments") -> tuple[str, str]:
    return f'{{"name": "weather", "{key}": {PARIS}}}', f'{{"name": "now", "{key}": {{}}}}'


def hermes(one: str, two: str) -> str:
    return f"<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>"


# (format, text, events): two calls in the family's own way, and what is no call.
CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", hermes(*_json()), BOTH),
    ("hermes", "Let me see.\n" + hermes(*_json()), [Text("Let me see."), *BOTH]),
    ("hermes", "Use a <b>tag</b>, 1 < 2 <tool", [Text("Use a <b>tag</b>, 1 < 2 <tool")]),
    ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
     [Text('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')]),
    ("hermes", "<tool_call>not json</tool_call>", [Text("<tool_call>not json</tool_call>")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', calls(("now", '{"a": 1}'))),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> done', [*calls(("now", "{}")), Text("done")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
     calls(("now", '{"a": "é"}'))),
    ("hermes", '<tool_call>{"id": [1, {"x": "}"}], "name": "now", "arguments": null}</tool_call>',
     calls(("now", "{}"))),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Pa', calls(("weather", '{"city": "Pa'))),
    ("llama3", _json("parameters")[0], BOTH[:2]),
    ("llama3", "<|python_tag|>" + "; ".join(_json("parameters")), BOTH),
    ("llama3", "It is {sunny}.", [Text("It is {sunny}.")]),
    ("llama3", '{"answer": 42} is it', [Text('{"answer": 42} is it')]),
    ("llama3", "<|py", [Text("<|py")]),
    ("mistral", "[TOOL_CALLS] [" + ", ".join(_json()) + "]", BOTH),
    ("mistral", "Well. [TOOL_CALLS][" + ", ".join(_json()) + "]", [Text("Well."), *BOTH]),
    ("mistral", "[TOOL_CALLS] nothing [1]", [Text("[TOOL_CALLS] nothing [1]")]),
    ("mistral_args", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}", BOTH),
    ("mistral_args", "[TOOL_CALLS]other[ARGS]{}", [Text("[TOOL_CALLS]other[ARGS]{}")]),
    ("deepseek_v3",
     f"{_ALL}{_CALL}function{_SEP}weather\n```json\n{PARIS}\n```{_END}\n"
     f"{_CALL}function{_SEP}now\n```json\n{{}}\n```{_END}{_ALL_END}", BOTH),
    ("deepseek_v31", f"Hm.\n\n{_ALL}{_CALL}weather{_SEP}{PARIS}{_END}{_CALL}now{_SEP}{{}}{_END}{_ALL_END}",
     [Text("Hm."), *BOTH]),
    ("deepseek_v31", f"{_ALL}{_CALL}weather{_SEP}" + '{"city": ', calls(("weather", '{"city":'))),
    ("glm",
     '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris, "x" {y}</arg_value>\n<arg_key>days</arg_key>\n'
     "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", BOTH),
    ("glm", "<tool_call>other\n</tool_call>", [Text("<tool_call>other\n</tool_call>")]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
     calls(("weather", '{"city": "12"}'))),
    ("qwen3_coder",
     '<tool_call>\n<function=weather>\n<parameter=city>\nParis, "x" {y}\n</parameter>\n<parameter=days>\n2\n'
     "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", BOTH),
    ("qwen3_coder", "Well.\n<function=now>\n</function>", [Text("Well."), *calls(("now", NOW))]),
    ("qwen3_coder", "<function=now></function> <b>", [*calls(("now", NOW)), Text("<b>")]),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>",
     [Text("<tool_call>\n<function=other>\n</function>")]),
    ("qwen3_coder", "<tool_call> is a tag, 1 < 2 <func", [Text("<tool_call> is a tag, 1 < 2 <func")]),
    ("qwen3_coder",
     "<function=weather><parameter=city>\n\n a\n</div>\n\n</parameter><parameter=ok>True</parameter></tool_call>",
     calls(("weather", '{"city": "\\n a\\n</div>\\n", "ok": true}'))),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nPa",
     calls(("weather", '{"days": 3'))),
    ("gpt_oss",
     "<|channel|>analysis<|message|>Think <hard>.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{PARIS}<|call|>", [Thought("Think <hard>."), *BOTH[:2]]),
    ("gpt_oss", f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{PARIS}", BOTH[:2]),
    ("gpt_oss",
     "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes, 1 <| 2.<|return|>",
     [Thought("So."), Text("Yes, 1 <| 2.")]),
    ("gpt_oss", "plain text", [Text("plain text")]),
    ("gpt_oss", "<|channel|>ana", []),
    ("json", _json()[0], BOTH[:2]),
    ("json", "\n".join(_json()), BOTH),
    ("json", "[" + ", ".join(_json()) + "]", BOTH),
    ("json", "Sure: " + _json()[0], [Text("Sure: " + _json()[0])]),
    ("json", '{"x": [1, 2]}', [Text('{"x": [1, 2]}')]),
]  # fmt: skip


def read(reader: Any, pieces: list[str]) -> list[Event]:
    """All events of text in these pieces, neighbours joined."""
    events: list[Event] = []
    for piece in pieces:
        events += reader.push(piece)
    return merged([*events, *reader.finish()])
