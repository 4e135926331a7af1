"""From a response's items to a chat request: the engine's side knows conversations only."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable
from typing import Any

from ...errors import RequestError
from ..chat_schema import ChatRequest, Message, read_effort
from ..schema import StreamOptions
from .schema import ResponseRequest

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")
# Fields that the chat body knows by the same name.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "ignore_eos",
    "cache_salt",
    "chat_template_kwargs",
)


def input_items(body: ResponseRequest) -> list[dict[str, Any]]:
    """The request's items in full form, each with a type and an id (RequestError for what is no item)."""
    if isinstance(body.input, str):
        given: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        given = body.input or []
    items = []
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        if kind not in _READERS:
            raise RequestError(
                f"input[{index}] has the type {kind!r}; served: {', '.join(_READERS)}", param=f"input[{index}].type"
            )
        given_fields = {name: value for name, value in item.items() if value is not None}
        given_fields["id"] = str(item.get("id") or f"{_PREFIXES[kind]}_{uuid.uuid4().hex}")
        items.append({"status": "completed", **given_fields, "type": kind})
    return items


def chat_request(body: ResponseRequest, history: list[dict[str, Any]], items: list[dict[str, Any]]) -> ChatRequest:
    """The chat body that answers ``body``: its instructions, what came before, then its own items."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    # Errors name the client's own items only: what came before passed these checks once.
    _append(messages, history, "previous_response_id")
    _append(messages, items, "input")
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=_chat_tools(body.tools) or None,
        tool_choice=_chat_tool_choice(body.tool_choice),
        response_format=_response_format(body.text),
        # The usage comes with the last chunk.
        stream=True,
        stream_options=StreamOptions(include_usage=True),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=read_effort(body.reasoning, "reasoning"),
        **fields,
    )


def _append(messages: list[Message], items: Iterable[dict[str, Any]], name: str) -> None:
    for index, item in enumerate(items):
        _READERS[item["type"]](messages, item, f"{name}[{index}]")


def _read_message(messages: list[Message], item: dict[str, Any], place: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{place}.role is {role!r}; it must be one of {', '.join(_ROLES)}", param=f"{place}.role")
    text = _text(item.get("content"), f"{place}.content")
    last = _open_turn(messages) if role == "assistant" else None
    if last is not None and last.content is None and not last.tool_calls:
        last.content = text
    else:
        messages.append(Message(role=role, content=text))


def _read_reasoning(messages: list[Message], item: dict[str, Any], place: str) -> None:
    text = _text(item.get("content") or [], f"{place}.content")
    if not text and item.get("encrypted_content") is not None:
        text = open_thoughts(item["encrypted_content"], f"{place}.encrypted_content")
    if text:
        messages.append(Message(role="assistant", reasoning_content=text))


def seal_thoughts(text: str) -> str:
    """Thoughts as the opaque text that clients keep when the server does not. Not a secret: they are shown as well."""
    return base64.b64encode(text.encode()).decode()


def open_thoughts(sealed: Any, place: str) -> str:
    """The thoughts in what `seal_thoughts` made (RequestError for anything else)."""
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (ValueError, TypeError):
        raise RequestError(f"{place} was not made by this server; leave the item out", param=place) from None


def _read_call(messages: list[Message], item: dict[str, Any], place: str) -> None:
    for field in ("call_id", "name", "arguments"):
        if not isinstance(item.get(field), str):
            raise RequestError(f"{place}.{field} must be a text", param=f"{place}.{field}")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    turn = _open_turn(messages)
    if turn is None:
        messages.append(Message(role="assistant", tool_calls=[call]))
    else:
        turn.tool_calls = [*(turn.tool_calls or []), call]


def _read_call_output(messages: list[Message], item: dict[str, Any], place: str) -> None:
    if not isinstance(item.get("call_id"), str):
        raise RequestError(f"{place}.call_id must be a text", param=f"{place}.call_id")
    text = _text(item.get("output"), f"{place}.output")
    messages.append(Message(role="tool", content=text, tool_call_id=item["call_id"]))


_READERS = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def _open_turn(messages: list[Message]) -> Message | None:
    """The assistant's turn that the last items belong to: its reasoning, its text and its calls are one message."""
    return messages[-1] if messages and messages[-1].role == "assistant" else None


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a text or a list of parts", param=place)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            text = part.get("refusal")
        elif kind in _TEXT_PARTS:
            text = part.get("text")
        else:
            raise RequestError(f"{place}[{index}] is no text part; only text is served", param=f"{place}[{index}]")
        if not isinstance(text, str):
            raise RequestError(f"{place}[{index}].text must be a text", param=f"{place}[{index}].text")
        texts.append(text)
    return "".join(texts)


def _chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    result = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{index}] has the type {tool.get('type')!r}; only functions are served, which the client runs",
                param=f"tools[{index}].type",
            )
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        result.append({"type": "function", "function": function})
    return result


def _chat_tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_chat_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if choice.get("type") != "function":
        raise RequestError(
            f"tool_choice has the type {choice.get('type')!r}; give none, auto, required or a function",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text: dict[str, Any] | None) -> Any:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return None if wanted is None or isinstance(wanted, dict) else wanted
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}
