"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from ..answer import json_response, read_body, send_answer
from ..errors import ANTHROPIC_PATH, ErrorReply
from ..sse import NamedEventStream, event
from ..state import state_of
from .answer import prepare_message
from .schema import CountTokensRequest, MessagesRequest


class MessageStream(NamedEventStream):
    def error_event(self, reply: ErrorReply) -> bytes:
        return b"event: error\n" + event(reply.encode(ANTHROPIC_PATH))


async def create_message(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of events."""
    arrival = time.monotonic()
    body = await read_body(request, MessagesRequest)
    answer = await prepare_message(state_of(request), body, arrival)
    return await send_answer(request, answer, stream=bool(body.stream), stream_class=MessageStream)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    body = await read_body(request, CountTokensRequest)
    answer = await prepare_message(state_of(request), body, 0.0)
    return json_response({"input_tokens": answer.message.usage.input_tokens})
