"""How many of an answer's tokens are thoughts: counted by the bytes that each token stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .reasoning import THINK, THINK_END

_START, _END = THINK.encode(), THINK_END.encode()
_ANALYSIS = re.compile(
    rb"<\|channel\|>analysis(?! to=functions)[^<]*<\|message\|>"
    rb"(.*?)(?=<\|(?:end|call|return|start|channel)\|>|\Z)",
    re.DOTALL,
)


def num_thought_tokens(
    token_ids: Sequence[int],
    token_bytes: Callable[[int], bytes],
    style: str | None,
    *,
    opened: bool = False,
    closed: bool = False,
) -> int:
    """Tokens with at least one byte between the marks of ``style`` (think, gpt_oss; None: no thoughts).

    ``opened``: the prompt has begun the thoughts. ``closed``: it has ended them.
    """
    if style is None:
        return 0
    pieces = [token_bytes(token) for token in token_ids]
    whole = b"".join(pieces)
    if style == "gpt_oss":
        spans = [match.span(1) for match in _ANALYSIS.finditer(whole)]
    else:
        spans = [] if closed else _think_span(whole, opened)
    count = place = 0
    for piece in pieces:
        end = place + len(piece)
        count += any(place < last and end > first for first, last in spans)
        place = end
    return count


def _think_span(whole: bytes, opened: bool) -> list[tuple[int, int]]:
    first = 0
    if not opened:
        first = len(whole) - len(whole.lstrip())
        if not whole.startswith(_START, first):
            return []
        first += len(_START)
    last = whole.find(_END, first)
    return [(first, len(whole) if last < 0 else last)]
