"""From conversations to prompts: messages as the model's chat template takes them."""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine.client import AsyncEngineClient
from .chat_schema import Conversation, Message

# Longer conversations are rendered in a thread, so that the loop stays free for the other requests.
_INLINE_CHARACTERS = 4000

# The role that OpenAI's newer models know by another name than templates do.
_TEMPLATE_ROLES = {"developer": "system"}


async def render_chat(client: AsyncEngineClient, conversation: Conversation) -> str:
    """The prompt's text. RequestError for a conversation that the template refuses, or content that is not text."""
    generation_prompt = conversation.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not conversation.continue_final_message
    messages = [template_message(message) for message in conversation.messages]
    options: dict[str, Any] = {
        "add_generation_prompt": generation_prompt,
        "continue_final_message": bool(conversation.continue_final_message),
        "template_kwargs": conversation.chat_template_kwargs,
    }
    if sum(_size(message) for message in conversation.messages) <= _INLINE_CHARACTERS:
        return str(client.tokenizer.render_chat(messages, **options))
    return str(await asyncio.to_thread(client.tokenizer.render_chat, messages, **options))


def template_message(message: Message) -> dict[str, Any]:
    """A message as a plain dict of the fields that it has; the role ``developer`` becomes ``system``."""
    fields = {name: value for name in message.__struct_fields__ if (value := getattr(message, name)) is not None}
    fields["role"] = _TEMPLATE_ROLES.get(message.role, message.role)
    return fields


def _size(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(str(part.get("text", ""))) for part in message.content)
    return len(message.content or "")
