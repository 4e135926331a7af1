"""From Anthropic's blocks to a chat request: the engine's side knows conversations only."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import RequestError
from ..chat_schema import ChatRequest, Message, read_effort
from ..schema import StreamOptions
from .schema import CountTokensRequest, MessagesRequest

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "cache_salt",
)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountTokensRequest, *, thinks: bool) -> ChatRequest:
    """The chat body that answers ``body``. A last turn of the assistant's is gone on with, as Anthropic does.

    Clients ask any model to think; the budget is for one that ``thinks``.
    """
    messages: list[Message] = []
    if body.system:
        messages.append(Message(role="system", content=_text(body.system, "system")))
    for index, message in enumerate(body.messages):
        place = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append(Message(role=message.role, content=message.content))
        else:
            _append_blocks(messages, message.role, message.content, place)
    _check_results(messages)
    fields = {name: value for name in _SAME if (value := getattr(body, name, None)) is not None}
    if isinstance(body, MessagesRequest):
        fields["max_completion_tokens"] = body.max_tokens
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
    last = body.messages[-1]
    tool_choice = body.tool_choice or {}
    return ChatRequest(
        model=body.model,
        messages=messages,
        continue_final_message=True if last.role == "assistant" else None,
        tools=_chat_tools(body.tools) or None,
        tool_choice=_chat_tool_choice(tool_choice) if body.tools else None,
        response_format=_response_format(body.output_config),
        chat_template_kwargs=_template_options(body),
        # The usage comes with the last chunk.
        stream=True,
        stream_options=StreamOptions(include_usage=True),
        parallel_tool_calls=False if tool_choice.get("disable_parallel_tool_use") else None,
        thinking_token_budget=(body.thinking or {}).get("budget_tokens") if thinks else None,
        include_reasoning=False if (body.thinking or {}).get("display") == "omitted" else None,
        reasoning_effort=read_effort(body.output_config, "output_config"),
        **fields,
    )


def _check_results(messages: list[Message]) -> None:
    """RequestError for the result of a call that no earlier turn has made."""
    called: set[str] = set()
    for message in messages:
        called.update(call["id"] for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in called:
            raise RequestError(
                f"a tool_result has the tool_use_id {message.tool_call_id!r}, which no earlier tool_use has; send the "
                "assistant's message with the call before it",
                param="messages",
            )


def _append_blocks(messages: list[Message], role: str, blocks: list[dict[str, Any]], place: str) -> None:
    """One message's blocks: an assistant's are one turn, results of tools in a user's are turns of their own."""
    texts: list[str] = []
    turn = Message(role=role)
    for index, block in enumerate(blocks):
        where = f"{place}[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_field(block, "text", where))
        elif kind == "tool_use" and role == "assistant":
            turn.tool_calls = [*(turn.tool_calls or []), _tool_call(block, where)]
        elif kind == "thinking" and role == "assistant":
            turn.reasoning_content = (turn.reasoning_content or "") + _field(block, "thinking", where)
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        elif kind == "tool_result" and role == "user":
            messages.append(_tool_result(block, where))
        else:
            raise RequestError(
                f"{where} has the type {kind!r}, which is not served in a message of {role}", param=f"{where}.type"
            )
    if texts or turn.tool_calls or turn.reasoning_content or not blocks:
        turn.content = "".join(texts) if texts or not turn.tool_calls else None
        messages.append(turn)


def _tool_call(block: dict[str, Any], place: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": _field(block, "name", place), "arguments": arguments}
    return {"id": _field(block, "id", place), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], place: str) -> Message:
    text = _text(block.get("content") or "", f"{place}.content")
    return Message(role="tool", content=text, tool_call_id=_field(block, "tool_use_id", place))


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a text or a list of blocks", param=place)
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise RequestError(f"{place}[{index}] is no text block; only text is served", param=f"{place}[{index}]")
        texts.append(_field(block, "text", f"{place}[{index}]"))
    return "".join(texts)


def _field(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} must be a text", param=f"{place}.{name}")
    return value


def _chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    result = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type", "custom") not in ("custom", None):
            raise RequestError(
                f"tools[{index}] has the type {tool['type']!r}; only tools that the client runs are served",
                param=f"tools[{index}].type",
            )
        function = {"name": _field(tool, "name", f"tools[{index}]"), "parameters": tool.get("input_schema") or {}}
        for name in ("description", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        result.append({"type": "function", "function": function})
    return result


def _chat_tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": _field(choice, "name", "tool_choice")}}
    if kind not in _TOOL_CHOICES:
        raise RequestError(f"tool_choice has the type {kind!r}; give auto, any, tool or none", param="tool_choice.type")
    return _TOOL_CHOICES[kind]


def _response_format(config: dict[str, Any] | None) -> Any:
    wanted = (config or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise RequestError("output_config.format must have the type json_schema", param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema"), "strict": True}}


def _template_options(body: CountTokensRequest) -> dict[str, Any] | None:
    """Templates of models that think know the switch ``enable_thinking``; what the client says itself goes first."""
    if body.thinking is None:
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.get("type") != "disabled", **(body.chat_template_kwargs or {})}
