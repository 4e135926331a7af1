"""``truncation: auto``: the oldest turns of a conversation that is too long are left out."""

from __future__ import annotations

from typing import Any

from ...errors import ContextLengthError
from ..chat import ChatAnswer, prepare_chat
from ..state import ServerState
from .conversation import chat_request
from .schema import ResponseRequest

Items = list[dict[str, Any]]


async def fitting_chat(
    state: ServerState, body: ResponseRequest, history: Items, items: Items, arrival: float
) -> ChatAnswer:
    """The answer to ``history`` and ``items``; with truncation as few of the oldest turns left out as possible.

    A turn begins with a message of the user's, so that no call loses its output. ContextLengthError where not even the
    last turn fits, or truncation is off. Prompts are rendered and counted once, or log2(turns) times.
    """

    async def prepare(num_dropped: int) -> ChatAnswer:
        kept = items[max(0, num_dropped - len(history)) :]
        chat = chat_request(body, history[num_dropped:], kept)
        chat.check()
        return await prepare_chat(state, chat, arrival)

    try:
        return await prepare(0)
    except ContextLengthError:
        cuts = _turn_starts([*history, *items]) if body.truncation == "auto" else []
        if not cuts:
            raise
    low, high = 0, len(cuts) - 1
    answer = await prepare(cuts[high])
    while low < high:
        middle = (low + high) // 2
        try:
            answer = await prepare(cuts[middle])
            high = middle
        except ContextLengthError:
            low = middle + 1
    return answer


def _turn_starts(items: Items) -> list[int]:
    return [
        index for index, item in enumerate(items) if index and item["type"] == "message" and item.get("role") == "user"
    ]
