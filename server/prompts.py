"""From conversations to prompts: messages as the model's chat template takes them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ..engine.client import AsyncEngineClient
from .chat_schema import Conversation, Message

# Longer conversations are rendered in a thread, so that the loop stays free for the other requests.
_INLINE_CHARACTERS = 4000

_TOOL_PROMPT = (
    'You may call functions. To call one, answer with nothing but JSON: {"name": its name, "arguments": an object that '
    "follows its parameters}. These are the functions:\n"
)

# The role that OpenAI's newer models know by another name than templates do.
_TEMPLATE_ROLES = {"developer": "system"}


async def render_chat(client: AsyncEngineClient, conversation: Conversation, *, show_tools: bool = True) -> str:
    """The prompt's text, the tools in it unless ``show_tools`` is False.

    RequestError for a conversation that the template refuses, or content that is not text.
    """
    generation_prompt = conversation.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not conversation.continue_final_message
    messages = [template_message(message) for message in conversation.messages]
    tools = conversation.tools if show_tools else None
    if tools and not template_shows_tools(client):
        messages, tools = with_tool_prompt(messages, tools), None
    options: dict[str, Any] = {
        "add_generation_prompt": generation_prompt,
        "continue_final_message": bool(conversation.continue_final_message),
        "template_kwargs": _template_kwargs(conversation),
        "tools": tools,
    }
    if sum(_size(message) for message in conversation.messages) <= _INLINE_CHARACTERS:
        return str(client.tokenizer.render_chat(messages, **options))
    return str(await asyncio.to_thread(client.tokenizer.render_chat, messages, **options))


def template_message(message: Message) -> dict[str, Any]:
    """A message as a plain dict of the fields that it has; the role ``developer`` becomes ``system``."""
    fields = {name: value for name in message.__struct_fields__ if (value := getattr(message, name)) is not None}
    refusal = fields.pop("refusal", None)
    if refusal is not None:
        fields.setdefault("content", refusal)
    thoughts = fields.pop("reasoning", None)
    if thoughts is not None:
        fields.setdefault("reasoning_content", thoughts)
    fields["role"] = _TEMPLATE_ROLES.get(message.role, message.role)
    return fields


def _template_kwargs(conversation: Conversation) -> dict[str, Any] | None:
    """What the client gives to the template; ``reasoning_effort`` is told under the names that templates know."""
    effort = getattr(conversation, "reasoning_effort", None)
    if effort is None:
        return conversation.chat_template_kwargs
    told = {"enable_thinking": False, "thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return {**told, **(conversation.chat_template_kwargs or {})}


def template_shows_tools(client: AsyncEngineClient) -> bool:
    """Whether the chat template prints the tools that it is given."""
    return "tools" in client.tokenizer.template_text


def with_tool_prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that knows no tools: they are described in a system message, calls and results become text."""
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = [_as_text(message) for message in messages]
    if told[0]["role"] == "system" and isinstance(told[0].get("content"), str):
        return [{**told[0], "content": f"{told[0]['content']}\n\n{_TOOL_PROMPT}{described}"}, *told[1:]]
    return [{"role": "system", "content": _TOOL_PROMPT + described}, *told]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message["role"] == "tool":
        return {"role": "user", "content": message.get("content")}
    if not calls:
        return message
    texts = [message["content"]] if isinstance(message.get("content"), str) else []
    for call in calls:
        function = call.get("function") or {}
        texts.append(
            f'{{"name": {json.dumps(function.get("name"))}, "arguments": {function.get("arguments") or "{}"}}}'
        )
    return {"role": "assistant", "content": "\n".join(texts)}


def _size(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(str(part.get("text", ""))) for part in message.content)
    return len(message.content or "")
