"""``POST /tokenize`` and ``POST /detokenize``: the served model's own tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.client import AsyncEngineClient
from ..errors import RequestError
from .body import read_json
from .chat_schema import Message, check_conversation
from .prompts import render_chat
from .schema import Refusable
from .state import ServerState, state_of
from .tools.request import read_tools


class TokenizeRequest(Refusable, kw_only=True):
    """Either ``prompt`` or ``messages``; ``model`` may be left out. Only prompts get special tokens by default."""

    served: ClassVar[frozenset[str]] = frozenset({"tools", "tool_choice"})

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


async def tokenize(request: Request) -> Response:
    """The ids of a prompt, or of a conversation as the chat route would see it."""
    state = state_of(request)
    client = state.ready_client()
    body = await _read(request, state, TokenizeRequest)
    body.check_served()
    text, add_special_tokens = await _text(client, body)
    client.inputs.check_length(text)
    # A thread in any case: a text of several thousand tokens would hold up the loop.
    ids = await asyncio.to_thread(client.tokenizer.encode, text, add_special_tokens)
    result: dict[str, Any] = {"count": len(ids), "max_model_len": client.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        result["token_strs"] = [state.token_texts.get(token)[0] for token in ids]
    return _json(result)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    client = state.ready_client()
    body = await _read(request, state, DetokenizeRequest)
    size = client.tokenizer.vocab_size
    for index, token in enumerate(body.tokens):
        if not 0 <= token < size:
            raise RequestError(
                f"tokens[{index}] is {token}; the vocabulary has ids 0 to {size - 1}", param=f"tokens[{index}]"
            )
    text = await asyncio.to_thread(client.tokenizer.decode, body.tokens, body.skip_special_tokens)
    return _json({"prompt": text})


async def _read(request: Request, state: ServerState, schema: type[Any]) -> Any:
    config = state.config
    body = await read_json(request, schema, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
    state.check_model(body.model)
    return body


async def _text(client: AsyncEngineClient, body: TokenizeRequest) -> tuple[str, bool]:
    if (body.prompt is None) == (not body.messages):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return body.prompt, True if body.add_special_tokens is None else body.add_special_tokens
    check_conversation(body)
    read_tools(body.tools, None, None)
    return await render_chat(client, body), bool(body.add_special_tokens)


def _json(result: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(result), media_type="application/json")
