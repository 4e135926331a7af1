"""How models write calls: one ToolFormat for each way, chosen by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import glm, harmony, llama, qwen_coder
from .events import Parser
from .marked import MarkedJsonParser, NamedJsonParser
from .request import Tool

_DEEPSEEK_ALL, _DEEPSEEK_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK, _DEEPSEEK_SEP, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    ``parser(tools)``       reads a model's text.
    ``tag(tool, schema)``   begin, content and end of one call, as a structural tag has them.
    ``separator``           between two calls; None: there is never more than one.
    ``around``              texts before the first and after the last call.
    ``trigger``             with which every call begins.
    ``marks``               texts that may be special tokens, and then have to be shown to the parser.
    """

    name: str
    parser: Callable[[Sequence[Tool]], Parser]
    tag: Callable[[Tool, Any], Format]
    separator: str | None
    trigger: str
    around: tuple[str, str] = ("", "")
    marks: tuple[str, ...] = ()


def json_tag(begin: str, end: str) -> Callable[[Tool, Any], Format]:
    """A call whose arguments are JSON; ``NAME`` in ``begin`` stands for the tool's name."""

    def tag(tool: Tool, schema: Any) -> Format:
        content = {"type": "json_schema", "json_schema": schema}
        return {"type": "tag", "begin": begin.replace("NAME", tool.name), "content": content, "end": end}

    return tag


def _pairs_tag(
    begin: str, key: tuple[str, str], value_end: str, end: str, layout: str = ""
) -> Callable[[Tool, Any], Format]:
    """A call whose arguments are pairs: required ones in the order of the schema, others where the model wants them.

    ``key`` stands around an argument's name. Texts are not written as JSON; they end where ``value_end`` begins, and
    hold the ``layout`` before it, which follows other values.
    """

    def tag(tool: Tool, schema: Any) -> Format:
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        elements: list[Format] = []
        for name, value in (schema.get("properties") or {}).items():
            content = _plain_value({**shared, **value} if isinstance(value, dict) else value)
            closing = value_end if content["type"] == "any_text" else layout + value_end
            pair = {"type": "tag", "begin": f"{key[0]}{name}{key[1]}", "content": content, "end": closing}
            nothing = {"type": "const_string", "value": ""}
            required = name in (schema.get("required") or ())
            elements.append(pair if required else {"type": "or", "elements": [pair, nothing]})
        content = {"type": "sequence", "elements": elements or [{"type": "const_string", "value": ""}]}
        return {"type": "tag", "begin": begin.replace("NAME", tool.name), "content": content, "end": end}

    return tag


def _plain_value(schema: Any) -> Format:
    if isinstance(schema, dict) and schema.get("type") == "string":
        texts = [item for item in schema.get("enum") or [] if isinstance(item, str)]
        if texts:
            return {"type": "or", "elements": [{"type": "const_string", "value": item} for item in texts]}
        return {"type": "any_text"}
    return {"type": "json_schema", "json_schema": schema}


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools)


def _marked(*starts: str, ends: Sequence[str] = ()) -> Callable[[Sequence[Tool]], Parser]:
    return lambda tools: MarkedJsonParser(_names(tools), starts, ends)


def _named(**marks: Any) -> Callable[[Sequence[Tool]], Parser]:
    return lambda tools: NamedJsonParser(_names(tools), **marks)


_FORMATS = (
    ToolFormat(
        name="hermes",
        parser=_marked("<tool_call>", ends=("</tool_call>",)),
        tag=json_tag('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
        separator="\n",
        trigger="<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        name="llama3",
        parser=lambda tools: llama.LlamaParser(_names(tools)),
        tag=json_tag('{"name": "NAME", "parameters": ', "}"),
        separator="; ",
        trigger='{"name": "',
        marks=(llama.PYTHON_TAG,),
    ),
    ToolFormat(
        name="mistral",
        parser=_marked("[TOOL_CALLS]"),
        tag=json_tag('{"name": "NAME", "arguments": ', "}"),
        separator=", ",
        trigger="[TOOL_CALLS]",
        around=("[TOOL_CALLS][", "]"),
        marks=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        name="mistral_args",
        parser=_named(starts=("[TOOL_CALLS]",), middles=("[ARGS]",), ends=("[TOOL_CALLS]",)),
        tag=json_tag("[TOOL_CALLS]NAME[ARGS]", ""),
        separator="",
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    ToolFormat(
        name="deepseek_v3",
        parser=_named(
            starts=(f"{_DEEPSEEK}function{_DEEPSEEK_SEP}",),
            middles=("\n```json\n",),
            ends=(_DEEPSEEK_END,),
            dropped=(_DEEPSEEK_ALL, _DEEPSEEK_ALL_END),
        ),
        tag=json_tag(f"{_DEEPSEEK}function{_DEEPSEEK_SEP}NAME\n```json\n", f"\n```{_DEEPSEEK_END}"),
        separator="\n",
        trigger=_DEEPSEEK_ALL,
        around=(_DEEPSEEK_ALL, _DEEPSEEK_ALL_END),
        marks=(_DEEPSEEK_ALL, _DEEPSEEK_ALL_END, _DEEPSEEK, _DEEPSEEK_SEP, _DEEPSEEK_END),
    ),
    ToolFormat(
        name="deepseek_v31",
        parser=_named(
            starts=(_DEEPSEEK,),
            middles=(_DEEPSEEK_SEP,),
            ends=(_DEEPSEEK_END,),
            dropped=(_DEEPSEEK_ALL, _DEEPSEEK_ALL_END),
        ),
        tag=json_tag(f"{_DEEPSEEK}NAME{_DEEPSEEK_SEP}", _DEEPSEEK_END),
        separator="",
        trigger=_DEEPSEEK_ALL,
        around=(_DEEPSEEK_ALL, _DEEPSEEK_ALL_END),
        marks=(_DEEPSEEK_ALL, _DEEPSEEK_ALL_END, _DEEPSEEK, _DEEPSEEK_SEP, _DEEPSEEK_END),
    ),
    ToolFormat(
        name="glm",
        parser=lambda tools: glm.GlmParser({tool.name: tool.parameters for tool in tools}),
        tag=_pairs_tag(
            f"{glm.START}NAME", (f"\n{glm.KEY}", f"{glm.KEY_END}\n{glm.VALUE}"), glm.VALUE_END, f"\n{glm.END}"
        ),
        separator="\n",
        trigger=glm.START,
        marks=(glm.START, glm.END, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
    ),
    ToolFormat(
        name="qwen3_coder",
        parser=lambda tools: qwen_coder.QwenCoderParser({tool.name: tool.parameters for tool in tools}),
        tag=_pairs_tag(
            f"{qwen_coder.START}\n{qwen_coder.FUNCTION}NAME>",
            (f"\n{qwen_coder.PARAMETER}", ">\n"),
            qwen_coder.PARAMETER_END,
            f"\n{qwen_coder.FUNCTION_END}\n{qwen_coder.END}",
            layout="\n",
        ),
        separator="\n",
        trigger=qwen_coder.START,
        marks=(qwen_coder.START, qwen_coder.END),
    ),
    ToolFormat(
        name="gpt_oss",
        parser=lambda tools: harmony.HarmonyParser(_names(tools)),
        tag=json_tag(f"{harmony.CHANNEL}commentary to=functions.NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}", ""),
        separator=None,
        trigger=f"{harmony.CHANNEL}commentary to=",
        marks=(harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.CONSTRAIN),
    ),
    ToolFormat(
        name="json",
        parser=_marked(),
        tag=json_tag('{"name": "NAME", "arguments": ', "}"),
        separator="\n",
        trigger='{"name": "',
    ),
)
FORMATS = {tool_format.name: tool_format for tool_format in _FORMATS}

# What a template says -> the format, first match first.
_SIGNS = (
    (("<|channel|>",), "gpt_oss"),
    ((_DEEPSEEK, "```json"), "deepseek_v3"),
    ((_DEEPSEEK,), "deepseek_v31"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    ((llama.PYTHON_TAG,), "llama3"),
    (("ipython", "parameters"), "llama3"),
)


def choose_format(template: str, option: str = "auto") -> ToolFormat:
    """The format that ``option`` names, or with ``auto`` the one that the chat template shows; else plain JSON."""
    if option != "auto":
        return FORMATS[option]
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return FORMATS["json"]
